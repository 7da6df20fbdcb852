"""T18-T20 beyond the cache: transformer_lens's tools that take a model. Right numbers, or the error that names ours."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from transformer_lens import SVDInterpreter, head_detector, patching

import t2lens
from t2lens.config import Attention, BucketAttention, Norm
from t2lens.hooks import NotAdditiveError
from tests.systems import SYSTEMS, random_tokens, tiny

tools: Any = pytest.importorskip("transformer_lens.tools.analysis", reason="came with transformer_lens 4")
pytestmark = pytest.mark.skipif(
    not hasattr(patching, "get_act_patch_direct_path"), reason="tools of transformer_lens 4.3"
)
SYSTEM = pytest.mark.parametrize("system", SYSTEMS)
SOME = pytest.mark.parametrize("system", ["standard", "attnres-full", "muddformer", "hyper-connections", "dca"])
CLEAN, CORRUPTED = torch.tensor([[0, 7, 3]]), torch.tensor([[0, 8, 3]])
OURS = r"t2lens\.analysis"


class Letters:
    """A tokenizer of letters."""

    bos_id, pad_id = 0, 1

    def encode(self, text):
        return [ord(letter) - ord("a") + 2 for letter in text]

    def decode(self, ids):
        return "".join(chr(i - 2 + ord("a")) for i in ids)

    def str_token(self, id):
        return self.decode([id])


@pytest.fixture(autouse=True)
def no_bars(monkeypatch):
    monkeypatch.setattr(patching, "tqdm", lambda rows, **_: rows)


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 6]


@functools.cache
def pair(system: str, heads: Attention | None = None) -> Any:
    changes: dict[str, Any] = {} if heads is None else {"attention": heads}
    model = tiny(system, n_layers=2, **changes)
    return model, model.run_with_cache(CLEAN)[1], model.run_with_cache(CORRUPTED)[1]


@functools.cache
def model_of(system: str, tied: bool = True) -> Any:
    model = tiny(system, tied=tied)
    model.tokenizer = Letters()
    return model


def patched(model: Any, name: str, clean: Any, where: tuple[Any, ...]) -> float:
    """The metric of one patch, by hand."""

    def hook(x, hook):
        x = x.clone()
        x[where] = clean[name][where]
        return x

    return float(metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, hook)])).detach())


# ---- transformer_lens.patching

ALL = slice(None)
#: helper -> axes of its result, its hook point, where each cell patches it
CELLS = {
    "attn_out": ("lp", "blocks.{}.hook_attn_out", lambda p: (ALL, p)),
    "mlp_out": ("lp", "blocks.{}.hook_mlp_out", lambda p: (ALL, p)),
    "resid_pre": ("lp", "blocks.{}.hook_resid_pre", lambda p: (ALL, p)),
    "resid_mid": ("lp", "blocks.{}.hook_resid_mid", lambda p: (ALL, p)),
    "attn_head_out_by_pos": ("lph", "blocks.{}.attn.hook_z", lambda p, h: (ALL, p, h)),
    "attn_head_q_by_pos": ("lph", "blocks.{}.attn.hook_q", lambda p, h: (ALL, p, h)),
    "attn_head_k_by_pos": ("lpg", "blocks.{}.attn.hook_k", lambda p, h: (ALL, p, h)),
    "attn_head_v_by_pos": ("lpg", "blocks.{}.attn.hook_v", lambda p, h: (ALL, p, h)),
    "attn_head_pattern_by_pos": ("lhp", "blocks.{}.attn.hook_pattern", lambda h, p: (ALL, h, p)),
    "attn_head_pattern_dest_src_pos": ("lhpp", "blocks.{}.attn.hook_pattern", lambda h, p, s: (ALL, h, p, s)),
    "attn_head_out_all_pos": ("lh", "blocks.{}.attn.hook_z", lambda h: (ALL, ALL, h)),
    "attn_head_q_all_pos": ("lh", "blocks.{}.attn.hook_q", lambda h: (ALL, ALL, h)),
    "attn_head_k_all_pos": ("lg", "blocks.{}.attn.hook_k", lambda h: (ALL, ALL, h)),
    "attn_head_v_all_pos": ("lg", "blocks.{}.attn.hook_v", lambda h: (ALL, ALL, h)),
    "attn_head_pattern_all_pos": ("lh", "blocks.{}.attn.hook_pattern", lambda h: (ALL, h)),
}
EVERY = {"attn_head_all_pos_every", "attn_head_by_pos_every", "block_every"}
DIRECT = {"direct_path", "direct_path_all_sources"}
SIZE = {"l": 2, "p": 3, "h": 2, "g": 1}


def helper(name: str) -> Any:
    return getattr(patching, f"get_act_patch_{name}")


def test_no_patching_helper_is_left_out():
    found = {name.removeprefix("get_act_patch_") for name in vars(patching) if name.startswith("get_act_patch_")}
    assert found == set(CELLS) | EVERY | DIRECT
    takes_model = {
        name for name, f in vars(patching).items()
        if inspect.isfunction(f) and f.__module__ == patching.__name__ and "model" in inspect.signature(f).parameters
    }  # fmt: skip
    ours = {f"get_act_patch_{name}" for name in EVERY | DIRECT}
    assert {name for name in takes_model if name[0] != "_"} == ours | {"generic_activation_patch"}


def check_cells(model: Any, clean: Any, name: str) -> None:
    axes, hook, where = CELLS[name]
    result = helper(name)(model, CORRUPTED, clean, metric)
    assert tuple(result.shape) == tuple(SIZE[axis] for axis in axes)
    dice = torch.Generator().manual_seed(len(name))
    for _ in range(2):
        cell = tuple(int(torch.randint(size, (), generator=dice)) for size in result.shape)
        expected = patched(model, hook.format(cell[0]), clean, where(*cell[1:]))
        assert float(result[cell]) == pytest.approx(expected, abs=1e-5, rel=1e-5)


@SYSTEM
@pytest.mark.parametrize("name", ["attn_out", "mlp_out", "attn_head_out_all_pos"])
def test_what_sublayers_write_is_patched_right_on_every_system(system, name):
    model, clean, _ = pair(system)
    check_cells(model, clean, name)


@SOME
@pytest.mark.parametrize("name", sorted(set(CELLS) - {"resid_pre", "resid_mid"}))
def test_every_helper_of_sublayers_is_right(system, name):
    model, clean, _ = pair(system)
    check_cells(model, clean, name)


@SYSTEM
def test_the_stream_is_patched_where_it_is_all_there_is_and_refused_elsewhere(system):
    model, clean, _ = pair(system)
    name = "blocks.1.hook_resid_pre"
    if name not in model.hook_dict:
        for which in ("resid_pre", "resid_mid", "block_every"):
            with pytest.raises(KeyError, match=r"hook_resid_(pre|mid)' is not a hook point.*did you mean"):
                helper(which)(model, CORRUPTED, clean, metric)
        return
    deeper = model_of(system)
    stream = deeper.run_with_cache(CLEAN)[1][name]
    whole = deeper.run_with_hooks(CORRUPTED, fwd_hooks=[(name, lambda x, hook: stream.clone())])
    restored = float((whole - deeper(CLEAN)).detach().abs().max()) < 1e-10
    assert restored == model.residual.stream_is_whole
    if restored:
        check_cells(model, clean, "resid_pre")
        check_cells(model, clean, "resid_mid")
        both = helper("block_every")(model, CORRUPTED, clean, metric)
        alone = [helper(kind)(model, CORRUPTED, clean, metric) for kind in ("resid_pre", "attn_out", "mlp_out")]
        assert torch.equal(both, torch.stack(alone))
        return
    for which in ("resid_pre", "resid_mid", "block_every"):
        with pytest.raises(NotAdditiveError, match=rf"reads also take older sources.*{OURS}\.patch_activations"):
            helper(which)(model, CORRUPTED, clean, metric)
    assert not model.list_hooks()


@SOME
def test_helpers_of_every_kind_at_once_stack_the_others(system):
    model, clean, _ = pair(system)
    every: Any = patching.get_act_patch_attn_head_all_pos_every(model, CORRUPTED, clean, metric)
    assert tuple(every.shape) == (5, 2, 2)
    for i, kind in enumerate(("out", "q", "k", "v", "pattern")):
        alone = helper(f"attn_head_{kind}_all_pos")(model, CORRUPTED, clean, metric)
        assert torch.equal(every[i, :, : alone.shape[1]], alone)
    result: Any = patching.get_act_patch_attn_head_by_pos_every(
        model, CORRUPTED, clean, lambda logits: metric(logits)[None], reduce="none", baseline=True
    )
    assert result.values.shape == (5, 2, 3, 2, 1)
    assert float(result.baseline) == pytest.approx(float(metric(model(CORRUPTED)).detach()), abs=1e-5)


@SYSTEM
def test_paths_between_heads_are_refused_by_the_name_of_ours(system):
    heads = Attention(n_heads=2, n_kv_heads=2, d_head=8)
    model, clean, corrupted = pair(system, heads)
    for component in ("q", "k", "v"):
        with pytest.raises(ValueError, match=OURS):
            patching.get_act_patch_direct_path(
                model, CORRUPTED, clean, corrupted, metric, 0, 0, component, verbose=False
            )
    with pytest.raises(ValueError, match=OURS):
        patching.get_act_patch_direct_path_all_sources(model, CORRUPTED, clean, corrupted, metric, verbose=False)
    edges = tools.EdgeAttributionConfig(granularity="edge")
    for call in (
        lambda: tools.attribution_patch(model, CLEAN, CORRUPTED, metric, edges),
        lambda: tools.faithfulness(model, CLEAN, CORRUPTED, metric, []),
    ):
        with pytest.raises(ValueError, match=OURS):
            call()
    assert not model.list_hooks()


# ---- transformer_lens.head_detector


@SYSTEM
def test_heads_are_detected_by_their_patterns(system):
    model = model_of(system)
    _, cache = model.run_with_cache(model.to_tokens("abcab"))
    duplicate = torch.zeros(6, 6)
    duplicate[4, 1] = duplicate[5, 2] = 1
    following = torch.zeros(6, 6)
    following[4, 2] = following[5, 3] = 1
    wanted: dict[Any, torch.Tensor] = {
        "previous_token_head": torch.diag(torch.ones(5), -1),
        "duplicate_token_head": duplicate,
        "induction_head": following,
    }
    assert set(wanted) == set(head_detector.HEAD_NAMES)
    for name, target in wanted.items():
        scores = head_detector.detect_head(model, "abcab", name)
        for layer in range(3):
            pattern = cache[("pattern", layer)][0]
            expected = (pattern * target).sum((1, 2)) / pattern.sum((1, 2))
            assert torch.allclose(scores[layer].double(), expected.detach(), atol=1e-6)
    mean = head_detector.detect_head(model, ["abcab", "aabb"], "previous_token_head", error_measure="abs")
    assert mean.shape == (3, 2) and mean.isfinite().all()
    some = head_detector.detect_head(model, "abcab", "previous_token_head", heads=[(1, 0)], exclude_bos=True)
    assert (some == -1).sum() == 5


# ---- transformer_lens.SVDInterpreter


def same_up_to_sign(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((torch.minimum((a - b).abs().amax(0), (a + b).abs().amax(0)) < 1e-8).all())


@SYSTEM
@pytest.mark.parametrize("tied", [True, False])
def test_singular_vectors_are_those_of_the_weights(system, tied):
    model = model_of(system, tied)
    svd = SVDInterpreter(model)
    block = model.blocks[1]
    values = block.attn.value.weight  # one group for two heads
    for head in range(2):
        output = block.attn.output.weight[:, 8 * head : 8 * head + 8]
        right = torch.linalg.svd((output @ values).T).Vh[:4]
        found = svd.get_singular_vectors("OV", 1, 4, head)
        assert found.shape == (50, 1, 4)
        assert same_up_to_sign(found[:, 0], (right @ model.W_U).T)
    norm = getattr(block, "ln2", None)
    read = block.mlp.input.weight * (1 if norm is None or norm.w is None else norm.w)
    kinds: tuple[tuple[Any, torch.Tensor], ...] = (("w_in", read), ("w_out", block.mlp.output.weight.T))
    for kind, weight in kinds:
        right = torch.linalg.svd(weight).Vh[:4]
        assert same_up_to_sign(svd.get_singular_vectors(kind, 1, 4)[:, 0], (right @ model.W_U).T)


@pytest.mark.parametrize("local", [False, True])
def test_weights_by_their_names_in_transformer_lens(local):
    model = tiny("standard", local=local, positions="learned", attention=Attention(n_heads=4, n_kv_heads=2, d_head=6))
    named = model.tl_parameters()
    attn = model.blocks[2].attn
    assert named["blocks.2.attn.W_K"].shape == named["blocks.2.attn.W_V"].shape == (4, 16, 6)
    for head in range(4):
        assert torch.equal(named["blocks.2.attn.W_V"][head], attn.W_V[head // 2])
    assert named["pos_embed.W_pos"] is model.pos_embed.weight and ("blocks.0.local.W_Q" in named) == local
    assert {"embed.W_E", "unembed.W_U", "unembed.b_U", "blocks.0.mlp.W_gate", "blocks.0.ln2.w"} <= set(named)
    assert "blocks.0.mlp.W_gate" not in tiny("standard", mlp=t2lens.config.MLP(gated=False)).tl_parameters()


# ---- transformer_lens.tools.analysis


@SYSTEM
@pytest.mark.parametrize("unit", ["component", "layer", "head"])
def test_direct_logit_attribution(system, unit):
    model = model_of(system)
    tokens = random_tokens(1)
    if not model.stream_is_additive:
        with pytest.raises(NotAdditiveError, match=r"t2lens\.contributions"):
            tools.direct_logit_attribution(model, tokens, 7, unit=unit)
        return
    result = tools.direct_logit_attribution(model, tokens, 7, unit=unit)
    whole = result.attribution[-1] if unit == "layer" else result.attribution.sum(0)
    assert float((whole - model(tokens)[:, -1, 7]).detach().abs().max()) < 1e-10


@SYSTEM
def test_lenses_of_transformer_lens(system):
    model, tokens = model_of(system), random_tokens(1)
    if not model.stream_is_additive:
        with pytest.raises(NotAdditiveError, match=rf"{OURS}\.logit_lens"):
            tools.logit_lens(model, tokens)
        with pytest.raises(NotAdditiveError, match=rf"{OURS}\.logit_lens"):
            tools.logit_readout(model, torch.randn(2, 16).double())
        return
    logits, cache = model.run_with_cache(tokens)
    lens = tools.logit_lens(model, tokens, positions=None)
    assert float((lens.values[-1] - logits).detach().abs().max()) < 1e-10
    read: Any = tools.logit_readout(model, cache["hook_read_final"])
    assert float((read.values - logits).detach().abs().max()) < 1e-10


@SYSTEM
def test_attribution_patching_of_nodes_is_the_gradient_times_the_difference(system):
    model = model_of(system)
    tokens = torch.tensor([[0, 7, 3, 9]]), torch.tensor([[0, 8, 3, 9]])
    result = tools.attribution_patch(model, *tokens, metric)
    clean = model.run_with_cache(tokens[0])[1]
    kept = {}

    def keep(x, hook):
        kept[hook.name] = x
        return x

    names = ["hook_embed", "blocks.0.hook_mlp_out", "blocks.1.attn.hook_z"]
    value = metric(model.run_with_hooks(tokens[1], fwd_hooks=[(name, keep) for name in names]))
    grads = dict(zip(names, torch.autograd.grad(value, [kept[name] for name in names]), strict=True))
    effect = {name: ((clean[name] - kept[name]) * grads[name]).detach()[0] for name in names}
    scores = result.node_scores
    for node, score in scores.items():
        if node.hook_name in effect:
            own = effect[node.hook_name][node.position]
            expected = own[node.head].sum() if node.kind == "attn_head_out" else own.sum()
            assert score == pytest.approx(float(expected), abs=1e-6, rel=1e-5)
    assert len(scores) == 4 * (1 + 3 * (2 + 1))


# ---- heads, norms and blocks of other kinds

VARIANTS = {
    "layer": {"norm": Norm(kind="layer", bias=True)},
    "layer, then rms": {"norm": Norm(kind="layer", bias=True), "final_norm": Norm()},
    "rms, then layer": {"final_norm": Norm(kind="layer", bias=True)},
    "rms, then none": {"final_norm": Norm(kind="none")},
    "none": {"norm": Norm(kind="none", weight=False)},
    "none with weights": {"norm": Norm(kind="none", bias=True)},
    "parallel": {"block": "parallel"},
    "positions": {"positions": "learned", "embed_norm": Norm()},
    "biases": {"attention": Attention(n_heads=2, n_kv_heads=1, d_head=8, bias=True), "head_bias": True},
    "buckets": {"attention": BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, n_buckets=6)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
def test_helpers_of_a_plain_sum_are_exact_whatever_stands_around_it(variant, local):
    model, tokens = tiny("standard", 1, local=local, **VARIANTS[variant]), random_tokens(1)
    logits, cache = model.run_with_cache(tokens)
    parallel = model.cfg.block == "parallel"

    def close(a, b):
        assert float((a - b).detach().abs().max()) < 1e-10

    for layer in (1, 2, 3):
        stream = cache[("resid_post", layer - 1)]
        norm = "ln_final" if layer == 3 else f"blocks.{layer}.{'ln_local' if local else 'ln1'}"
        normed = cache[f"{norm}.hook_normalized"]
        close(cache.decompose_resid(layer).sum(0), stream)
        close(cache.decompose_resid(layer, apply_ln=True).sum(0), normed)
        close(cache.stack_head_results(layer, incl_remainder=True, apply_ln=True).sum(0), normed)
        close(cache.stack_neuron_results(layer, incl_remainder=True).sum(0), stream)
        for neurons in (False, True):
            close(cache.get_full_resid_decomposition(layer, expand_neurons=neurons).sum(0), stream)
            close(cache.get_full_resid_decomposition(layer, expand_neurons=neurons, apply_ln=True).sum(0), normed)
    if parallel:
        for call in (cache.decompose_resid, cache.get_full_resid_decomposition, cache.accumulated_resid):
            with pytest.raises(NotAdditiveError, match=r"parallel block.*cache\.decompose"):
                call(1, mlp_input=True)
    else:
        close(cache.decompose_resid(1, mlp_input=True, apply_ln=True).sum(0), cache["blocks.1.ln2.hook_normalized"])
        close(cache.get_full_resid_decomposition(1, mlp_input=True).sum(0), cache[("resid_mid", 1)])
    close(cache.logit_attrs(cache.decompose_resid(), 7).sum(0) + model.logit_bias[7], logits[..., 7])
    close(cache.accumulated_resid(apply_ln=True)[-1], model.ln_final(cache["hook_read_final"]))
    close(cache.logit_lens(positions=None).values[-1], logits)


def test_a_head_that_is_not_linear_has_no_logit_attributions():
    model = tiny("standard", head="mlm", head_bias=True)
    _, cache = model.run_with_cache(random_tokens(0))
    assert cache.decompose_resid().shape[0] == 7
    with pytest.raises(NotAdditiveError, match="logit_attrs takes logits for linear in the last read"):
        cache.logit_attrs(cache.decompose_resid(), 7)
    with pytest.raises(NotAdditiveError, match="logit_lens takes logits for linear"):
        cache.logit_lens()
    with pytest.raises(ValueError, match="logit"):
        tools.logit_lens(model, random_tokens(0))
    with pytest.raises(NotAdditiveError, match="logit_attrs takes logits"):
        tools.direct_logit_attribution(model, random_tokens(0), 7)


def test_a_hook_of_your_own_may_edit_any_stream():
    model, clean, _ = pair("denseformer")
    name = "blocks.1.hook_resid_pre"
    value = model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, lambda x, hook: clean[name].clone())])
    assert value.isfinite().all()
