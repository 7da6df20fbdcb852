"""The logit lens against ln_final and unembed applied by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import logit_lens
from t2lens.cli import app
from t2lens.config import MLP, Attention, ModelConfig, Norm
from t2lens.residual import HyperConnections
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config

TIGHT = 1e-10


def by_hand(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.unembed(model.ln_final(x)).log_softmax(-1)


def table(finding: Any, name: str, **at: Any) -> np.ndarray:
    values = finding[name].sel(**at).values
    return values if "sequence" in finding[name].dims else values[None]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_number_of_every_read_is_that_of_the_readout_applied_by_hand(system):
    model, tokens = tiny(system, 1, local=True), random_tokens(1)
    finding = logit_lens(model, tokens, top=3)
    assert finding["read"].values.tolist() == [read.name for read in model.reads]
    record, final = model.record(tokens), model(tokens).detach().log_softmax(-1)
    following = torch.cat([tokens[:, 1:], final[:, -1:].argmax(dim=-1)], dim=1)[..., None]
    for read in model.reads:
        lens = by_hand(model, record.reads[read.name])
        p, name = lens.exp(), read.name
        of_next = lens.gather(-1, following)
        assert np.abs(table(finding, "entropy", read=name) + (p * lens).sum(-1).numpy()).max() < TIGHT
        assert np.abs(table(finding, "kl", read=name) - (final.exp() * (final - lens)).sum(-1).numpy()).max() < TIGHT
        assert np.abs(table(finding, "loss", read=name)[:, :-1] + of_next[:, :-1, 0].numpy()).max() < TIGHT
        assert np.abs(table(finding, "probability", read=name) - of_next.exp().squeeze(-1).numpy()).max() < TIGHT
        order = lens.argsort(dim=-1, descending=True)
        place = (order == following).int().argmax(-1) + 1
        assert (table(finding, "rank", read=name) == place.numpy()).all()
        assert (table(finding, "top_id", read=name) == p.topk(3).indices.numpy()).all()
        assert np.isnan(table(finding, "loss", read=name)[:, -1]).all()  # the last position has no true next token
    assert not table(finding, "kl", read="out").any()
    kl = finding.columns.index("KL (nats)")
    rows = {row[0]: row for row in finding.rows}
    assert rows["1.mlp"][kl] == pytest.approx(float(finding["kl"].sel(read="1.mlp").mean()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_and_has_no_value(side):
    model, tokens = tiny("muddformer", 2), random_tokens(2)[:1]
    pad, real = torch.full((1, 3), 1), torch.ones_like(tokens)
    both = [(pad, torch.zeros_like(pad)), (tokens, real)]
    both = both if side == "left" else both[::-1]
    padded, mask = (torch.cat([pair[i] for pair in both], 1) for i in (0, 1))
    plain = logit_lens(model, tokens)
    ours = logit_lens(model, padded, attention_mask=mask)
    kept = slice(3, None) if side == "left" else slice(None, -3)
    for name in ("kl", "entropy", "loss", "rank"):
        a, b = ours[name].values, plain[name].values
        assert np.nanmax(np.abs(a[:, kept] - b)) < TIGHT
        assert (np.isnan(a[:, kept]) == np.isnan(b)).all()
        gone = np.delete(a, np.arange(a.shape[1])[kept], axis=1)
        assert np.isnan(gone).all()
    assert (ours["top_id"].values[:, kept] == plain["top_id"].values).all()
    for row, bare in zip(ours.rows, plain.rows, strict=True):
        assert row[:2] == bare[:2] and row[2:] == pytest.approx(bare[2:])


def test_a_chosen_target_is_followed_everywhere():
    model, tokens = tiny("attnres-full", 3), torch.tensor([[4, 4, 9], [1, 2, 3]])
    finding = logit_lens(model, tokens, target=[7, 8])
    lens = by_hand(model, model.record(tokens).reads["1.mlp"])
    expected = torch.stack([lens[0, :, 7], lens[1, :, 8]])
    assert np.abs(finding["loss"].sel(read="1.mlp").values + expected.numpy()).max() < TIGHT
    assert "each sequence" in finding.title
    with pytest.raises(ValueError, match="outside the vocabulary"):
        logit_lens(model, tokens, target=99)
    with pytest.raises(ValueError, match="top must be a whole number from 1 on, not 0"):
        logit_lens(model, tokens, top=0)
    assert logit_lens(model, tokens, top=1000).dataset.sizes["k"] == 50


def test_a_bidirectional_model_has_no_next_token_but_a_lens():
    attention = Attention(n_heads=2, n_kv_heads=1, d_head=8, causal=False)
    for head in ("linear", "mlm"):
        model = tiny("standard", 4, attention=attention, head=head)
        tokens = random_tokens(4)
        finding = logit_lens(model, tokens)
        assert np.isnan(finding["loss"].values).all() and np.isfinite(finding["kl"].values).all()
        final = by_hand(model, model.record(tokens).reads["out"])
        assert np.abs(table(finding, "entropy", read="out") + (final.exp() * final).sum(-1).numpy()).max() < TIGHT
        own = (
            final.exp().gather(-1, tokens[..., None]).squeeze(-1)
        )  # its predictions are of the token that stands there
        assert np.abs(table(finding, "probability", read="out") - own.numpy()).max() < TIGHT
        assert any("the token at each position is followed" in note for note in finding.notes)
        assert finding.rows[0][3] is None and finding.rows[0][4] is not None


def test_the_last_token_can_be_given_and_one_token_alone_has_no_loss():
    model, tokens = tiny("muddformer", 2), random_tokens(2)[:1, :4]
    found = logit_lens(model, tokens, last=9)
    p = by_hand(model, model.record(tokens).reads["out"])[0, -1, 9].exp()
    assert float(found["probability"].sel(read="out")[-1]) == pytest.approx(float(p), abs=TIGHT)
    assert np.isnan(found["loss"][:, -1]).all() and any("'9' is followed" in note for note in found.notes)
    one = logit_lens(model, tokens[:, :1])
    assert one["rank"].sel(read="out").values.tolist() == [1] and np.isnan(one["loss"]).all()
    assert any("no position has a next token" in note for note in one.notes) and one.rows[-1][4] == 1


@pytest.mark.parametrize("system", [s for s in SYSTEMS if isinstance(SYSTEMS[s], HyperConnections)])
def test_each_stream_has_a_lens(system):
    model, tokens = tiny(system, 5), random_tokens(5)
    finding = logit_lens(model, tokens)
    n = model.cfg.residual.n_streams
    assert finding["stream"].values.tolist() == [*(f"stream{i}" for i in range(n)), "all"]
    _, cache = model.run_with_cache(tokens)
    final = model(tokens).detach().log_softmax(-1)
    for block in range(3):
        streams = cache[f"blocks.{block}.hook_streams_post"].detach()
        weights = model.residual.read_gates(streams, model.sites[-1])["weights"].detach()
        for i in range(n):
            lens = by_hand(model, weights[..., i : i + 1] * streams[:, :, i])
            expected = (final.exp() * (final - lens)).sum(-1).numpy()
            assert np.abs(table(finding, "stream_kl", block=block, stream=f"stream{i}") - expected).max() < TIGHT
    whole = table(finding, "stream_kl", block=2, stream="all")  # what the readout reads
    assert np.abs(whole).max() < TIGHT
    assert len(finding.rows) == len(model.reads) + 3 * (n + 1)


def test_streams_that_are_normed_one_by_one_are_seen_so():
    """normed_sum with a final norm that divides by nothing: a stream's lens does not depend on its size."""
    residual = HyperConnections(n_streams=2, readout="normed_sum")
    model, tokens = tiny("standard", 6, residual=residual, final_norm=Norm(kind="none")), random_tokens(6)[:1]
    finding = logit_lens(model, tokens)
    _, cache = model.run_with_cache(tokens)
    streams = cache["blocks.1.hook_streams_post"].detach()
    normed = streams / (streams.square().mean(-1, keepdim=True) + model.cfg.norm.eps).sqrt()
    for i in range(2):
        lens = by_hand(model, normed[:, :, i])
        entropy = -(lens.exp() * lens).sum(-1).numpy()
        assert np.abs(table(finding, "stream_entropy", block=1, stream=f"stream{i}") - entropy).max() < TIGHT
    assert any("divides by nothing" in note for note in finding.notes)


