"""The DDL audit: known gates, identities, broken models, and its numbers against naive loops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis.ddl_audit import audit_ddl, checks_of
from t2lens.analysis.ddl_transport import transport
from t2lens.cli import app
from t2lens.residual import DeepDelta
from tests.systems import random_tokens, tiny

VARIANTS = {
    "scalar": DeepDelta(),
    "scalar, paper's v": DeepDelta(value_form="linear_of_normed"),
    "CC": DeepDelta(value_channels=4),
    "CC-EC": DeepDelta(value_channels=3, compress_kernel=3, embed_conv=4),
    "TC": DeepDelta(value_channels=2, compress="time"),
    "TC-EC": DeepDelta(value_channels=2, compress="time", embed_conv=3, value_form="linear_of_raw", beta_hidden=5),
    "write-only": DeepDelta(value_channels=4, edit="write_only"),
    "write-only scalar": DeepDelta(edit="write_only", beta_hidden=3),
}
DELTA = [name for name, value in VARIANTS.items() if value.edit == "delta"]


def model_of(variant: str, seed: int = 0, **changes: Any) -> Any:
    return tiny("ddl", seed, residual=VARIANTS[variant], **changes)


def force(what: str, value: float) -> tuple[Any, Any]:
    """A hook that puts `value` in place of a gate in every sublayer."""
    return lambda name: name.endswith(f"hook_{what}"), lambda gate, *, hook: torch.full_like(gate, value)


def quick(model: Any, input: Any, mask: Any = None, **options: Any) -> Any:
    return audit_ddl(model, input, mask, **{"counterfactuals": False, **options})


# --- identities


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_check_passes_at_rounding_in_float64_with_padding(variant: str, seed: int) -> None:
    model, tokens = model_of(variant, seed), random_tokens(seed)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # on the left
    mask[-1, -1] = 0  # and on the right
    for given in (None, mask):
        finding = quick(model, tokens, given)
        assert finding.passed
        for check in checks_of(finding):
            if check.name != "unit direction":
                assert check.value < 1e-10, check


@pytest.mark.parametrize("variant", DELTA)
def test_transport_is_the_dense_product_and_the_coefficient_of_the_embedding(variant: str) -> None:
    """Naive loops over the recorded gates; and, through the readout, against the accounting in the operator form."""
    model, tokens = model_of(variant, 3), torch.tensor([[4, 9, 4, 1]])
    record, residual = model.record(tokens), model.residual
    gates = [step.gates for step in record.steps if step.out is not None]
    finding, d = quick(model, tokens), 16
    x0 = residual.begin(record.embed)
    x0 = (x0 if isinstance(x0, torch.Tensor) else x0.x).detach()
    per_token: dict[str, list[list[float]]] = {"smallest": [], "largest": [], "rank": [], "survival": []}
    products = []
    for t in range(tokens.shape[1]):
        product, starts = torch.eye(d, dtype=torch.float64), []
        for gate in reversed(gates):
            starts.append(product)
            k = gate["direction"][0, t]
            product = product @ (torch.eye(d, dtype=torch.float64) - gate["beta"][0, t] * torch.outer(k, k))
        starts.append(product)
        products.append(product)
        starts = starts[::-1]
        values = [np.linalg.svd(each.detach().numpy(), compute_uv=False) for each in starts]
        per_token["smallest"].append([v.min() for v in values])
        per_token["largest"].append([v.max() for v in values])
        shares = [v / v.sum() for v in values]
        per_token["rank"].append([math.exp(-sum(p * math.log(p) for p in s if p > 0)) for s in shares])
        e = x0[0, t].T if residual.expanded else x0[0, t]
        ks = [gate["direction"][0, t] for gate in gates]
        lasting = [float((starts[0] @ e).norm() / e.norm())]
        lasting += [float((s @ k).norm() / k.norm()) for s, k in zip(starts[1:], ks, strict=True)]
        per_token["survival"].append(lasting)
    got = {name: np.array(values) for name, values in per_token.items()}
    for name in ("smallest", "survival"):
        ours = finding[f"transport_{name}" if name == "smallest" else name].sel(quantile=0.5).values
        assert np.abs(np.median(got[name], axis=0) - ours).max() < 1e-10
    assert np.abs(got["largest"].mean(axis=0) - finding["transport_largest"].values).max() < 1e-10
    assert np.abs(got["rank"].mean(axis=0) - finding["transport_rank"].values).max() < 1e-8
    carried = torch.stack([p @ (x0[0, t].T if residual.expanded else x0[0, t]) for t, p in enumerate(products)])
    state = (carried.mT if residual.expanded else carried).unsqueeze(0)
    if not isinstance(residual.begin(record.embed), torch.Tensor):
        state = residual.begin(record.embed)._replace(x=state)
    read = residual.read(state, model.sites[-1], {})
    share = t2lens.contributions(model, tokens, read="out", form="operator")[:, :, 0]
    assert float((read - share).detach().abs().max()) < 1e-10


def test_transport_of_orthogonal_directions_is_known() -> None:
    """Three writes along axes 0, 1, 2 with beta 1, 2, 0.5: singular values 0, 1, 0.5 and ones; read from each start."""
    eye = torch.eye(5, dtype=torch.float64)
    k, beta = eye[None, :3], torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
    x0 = torch.ones(1, 2, 5, dtype=torch.float64)
    found = transport(k, beta, x0)
    assert np.allclose(found.values[:, 0], [[1, 0.5, 0], [1, 1, 0.5], [1, 1, 0.5], [1, 1, 1]], atol=1e-12)
    assert np.allclose(found.carried[0, 0], [0, -1, 0.5, 1, 1], atol=1e-12)
    # the embedding keeps sqrt(3.25 / 5); a write along k is met by no later one here
    assert np.allclose(found.survival[:, 0], [math.sqrt(3.25 / 5), 1, 1, 1], atol=1e-12)
    assert float(found.rank[3, 0]) == pytest.approx(5)
    p = np.array([1, 1, 1, 0.5]) / 3.5
    assert float(found.rank[0, 0]) == pytest.approx(math.exp(-(p * np.log(p)).sum()))


def test_measured_numbers_equal_those_of_the_hooks() -> None:
    """Scalar state: energies, errors, alignment and reuse from the cached stream, at the tokens that are no padding."""
    model = model_of("scalar", 5)
    tokens = torch.tensor([[3, 8, 1, 8, 2], [5, 5, 7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    valid = mask.bool()
    cache = model.run_with_cache(tokens, mask)[1]
    finding = quick(model, tokens, mask)
    assert int(finding["n_tokens"]) == 8
    before, after = cache["blocks.1.hook_resid_mid"][valid], cache["blocks.1.hook_resid_post"][valid]
    gates = {n: cache[f"blocks.1.ddl_mlp.hook_{n}"][valid] for n in ("beta", "beta_logit", "dir", "value")}
    beta, k, v = gates["beta"].squeeze(-1), gates["dir"], gates["value"].squeeze(-1)
    held, left = (k * before).sum(-1), (k * after).sum(-1)
    expected = {
        "beta": beta,
        "error_before": (held - v).abs(),
        "error_after": (left - v).abs(),
        "erased": (beta.unsqueeze(-1) * k * held.unsqueeze(-1)).square().sum(-1),
        "written": (beta * v).square(),
        "change": (after - before).norm(dim=-1) / before.norm(dim=-1),
        "alignment": held.abs() / before.norm(dim=-1),
        "saturated": (gates["beta_logit"].abs() > 6).double(),
        "eigenvalue_negative": (1 - beta < 0).double(),
    }
    for name, values in expected.items():
        assert float(finding[name].sel(site="1.mlp")) == pytest.approx(float(values.mean()), abs=1e-8), name
    # error after = |1 - beta| times that before, token by token
    assert float(((left - v) - (1 - beta) * (held - v)).abs().max()) < 1e-7
    other = cache["blocks.2.ddl_attn.hook_dir"][valid]
    cosine = (k * other).sum(-1).abs() / (k.norm(dim=-1) * other.norm(dim=-1))
    assert float(finding["cosine"].sel(site="1.mlp", other="2.attn")) == pytest.approx(float(cosine.mean()), abs=1e-10)
    spans = [np.linalg.svd(each.numpy(), full_matrices=False)[2][:4] for each in (k, other)]
    angles = np.degrees(np.arccos(np.clip(np.linalg.svd(spans[0] @ spans[1].T)[1], 0, 1)))
    ours = finding["principal_angle"].sel(site="1.mlp", other="2.attn").values
    assert np.abs(np.sort(ours) - np.sort(angles)).max() < 1e-5


# --- known gates


@pytest.mark.parametrize("variant", ["scalar", "CC-EC", "TC"])
@pytest.mark.parametrize(
    ("beta", "regime", "eigenvalue", "smallest"),
    [
        (0.0, "skip", 1.0, 1.0),
        (0.5, "partial", 0.5, None),
        (1.0, "overwrite", 0.0, 0.0),
        (1.3, "over-relax", -0.3, None),
        (2.0, "reflect", -1.0, 1.0),
    ],
)
def test_a_forced_gate_is_in_its_regime(
    variant: str, beta: float, regime: str, eigenvalue: float, smallest: float | None
) -> None:
    model, tokens = model_of(variant, 2), random_tokens(2)
    with model.hooks([force("beta", beta)]):
        finding = quick(model, tokens)
    assert finding.passed
    assert (finding["share"].sel(regime=regime) == 1).all()
    assert np.allclose(finding["share"].sum("regime"), 1)
    assert np.allclose(finding["eigenvalue_quantile"], eigenvalue)
    assert np.allclose(finding["error_after"], abs(eigenvalue) * finding["error_before"], atol=1e-7)
    values = finding["transport_spectrum"]
    if smallest == 1.0:  # nothing is lost: the identity, or a product of reflections
        assert np.allclose(values, 1, atol=1e-7)
        assert np.allclose(finding["survival"], 1, atol=1e-7)
    elif smallest == 0.0:  # of the last write alone, one direction is lost and no other
        one = values.isel(atom=-2)
        assert np.allclose(one.isel(direction=-1), 0, atol=1e-7)
        assert np.allclose(one.isel(direction=slice(None, -1)), 1, atol=1e-7)
        assert np.allclose(finding["transport_smallest"].isel(atom=slice(None, -1)), 0, atol=1e-7)
    edges = finding["beta_histogram"].sel(site="1.attn").values
    assert edges.sum() == int(finding["n_tokens"])
    assert edges[min(int(beta * 20), 39)] == int(finding["n_tokens"])


def test_a_bound_belongs_to_the_regime_that_its_words_say() -> None:
    model = model_of("scalar")
    for beta, regime in ((0.1, "partial"), (0.9, "overwrite"), (1.1, "overwrite"), (1.5, "over-relax")):
        with model.hooks([force("beta", beta)]):
            assert (quick(model, [[1, 2, 3]])["share"].sel(regime=regime) == 1).all()


def test_write_only_models_have_sizes_and_no_regimes() -> None:
    finding = quick(model_of("write-only"), random_tokens(0))
    assert finding["regime"].values.tolist()[0] == "below 0.1"
    assert np.allclose(finding["eigenvalue_quantile"], 1)
    assert (finding["transport_spectrum"] == 1).all()
    assert (finding["erased"] == 0).all()
    assert any("no regime" in note for note in finding.notes)
    assert "erased" not in finding.columns
    said = " ".join([*finding.notes, *finding.columns, *(check.meaning for check in checks_of(finding))])
    assert not any(regime in said for regime in ("skip", "overwrite", "over-relax", "reflect", "I - beta k k^T"))


def test_idle_constant_and_saturated_gates_are_findings_and_no_failures() -> None:
    model = model_of("scalar", 1)
    name = "blocks.1.ddl_mlp.hook_beta_logit"
    hooks = [
        (name, lambda gate, *, hook: torch.full_like(gate, 7.0)),
        ("blocks.2.hook_attn_out", lambda out, *, hook: torch.zeros_like(out)),
    ]
    with model.hooks(hooks):
        finding = quick(model, random_tokens(1))
    assert finding.passed
    assert float(finding["saturated"].sel(site="1.mlp")) == 1
    assert float(finding["beta_std"].sel(site="1.mlp")) < 1e-12
    assert float(finding["idle"].sel(site="2.attn")) == 1
    said = " ".join(finding.notes)
    assert "1.mlp (100.0%)" in said
    assert "standard deviation of beta below 0.01): 1.mlp" in said
    assert "k is no direction (share of tokens): 2.attn (100.0%)" in said


# --- broken models


@pytest.mark.parametrize("variant", ["scalar", "CC", "TC-EC"])
@pytest.mark.parametrize(
    ("what", "edit", "check", "refused"),
    [
        ("dir", lambda x: 1.1 * x, "unit direction", True),
        ("beta", lambda x: x + 2.1, "gate range", True),
        ("beta", lambda x: x - 2.1, "gate range", True),
        ("value", lambda x: x * torch.nan, "finite numbers", True),
        ("proj", lambda x: x + 1, "post-write", False),
    ],
)
def test_a_broken_model_fails_the_check_named_for_it(
    variant: str, what: str, edit: Any, check: str, refused: bool
) -> None:
    model = model_of(variant, 4)
    hook = (f"blocks.1.ddl_mlp.hook_{what}", lambda gate, *, hook: edit(gate))
    with model.hooks([hook]):
        finding = quick(model, random_tokens(4))
    assert finding.passed is False
    assert not checks_of(finding)[check].passed
    assert bool(finding["share"].isnull().all()) == refused
    assert bool(finding["eigenvalue_negative"].isnull().all()) == refused
    assert any(check in note and "refused" in note for note in finding.notes) == refused
    json.loads(finding.to_json())


def test_a_stream_that_a_hook_edits_fails_the_replay() -> None:
    model = model_of("scalar")
    with model.hooks([("blocks.1.hook_resid_mid", lambda x, *, hook: x + 0.1)]):
        finding = quick(model, [[1, 2, 3]])
    assert not checks_of(finding)["replay"].passed


def test_other_systems_are_refused_by_a_sentence_that_names_ddl_models() -> None:
    with pytest.raises(ValueError, match=r"this one is standard residual; bundled are ddl, ddl-cc-ec, ddl-tc-ec, "):
        audit_ddl(tiny("standard"), [[1, 2]])


# --- counterfactuals


@pytest.mark.parametrize("variant", ["scalar", "CC-EC", "TC-EC", "write-only"])
def test_counterfactuals_equal_passes_with_the_gate_forced(variant: str) -> None:
    """Each sublayer alone and all at once, one naive pass per sequence and kind."""
    model = model_of(variant, 6)
    rows = [[3, 8, 1, 8, 2], [5, 5, 7], [1, 9, 4, 4]]
    tokens = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (5 - len(row)) for row in rows])
    finding = audit_ddl(model, tokens, mask)
    sites = [site.name for site in model.sites[:-1]]
    kinds = finding["kind"].values.tolist()
    assert kinds == ["beta = 0", "beta = 1", "beta = mean", *(["no erasure"] if variant != "write-only" else [])]

    def forced(place: str, kind: str) -> list[tuple[str, Any]]:
        hooks = []
        for site in model.sites[:-1]:
            if place in ("all", site.name):
                value = {"beta = 0": 0.0, "beta = 1": 1.0, "no erasure": 0.0}.get(kind)
                value = float(finding["beta"].sel(site=site.name)) if value is None else value
                what = "proj" if kind == "no erasure" else "beta"
                hooks.append((f"blocks.{site.layer}.ddl_{site.kind}.hook_{what}", force("", value)[1]))
        return hooks

    def passed(hooks: list[tuple[str, Any]]) -> tuple[float, float, list[torch.Tensor]]:
        loss, n, logprobs = 0.0, 0, []
        for row in rows:
            with torch.no_grad():
                logprob = model.run_with_hooks(torch.tensor([row]), fwd_hooks=hooks)[0].log_softmax(-1)
            loss -= float(logprob[:-1].gather(-1, torch.tensor(row[1:])[:, None]).sum())
            n += len(row) - 1
            logprobs.append(logprob)
        return loss / n, n, logprobs

    base, _, plain = passed([])
    assert float(finding["loss"]) == pytest.approx(base, abs=1e-10)
    for place in [*sites[::2], "all"]:
        for i, kind in enumerate(kinds):
            loss, _, logprobs = passed(forced(place, kind))
            kl = sum(float((p.exp() * (p - q))[:-1].sum()) for p, q in zip(plain, logprobs, strict=True)) / 9
            got = {name: float(finding[name].sel(place=place).values[i]) for name in ("loss_effect", "kl")}
            assert got["loss_effect"] == pytest.approx(loss - base, abs=1e-10)
            assert got["kl"] == pytest.approx(kl, abs=1e-10)
            low, high = (float(finding[f"loss_{end}"].sel(place=place).values[i]) for end in ("low", "high"))
            assert low <= got["loss_effect"] + 1e-9
            assert got["loss_effect"] - 1e-9 <= high


def test_without_writes_the_readout_is_that_of_the_embedding() -> None:
    model = model_of("scalar", 7)
    tokens = torch.tensor([[3, 8, 1, 8]])
    with torch.no_grad():
        logits = model.unembed(model.ln_final(model.embed(tokens)))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    finding = audit_ddl(model, tokens)
    effect = float(finding["loss_effect"].sel(place="all").values[0])
    assert effect == pytest.approx(float(loss) - float(finding["loss"]), abs=1e-10)
    assert finding["loss_low"].isnull().all()  # one sequence has no spread


def test_one_token_and_bidirectional_models_have_kl_alone() -> None:
    both_ways = tiny("ddl", attention=replace(tiny("ddl").cfg.attention, causal=False))
    for model, tokens in ((model_of("scalar"), [[3]]), (both_ways, [[3, 1, 2]])):
        finding = audit_ddl(model, tokens)
        assert finding.passed
        assert finding["loss_effect"].isnull().all()
        assert finding["kl"].notnull().all()


# --- any input


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["scalar", "TC-EC", "write-only"])
def test_half_precision_is_finite_and_within_its_limits(variant: str, dtype: torch.dtype) -> None:
    finding = audit_ddl(model_of(variant, 8, dtype=dtype), random_tokens(8))
    assert finding.passed, str(checks_of(finding))
    for name in ("beta", "error_after", "change", "transport_rank", "loss_effect", "kl"):
        assert finding[name].notnull().all(), name


def test_padding_and_the_grouping_of_sequences_change_nothing() -> None:
    model = model_of("CC-EC", 9)
    rows = [[3, 8, 1, 8, 2, 7], [5, 5, 7]]
    padded = quick(model, torch.tensor([rows[0], [0, 0, 0, *rows[1]]]), torch.tensor([[1] * 6, [0] * 3 + [1] * 3]))
    alone = [quick(model, [row]) for row in rows]
    for name in ("beta", "error_before", "erased", "alignment", "share", "saturated"):
        mean = (6 * alone[0][name].values + 3 * alone[1][name].values) / 9
        assert np.abs(padded[name].values - mean).max() < 1e-10, name


def test_the_transport_is_sampled_evenly() -> None:
    finding = quick(model_of("scalar"), torch.arange(30).reshape(2, 15), transport_tokens=7)
    assert int(finding["n_transport_tokens"]) == 7
    with pytest.raises(ValueError, match="transport_tokens must be at least 1, not 0"):
        quick(model_of("scalar"), [[1, 2]], transport_tokens=0)


# --- files and the command line


def test_json_holds_checks_bounds_and_numbers(tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    done = CliRunner().invoke(
        app, ["audit", "ddl", "ddl", "In the beginning God created", "--no-counterfactuals", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    data = json.loads(out.read_text())
    assert data["passed"] is True
    assert "post-write" in data["coords"]["check"]
    assert data["coords"]["regime"] == ["skip", "partial", "overwrite", "over-relax", "reflect"]
    assert any("skip below 0.1" in note for note in data["notes"])
    assert "pass  unit direction" in done.output


def test_a_failed_check_is_exit_code_1_and_bad_input_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = model_of("scalar")
    monkeypatch.setattr("t2lens.cli.audit.load", lambda *_: model)
    run, page = CliRunner().invoke, tmp_path / "audit.html"
    arguments = ["audit", "ddl", "--ids", "1,2,3", "--no-counterfactuals"]
    assert run(app, arguments).exit_code == 0
    with model.hooks([force("beta", 2.5)]):
        done = run(app, [*arguments, "--html", str(page)])
    assert done.exit_code == 1
    assert "FAIL  gate range" in done.output
    assert "FAILED" in page.read_text()
    monkeypatch.setattr("t2lens.cli.audit.load", lambda *_: tiny("standard"))
    for bad, words in (
        (arguments, "is for models of Deep Delta Learning"),
        ([*arguments, "--texts", str(tmp_path)], "one of them"),
        (["audit", "ddl", "--texts", str(tmp_path / "none.txt")], "there is none at"),
        (["audit", "ddl", "--texts", str(tmp_path)], "holds no .txt file"),
    ):
        done = run(app, bad)
        assert done.exit_code == 2, done.output
        assert words in done.stderr


def test_texts_of_a_file_and_of_a_folder_are_paragraphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("In the beginning\n\nAnd God said\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n\nLet there be light", encoding="utf-8")
    seen: list[Any] = []

    def audit(model: Any, prompt: Any, **_: Any) -> Any:
        seen.append(prompt)
        return quick(model_of("scalar"), [[1, 2]])

    monkeypatch.setattr("t2lens.analysis.ddl_audit.audit_ddl", audit)
    for path in (tmp_path / "a.txt", tmp_path):
        assert CliRunner().invoke(app, ["audit", "ddl", "ddl", "--texts", str(path)]).exit_code == 0
    assert [[text.strip() for text in texts] for texts in seen] == [
        ["In the beginning", "And God said"],
        ["In the beginning", "And God said", "Let there be light"],
    ]


def test_the_catalog_runs_it() -> None:
    done = CliRunner().invoke(app, ["analyze", "ddl", "In the beginning", "--model", "ddl", "--no-counterfactuals"])
    assert done.exit_code == 0, done.output
    assert "DDL audit of ddl" in done.output
