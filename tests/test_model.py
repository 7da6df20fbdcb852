"""The reference model as a whole: input checks, hooks, transformer-lens citizenship, text."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import t2lens
from t2lens.config import Attention, ModelConfig, ShortSWA
from t2lens.residual import AttnRes, DeepDelta, HyperConnections, OpenAttnRes
from t2lens.sublayers import DecodingCache
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config

GOLDEN = Path(__file__).parent / "data" / "hook_names.txt"


@pytest.mark.parametrize("system", SYSTEMS)
def test_hook_names_are_the_golden_list(system):
    """Names are a promise: a change here is a change of the public interface (see CONTRIBUTING)."""
    rows = [f"{row.name} [{row.shape}]" for row in tiny(system, local=True).describe_hooks()]
    golden = GOLDEN.read_text().split("\n\n")
    sections = {part.splitlines()[0]: part.splitlines()[1:] for part in golden if part.strip()}
    assert rows == sections[f"# {system}"]


@pytest.mark.parametrize(
    "ids, words",
    [
        ([[]], "at least one token"),
        ([[0, 50]], "Token id 50 is outside the vocabulary 0..49"),
        ([[-1, 3]], "Token id -1"),
        ([[0.5, 1.0]], "whole numbers"),
        ([[True, False]], "whole numbers"),
        ([[[0, 1]]], r"\[batch, pos\]"),
        ([list(range(33))], "33 tokens are more than the context of 32"),
    ],
)
def test_bad_tokens_get_one_sentence(ids, words):
    with pytest.raises(ValueError, match=words):
        tiny("standard")(ids)


def test_masks_are_checked_and_an_all_real_mask_is_no_mask():
    model, tokens = tiny("attnres-full"), torch.tensor([[0, 7, 3]])
    with pytest.raises(ValueError, match=r"shape \[1, 3\] of the tokens, not \[1, 2\]"):
        model(tokens, [[1, 1]])
    assert torch.equal(model(tokens, [[1, 1, 1]]), model(tokens))
    assert torch.equal(model([0, 7, 3]), model(tokens))  # one sequence is a batch of one
    with pytest.raises(ValueError, match="no tokenizer"):
        model("text")


def test_loss_leaves_padding_out():
    model = tiny("ddl")
    tokens = torch.tensor([[1, 1, 0, 7, 3], [0, 7, 3, 7, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    alone = [float(model(row, return_type="loss").detach()) for row in ([[0, 7, 3]], [[0, 7, 3, 7, 9]])]
    together = float(model(tokens, mask, return_type="loss").detach())
    assert together == pytest.approx((2 * alone[0] + 4 * alone[1]) / 6, abs=1e-6)
    logits, loss = model(tokens, mask, return_type="both")
    assert float(loss.detach()) == pytest.approx(together) and logits.shape == (2, 5, 50)


def test_stop_at_layer_returns_the_state_and_runs_no_later_hook():
    model, tokens = tiny("standard"), random_tokens(0)
    fired = []
    with model.hooks(fwd_hooks=[(lambda name: True, lambda x, hook: fired.append(hook.name))]):
        state = model(tokens, stop_at_layer=1)
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(state, cache["blocks.0.hook_resid_post"])
    assert fired and all(name == "hook_embed" or name.startswith("blocks.0.") for name in fired)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        model(tokens, stop_at_layer=9)


def test_decompose_sums_to_the_read():
    for system in ("attnres-block", "ddl-cc-ec", "depth-swa"):
        model, tokens = tiny(system), random_tokens(1)
        _, cache = model.run_with_cache(tokens)
        parts, labels = cache.decompose("2.mlp")
        assert labels == list(model.atoms)
        assert float((parts.sum(0) - cache["blocks.2.hook_read_mlp"]).abs().max()) < 1e-10
        with pytest.raises(KeyError, match=r"0\.attn"):
            cache.decompose("7.mlp")


def test_the_record_of_a_cache_holds_no_graph_and_a_slice_has_none():
    for system in ("attnres-block", "ddl-cc-ec", "depth-swa"):
        model, tokens = tiny(system), random_tokens(1)
        _, cache = model.run_with_cache(tokens)
        parts, _ = copy.deepcopy(cache).decompose()
        assert torch.equal(parts, cache.decompose()[0]) and not cache.record.read("out").requires_grad
        _, cache = model.run_with_cache(tokens, pos_slice=-1)
        with pytest.raises(ValueError, match="no record"):
            cache.decompose()


def test_gqa_edits_touch_one_head():
    model, tokens = tiny("standard"), random_tokens(4)  # two heads share one key/value head

    def blank_first(pattern, *, hook):
        pattern = pattern.clone()
        pattern[:, 0] = 0
        return pattern

    _, plain = model.run_with_cache(tokens)
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", blank_first)]):
        _, edited = model.run_with_cache(tokens, names_filter="blocks.1.attn.*")
    name = "blocks.1.attn.hook_z"
    assert not edited[name][:, :, 0].any()
    torch.testing.assert_close(edited[name][:, :, 1], plain[name][:, :, 1], atol=1e-12, rtol=0)


def test_editing_any_hook_point_changes_the_logits():
    """T04, on every system: each hook point lies on the live path."""
    for system in SYSTEMS:
        model, tokens = tiny(system, 2, local=True), random_tokens(6)
        with torch.no_grad():
            plain = model(tokens)
            for name in model.hook_dict:

                def disturb(x, *, hook):
                    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
                    return x + 0.3 * noise

                if name == "blocks.0.hc_local.hook_res_scores":
                    continue  # the first exchange is between copies: rows that sum to 1 leave them what they are
                least = 1e-6
                if name.endswith(("ln1_q.hook_scale", "ln1_k.hook_scale")):
                    least = 1e-9  # QK norm takes the scale of queries and keys out again, but for its eps
                changed = model.run_with_hooks(tokens, fwd_hooks=[(name, disturb)])
                assert float((changed - plain).abs().max()) > least, (system, name)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_read_edited_in_place_is_that_read_and_no_other(system, grad):
    """Where the read is the carried state itself, too."""
    model, tokens = tiny(system, 2, local=True), random_tokens(6)
    with torch.set_grad_enabled(grad):
        for name in [name for name in model.hook_dict if ".1.hook_read_" in name or name == "hook_read_final"]:
            edited = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 2 + 1)])
            in_place = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x.mul_(2).add_(1))])
            torch.testing.assert_close(in_place, edited, atol=1e-12, rtol=0)


@pytest.mark.parametrize("part", ["attention", "mlp", "residual", "local"])
def test_a_part_of_another_kind_is_refused(part):
    with pytest.raises(ValueError, match=rf"ModelConfig\.{part} must be a"):
        replace(tiny_config("ddl"), **{part: "attnres"})
    with pytest.raises(ValueError, match=r"must be"):
        ModelConfig.from_dict({**tiny_config("ddl").to_dict(), part: "attnres"})


@pytest.mark.parametrize("part", ["attention", "mlp", "residual", "local"])
def test_unknown_config_keys_name_the_nearest(part):
    data = tiny_config("attnres-full", local=True).to_dict()
    data[part]["n_headz"] = 3
    with pytest.raises(ValueError, match="no key 'n_headz'"):
        ModelConfig.from_dict(data)
    with pytest.raises(ValueError, match="did you mean 'd_model'"):
        ModelConfig.from_dict({"d_modell": 4})
    with pytest.raises(ValueError, match="known systems are standard"):
        ModelConfig.from_dict({"residual": {"kind": "nope"}})
    with pytest.raises(ValueError, match="needs the keys d_vocab"):
        ModelConfig.from_dict({})


def test_bad_configs_say_what_is_wrong():
    for make, words in (
        (lambda: Attention(n_heads=3, n_kv_heads=2), "multiple of n_kv_heads"),
        (lambda: Attention(d_head=7), "even d_head"),
        (lambda: ShortSWA(window=None), "needs a window"),
        (lambda: AttnRes(block_size=0), "at least 1"),
        (
            lambda: AttnRes(normaliser="max"),  # type: ignore[arg-type]
            "one of softmax, sparsemax",
        ),
        (lambda: ModelConfig(d_vocab=0, n_ctx=1, d_model=1, n_layers=1), "d_vocab"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_untied_head_has_its_own_weight():
    tied, untied = tiny("standard"), tiny("standard", tied=False)
    assert "unembed.weight" not in tied.state_dict() and "unembed.weight" in untied.state_dict()
    assert untied.n_params - tied.n_params == 50 * 16
    assert tied.W_U.data_ptr() == tied.W_E.data_ptr()
    assert torch.equal(tied.double().W_U, tied.W_E.T)


def test_copies_do_not_share_hooks_or_weights():
    import copy

    model, tokens = tiny("ddl"), random_tokens(0)
    twin = copy.deepcopy(model)
    twin.embed.weight.data.zero_()
    twin.add_hook("blocks.0.ddl_attn.hook_beta", lambda x, hook: x * 0)
    assert float(model(tokens).detach().abs().max()) > 0
    assert all(not point.active for point in model.hook_dict.values())
    assert twin.hook_dict["blocks.0.ddl_attn.hook_beta"] is twin.residual.hook_points["blocks.0.ddl_attn.hook_beta"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_edit_in_place_is_noticed_in_every_mode(mode):
    model, tokens = tiny("standard"), random_tokens(1)

    def blank(pattern, *, hook):
        pattern.zero_()

    name = "blocks.1.attn.hook_pattern"
    with mode():
        _, cache = model.run_with_cache(tokens)
        with model.hooks(fwd_hooks=[(name, blank)]):
            _, edited = model.run_with_cache(tokens)
    assert cache[name].any() and not edited[name].any() and not edited["blocks.1.attn.hook_z"].any()


def test_odd_arguments_get_one_sentence():
    model = tiny("standard")
    for call, words in (
        (lambda: model(None), "rows of one length"),
        (lambda: model([[0, 1], [2]]), "rows of one length"),
        (lambda: model([0, 1], "x"), "attention_mask must be numbers"),
        (lambda: model([0, 1], return_type="x"), "logits, loss or both"),
        (lambda: model([0], return_type="loss"), "at least two tokens"),
        (lambda: model.generate([0, 1], temperature=float("nan")), "temperature"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    cache = DecodingCache()
    model([[0, 1]], cache=cache)
    with pytest.raises(ValueError, match="batch of 1; these tokens are a batch of 2"):
        model([[0], [1]], cache=cache)
    assert torch.equal(model([0, 1, 2], stop_at_layer=-1), model([0, 1, 2], stop_at_layer=2))


def test_a_row_that_stopped_repeats_the_stop_token():
    model, prompt = tiny("standard", 3), torch.tensor([[0, 7], [9, 2]])
    free = model.generate(prompt, 12, seed=1)
    stop = int(free[0, 3])
    stopped = model.generate(prompt, 12, seed=1, stop_at=stop)
    assert (stopped[0, 3:] == stop).all() and stopped.shape[1] > 4


@pytest.mark.parametrize("name", ["blocks.1.hook_read_mlp", "blocks.1.hook_resid_pre"])
def test_contributions_refuse_what_no_write_accounts_for(name):
    model, tokens = tiny("standard"), random_tokens(2)
    model.add_hook(name, lambda x, hook: x + 5.0)
    with pytest.raises(ValueError, match="no write accounts for it"):
        t2lens.contributions(model, tokens, read="1.mlp")


@pytest.mark.parametrize(
    ("system", "stream", "gate"),
    [
        (OpenAttnRes(gate="sigmoid_vector"), "resid", "hook_depth_attn_mlp"),
        (OpenAttnRes(gate="sigmoid_vector"), "resid", "hook_depth_gate_mlp"),
        (HyperConnections(n_streams=3), "streams", "hook_depth_attn_mlp"),
        (HyperConnections(n_streams=3), "streams", "hc_mlp.hook_post"),
        (DeepDelta(), "resid", "ddl_mlp.hook_beta"),
    ],
)
def test_gates_of_a_read_are_made_of_the_stream_that_hooks_have_edited(system, stream, gate):
    model, tokens = tiny("standard", seed=5, residual=system), random_tokens(5)
    stretch = (f"blocks.1.hook_{stream}_mid", lambda x, hook: x * torch.linspace(0.5, 2, 16, dtype=x.dtype))
    with torch.no_grad():
        plain = model.run_with_cache(tokens)[1][f"blocks.1.{gate}"]
        with model.hooks([stretch]):
            stretched = model.run_with_cache(tokens)[1][f"blocks.1.{gate}"]
    assert (stretched - plain).abs().max() > 1e-4