def test_a_known_network():
    """Untied identity embeddings and sublayers that write nothing: every read predicts the token it stands on."""
    cfg = ModelConfig(d_vocab=8, n_ctx=8, d_model=8, n_layers=2, tied=False,
                      attention=Attention(n_heads=2, n_kv_heads=2, d_head=4), mlp=MLP(d_mlp=4))  # fmt: skip
    model = t2lens.build(cfg, seed=0).double()
    for name, p in model.named_parameters():
        p.data.zero_() if "output" in name or "embed" in name else None
    model.embed.weight.data += torch.eye(8)
    model.get_parameter("unembed.weight").data += torch.eye(8)
    finding = logit_lens(model, [3, 5, 5])
    size = 8**0.5 / (1 + 8 * model.cfg.norm.eps) ** 0.5  # of the one entry of a normed one-hot read
    p_own = np.exp(size) / (np.exp(size) + 7)
    for read in finding["read"].values:
        assert finding["top_token"].sel(read=read, k=0).values.tolist() == ["3", "5", "5"]
        assert finding["top_probability"].sel(read=read, k=0).values == pytest.approx([p_own] * 3)
        assert finding["rank"].sel(read=read).values[1] == 1.0
        assert finding["loss"].sel(read=read).values[:2] == pytest.approx([np.log(np.exp(size) + 7), -np.log(p_own)])
        assert not finding["kl"].sel(read=read).values.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("system", ["attnres-block", "ddl-tc-ec", "mhc"])
