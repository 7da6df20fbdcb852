"""Known public checkpoints of the family, smallest first within a system.

None of the files was opened when this was written (the hub was out of reach): names, sizes and licences come from
model cards, file listings and the published code, and `status` says how sure the layout is. What a file holds is
decided by its config and keys when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PUBLISHED", "UNPUBLISHED", "Published"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """One public checkpoint, or a set of them under one pattern.

    causal: whether a token sees only those before it; "both" where the same weights are used either way.
    reads: whether `t2lens.load` knows the format: "yes", "perhaps" (the layout is not known well enough), or "no".
    needs: what to give or to do. status: what is known of the file, from where.
    """

    id: str
    system: str
    parameters: str
    size: str
    licence: str
    causal: Literal["yes", "no", "both"]
    reads: Literal["yes", "perhaps", "no"]
    needs: str = ""
    status: str = ""


_BY_HAND = "holds a torch file: download it yourself and give the folder"
_ELC = "elc_variant= (base, zero or normalized): the file does not say which; compare the losses"
_UNOPENED = "layout known from its code; file never opened"

PUBLISHED: tuple[Published, ...] = (
    Published(
        id="ltg/gpt-bert-babylm-small",
        system="GPT-BERT (DenseFormer per sublayer)",
        parameters="29.9M",
        size="145 MB",
        licence="MIT",
        causal="both",
        reads="yes",
        status=f"{_UNOPENED}; its size fits that layout to the byte",
    ),
    Published(
        id="ltg/gpt-bert-babylm-base",
        system="GPT-BERT (DenseFormer per sublayer)",
        parameters="119M",
        size="503 MB",
        licence="MIT",
        causal="both",
        reads="yes",
        needs=_BY_HAND,
        status=f"{_UNOPENED}; its size fits that layout to the byte",
    ),
    Published(
        id="lgcharpe/ELC_BERT_small_baby_10M",
        system="ELC-BERT",
        parameters="23.8M",
        size="120 MB",
        licence="none stated",
        causal="no",
        reads="yes",
        needs=_ELC,
        status=f"{_UNOPENED}; its size rules out weighted_output",
    ),
    Published(
        id="lgcharpe/ELC_BERT_baby_100M",
        system="ELC-BERT",
        parameters="98M",
        size="418 MB",
        licence="none stated",
        causal="no",
        reads="yes",
        needs=f"{_BY_HAND}; {_ELC}",
        status=f"{_UNOPENED}; its size rules out weighted_output",
    ),
    Published(
        id="ActiveBaby/ELC-BERT-B_32, -B_512",
        system="ELC-BERT",
        parameters="98M",
        size="size not seen",
        licence="Apache-2.0",
        causal="no",
        reads="yes",
        needs=_ELC,
        status="trained anew by others in the same layout, by their card; never opened",
    ),
    Published(
        id="Caiyun-AI/MUDDPythia-1.4B",
        system="MUDDFormer (MUDDPythia)",
        parameters="1.42B",
        size="about 2.8 GB",
        licence="MIT",
        causal="yes",
        reads="yes",
        needs="6 GB of memory in float32",
        status=_UNOPENED,
    ),
    Published(
        id="Caiyun-AI/MUDDPythia-2.8B",
        system="MUDDFormer (MUDDPythia)",
        parameters="2.78B",
        size="5.57 GB",
        licence="MIT",
        causal="yes",
        reads="yes",
        needs="12 GB of memory in float32",
        status=f"{_UNOPENED}; two shards seen in the listing",
    ),
    Published(
        id="Caiyun-AI/MUDDFormer-2.8B",
        system="MUDDFormer",
        parameters="2.80B",
        size="about 5.6 GB",
        licence="MIT",
        causal="yes",
        reads="yes",
        needs="12 GB of memory in float32",
        status=_UNOPENED,
    ),
    Published(
        id="winglian/mistral-denseformer-7b",
        system="DenseFormer, dilation 4, period 5",
        parameters="7B",
        size="14.5 GB",
        licence="Apache-2.0",
        causal="yes",
        reads="yes",
        needs="29 GB of memory in float32",
        status="prefix of the depth weights unverified; they are presumably still at their identity start",
    ),
    Published(
        id="wdlctc/open-attnres-block, -full, -baseline",
        system="Attention Residuals, open port",
        parameters="100M",
        size="size not seen",
        licence="none stated",
        causal="yes",
        reads="yes",
        status=f"{_UNOPENED}; -full is named in an older README only; which dialect, its keys say",
    ),
    Published(
        id="wdlctc/open-attnres-0.6b-block, -baseline",
        system="Attention Residuals, open port",
        parameters="0.6B",
        size="size not seen",
        licence="none stated",
        causal="yes",
        reads="yes",
        status=f"{_UNOPENED}; which dialect, its keys say",
    ),
    Published(
        id="oars344/attnres-phase1",
        system="Attention Residuals, another port",
        parameters="114M",
        size="size not seen",
        licence="Apache-2.0",
        causal="yes",
        reads="perhaps",
        status="only its card was read; its code has to be looked at first",
    ),
    Published(
        id="moonshotai/Kimi-K3",
        system="Attention Residuals in blocks",
        parameters="2.8T",
        size="1.56 TB",
        licence="Kimi K3",
        causal="yes",
        reads="no",
        needs="its depth tensors alone are 5 MB; the rest needs other attention and experts",
        status="from its report and ports; never opened",
    ),
    Published(
        id="Realmbird/mhc-781m-residual, -mhc, -mhc-lite",
        system="Hyper-Connections: plain, mHC, mHC-lite",
        parameters="781M",
        size="about 1.6 GB each",
        licence="Apache-2.0",
        causal="yes",
        reads="yes",
        status=f"{_UNOPENED}; the upload of -residual is confirmed, the others are described as released",
    ),
    Published(
        id="wgpeng/mhc-780m",
        system="mHC",
        parameters="780M",
        size="size not seen",
        licence="not seen",
        causal="yes",
        reads="perhaps",
        status="probably the layout of the row above",
    ),
    Published(
        id="HuggingFaceTB/nanowhale-100m-base",
        system="mHC in DeepSeek-V4's form",
        parameters="110M",
        size="size not seen",
        licence="Apache-2.0",
        causal="yes",
        reads="no",
        needs="experts and other attention; its card asks for float32",
        status="names to be checked; never opened",
    ),
    Published(
        id="GoedelMachines/Goedel-mHC-1B, Goedel-Baseline-1B",
        system="mHC",
        parameters="1.0B",
        size="size not seen",
        licence="Apache-2.0",
        causal="yes",
        reads="perhaps",
        needs="gated attention and ReLU^2",
        status="its code was not seen",
    ),
    Published(
        id="deepseek-ai/DeepSeek-V4-Flash",
        system="mHC, DeepSeek-V4's form",
        parameters="large",
        size="size not seen",
        licence="not seen",
        causal="yes",
        reads="no",
        needs="experts and other attention; its hc_* tensors alone are small",
        status="names from the ports; never opened",
    ),
    Published(
        id="facebook/PhysicsLM4.2__LlamaCanon-1B-Nemo-*",
        system="Canon layers ABCD (1B, 3B, 8B; 1T and 2T tokens)",
        parameters="1B to 8B",
        size="size not seen",
        licence="Apache-2.0 (code)",
        causal="yes",
        reads="yes",
        needs=f"{_BY_HAND} default/ with params.json and consolidated.pth",
        status=_UNOPENED,
    ),
    Published(
        id="google/gemma-3n-E2B-it",
        system="LAuReL and AltUp",
        parameters="2B effective",
        size="size not seen",
        licence="Gemma, gated",
        causal="yes",
        reads="no",
        needs="other attention, and streams of its own",
        status="from the code in transformers; never opened",
    ),
)

UNPUBLISHED = (
    "Deep Delta Learning, DeepCrossAttention (official), Vertical Attention, DenseFormer (by its authors), original "
    "Hyper-Connections, ShortSWA, Delta Attention Residuals and KV shift: no checkpoint is known; files in the format "
    "of their code load all the same."
)
