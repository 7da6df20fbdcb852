"""Writes taken away one at a time: against one edited pass per write, on every system."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import t2lens
from t2lens.analysis import ablate_writes, attribute_logits
from t2lens.analysis.under_edits import check_under_edits
from tests.systems import SYSTEMS, random_tokens, tiny


def passed(model, ids, edits=()):
    with torch.no_grad(), t2lens.edited(model, list(edits)):
        return model(ids[None])[0].double()


def loss_of(logits, ids):
    return float(F.cross_entropy(logits[:-1], ids[1:]))


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_write_is_what_one_edited_pass_says(system: str) -> None:
    seed = random.randrange(1000)
    _compare(tiny(system, seed, local=bool(seed % 2)), seed)
    if (parallel := _parallel(system, seed)) is not None:
        _compare(parallel, seed)


def _compare(model: Any, seed: int) -> None:
    ids = random_tokens(seed)[0]
    pos, token = random.Random(seed).randrange(-len(ids), len(ids)), seed % 50
    found = ablate_writes(model, ids, pos=pos, token=token)
    plain = passed(model, ids)
    assert found["write"].values.tolist() == list(model.atoms)
    p = plain.log_softmax(dim=-1)
    for atom in model.atoms:
        edit = t2lens.Edit(target="atom", operation="zero", site=atom)
        logits = passed(model, ids, [edit])
        q = logits.log_softmax(dim=-1)
        kl = (p.exp() * (p - q)).sum(dim=-1)
        wanted = {
            "kl": kl[pos],
            "kl_mean": kl.mean(),
            "loss": loss_of(logits, ids) - loss_of(plain, ids),
            "logit": logits[pos, token] - plain[pos, token],
            "probability": (q[pos, token].exp() - p[pos, token].exp()),
        }
        for name, value in wanted.items():
            assert float(found[name].sel(write=atom)) == pytest.approx(float(value), abs=1e-10, rel=1e-9), (seed, atom)
    assert float(found["plain_logit"]) == pytest.approx(float(plain[pos, token]), rel=1e-12)
    assert float(found["plain_loss"]) == pytest.approx(loss_of(plain, ids), rel=1e-10)
    share = attribute_logits(model, ids, pos=pos, token=token)["share"].values[:-1]
    assert np.allclose(found["share"], share, atol=1e-12)
    for name in ("kl", "logit"):
        order = [np.abs(x)[:, None] for x in (share, found[name].values)]
        places = [(x > x.T).sum(1) + (x == x.T).sum(1) / 2 for x in order]
        if min(np.ptp(x) for x in places) > 0:
            wanted = np.corrcoef(*places)[0, 1]
            assert float(found["spearman"].sel(measure=name)) == pytest.approx(wanted, abs=1e-9)


def _parallel(system: str, seed: int) -> Any:
    """None where the system has no parallel blocks."""
    try:
        return tiny(system, seed, block="parallel")
    except ValueError:
        return None


@pytest.mark.parametrize("system", ["standard", "ddl-cc-ec", "muddformer"])
def test_several_sequences_and_means(system: str) -> None:
    seed = random.randrange(1000)
    model, dice = tiny(system, seed), random.Random(seed)
    texts = [torch.tensor([dice.randrange(50) for _ in range(n)]) for n in (4, 7)]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.tensor([[1] * len(t) + [0] * (7 - len(t)) for t in texts])
    found = ablate_writes(model, tokens, attention_mask=mask, by="mean")
    names = {atom: "hook_embed" if atom == "embed" else _hook(atom) for atom in model.atoms}
    caches = [model.run_with_cache(text[None])[1] for text in texts]
    for atom, name in names.items():
        mean = torch.cat([cache[name][0] for cache in caches]).mean(dim=0)
        edit = t2lens.Edit(target="atom", operation="set", site=atom, value=mean.tolist())
        for row, text in enumerate(texts):
            plain, logits = passed(model, text), passed(model, text, [edit])
            p, q = plain[-1].softmax(dim=-1), logits[-1].softmax(dim=-1)
            here = found.dataset.sel(write=atom).isel(sequence=row)
            assert float(here["kl"]) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-10)
            best = int(p.argmax())
            assert float(here["probability"]) == pytest.approx(float(q[best] - p[best]), abs=1e-10)
            assert float(here["loss"]) == pytest.approx(loss_of(logits, text) - loss_of(plain, text), abs=1e-10)
    assert "n = 2 sequences" in found.notes[0] and found.columns[-1] == "spread of KL"


def _hook(atom):
    layer, kind = atom.split(".")
    return f"blocks.{layer}.hook_{kind}_out"


def test_a_write_that_does_nothing_has_no_effect_and_the_largest_comes_first() -> None:
    model = tiny("standard", 3)
    with torch.no_grad():
        for p in model.blocks[1].mlp.parameters():
            p.zero_()
    found = ablate_writes(model, [3, 7, 1, 9])
    assert float(found["kl"].sel(write="1.mlp")) == 0
    assert [row[1] for row in found.rows] == sorted((row[1] for row in found.rows), reverse=True)
    assert found.rows[-1][0] == "1.mlp"


def test_one_token_has_no_loss_and_what_is_asked_wrongly_is_said() -> None:
    model = tiny("attnres-full", 1)
    assert np.isnan(ablate_writes(model, [3])["loss"]).all()
    with pytest.raises(ValueError, match='by "zero" or by its "mean"'):
        ablate_writes(model, [3, 4], by="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pos must lie"):
        ablate_writes(model, [3, 4], pos=2)
    for pos in (True, 0.5, None):
        with pytest.raises(ValueError, match=f"pos must be a whole number, not {pos}"):
            ablate_writes(model, [3, 4], pos=pos)  # type: ignore[arg-type]


def test_under_edits_it_is_of_the_edited_pass_or_refused() -> None:
    model, ids = tiny("standard", 5), torch.tensor([3, 7, 1, 9])
    kept = t2lens.Edit(target="atom", operation="scale", site="0.mlp", value=0.3)
    check_under_edits(model, [kept], "writes")
    with t2lens.edited(model, kept):
        found = ablate_writes(model, ids)
    plain, gone = (
        passed(model, ids, [kept]),
        passed(model, ids, [kept, t2lens.Edit(target="atom", operation="zero", site="1.attn")]),
    )
    p, q = plain[-1].log_softmax(dim=-1), gone[-1].log_softmax(dim=-1)
    assert float(found["kl"].sel(write="1.attn")) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-10)
    with pytest.raises(ValueError, match="stream"):
        check_under_edits(model, [t2lens.Edit(target="stream", operation="zero", site="1.attn")], "writes")
