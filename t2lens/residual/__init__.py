"""The depth axis: one file per residual system (its config, its equation, its module), and the line that names it."""

from __future__ import annotations

from t2lens.config import ModelConfig, ResidualConfig
from t2lens.residual.attnres import AttentionResiduals
from t2lens.residual.attnres import AttnRes as AttnRes
from t2lens.residual.base import Gates as Gates
from t2lens.residual.base import Read as Read
from t2lens.residual.base import ResidualSystem as ResidualSystem
from t2lens.residual.base import Site as Site
from t2lens.residual.base import Source as Source
from t2lens.residual.base import WeightsFrom as WeightsFrom
from t2lens.residual.base import by_way as by_way
from t2lens.residual.base import make_sites as make_sites
from t2lens.residual.dca import DCA as DCA
from t2lens.residual.dca import DeepCrossAttention
from t2lens.residual.deep_delta import DeepDelta as DeepDelta
from t2lens.residual.deep_delta import DeepDeltaLearning
from t2lens.residual.delta_attnres import DeltaAttentionResiduals
from t2lens.residual.delta_attnres import DeltaAttnRes as DeltaAttnRes
from t2lens.residual.denseformer import DenseFormer as DenseFormer
from t2lens.residual.denseformer import DepthWeightedAverage
from t2lens.residual.depth_swa import DepthShortSWA
from t2lens.residual.depth_swa import DepthSWA as DepthSWA
from t2lens.residual.elc_bert import ELCBert as ELCBert
from t2lens.residual.elc_bert import EveryLayerCounts
from t2lens.residual.hyper_connections import HyperConnected
from t2lens.residual.hyper_connections import HyperConnections as HyperConnections
from t2lens.residual.muddformer import MUDDFormer as MUDDFormer
from t2lens.residual.muddformer import MultiwayDynamicDense
from t2lens.residual.open_attnres import OpenAttentionResiduals
from t2lens.residual.open_attnres import OpenAttnRes as OpenAttnRes
from t2lens.residual.scaled import RELATIVES as RELATIVES
from t2lens.residual.scaled import Gain as Gain
from t2lens.residual.scaled import Scaled as Scaled
from t2lens.residual.scaled import ScaledResidual
from t2lens.residual.scaled import deepnet as deepnet
from t2lens.residual.standard import Standard as Standard
from t2lens.residual.standard import StandardResidual
from t2lens.residual.vertical_attention import VerticalAttention as VerticalAttention
from t2lens.residual.vertical_attention import VerticalAttentionReconstruction

SYSTEMS: dict[type[ResidualConfig], type[ResidualSystem]] = {
    Standard: StandardResidual,
    Scaled: ScaledResidual,
    AttnRes: AttentionResiduals,
    DeltaAttnRes: DeltaAttentionResiduals,
    OpenAttnRes: OpenAttentionResiduals,
    DeepDelta: DeepDeltaLearning,
    DepthSWA: DepthShortSWA,
    DenseFormer: DepthWeightedAverage,
    ELCBert: EveryLayerCounts,
    VerticalAttention: VerticalAttentionReconstruction,
    MUDDFormer: MultiwayDynamicDense,
    DCA: DeepCrossAttention,
    HyperConnections: HyperConnected,
}


def build_residual(cfg: ModelConfig, sites: tuple[Site, ...]) -> ResidualSystem:
    """The residual system that `cfg.residual` describes, for the sites of the model."""
    return SYSTEMS[type(cfg.residual)](cfg, sites)
