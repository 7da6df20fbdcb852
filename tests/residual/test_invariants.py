"""design invariants, on every residual system: float64, random weights, random shapes, with and without padding."""

from __future__ import annotations

import pytest
import torch

import t2lens
from t2lens.mixing import account_by_read, contributions_by_read, contributions_of_parts, mixing_by_read, walk
from t2lens.model import Transformer
from t2lens.sublayers import DecodingCache
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config

TIGHT = 1e-10

pytestmark = pytest.mark.parametrize("system", SYSTEMS)
local = pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
seeds = pytest.mark.parametrize("seed", [0, 1])


def padded(tokens: torch.Tensor, n: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    gap = torch.full((tokens.shape[0], n), 1)
    real, flags = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(gap, dtype=torch.bool)
    if side == "left":
        return torch.cat([gap, tokens], 1), torch.cat([flags, real], 1)
    return torch.cat([tokens, gap], 1), torch.cat([real, flags], 1)


def close(a, b, limit=TIGHT):
    assert float((a - b).detach().abs().max()) < limit


@seeds
@local
def test_contributions_sum_to_the_read_and_shares_to_the_logits(system, local, seed):
    model = tiny(system, seed, local=local)
    tokens, mask = padded(random_tokens(seed), 2, "left")
    for attention_mask in (None, mask):
        record = model.record(tokens, attention_mask)
        for form in model.residual.forms:
            for account in account_by_read(model.residual, record, form):
                share, read = account.contributions(), record.reads[account.read.name]
                close(share.sum(dim=0), read)
                close(account.total(), read)
                close(account.lengths(), share.norm(dim=-1))
            shares = model.logit_shares(share, record.reads["out"])
            close(shares.sum(dim=0) + model.logit_bias, model(tokens, attention_mask))


@local
def test_contributions_of_parts_sum_to_those_of_their_atom(system, local):
    model = tiny(system, 2, local=local)
    tokens, mask = padded(random_tokens(2), 2, "left")
    record = model.record(tokens, mask)
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for i in (0, 2, len(model.atoms) - 1):
        whole = record.atoms[i]
        some = torch.randn(2, *whole.shape, generator=generator, dtype=whole.dtype) * mask.unsqueeze(-1)
        parts[model.atoms[i]] = torch.stack([*some, whole - some.sum(dim=0)])
    for form in model.residual.forms:
        for read, share in contributions_by_read(model.residual, record, form):
            if read.site.index not in (1, 4, len(model.sites) - 1):
                continue
            for atom, mine in contributions_of_parts(model.residual, record, read.name, parts, form):
                close(mine.sum(dim=0), share[model.atoms.index(atom)])
                doubled = contributions_of_parts(model.residual, record, read.name, [(atom, 2 * parts[atom])], form)
                close(next(iter(doubled))[1], 2 * mine)
    with pytest.raises(KeyError, match=r"No atom '9\.mlp'.*embed, 0\."):
        list(contributions_of_parts(model.residual, record, "out", {"9.mlp": whole[None]}))
    with pytest.raises(KeyError, match="No read 'nowhere'"):
        list(contributions_of_parts(model.residual, record, "nowhere", parts))


@seeds
def test_mixing_matrix_applied_to_the_atoms_gives_the_read(system, seed):
    model, tokens = tiny(system, seed), random_tokens(seed)
    record = model.record(tokens)
    atoms = torch.stack(record.atoms)
    matrix = t2lens.mixing_matrix(model, tokens)
    assert matrix.shape == (len(tokens), len(model.reads), tokens.shape[1], len(model.atoms))
    for i, (read, row) in enumerate(mixing_by_read(model.residual, record)):
        assert torch.equal(matrix[:, i].movedim(-1, 0), row)
        assert not row[read.site.seen + 1 :].any()  # what is not written yet has no part in the read
        if model.residual.coefficients() == "scalar":
            close((row.unsqueeze(-1) * atoms).sum(dim=0), record.reads[read.name])


@seeds
@local
def test_coefficients_that_are_numbers_give_what_the_walk_with_whole_vectors_gives(system, local, seed):
    model = tiny(system, seed, local=local)
    record, code = model.record(random_tokens(seed)), model.residual
    walked = walk(code, record, *_apart(code, record))
    for account, (read, whole) in zip(account_by_read(code, record), walked, strict=True):
        assert account.read == read
        close(account.contributions(), whole)


def _apart(code, record):
    """Every atom on a line of its own: [A, B, T, D] of the embedding, and of what a step wrote."""

    def line(i, vectors):
        lines = vectors.new_zeros(len(code.atoms), *vectors.shape)
        lines[i] = vectors
        return lines

    return line(0, record.embed), lambda step: line(step.site.index + 1, code.atom(step.out, step.gates))


@seeds
@local
def test_padding_changes_nothing_at_real_tokens(system, local, seed):
    model, tokens = tiny(system, seed, local=local), random_tokens(seed)
    plain, logits = model.record(tokens), model(tokens)
    for side, real in (("left", slice(3, None)), ("right", slice(None, -3))):
        record = model.record(*padded(tokens, 3, side))
        for name, read in plain.reads.items():
            close(record.reads[name][:, real], read)
        for ours, bare in zip(record.steps, plain.steps, strict=True):
            for name, gate in bare.gates.items():
                close(ours.gates[name][:, real], gate)
        close(model(*padded(tokens, 3, side))[:, real], logits)


@seeds
@local
def test_decoding_equals_the_full_pass(system, local, seed):
    model, tokens = tiny(system, seed, local=local), random_tokens(seed)
    tokens, mask = padded(tokens, 2, "left")
    with torch.no_grad():
        full = model(tokens, mask)[:, 2:]
        for first in (3, tokens.shape[1] - 1):
            cache = DecodingCache()
            parts = [model(tokens[:, :first], mask[:, :first], cache=cache)]
            parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(first, tokens.shape[1])]
            close(torch.cat(parts, dim=1)[:, 2:], full)


