"""Shares of logits and losses against the model, naive recomputation and transformer-lens."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import attribute_logits, attribute_loss
from t2lens.cli import app
from t2lens.config import MLP, BucketAttention, Canon, KVShift, ModelConfig, Norm
from t2lens.config import Attention as AttentionConfig
from t2lens.hooks import NotAdditiveError
from t2lens.residual import ELCBert, Standard
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config

TIGHT = 1e-10
systems = pytest.mark.parametrize("system", SYSTEMS)


def gap(tokens: torch.Tensor, n: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    pad, real = torch.full((len(tokens), n), 1), torch.ones_like(tokens, dtype=torch.bool)
    flags = torch.zeros_like(pad, dtype=torch.bool)
    order = (0, 1) if side == "left" else (1, 0)
    both, marks = [pad, tokens], [flags, real]
    return torch.cat([both[i] for i in order], 1), torch.cat([marks[i] for i in order], 1)


def forms(model):
    return model.residual.forms


@systems
def test_shares_sum_to_the_logit_by_atom_and_by_head_in_every_form(system):
    model, tokens = tiny(system, 1, local=True), random_tokens(1)
    padded, mask = gap(tokens, 2, "left")
    logits = model(padded, mask).detach()
    for form in forms(model):
        atoms = attribute_logits(model, padded, attention_mask=mask, token=5, against=7, form=form)
        heads = attribute_logits(model, padded, attention_mask=mask, token=5, against=7, form=form, by="head")
        for finding in (atoms, heads):
            total = finding["share_by_pos"].sum("part", skipna=False).values
            expected = np.atleast_2d((logits[..., 5] - logits[..., 7]).numpy())
            real = np.atleast_2d(mask.numpy())
            assert np.abs(np.atleast_2d(total)[real] - expected[real]).max() < TIGHT
            assert np.isnan(np.atleast_2d(total)[~real]).all()
            assert float(abs(finding["error"]).max()) < TIGHT
        for atom in model.atoms:  # the pieces of an atom are the atom
            pieces = heads["share"].where(heads["atom"] == atom, drop=True).sum("part")
            assert float(abs(pieces - atoms["share"].sel(part=atom)).max()) < TIGHT
        assert len(heads["part"]) == 2 + 3 * (1 + 2 + 1)  # embed, bias, and per block: local head, 2 heads, mlp


@systems
def test_losses_are_log_v_plus_shares(system):
    model, tokens = tiny(system, 2), random_tokens(2)
    padded, mask = gap(tokens, 1, "right")
    for form in forms(model):
        finding = attribute_loss(model, padded, attention_mask=mask, by="head", form=form)
        logprob = model(tokens).detach().log_softmax(-1)
        expected = -logprob[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()
        n = tokens.shape[1] - 1
        total = np.atleast_2d(finding["share"].sum("part", skipna=False).values)
        assert np.abs(total[:, :n] + math.log(50) - expected).max() < TIGHT
        assert np.isnan(total[:, n:]).all()
        assert np.abs(finding["loss"].values.reshape(len(tokens), -1)[:, :n] - expected).max() < TIGHT


def test_a_losss_shares_are_the_integral_of_its_gradient_along_the_ray():
    model, tokens = tiny("attnres-full", 3), random_tokens(3)[:1]
    finding = attribute_loss(model, tokens)
    record = model.record(tokens)
    parts = model.logit_shares(t2lens.contributions(model, tokens).movedim(-2, 0), record.reads["out"]).detach()
    z, steps = model(tokens).detach(), 400
    for pos in range(tokens.shape[1] - 1):
        y = int(tokens[0, pos + 1])
        by_hand = torch.zeros(len(model.atoms), dtype=torch.float64)
        for i in range(steps):  # midpoint rule
            at = ((i + 0.5) / steps * z[0, pos]).requires_grad_()
            loss = torch.nn.functional.cross_entropy(at[None], torch.tensor([y]))
            (slope,) = torch.autograd.grad(loss, at)
            by_hand += parts[:, 0, pos] @ slope / steps
        assert np.abs(finding["share"].values[:-1, pos] - by_hand.numpy()).max() < 1e-4


def test_quadrature_is_exact_for_two_tokens_and_for_sharp_logits():
    from t2lens.analysis.attribution import _mean_gradient

    # two tokens: the integral of sigmoid(-t d) over t is (log 2 - log(1 + exp(-d))) / d
    for d in (1e-3, 1.0, 40.0, -700.0):
        g, _ = _mean_gradient(torch.tensor([[d, 0.0]], dtype=torch.float64), torch.tensor([0]))
        expected = (math.log(2) - float(torch.nn.functional.softplus(torch.tensor(-d, dtype=torch.float64)))) / d
        assert abs(float(g[0, 1]) - expected) < 1e-12 and abs(float(g.sum())) < 1e-12
    z = 60 * torch.randn(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20)
    g, nodes = _mean_gradient(z, y)
    gained = -z.log_softmax(-1)[torch.arange(20), y] - math.log(50)
    assert float(((g * z).sum(-1) - gained).abs().max()) < TIGHT
    assert nodes <= 256


def test_shares_of_a_known_network():
    """No norms, one block, identity unembedding: the share of an atom is its own entry."""
    attention = AttentionConfig(n_heads=2, n_kv_heads=2, d_head=2, bias=True)
    sizes: dict[str, Any] = {"d_vocab": 4, "n_ctx": 8, "d_model": 4, "n_layers": 1, "mlp": MLP(d_mlp=4)}
    cfg = ModelConfig(**sizes, attention=attention, norm=Norm(kind="none"), tied=False, head_bias=True)
    model: Any = t2lens.build(cfg, seed=0).double()
    for p in model.parameters():
        p.data.zero_()
    norms = (model.ln_final, model.blocks[0].ln1, model.blocks[0].ln2)
    for norm in norms:
        norm.w.data.fill_(1.0)
    model.embed.weight.data += torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    model.unembed.weight.data += torch.eye(4)
    model.unembed.bias.data += torch.tensor([0.0, 0.0, 0.0, 0.5])
    attn = model.blocks[0].attn  # uniform attention over v: head 0 copies channels 0-1, head 1 channels 2-3
    attn.value.weight.data += torch.eye(4)
    attn.output.weight.data += torch.eye(4)
    attn.output.bias.data += torch.tensor([0.0, 0.0, 0.0, 0.25])
    finding: Any = attribute_logits(model, [0, 3], token=3, by="head")
    said = dict(zip(finding["part"].values.tolist(), finding["share"].values.tolist(), strict=True))
    expected = {"embed": 4.0, "0.attn.h0": 0.0, "0.attn.h1": 2.0, "0.attn.bias": 0.25, "0.mlp": 0.0, "bias": 0.5}
    assert said == pytest.approx(expected, abs=1e-12)
    assert [row[:2] for row in finding.rows[:2]] == [("logit of the model", 6.75), ("embed", 4.0)]
    difference = attribute_logits(model, [0, 3], token=3, against=1)
    assert difference.columns == ("part", "share")
    assert difference.rows[0][0] == "difference of logits"
    above = dict(zip(finding["part"].values.tolist(), finding["share_above_mean"].values.tolist(), strict=True))
    assert above["embed"] == pytest.approx(3.0) and above["bias"] == pytest.approx(0.375)
    wanted = attribute_logits(model, [0, 3])
    assert wanted["target"].item() == "3"  # the likeliest


SCALAR = [name for name in SYSTEMS if tiny(name).residual.coefficients() == "scalar"]


@pytest.mark.parametrize("system", SCALAR)
def test_a_heads_share_is_what_leaves_the_logit_with_its_contribution_at_the_readout(system):
    model, tokens = tiny(system, 4), random_tokens(4)[:1]
    finding = attribute_logits(model, tokens, token=9, by="head")
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        lost = _lost_with_a_head(model, tokens, cache, layer=1, head=1, token=9)
    assert lost == pytest.approx(float(finding["share"].sel(part="1.attn.h1")), abs=TIGHT)


def _lost_with_a_head(model, tokens, cache, layer, head, token) -> float:
    """How much the last logit falls when the head's part of the last read is left out, at the same norm scale."""
    record = cache.record
    wrote = cache[f"blocks.{layer}.attn.hook_z"][:, :, head] @ model.blocks[layer].attn.W_O[head]
    row = list(t2lens.mixing_matrix(model, tokens)[:, -1].unbind(-1))[model.atoms.index(f"{layer}.attn")]
    read = record.reads["out"]
    scale = model.ln_final.scale(read)
    weight = 1.0 if model.ln_final.w is None else model.ln_final.w
    bias = 0.0 if model.ln_final.b is None else model.ln_final.b
    without = (read - row.unsqueeze(-1) * wrote) / scale * weight + bias
    return float((model.ln_final(read) - without)[0, -1] @ model.W_U[:, token])


