"""The small relatives of the residual stream: each against its equation, its start, and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import t2lens
from t2lens.config import Norm
from t2lens.model import Transformer
from t2lens.residual import RELATIVES, Gain, Scaled, deepnet
from tests.systems import random_tokens, tiny_config

RANDOM = {
    **RELATIVES,
    "laurel": Scaled(low_rank=3),
    "laurel-gemma": Scaled(low_rank=3, low_rank_form="normed"),
    "deepnet": deepnet(3),
    "highway per token": Scaled(gate="scalar", keep=Gain(), add=Gain(per="layer")),
    "post-norm": Scaled(post_norm=Norm(kind="rms", weight=False), x0=Gain(per="channel", start=0.3)),
}


def model_of(residual: Scaled, seed: int | None = 0, **changes: Any) -> Any:  # not Transformer: tests reach into parts
    model = t2lens.build(tiny_config("standard", residual=residual, **changes), seed=1)
    if seed is None:
        return model
    generator = torch.Generator().manual_seed(seed)
    for p in model.residual.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return model.double()


def naive(cfg: Scaled, system: Any, atoms: list[torch.Tensor], eps: float) -> list[torch.Tensor]:
    """Every read, one written term after another, from the equations as the papers have them."""
    x = x0 = atoms[0]
    reads, lowered = [], 0

    def gain(name: str, site: Any) -> Any:
        g = getattr(cfg, name)
        if g is None:
            return {"keep": 1.0, "add": 1.0, "x0": 0.0}[name]
        if g.per == "fixed":
            return g.start
        return getattr(system, name)[site.layer if g.per == "layer" else site.index]

    def rms(v: torch.Tensor, e: float) -> torch.Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + e).sqrt()

    for site, f in zip(system.sites[:-1], atoms[1:], strict=True):
        if cfg.at == "block" and site.opens:
            x = gain("keep", site) * x + gain("x0", site) * x0
        reads.append(x)
        new = cfg.at == "write"
        kept = gain("keep", site) * x + gain("x0", site) * x0 if new else x
        added = gain("add", site) * f
        if cfg.gate != "none":
            g = torch.sigmoid(x @ system.gate_weight[site.index].T + system.gate_bias[site.index])
            kept, added = (1 - g) * kept, g * added
        y = kept + added
        if cfg.low_rank and cfg.low_rank_form == "plain":
            y = y + x @ system.low_left[lowered].T @ system.low_right[lowered].T
            lowered += 1
        elif cfg.low_rank and site.kind == "attn":
            n = rms(x, eps) * system.low_norm_in[lowered]
            low = n @ system.low_left[lowered].T @ system.low_right[lowered].T
            y = (y + n + rms(low, eps) * system.low_norm_out[lowered]) / math.sqrt(2)
            lowered += 1
        if cfg.post_norm is not None:
            y = y - y.mean(-1, keepdim=True) if cfg.post_norm.kind == "layer" else y
            y = rms(y, cfg.post_norm.eps)
            y = y * system.post_norm_weight[site.index] if cfg.post_norm.weight else y
        x = y
    return [*reads, x]


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
def test_reads_are_those_of_a_plain_loop(name: str, local: bool):
    model = model_of(RANDOM[name], seed=3, local=local)
    record = model.record(random_tokens(3))
    expected = naive(RANDOM[name], model.residual, record.atoms, model.cfg.norm_eps)
    for read, wanted in zip(record.reads.values(), expected, strict=True):
        torch.testing.assert_close(read, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["skips-with-gains", "laurel"])
def test_what_starts_as_a_standard_transformer_is_bit_equal_to_it(name: str):
    model = model_of(RANDOM[name], seed=None)
    twin = Transformer(tiny_config("standard"))
    twin.load_state_dict({n: p for n, p in model.state_dict().items() if not n.startswith("residual.")})
    assert torch.equal(model(random_tokens(0)), twin.eval()(random_tokens(0)))


def test_rezero_starts_as_the_identity_and_layerscale_near_it():
    for name, limit in (("rezero", 0.0), ("layerscale", 1e-3)):
        record = model_of(RELATIVES[name], seed=None).record(random_tokens(1))
        assert float((record.reads["out"] - record.atoms[0]).abs().max()) <= limit


def test_a_highway_gate_at_one_replaces_and_at_zero_keeps():
    model, tokens = model_of(Scaled(gate="channel")), random_tokens(2)

    def at(value: float) -> t2lens.mixing.ForwardRecord:
        fill = lambda t, *, hook: torch.full_like(t, value)  # noqa: E731
        with model.hooks(fwd_hooks=[(n, fill) for n in model.hook_dict if "hook_transform" in n]):
            return model.record(tokens)

    shut, wide_open = at(0.0), at(1.0)
    assert torch.equal(shut.reads["out"], shut.atoms[0])
    assert torch.equal(wide_open.reads["out"], wide_open.atoms[-1])
    gate = t2lens.trace(model, tokens[:1]).dataset["gate"]
    assert 0 < float(gate.min()) < float(gate.max()) < 1


def test_x0_lambdas_start_at_the_published_values_and_add_the_embedding_as_a_block_opens():
    model = model_of(RELATIVES["x0-lambdas"], seed=None)
    torch.testing.assert_close(model.residual.keep.flatten(), torch.tensor([1.15, 1.10, 1.05]))
    torch.testing.assert_close(model.residual.x0.flatten(), torch.tensor([0.2, 0.125, 0.05]))
    matrix = t2lens.mixing_matrix(model, random_tokens(0))[0, :, 0]
    first = 1.15 + 0.2
    second = 1.10 * first + 0.125
    torch.testing.assert_close(matrix[[0, 2], 0], torch.tensor([first, second]))
    torch.testing.assert_close(matrix[2, 1:3], torch.tensor([1.10, 1.10]))  # what block 0 wrote, once scaled
    _, cache = model.run_with_cache(random_tokens(0))
    assert torch.equal(cache["blocks.0.hook_resid_pre"], cache["blocks.0.hook_read_attn"])


def test_deepnet_has_its_alpha_and_norms_the_sum():
    cfg = deepnet(3)
    assert cfg.keep is not None and cfg.keep.start == pytest.approx(6**0.25)
    plain = Norm(kind="none", weight=False)  # the paper's model: no norm but those after the sums
    record = model_of(cfg, seed=None, norm=plain).double().record(random_tokens(4))
    for name in list(record.reads)[1:]:
        read = record.reads[name]
        assert float(read.mean(dim=-1).abs().max()) < 1e-12
        torch.testing.assert_close(read.square().mean(dim=-1), torch.ones_like(read[..., 0]), atol=2e-2, rtol=0)


def test_layer_gains_are_shared_by_the_sublayers_of_a_block():
    model = model_of(Scaled(add=Gain(per="layer", start=0.5, end=1.5)), seed=None)
    assert model.residual.add.shape == (3, 1)
    last = t2lens.mixing_matrix(model, random_tokens(0))[0, -1, 0]
    torch.testing.assert_close(last, torch.tensor([1.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]))


@pytest.mark.parametrize("name", RANDOM)
def test_every_relative_survives_its_config_file_and_has_a_description(name: str):
    cfg = tiny_config("standard", residual=RANDOM[name])
    assert t2lens.ModelConfig.from_dict(cfg.to_dict()) == cfg
    assert len(RANDOM[name].describe()) > len("scaled residual: ")


def test_bad_configurations_say_what_is_wrong():
    for bad, message in (
        ({"keep": 1.0}, "Scaled.keep must be a Gain or None, not 1.0."),
        ({"gate": "token"}, "Scaled.gate must be one of none, scalar, channel, not 'token'."),
        ({"low_rank": 0}, "Scaled.low_rank must be a whole number of at least 1, not 0."),
        ({"post_norm": Norm(bias=True)}, "must have no bias"),
        ({"post_norm": Norm(kind="none")}, "for no norm leave it None"),
        ({"at": "block", "keep": Gain()}, 'Scaled.keep acts once per block .* per "layer" or "fixed"'),
    ):
        with pytest.raises(ValueError, match=message):
            Scaled(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Gain\.per must be one of"):
        Gain(per="token")  # type: ignore[arg-type]
