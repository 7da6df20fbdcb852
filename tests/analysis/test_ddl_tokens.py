"""Gates by token, spectra at a token and the curve of another beta, against naive passes and dense products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis import audit_ddl, gate_curve, gate_spectrum, gate_tokens
from t2lens.analysis.catalog import ANALYSES, analysis
from t2lens.analysis.regimes import REGIMES, regime_of
from t2lens.residual import DeepDelta
from tests.systems import random_tokens, tiny

VARIANTS = {
    "scalar": DeepDelta(),
    "CC-EC": DeepDelta(value_channels=3, compress_kernel=3, embed_conv=4),
    "TC-EC": DeepDelta(value_channels=2, compress="time", embed_conv=3, value_form="linear_of_raw", beta_hidden=5),
    "write-only": DeepDelta(value_channels=4, edit="write_only"),
}


def some_tokens(seed: int) -> torch.Tensor:
    """Two to four sequences of four to nine tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = [int(torch.randint(2, 5, (), generator=generator)), int(torch.randint(4, 10, (), generator=generator))]
    return torch.randint(0, 20, shape, generator=generator)


def model_of(variant: str, seed: int = 0) -> Any:
    return tiny("ddl", seed, residual=VARIANTS[variant])


# --- gates by token


@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_of_tokens_are_those_that_the_audit_averages(variant: str) -> None:
    model, tokens = model_of(variant, 1), some_tokens(1)
    mask = torch.ones_like(tokens)
    mask[0, :2], mask[-1, -1] = 0, 0
    audit = audit_ddl(model, tokens, mask, counterfactuals=False)
    found = gate_tokens(model, tokens, mask)
    assert found["beta"].shape == (len(model.sites) - 1, int(mask.sum()))
    for name in ("beta", "erased", "written", "alignment", "change", "error_before", "error_after", "norm"):
        assert found[name].mean("place").values == pytest.approx(audit[name].values, rel=1e-12)
    shares = np.stack([(found["regime_index"] == i).mean("place").values for i in range(5)], axis=1)
    assert shares == pytest.approx(audit["share"].values)
    assert found["regime"].values.tolist() == audit["regime"].values.tolist()
    rows = [row for row in found.rows if row[0] == "0.mlp"]
    assert sum(int(row[2] or 0) for row in rows) == int(mask.sum())


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_token_has_its_own_gate_in_the_order_of_the_text(variant: str) -> None:
    model, tokens = model_of(variant, 2), some_tokens(2)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    record = model.record(tokens, mask)
    found = gate_tokens(model, tokens, mask)
    for i, step in enumerate(step for step in record.steps if step.out is not None):
        assert found["beta"].values[i] == pytest.approx(step.gates["beta"][mask.bool()].squeeze(-1).detach().numpy())
    assert found["token"].values.tolist() == [str(t) for t in tokens[mask.bool()].tolist()]
    row, column = mask.bool().nonzero().T
    assert found["sequence"].values.tolist() == row.tolist()
    assert found["position"].values.tolist() == (column - 3 * (row == 1)).tolist()


def test_one_sequence_lies_along_positions() -> None:
    found = gate_tokens(model_of("scalar"), [3, 1, 3])
    assert found["beta"].dims == ("site", "pos")
    assert found["token"].values.tolist() == ["3", "1", "3"]


def test_bounds_of_regimes() -> None:
    values = {0.0: 0, 0.0999: 0, 0.1: 1, 0.8999: 1, 0.9: 2, 1.0: 2, 1.1: 2, 1.1001: 3, 1.5: 3, 1.5001: 4, 2.0: 4}
    assert regime_of(np.array(list(values))).tolist() == list(values.values())
    assert len(REGIMES) == 5


def test_no_regime_is_named_where_k_is_no_unit_vector() -> None:
    model = model_of("scalar")
    stretch = (lambda name: name.endswith("hook_dir"), lambda k, *, hook: 2 * k)
    with model.hooks([stretch]):
        found = gate_tokens(model, [3, 1, 3])
    assert (found["regime_index"] == -1).all()
    assert any("No regime is named" in note for note in found.notes)
    assert all(row[2] == 0 for row in found.rows)


# --- spectrum


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pos", [0, -1])
def test_spectrum_is_that_of_dense_products(variant: str, pos: int) -> None:
    model, tokens = model_of(variant, 3), torch.tensor([[4, 9, 4, 1]])
    steps = [step.gates for step in model.record(tokens).steps if step.out is not None]
    found, d = gate_spectrum(model, tokens, pos=pos), model.cfg.d_model
    eye = torch.eye(d, dtype=torch.float64)
    product, products = eye, [eye]
    for gate in reversed(steps):
        k, beta = gate["direction"][0, pos].double(), float(gate["beta"][0, pos, 0])
        product = product @ (eye - beta * torch.outer(k, k)) if variant != "write-only" else product
        products.append(product)
    for atom, dense in zip(model.atoms, reversed(products), strict=True):
        sigma = torch.linalg.svdvals(dense)
        inside = found["transport"].sel(atom=atom).values
        ones = np.ones(d - len(inside))
        assert np.sort(np.concatenate([inside, ones])) == pytest.approx(sigma.flip(0).detach().numpy(), abs=1e-10)
    for site, gate in zip(model.sites, steps, strict=False):
        k, beta = gate["direction"][0, pos].double(), float(gate["beta"][0, pos, 0])
        values = torch.linalg.eigvalsh(eye - (0 if variant == "write-only" else beta) * torch.outer(k, k))
        far = float(values[(values - 1).abs().argmax()])
        assert float(found["eigenvalue"].sel(site=site.name)) == pytest.approx(far, abs=1e-10)
        assert float(found["beta"].sel(site=site.name)) == pytest.approx(beta)