@pytest.mark.parametrize("output", ["gated", "post_norm"])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_behind_a_norm_are_split_at_its_scale(output, bias):
    plain = Norm(kind="layer", weight=False, eps=1e-7)
    attention = BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, n_buckets=8, output=output, bias=bias)
    model = tiny("standard", 5, residual=ELCBert(variant="zero"), norm=plain, embed_norm=plain, attention=attention)
    tokens, mask = gap(random_tokens(5), 2, "left")
    finding = attribute_logits(model, tokens, attention_mask=mask, token=3, by="head")
    assert float(abs(finding["error"]).max()) < TIGHT
    assert "0.attn.h1" in finding["part"].values and not any("Not split" in note for note in finding.notes)
    assert ("0.attn.bias" in finding["part"].values) == (bias or output == "post_norm")
    attn = model.blocks[1].attn
    _, cache = model.run_with_cache(tokens, mask)
    z = cache["blocks.1.attn.hook_z"]
    gate = cache["blocks.1.attn.hook_gate"] if output == "gated" else None
    parts = attn.by_head(z, gate).detach()
    out = cache["blocks.1.hook_attn_out"]
    assert float((parts.sum(0) - out)[mask].abs().max()) < TIGHT


def test_mixers_of_keys_and_values_leave_the_split_exact():
    attention = AttentionConfig(n_heads=2, n_kv_heads=1, d_head=8, kv_shift=KVShift(), bias=True)
    model, tokens = tiny("attnres-full", 6, attention=attention, canon=Canon()), random_tokens(6)
    finding = attribute_logits(model, tokens, token=3, by="head")
    assert float(abs(finding["error"]).max()) < TIGHT
    assert "2.attn.bias" in finding["part"].values