def test_half_precision_is_finite(system, dtype):
    finding = logit_lens(t2lens.build(tiny_config(system), seed=7).to(dtype), random_tokens(7))
    for name in ("kl", "entropy", "top_probability"):
        assert np.isfinite(finding[name].values).all() and (finding[name].values >= 0).all()


def test_a_lens_in_chunks_is_the_same(monkeypatch):
    model, tokens = tiny("hyper-connections", 8), random_tokens(8)
    whole = logit_lens(model, tokens)
    monkeypatch.setattr("t2lens.readout._ENTRIES", 100)  # two positions at a time
    for name, values in logit_lens(model, tokens).dataset.data_vars.items():
        same = values.values == whole[str(name)].values
        missing = np.isnan(values.values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
        close = (
            np.abs(np.nan_to_num(values.values) - np.nan_to_num(whole[str(name)].values)) < 1e-12
            if values.dtype.kind == "f"
            else same
        )
        assert (same | missing | close).all()


def test_one_prompt_on_the_command_line(tmp_path):
    file = tmp_path / "lens.json"
    args = ["analyze", "lens", "The cat sat", "--model", "mhc", "--top", "2", "--json", str(file)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    said = json.loads(file.read_text())
    direct = logit_lens(t2lens.load("mhc"), "The cat sat", top=2)
    assert said["variables"]["top_token"]["values"] == direct["top_token"].values.tolist()
    assert np.allclose(said["variables"]["stream_kl"]["values"], direct["stream_kl"].values)
    assert direct["top_token"].dtype.kind == "U" and direct["pos"].size == len(direct["token"])


def test_reads_that_are_not_finite_have_no_prediction():
    model, tokens = tiny("attnres-full", 1), random_tokens(1)[:1]
    model.blocks[1].mlp.output.weight.data[0, 0] = torch.nan
    finding = logit_lens(model, tokens)
    broken = [read.name for read in model.reads if read.site.layer in (2, None)]
    assert finding.notes[0].endswith(f"at some positions: {', '.join(broken)}.")
    for name in ("rank", "loss", "kl", "entropy", "top_probability"):
        assert finding[name].sel(read=broken).isnull().all()
    assert (finding["top_id"].sel(read=broken) == -1).all() and (finding["top_token"].sel(read="out") == "").all()
    assert finding["rank"].sel(read="1.mlp").notnull().any()