# --- another beta


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("at", ["all", "position"])
def test_a_pass_with_each_beta_as_an_edit_gives_the_curve(variant: str, at: Any) -> None:
    """A whole naive pass per value, in plain softmaxes."""
    seed = sum(map(ord, variant + at))
    model, tokens = model_of(variant, seed), torch.tensor([random_tokens(seed)[0].tolist()])
    site = model.sites[seed % (len(model.sites) - 1)].name
    n = tokens.shape[1]
    pos = seed % n
    found = gate_curve(model, tokens, site=site, pos=pos, at=at, steps=4, top=3)
    plain = model(tokens).softmax(-1)[0].detach()
    for i, value in enumerate([0, 0.5, 1, 1.5, 2]):
        where = None if at == "all" else [pos]
        edit = t2lens.Edit(target="gate", name="beta", site=site, operation="set", value=value, positions=where)
        with t2lens.edited(model, edit):
            changed = model(tokens).softmax(-1)[0].detach()
        kl = (plain * (plain / changed).log()).sum(-1)
        loss = -(changed[range(n - 1), tokens[0, 1:]] / plain[range(n - 1), tokens[0, 1:]]).log().mean()
        assert float(found["value"][i]) == value
        assert float(found["kl"][i]) == pytest.approx(float(kl[pos]), abs=1e-12)
        assert float(found["kl_mean"][i]) == pytest.approx(float(kl.mean()), abs=1e-12)
        assert float(found["loss"][i]) == pytest.approx(float(loss), abs=1e-12)
        ids = found["token_id"].values
        assert found["probability"].values[i] == pytest.approx(changed[pos, ids].numpy(), abs=1e-12)
        assert set(changed[pos].topk(3).indices.tolist()) <= set(ids.tolist())
        assert found.rows[i][4] == str(int(changed[pos].argmax()))
    assert found["plain_probability"].values == pytest.approx(plain[pos, found["token_id"].values].numpy())
    assert float(found["kl"].max()) > 1e-9


def test_the_gate_as_it_is_changes_nothing() -> None:
    model, tokens = model_of("scalar", 5), [2, 8, 2, 6]
    as_it_is = gate_curve(model, tokens, site="1.attn", pos=2)["plain_gate"]
    record = model.record(torch.tensor([tokens]))
    step = next(step for step in record.steps if step.site.name == "1.attn")
    assert as_it_is.values == pytest.approx(step.gates["beta"][0, :, 0].detach().numpy())
    same = t2lens.Edit(
        target="gate", name="beta", site="1.attn", operation="set", value=0.5 * round(2 * float(as_it_is[2]))
    )
    with t2lens.edited(model, same):  # beta is on the grid then
        curve = gate_curve(model, tokens, site="1.attn", pos=2, steps=4)
    at = float(same.value)
    assert float(curve["kl"].sel(value=at)) < 1e-12
    assert float(curve["kl"].max()) > 1e-9


def test_inside_edits_as_it_is_is_the_edited_model() -> None:
    model, tokens = model_of("CC-EC", 6), [2, 8, 2, 6]
    other = t2lens.Edit(target="atom", site="1.mlp", operation="scale", value=3)
    beta = t2lens.Edit(target="gate", name="beta", site="0.mlp", operation="set", value=0)
    with t2lens.edited(model, [other]):
        found = gate_curve(model, tokens, site="0.mlp", steps=2)
        plain = model([tokens]).log_softmax(-1)[0, -1].detach()
    with t2lens.edited(model, [other, beta]):
        changed = model([tokens]).log_softmax(-1)[0, -1].detach()
    assert float(found["kl"][0]) == pytest.approx(float((plain.exp() * (plain - changed)).sum()), abs=1e-12)


def test_padding_moves_nothing() -> None:
    model = model_of("scalar", 7)
    padded = gate_curve(model, [0, 0, 5, 3, 9], [0, 0, 1, 1, 1], site="0.attn", pos=1)
    alone = gate_curve(model, [5, 3, 9], site="0.attn", pos=1)
    for name in ("kl", "kl_mean", "loss", "plain_gate", "plain_probability"):
        assert padded[name].values == pytest.approx(alone[name].values, abs=1e-12)
    assert padded.dataset.attrs["position"] == 1
    moved, still = (gate_spectrum(model, *given, pos=1) for given in (([0, 5, 3], [0, 1, 1]), ([5, 3],)))
    assert moved["transport"].values == pytest.approx(still["transport"].values, abs=1e-12)
    assert moved.dataset.attrs["pos"] == 1


def test_one_pass_and_one_resumed_pass_make_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = model_of("scalar"), []
    forward = type(model).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append("resumed" if kwargs.get("resume") is not None else "whole")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    gate_curve(model, [2, 8, 2, 6], site="1.attn", steps=40)
    assert passes == ["whole", "resumed"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"site": "1.atn"}, "did you mean '1.attn'"),
        ({"site": "out"}, "No sublayer 'out'"),
        ({"site": "1.attn", "pos": 9}, "pos must lie in"),
        ({"site": "1.attn", "at": "some"}, "at must be"),
        ({"site": "1.attn", "steps": 0}, "at least 1"),
    ],
)
def test_bad_options_are_a_sentence(options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, KeyError), match=error):
        gate_curve(model_of("scalar"), [2, 8], **options)


@pytest.mark.parametrize("key", [entry.key for entry in ANALYSES if entry.key.startswith("gates-")])
def test_other_systems_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match="ddl-write-only"):
        analysis(key).run(tiny("standard"), [2, 8], **({"site": "0.attn"} if key == "gates-curve" else {}))