def test_a_batch_equals_its_sequences_and_positions_count_real_tokens():
    model, tokens = tiny("attnres-block", 7), torch.tensor([[3, 8, 8, 1], [5, 2, 9, 0]])
    both = attribute_logits(model, tokens, pos=-2, token=[4, 6])
    for i, token in enumerate((4, 6)):
        alone = attribute_logits(model, tokens[i], pos=2, token=token)
        assert np.abs(both["share"].isel(sequence=i).values - alone["share"].values).max() < 1e-12
        padded, mask = gap(tokens[i : i + 1], 3, "left")
        same = attribute_logits(model, padded, attention_mask=mask, pos=2, token=token)
        assert np.abs(same["share"].values - alone["share"].values).max() < 1e-12
        assert same.title == alone.title and int(same["column"]) == 5
    assert both.columns == ("part", "mean share", "above mean token", "spread over sequences")
    share = both["share"].values
    row = next(row for row in both.rows if row[0] == "1.mlp")
    i = both["part"].values.tolist().index("1.mlp")
    assert row[1] == pytest.approx(share[i].mean()) and row[3] == pytest.approx(share[i].std(ddof=1))


def test_the_table_begins_with_the_whole_and_its_parts_are_sorted_and_sum_to_it():
    model, biased = tiny("standard", 8), tiny("standard", 8, head_bias=True)
    for one, n_parts in ((model, len(model.atoms)), (biased, len(model.atoms) + 1)):
        logit, *parts = attribute_logits(one, random_tokens(8)[0]).rows
        sizes = [abs(row[1]) for row in parts]
        assert sizes == sorted(sizes, reverse=True) and len(parts) == n_parts  # no row for a bias that is not there
        for column in (1, 2):
            assert sum(row[column] for row in parts) == pytest.approx(logit[column], abs=TIGHT)
        loss, uniform, *parts = attribute_loss(one, random_tokens(8)).rows
        assert [abs(row[1]) for row in parts] == sorted((abs(row[1]) for row in parts), reverse=True)
        assert len(parts) == n_parts
        assert sum(row[1] for row in (*parts, uniform)) == pytest.approx(loss[1], abs=TIGHT)
        with torch.no_grad():
            assert loss[1] == pytest.approx(float(one(random_tokens(8), return_type="loss")), abs=1e-6)


def test_transformer_lens_agrees_where_the_stream_is_a_sum():
    model: Any = t2lens.build(tiny_config("standard"), seed=9).double()
    tokens = random_tokens(9)[:1]
    _, cache = model.run_with_cache(tokens)
    parts, labels = cache.decompose_resid(return_labels=True)
    theirs = cache.logit_attrs(parts, 5, 11)[:, 0].detach()
    ours = attribute_logits(model, tokens, token=5, against=11)["share_by_pos"].values
    names = {"embed": "embed", **{f"{i}_{kind}_out": f"{i}.{kind}" for i in range(3) for kind in ("attn", "mlp")}}
    assert [names[label] for label in labels] == list(model.atoms)
    assert np.abs(theirs.numpy() - ours[:-1]).max() < TIGHT
    depth = tiny("attnres-full", 9)
    _, cache = depth.run_with_cache(tokens)
    with pytest.raises(NotAdditiveError, match="attribute_logits"):
        cache.logit_attrs(torch.zeros(1, *cache["hook_embed"].shape), 5)


