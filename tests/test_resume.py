"""A recorded pass taken up in the middle equals the whole pass, on every system."""

import random

import pytest
import torch

from t2lens.config import Attention, ValueResidual
from t2lens.mixing import ForwardRecord
from t2lens.sublayers import DecodingCache
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_pass_taken_up_at_any_block_equals_the_whole_pass(system: str) -> None:
    seed = random.randrange(1000)
    model = tiny(system, seed=seed, local=seed % 2 == 0 and tiny_config(system).block != "parallel")
    tokens = random_tokens(seed)
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) > 0.2
    mask[:, 0] = True
    with torch.no_grad():
        record, whole = model.record(tokens, mask), model(tokens, mask)
        rows = torch.randint(len(tokens), (4,))
        for layer in range(model.cfg.n_layers + 1):
            again = model.resume(record, layer, rows)
            assert (again - whole[rows])[mask[rows]].abs().max() < 1e-10, (seed, layer)


@pytest.mark.parametrize("system", SYSTEMS)
def test_many_rows_of_one_sequence_share_what_comes_before_them(system: str) -> None:
    seed = random.randrange(1000)
    model, tokens = tiny(system, seed=seed), random_tokens(seed)[:1]
    with torch.no_grad():
        record, whole = model.record(tokens), model(tokens)
        before = [atom.clone() for atom in record.atoms]
        for layer in range(model.cfg.n_layers + 1):
            rows = torch.zeros(3, dtype=torch.long)
            hooks = [("*hook_read_mlp*", lambda x, hook: x.mul_(torch.arange(1, 4).to(x)[:, None, None]))]
            with model.hooks(hooks):
                again = model.resume(record, layer, rows)
            assert (again[0] - whole[0]).abs().max() < 1e-10, (seed, layer)
            if layer < model.cfg.n_layers:
                alone = model.hooks(
                    [(hooks[0][0], lambda x, hook, layer=layer: x.mul_(3.0) if _late(hook, layer) else x)]
                )
                with alone:
                    third = model(tokens)
                assert (again[2] - third[0]).abs().max() < 1e-8 * third.abs().max(), (seed, layer)
    assert all(torch.equal(a, b) for a, b in zip(before, record.atoms, strict=True))


def _late(hook: object, layer: int) -> bool:
    return int(hook.name.split(".")[1]) >= layer  # type: ignore[attr-defined]


def test_rows_of_a_resumed_pass_can_differ_by_a_hook() -> None:
    model, tokens = tiny("attnres-full", seed=3), random_tokens(4)[:1]
    name = "blocks.2.hook_depth_attn_attn"

    def drop(weights: torch.Tensor, *, hook: object) -> torch.Tensor:
        mask = torch.eye(weights.shape[-1], dtype=weights.dtype)[: len(weights), None]
        return weights * (1 - mask)

    with torch.no_grad():
        record = model.record(tokens)
        with model.hooks([(name, drop)]):
            many = model.resume(record, 2, torch.zeros(3, dtype=torch.long))
        for source in range(3):

            def drop_one(weights: torch.Tensor, *, hook: object, source: int = source) -> torch.Tensor:
                weights = weights.clone()
                weights[..., source] = 0
                return weights

            alone = model.run_with_hooks(tokens, fwd_hooks=[(name, drop_one)])
            assert (many[source] - alone[0]).abs().max() < 1e-10


def test_values_of_the_first_layer_reach_later_ones() -> None:
    attention = Attention(n_heads=2, n_kv_heads=1, d_head=8, value_residual=ValueResidual())
    model = tiny("standard", seed=5, attention=attention)
    tokens = random_tokens(6)
    with torch.no_grad():
        assert (model.resume(model.record(tokens), 1) - model(tokens)).abs().max() < 1e-10


def test_what_cannot_be_resumed_is_refused_in_a_sentence() -> None:
    model, tokens = tiny("standard"), random_tokens(1)[:1]
    record, part = model.record(tokens), ForwardRecord()
    for layer in (4, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"layer must be a whole number in 0\.\.3"):
            model.resume(record, layer)
    for rows in ([1], [-1], [], [0.0], [True], [[0]]):
        with pytest.raises(ValueError, match=r"rows must be whole numbers in 0\.\.0"):
            model.resume(record, 1, torch.tensor(rows))
    with pytest.raises(ValueError, match="nothing ran yet"):
        model.resume(part, 0)
    model(tokens, record=part, stop_at_layer=1)
    with pytest.raises(ValueError, match=r"Block 2 cannot be resumed: the recorded pass did not reach 1\.attn"):
        model.resume(part, 2)
    with torch.no_grad():
        assert (model.resume(part, 1, [0, 0]) - model(tokens)).abs().max() < 1e-10
        decoded, cache = ForwardRecord(), DecodingCache()
        model(tokens, cache=cache, record=decoded)
    with pytest.raises(ValueError, match="ran with a decoding cache"):
        model.resume(decoded, 1)


def test_hooks_can_ask_for_the_record_of_the_pass_they_are_in() -> None:
    model, tokens = tiny("muddformer", seed=1), random_tokens(2)
    seen = {}
    with torch.no_grad(), model.recording() as record:

        def look(read: torch.Tensor, *, hook: object) -> None:
            share = model.decompose(record(), "1.mlp")[0]
            seen["error"] = float((share.sum(0) - read).abs().max())

        model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_read_mlp", look)])
    assert seen["error"] < 1e-10
    assert model._live is None