def test_generation_with_and_without_cache_is_the_same(system):
    model = tiny(system, 3, local=True)
    prompt = torch.tensor([[0, 7, 3, 7], [0, 9, 9, 2]])
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 5, "seed": 4}):
        with_cache = model.generate(prompt, 6, **options)
        assert torch.equal(with_cache, model.generate(prompt, 6, use_cache=False, **options))
        assert with_cache.shape == (2, 10) and torch.equal(with_cache[:, :4], prompt)


@seeds
def test_no_position_sees_the_future(system, seed):
    model, tokens = tiny(system, seed, local=True), random_tokens(seed)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    before, after = model(tokens), model(other)
    close(after[:, :-1], before[:, :-1], 1e-12)
    assert not torch.equal(after[:, -1], before[:, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_near(system, dtype):
    model, tokens = tiny(system, 2, dtype=torch.float32, local=True), random_tokens(2)
    exact = model(tokens)
    half = model.to(dtype)
    tokens, mask = padded(tokens, 2, "left")
    logits = half(tokens, mask)
    assert logits.dtype == dtype and logits.isfinite().all()
    divergence = torch.nn.functional.kl_div(
        logits[:, 2:].float().log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    # Depth attention without a sum amplifies rounding more than anything else here
    assert float(divergence.detach()) < (2.0 if system == "depth-swa-replace" else 0.5)


def test_every_parameter_gets_a_gradient(system):
    model = tiny(system, 5, local=True, tied=False)
    model(random_tokens(5), return_type="loss").backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert silent == []


def test_identity_at_init(system):
    """Where the rule says so: extra reads and ShortSWA start as nothing, Attention Residuals as the plain mean."""
    cfg = tiny_config(system)
    model = t2lens.build(cfg, seed=7)
    tokens = random_tokens(7)
    with_local = t2lens.build(tiny_config(system, local=True), seed=7)
    missing = with_local.load_state_dict(
        {n: p for n, p in model.state_dict().items() if not n.startswith("residual.")}, strict=False
    )
    assert not missing.unexpected_keys
    if system == "standard":
        assert torch.equal(with_local(tokens), model(tokens))  # ShortSWA writes exact zeros
    if system == "depth-swa":
        twin = Transformer(tiny_config("standard"))
        twin.load_state_dict({n: p for n, p in model.state_dict().items() if not n.startswith("residual.")})
        assert torch.equal(twin.eval()(tokens), model(tokens))
    if system in ("attnres-full", "attnres-block", "depth-swa-replace"):
        for step in model.record(tokens).steps:
            weights = step.gates["weights"]
            assert torch.allclose(weights, torch.full_like(weights, 1 / weights.shape[-1]), atol=1e-7, rtol=0)


def test_verify_passes_and_the_trace_survives_a_file(system, tmp_path):
    model = tiny(system, 6, local=True)
    ids = random_tokens(6)[0].tolist()
    report = t2lens.verify(model, ids)
    assert report.passed, str(report)
    trace = t2lens.trace(model, ids)
    back = t2lens.load_trace(trace.save(tmp_path / "a.safetensors"))
    assert back.dataset.identical(trace.dataset)
    assert (back.config, back.source_atoms, back.verify()) == (
        trace.config,
        trace.source_atoms,
        trace.verify(),
    )


def test_same_seed_same_weights(system):
    a, b, c = (t2lens.build(tiny_config(system), seed=s) for s in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)


def test_config_round_trip(system):
    cfg = tiny_config(system, local=True)
    assert t2lens.ModelConfig.from_dict(cfg.to_dict()) == cfg