def test_an_edit_of_what_attention_writes_keeps_that_atom_whole():
    model, tokens = tiny("attnres-full", 10), random_tokens(10)[:1]
    with model.hooks([("blocks.1.hook_attn_out", lambda x, hook: x + 1)]):
        finding = attribute_logits(model, tokens, token=1, by="head")
    parts = finding["part"].values.tolist()
    assert "1.attn" in parts and "1.attn.h0" not in parts and "0.attn.h0" in parts
    assert any("1.attn" in note and "Not split" in note for note in finding.notes)
    assert float(abs(finding["error"])) < TIGHT
    with model.hooks([("blocks.1.attn.hook_z", lambda z, hook: z * 0)]):  # in a head: that head has no share
        finding = attribute_logits(model, tokens, token=1, by="head")
    assert float(finding["share"].sel(part="1.attn.h0")) == 0.0 and float(abs(finding["error"])) < TIGHT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("system", ["standard", "attnres-block", "ddl-cc", "mhc", "muddformer-prepost"])
def test_half_precision_is_finite_and_its_error_is_stated(system, dtype):
    model = t2lens.build(tiny_config(system), seed=11).to(dtype)
    tokens = random_tokens(11)
    for finding in (attribute_logits(model, tokens, by="head"), attribute_loss(model, tokens, by="head")):
        assert np.isfinite(finding["error"].values[..., 0]).all()
        assert not np.isinf(finding["share"].values).any()
        assert float(abs(finding["error"]).max()) < {torch.float32: 1e-5}.get(dtype, 0.1)
        assert any("(error " in note for note in finding.notes)


def test_what_cannot_be_attributed_is_refused_in_a_sentence():
    model, tokens = tiny("standard", 12), [0, 7, 3]
    with pytest.raises(ValueError, match=r"by must be \"atom\" or \"head\", not 'layer'"):
        attribute_logits(model, tokens, by="layer")
    with pytest.raises(ValueError, match=r"pos must lie in -3..2, not 3"):
        attribute_logits(model, tokens, pos=3)
    with pytest.raises(ValueError, match=r"Token id 50 is outside the vocabulary 0..49"):
        attribute_logits(model, tokens, token=50)
    with pytest.raises(ValueError, match="names 2 tokens for 1 sequences"):
        attribute_logits(model, tokens, token=[1, 2])
    with pytest.raises(TypeError, match="A token is its text or its id, not float"):
        attribute_logits(model, tokens, token=1.5)
    with pytest.raises(ValueError, match="no form 'operator'"):
        attribute_loss(model, tokens, form="operator")
    with pytest.raises(ValueError, match="at least two tokens"):
        attribute_loss(model, [4])
    mlm = tiny("standard", 12, head="mlm", residual=Standard())
    with pytest.raises(ValueError, match="not a sum of shares of the last read"):
        attribute_logits(mlm, tokens)
    assert attribute_logits(model, tokens, token="9")["target"].item() == "9"  # no tokenizer: ids as text


def test_one_prompt_on_the_command_line(tmp_path):
    model = t2lens.load("standard")
    text = "The cat sat on the mat"
    file = tmp_path / "logits.json"
    args = ["analyze", "logits", text, "--model", "standard", "--token", " and", "--by", "head", "--json", str(file)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    said = json.loads(file.read_text())
    direct = attribute_logits(model, text, token=" and", by="head")
    assert np.array_equal(said["variables"]["share"]["values"], direct["share"].values)
    result = CliRunner().invoke(app, ["analyze", "logits", text, "--model", "standard", "--token", " and the"])
    assert result.exit_code == 2 and "is not one token of this model but the tokens" in result.output
    result = CliRunner().invoke(app, ["analyze", "loss", text, "--model", "standard", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert max(abs(x) for x in json.loads(file.read_text())["variables"]["error"]["values"] if x is not None) < 1e-4


def test_many_sequences_in_groups_are_as_one(monkeypatch):
    model, tokens = tiny("ddl", 13), torch.randint(50, (5, 6), generator=torch.Generator().manual_seed(13))
    whole = attribute_loss(model, tokens, by="head")
    monkeypatch.setattr("t2lens.analysis.attribution._BUDGET", 1)
    monkeypatch.setattr("t2lens.analysis.attribution._ENTRIES", 100)
    grouped = attribute_loss(model, tokens, by="head")
    for name in ("share", "loss", "mean", "spread"):
        a, b = whole[name].values, grouped[name].values
        assert (np.isnan(a) == np.isnan(b)).all() and np.nanmax(np.abs(a - b)) < TIGHT
    assert [row[0] for row in whole.rows] == [row[0] for row in grouped.rows]
