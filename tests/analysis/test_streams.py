"""Ablating and rescuing streams, against one pass per intervention, and where the answer is known."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from t2lens.analysis import ablate_streams
from t2lens.cli import app
from t2lens.residual import HyperConnections
from tests.systems import SYSTEMS, random_tokens, tiny

STREAMS = [name for name in SYSTEMS if isinstance(SYSTEMS[name], HyperConnections)]


@pytest.mark.parametrize(("system", "by"), [*product(STREAMS, ["zero", "mean"])])
def test_every_entry_is_what_one_pass_with_that_intervention_gives(system: str, by: Any) -> None:
    seed = random.randrange(1000)
    model, tokens = tiny(system, seed=seed), random_tokens(seed)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[-1, -1] = len(tokens) == 1 and tokens.shape[1] < 3
    found = ablate_streams(model, tokens, by=by, attention_mask=mask)
    where = mask[:, :-1] & mask[:, 1:]
    n_layers, n = model.cfg.n_layers, model.cfg.residual.n_streams
    _, cache = model.run_with_cache(tokens, mask)

    def loss(hooks: list[Any]) -> float:
        with torch.no_grad():
            logprob = model.run_with_hooks(tokens, mask, fwd_hooks=hooks)[:, :-1].log_softmax(-1)
        return float(-logprob.gather(-1, tokens[:, 1:, None]).squeeze(-1)[where].mean())

    base = loss([])
    names = [*(f"blocks.{layer}.hook_streams_pre" for layer in range(n_layers)), "blocks.2.hook_streams_post"]
    for b in random.sample(range(n_layers + 1), 2):
        streams = cache[names[b]]
        mean = streams[mask].mean(0) if by == "mean" else torch.zeros_like(streams[0, 0])

        def put(source: int | None, *targets: int, b: int = b, mean: torch.Tensor = mean) -> float:
            def hook(x: torch.Tensor, *, hook: Any) -> torch.Tensor:
                y = x.clone()
                for i in targets:
                    y[:, :, i] = mean[i] if source is None else x[:, :, source]
                return y

            return loss([(names[b], hook)]) - base

        alone = [put(None, i) for i in range(n)]
        for i in range(n):
            assert abs(float(found["ablated"][b, i]) - alone[i]) < 1e-10, seed
            assert found["norm"][b, i] == pytest.approx(float(streams[mask][:, i].norm(dim=-1).mean()))
            for j in range(n):
                if i == j:
                    assert np.isnan(found["rescue"][b, i, j])
                    continue
                both, substituted = put(None, i, j), put(j, i)
                assert abs(float(found["both"][b, i, j]) - both) < 1e-10
                assert abs(float(found["substituted"][b, i, j]) - substituted) < 1e-10
                assert abs(float(found["interaction"][b, i, j]) - (both - alone[i] - alone[j])) < 1e-10
                if alone[i] > 0.011:
                    assert float(found["rescue"][b, i, j]) == pytest.approx(1 - substituted / alone[i])
                if both > 0.011:
                    assert float(found["restored"][b, i, j]) == pytest.approx(1 - alone[j] / both)
                cosine = torch.cosine_similarity(streams[mask][:, i], streams[mask][:, j], dim=-1).mean()
                assert float(found["cosine"][b, i, j]) == pytest.approx(float(cosine))


def _twins(seed: int) -> Any:
    """Two streams that hold the same, of which only stream `seed % 2` is read."""
    residual = HyperConnections(n_streams=2, coefficients="static", readout="head")
    model = tiny("hyper-static", seed=seed, residual=residual)
    read = torch.tensor([1.0, 0.0]) if seed % 2 == 0 else torch.tensor([0.0, 1.0])
    model.residual.static_pre.data[:] = read
    model.residual.static_post.data[:] = 1.0
    model.residual.static_res.data[:] = torch.eye(2)
    model.residual.head_static.data[:] = 200 * (read - 0.5)
    return model


def test_streams_that_hold_the_same_and_are_not_used_alike() -> None:
    seed = random.randrange(1000)
    model = _twins(seed)
    used = seed % 2
    found = ablate_streams(model, random_tokens(seed))
    assert np.abs(found["cosine"].values - 1).max() < 1e-10
    assert np.nanmax(np.abs(found["substituted"].values)) < 1e-12  # a copy stands in for all
    assert np.abs(found["ablated"].values[:, 1 - used]).max() < 1e-10
    assert np.abs(found["ablated"].values[:, used]).min() > 1e-4
    assert np.abs(found["both"].values[:, 0, 1] - found["ablated"].values[:, used]).max() < 1e-10
    rescue = found["rescue"].values[:, used, 1 - used]
    assert np.allclose(rescue[np.isfinite(rescue)], 1, atol=1e-9)


def test_streams_are_copies_before_the_first_block() -> None:
    found = ablate_streams(tiny("mhc", seed=4), random_tokens(9))
    assert np.abs(found["cosine"].values[0] - 1).max() < 1e-12
    assert np.nanmax(np.abs(found["substituted"].values[0])) < 1e-12


@pytest.mark.parametrize("system", ["standard", "attnres-full", "ddl-cc", "muddformer"])
def test_models_without_streams_are_refused_with_what_to_use_instead(system: str) -> None:
    with pytest.raises(ValueError, match=r"carries no parallel streams.*ablate_families"):
        ablate_streams(tiny(system), [1, 2, 3])


def test_another_replacement_is_one_sentence() -> None:
    with pytest.raises(ValueError, match='by "zero" or by its "mean", not by \'noise\''):
        ablate_streams(tiny("mhc"), [1, 2, 3], by="noise")  # type: ignore[arg-type]


def test_intervals_are_seeded_and_half_precision_is_finite() -> None:
    tokens = torch.randint(50, (8, 4))
    one, same, other = (ablate_streams(tiny("mhc"), tokens, seed=seed)["low"].values for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    found = ablate_streams(tiny("mhc", dtype=torch.bfloat16), tokens)
    assert np.isfinite(found["ablated"].values).all()


def test_the_command_line_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "streams.json"
    run = CliRunner().invoke(app, ["analyze", "streams", "In the", "--model", "mhc", "--json", str(out)])
    assert run.exit_code == 0, run.output
    assert "cosine and rescue" in run.output
    data = json.loads(out.read_text())
    assert len(data["variables"]["rescue"]["values"]) == 9  # 8 blocks and the readout
