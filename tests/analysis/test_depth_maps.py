"""Averaged depth maps against loops over single tokens and public functions, on every system."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis import depth_profile, load_finding
from t2lens.analysis.depth_maps import MAPS, QUARTILES
from t2lens.analysis.families import FAMILIES
from tests.systems import SYSTEMS, tiny


def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of a few sequences of different lengths, padded on either side."""
    dice, n = random.Random(seed), random.Random(seed).randint(2, 3)
    lengths = [dice.randint(2, 6) for _ in range(n)]
    width = max(lengths) + dice.randint(0, 2)
    ids = torch.randint(50, (n, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(n, width, dtype=torch.bool)
    for i, length in enumerate(lengths):
        first = dice.choice([0, width - length])
        mask[i, first : first + length] = True
    return ids, mask


def naive(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, start: bool
) -> dict[str, list[dict[tuple[str, str], float]]]:
    """map -> for every counted token {(read, column): value}: one sequence at a time, no padding, plain loops."""
    out: dict[str, list[dict[tuple[str, str], float]]] = {kind: [] for kind in MAPS}
    for row, there in zip(ids, mask, strict=True):
        tokens = row[there][None]
        _, cache = model.run_with_cache(tokens)
        mixing = t2lens.mixing_matrix(model, tokens)[0]
        added = {read.name: t2lens.contributions(model, tokens, read=read.name)[0] for read in model.reads}
        for pos in range(0 if start else 1, tokens.shape[1]):
            found: dict[str, dict[tuple[str, str], float]] = {kind: {} for kind in MAPS}
            for i, read in enumerate(model.reads):
                hook = read.site.hook("depth_attn", read.way)
                for j, source in enumerate(model.residual.sources(read.site)):
                    value = float(cache[hook][0, pos, j]) if hook in model.hook_dict else 1.0
                    found["weight"][read.name, source.name] = value
                atoms = model.atoms[: read.site.seen + 1]
                sizes = [float(added[read.name][pos, j].norm()) for j in range(len(atoms))]
                for j, atom in enumerate(atoms):
                    found["mixing"][read.name, atom] = float(mixing[i, pos, j])
                    found["contribution"][read.name, atom] = sizes[j]
                    found["share"][read.name, atom] = sizes[j] / sum(sizes) if sum(sizes) else 0.0
            for kind in MAPS:
                out[kind].append(found[kind])
    return out


@pytest.mark.parametrize("system", SYSTEMS)
def test_maps_are_those_of_a_loop_over_tokens(system: str) -> None:
    seed = sum(map(ord, system))
    model, (ids, mask), start = tiny(system, seed), ragged(seed), bool(seed % 2)
    found = depth_profile(model, ids, attention_mask=mask, start=start, n_boot=20)
    expected = naive(model, ids, mask, start)
    n = int(mask.sum()) - (0 if start else len(ids))
    assert int(found["n_tokens"]) == n == len(expected["share"])
    assert int(found["n_excluded"]) == (0 if start else len(ids))
    assert int(found["n_sequences"]) == len(ids)
    for kind, tokens in expected.items():
        axis = MAPS[kind][0]
        means, stds, quartiles, intervals = (
            found[f"{kind}_{name}"].transpose("read", axis, ...).values
            for name in ("mean", "std", "quartile", "interval")
        )
        for i, read in enumerate(found["read"].values):
            for j, column in enumerate(found[axis].values):
                mine = [token[read, column] for token in tokens if (read, column) in token]
                if not mine:
                    assert np.isnan(means[i, j])  # no such source, and no zero
                    continue
                got = [means[i, j], stds[i, j], *quartiles[i, j]]
                wanted = [sum(mine) / n, np.std(mine), *np.quantile(mine, QUARTILES)]
                assert np.allclose(got, wanted, rtol=1e-6, atol=1e-10), (kind, read, column)
                low, high = intervals[i, j]
                assert low - 1e-9 <= high and min(mine) - 1e-9 <= low and high <= max(mine) + 1e-9
    for read in found["read"].values:  # a gated read may hold nothing at some token
        some = [any(v > 0 for (r, _), v in token.items() if r == read) for token in expected["share"]]
        assert float(found["share_mean"].sel(read=read).sum()) == pytest.approx(np.mean(some), abs=1e-10)


@pytest.mark.parametrize(
    "system", ["attnres-full", "attnres-block", "muddformer", "ddl-cc", "hyper-connections", "dca"]
)
def test_profiles_are_those_of_a_loop_over_tokens(system: str) -> None:
    model, (ids, mask) = tiny(system, 3), ragged(11)
    found = depth_profile(model, ids, attention_mask=mask, n_boot=0)
    tokens = naive(model, ids, mask, start=False)
    per_block = (len(model.residual.sites) - 1) / model.cfg.n_layers
    far: dict[tuple[str, int], list[float]] = {}
    for read in model.reads:
        atoms = model.atoms[: read.site.seen + 1]
        mine = [[token[read.name, atom] for atom in atoms] for token in tokens["share"]]
        back = [1 + read.site.index - j for j in range(len(atoms))]
        lookback = np.mean([sum(s * d for s, d in zip(row, back, strict=True)) / per_block for row in mine])
        assert float(found["lookback"].sel(read=read.name)) == pytest.approx(lookback, abs=1e-10)
        reader = "carried" if read.way == "r" else read.site.kind
        for j in range(1, len(atoms)):
            far.setdefault((reader, back[j]), []).append(float(np.mean([row[j] for row in mine])))
        family = dict(zip(FAMILIES, found["family_share"].sel(read=read.name).values, strict=True))
        assert family["embedding"] == pytest.approx(np.mean([row[0] for row in mine]), abs=1e-10)
        if len(atoms) > 1:
            assert family["current"] == pytest.approx(np.mean([row[-1] for row in mine]), abs=1e-10)
        assert np.nansum(list(family.values())) == pytest.approx(1, abs=1e-10)
    for reader in found["reader"].values:
        for distance in found["distance"].values:
            value = float(found["share_by_distance"].sel(reader=reader, distance=distance))
            if (reader, distance) in far:
                assert value == pytest.approx(np.mean(far[reader, distance]), abs=1e-10)
            else:
                assert np.isnan(value)
    assert ("family_mass" in found.dataset) == (system not in ("ddl-cc", "hyper-connections"))


def test_family_mass_is_of_the_sources_that_weights_run_over() -> None:
    model, tokens = tiny("attnres-block", 1), torch.tensor([[1, 2, 3, 4]])
    found = depth_profile(model, tokens, n_boot=0)
    weight = found["weight_mean"].sel(read="out").dropna("source")
    mass = found["family_mass"].sel(read="out").values
    assert mass[FAMILIES.index("embedding")] == pytest.approx(float(weight.sel(source="embed")))
    assert mass[FAMILIES.index("current")] == pytest.approx(float(weight[-1]))
    held = found["holds"].sel(read="out", source=weight.source.values[-1]).item()
    assert held.split() == list(model.residual.sources(model.reads[-1].site)[-1].atoms)


def test_intervals_narrow_with_sequences_and_need_two() -> None:
    model = tiny("attnres-full")
    tokens = torch.randint(50, (16, 6), generator=torch.Generator().manual_seed(0))
    few, many = depth_profile(model, tokens[:4]), depth_profile(model, tokens)
    width = [(f["share_interval"].diff("bound").squeeze() / 1).mean().item() for f in (few, many)]
    assert 0 < width[1] < width[0]
    assert np.isnan(depth_profile(model, tokens[:1])["share_interval"]).all()


def test_an_edited_stream_leaves_out_what_no_write_accounts_for() -> None:
    model, tokens = tiny("standard"), [[1, 2, 3]]
    with t2lens.edited(model, t2lens.Edit(target="stream", site="1.attn", operation="scale", value=0.2)):
        found = depth_profile(model, tokens)
    assert np.isfinite(found["share_mean"].sel(read="0.mlp", atom="embed"))
    assert np.isnan(found["share_mean"].sel(read="out")).all() and np.isnan(found["lookback"].sel(read="out"))
    assert any("stream was edited" in note for note in found.notes)


def test_it_is_kept_and_refuses_in_a_sentence(tmp_path: Any) -> None:
    model = tiny("muddformer")
    found = depth_profile(model, [[1, 2, 3], [4, 5, 6]])
    (tmp_path / "f.json").write_bytes(found.to_json())
    again = load_finding(tmp_path / "f.json")
    assert again["share_quartile"].equals(found["share_quartile"])
    assert again["holds"].values.tolist() == found["holds"].values.tolist()
    with pytest.raises(ValueError, match="Only first tokens"):
        depth_profile(model, [[1]])
    assert int(depth_profile(model, [[1]], start=True)["n_tokens"]) == 1
    with pytest.raises(ValueError, match="n_boot must be"):
        depth_profile(model, [[1, 2]], n_boot=-1)
