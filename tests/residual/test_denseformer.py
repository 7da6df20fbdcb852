"""DenseFormer: its averages from a plain loop, its start as a standard transformer, and who is a source of whom."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import t2lens
from t2lens.model import Transformer
from t2lens.residual import DenseFormer, make_sites
from tests.systems import random_tokens, tiny_config

VARIANTS = [
    DenseFormer(),
    DenseFormer(dilation=2),
    DenseFormer(dilation=3, period=2),
    DenseFormer(dilation=2, group=2),
    DenseFormer(period=None, off_diagonal=1e-4),
    DenseFormer(period=None, group=3),
    DenseFormer(every="sublayer"),
    DenseFormer(every="sublayer", dilation=4, period=5),
    DenseFormer(every="sublayer", group=3, dilation=2),
]
every_variant = pytest.mark.parametrize("cfg", VARIANTS, ids=str)


def model_of(
    cfg: DenseFormer, *, n_layers: int = 6, local: bool = False, seed: int | None = None
) -> Any:  # not Transformer: tests reach into its residual system
    """Fresh in float32, or with random depth weights in float64 where a seed is given."""
    model = t2lens.build(tiny_config("standard", local=local, residual=cfg, n_layers=n_layers), seed=1)
    if seed is None:
        return model
    generator = torch.Generator().manual_seed(seed)
    for row in model.residual.parameters():
        row.data.normal_(0.0, 0.7, generator=generator)
    return model.double()


def looped_reads(cfg: DenseFormer, rows: list[torch.Tensor], atoms: list[torch.Tensor], n_layers: int):
    """Every read, straight from the equation: X_i = Y_{i-1} + what unit i wrote, Y_i = sum_j a_ij X_j."""
    per_unit = cfg.group * ((len(atoms) - 1) // n_layers if cfg.every == "block" else 1)
    n_units = (len(atoms) - 1) // per_unit
    x, y, reads, rows = [atoms[0]], atoms[0], [], list(rows)
    for i in range(1, n_units + 1):
        for f in atoms[1 + (i - 1) * per_unit : 1 + i * per_unit]:
            reads.append(y)
            y = y + f
        x.append(y)
        if i % (cfg.period or n_units) == 0:
            row, js = rows.pop(0), [j for j in range(i + 1) if (i - j) % cfg.dilation == 0]
            assert len(row) == len(js) == i // cfg.dilation + 1
            y = torch.stack([a * x[j] for a, j in zip(row, js, strict=True)]).sum(dim=0)
    assert not rows
    return [*reads, y]


@every_variant
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
@pytest.mark.parametrize("grad", [False, True], ids=["", "with gradients"])
def test_reads_are_the_averages_of_a_plain_loop(cfg: DenseFormer, seed: int, local: bool, grad: bool):
    model = model_of(cfg, local=local, seed=seed)
    record = t2lens.mixing.ForwardRecord()
    with torch.set_grad_enabled(grad):
        model(random_tokens(seed), record=record)
        naive = looped_reads(cfg, list(model.residual.weights), record.atoms, 6)
    for read, expected in zip(record.reads.values(), naive, strict=True):
        torch.testing.assert_close(read, expected, rtol=0, atol=1e-12)


@every_variant
@pytest.mark.parametrize("grad", [False, True], ids=["", "with gradients"])
def test_a_fresh_model_is_bit_equal_to_its_standard_twin(cfg: DenseFormer, grad: bool):
    model = model_of(cfg)
    twin = Transformer(tiny_config("standard", n_layers=6))
    twin.load_state_dict({n: p for n, p in model.state_dict().items() if not n.startswith("residual.")})
    with torch.set_grad_enabled(grad):
        same = torch.equal(model(random_tokens(3)), twin.eval()(random_tokens(3)))
    assert same == (cfg.off_diagonal == 0.0)
    for step in model.record(random_tokens(3)).steps:
        if "weights" in step.gates:
            newest = torch.zeros_like(step.gates["weights"]) + cfg.off_diagonal
            newest[..., -1] = 1
            assert torch.equal(step.gates["weights"], newest)


def test_sources_of_a_dilated_model_carry_their_own_names():
    model = model_of(DenseFormer(dilation=2, period=2), n_layers=4)
    assert model.sources() == {
        "0.attn": ["embed"],
        "0.mlp": ["stream"],
        "1.attn": ["block1"],  # no average after block 1: one source and no depth weights
        "1.mlp": ["stream"],
        "2.attn": ["embed", "block2"],
        "2.mlp": ["stream"],
        "3.attn": ["block3"],
        "3.mlp": ["stream"],
        "out": ["embed", "block2", "block4"],
    }
    hooks = {name for name in model.hook_dict if "hook_depth" in name}
    assert hooks == {"blocks.2.hook_depth_attn_attn", "hook_depth_attn_final"}
    weights = t2lens.trace(model, [1, 2, 3]).dataset["depth_weight"]
    assert weights.sel(read="1.attn").dropna("source").source.values.tolist() == ["block1"]


def test_the_4x5_model_of_32_blocks_averages_what_the_paper_lists():
    system = model_of(DenseFormer(dilation=4, period=5), n_layers=32).residual
    found = [[s.name for s in system.sources(site)] for site in system.slot]
    numbers = [[1, 5], [2, 6, 10], [3, 7, 11, 15], [0, 4, 8, 12, 16, 20], [*range(1, 26, 4)], [*range(2, 31, 4)]]
    assert found == [["embed" if n == 0 else f"block{n}" for n in row] for row in numbers]
    assert [tuple(row.shape) for row in system.weights] == [(2,), (3,), (4,), (6,), (7,), (8,)]
    state = system.begin(torch.zeros(1, 1, 1))
    for site in system.sites[:-1]:
        state = system.write(system.enter(state, site, system.read_gates(state, site)), site, torch.zeros(1, 1, 1), {})
    system.enter(state, system.sites[-1], {})
    assert {which: len(stack) for which, stack in state.sources.items()} == {0: 6, 1: 7, 2: 8, 3: 4}


@pytest.mark.parametrize(("n_layers", "total"), [(48, 1224), (72, 2700)])
def test_number_of_depth_weights_is_the_papers(n_layers: int, total: int):
    cfg = tiny_config("standard", residual=DenseFormer(), n_layers=n_layers)
    rows = t2lens.residual.build_residual(cfg, make_sites(n_layers, ("attn", "mlp")))
    assert sum(p.numel() for p in rows.parameters()) == total == n_layers * (n_layers + 3) // 2


def test_number_of_depth_weights_per_sublayer_is_that_of_gpt_bert():
    cfg = tiny_config("standard", residual=DenseFormer(every="sublayer"), n_layers=12)
    rows = t2lens.residual.build_residual(cfg, make_sites(12, ("attn", "mlp")))
    assert [p.numel() for p in rows.parameters()] == list(range(2, 26)) and sum(range(2, 26)) == 324


def test_mixing_matrix_is_the_weights_carried_from_states_to_writes():
    """E[i,k] = a_ik + sum_{j>k} a_ij E[j-1,k]: the coefficient of what block k wrote in Y_i."""
    n = 5
    model = model_of(DenseFormer(), n_layers=n, seed=2)
    rows = [torch.ones(1, dtype=torch.float64), *(row.detach() for row in model.residual.weights)]
    e = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    for i in range(n + 1):
        for k in range(i + 1):
            e[i, k] = rows[i][k] + sum(rows[i][j] * e[j - 1, k] for j in range(k + 1, i + 1))
    matrix = t2lens.mixing_matrix(model, [3, 1, 4])[0, :, 1]
    for i, read in enumerate(r for r, site in enumerate(model.sites) if site.opens):
        torch.testing.assert_close(matrix[read, 0], e[i, 0])
        for k in range(1, n + 1):  # both sublayers of a block have its coefficient
            torch.testing.assert_close(matrix[read, 2 * k - 1 : 2 * k + 1], e[i, k].repeat(2))


def test_a_one_hot_row_reads_that_source_and_an_edited_state_is_an_edited_source():
    model, tokens = model_of(DenseFormer(), n_layers=3, seed=4), random_tokens(4)

    def pick_block_1(weights: torch.Tensor, *, hook: Any) -> torch.Tensor:
        return torch.eye(4, dtype=weights.dtype)[1].expand_as(weights)

    def add_one(state: torch.Tensor, *, hook: Any) -> torch.Tensor:
        return state + 1

    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        picked = ("hook_depth_attn_final", pick_block_1)
        seen: dict[str, torch.Tensor] = {}
        look = ("hook_read_final", lambda x, *, hook: seen.update({hook.name: x.clone()}))
        model.run_with_hooks(tokens, fwd_hooks=[picked, look])
        assert torch.equal(seen["hook_read_final"], cache["blocks.0.hook_resid_post"])
        model.run_with_hooks(tokens, fwd_hooks=[picked, look, ("blocks.0.hook_resid_post", add_one)])
        assert torch.equal(seen["hook_read_final"], cache["blocks.0.hook_resid_post"] + 1)


def test_what_a_hook_writes_into_the_weights_stays_in_that_pass():
    model = model_of(DenseFormer(), n_layers=2, seed=5)
    before = [row.clone() for row in model.residual.weights]

    def overwrite(weights: torch.Tensor, *, hook: Any) -> None:
        weights.zero_()

    with torch.no_grad():
        model.run_with_hooks([[7]], fwd_hooks=[("hook_depth_attn_final", overwrite)])  # one token: the row as it is
    assert all(torch.equal(a, b) for a, b in zip(before, model.residual.weights, strict=True))


def test_grouping_gives_fewer_sources_and_the_period_does_not():
    grouped, skipped = (model_of(cfg, n_layers=4) for cfg in (DenseFormer(group=2), DenseFormer(period=2)))
    assert grouped.sources()["out"] == ["embed", "block2", "block4"]
    assert skipped.sources()["out"] == ["embed", "block1", "block2", "block3", "block4"]


def test_bad_configurations_say_what_is_wrong():
    for bad, message in (
        ({"every": "layer"}, "DenseFormer.every must be one of block, sublayer, not 'layer'."),
        ({"dilation": 0}, "DenseFormer.dilation must be a whole number of at least 1, not 0."),
        ({"group": 1.5}, "DenseFormer.group must be a whole number of at least 1, not 1.5."),
        ({"period": 0}, "DenseFormer.period must be a whole number of at least 1, not 0."),
    ):
        with pytest.raises(ValueError, match=message):
            DenseFormer(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"DenseFormer.group \(4\) must divide the number of blocks \(6\)."):
        model_of(DenseFormer(group=4))
    with pytest.raises(ValueError, match="is not defined for parallel blocks"):
        Transformer(tiny_config("standard", residual=DenseFormer(), block="parallel"))


def test_descriptions_name_the_variant():
    assert DenseFormer(dilation=4, period=5).describe() == "DenseFormer 4x5, a source per block"
    assert DenseFormer(group=2).describe() == "DenseFormer 1x1, a source per 2 blocks"
    assert DenseFormer(period=None).describe() == "connect to last, a source per block"


def test_random_shapes_stay_equal_to_the_loop():
    dice = random.Random(0)
    for _ in range(6):
        every: Any = dice.choice(["block", "sublayer"])
        n_layers = dice.randint(1, 4)
        group = dice.choice([g for g in (1, 2, 3) if (n_layers if every == "block" else 2 * n_layers) % g == 0])
        cfg = DenseFormer(every=every, group=group, dilation=dice.randint(1, 3), period=dice.choice([None, 1, 2, 3]))
        model = model_of(cfg, n_layers=n_layers, seed=dice.randint(0, 99))
        record = model.record(random_tokens(dice.randint(0, 99)))
        naive = looped_reads(cfg, list(model.residual.weights), record.atoms, n_layers)
        torch.testing.assert_close(list(record.reads.values()), naive, rtol=0, atol=1e-12)
