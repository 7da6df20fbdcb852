"""The open programs of Attention Residuals against loops written from their descriptions, one token list at a time."""

from __future__ import annotations

import pytest
import torch

import t2lens
from t2lens.mixing import contributions_by_read
from t2lens.model import Transformer
from t2lens.residual import AttnRes, DeltaAttnRes, OpenAttnRes, by_way
from t2lens.residual.open_attnres import _SCHEMES
from tests.systems import random_tokens, tiny, tiny_config

MODES = [tuple(name.split()) for name in _SCHEMES]


class Program:
    """What each program computes, on the writes of a recorded pass; nothing in here comes from the module."""

    def __init__(self, model, record):
        self.model, self.p = model, dict(model.residual.named_parameters())
        self.eps = model.cfg.norm_eps
        self.dialect, self.mode = model.cfg.residual.dialect, model.cfg.residual.mode
        self.gate_kind = model.cfg.residual.gate
        n_layers = model.cfg.n_layers
        self.per_block = max(1, (n_layers + model.cfg.residual.n_blocks - 1) // model.cfg.residual.n_blocks)
        self.embed, *self.outs = [x for x in (record.embed, *(s.out for s in record.steps)) if x is not None]

    def mix(self, sources, query, norm, bias=None):
        stack = torch.stack(sources)
        keys = norm * stack / (stack.square().mean(-1, keepdim=True) + self.eps).sqrt()
        scores = torch.einsum("d,nbtd->nbt", query, keys)
        if bias is not None:
            scores[-1] = scores[-1] + bias
        return torch.einsum("nbt,nbtd->btd", scores.softmax(0), stack)

    def replaced(self, sources, i, rows=None):
        query, norm = (self.p["query"], self.p["key_norm"]) if rows is None else rows
        return self.mix(sources, query[i], norm[i], self.p["bias"][i] if "bias" in self.p else None)

    def added(self, x, sources, i, rows=None):
        return x + self.replaced(sources, i, rows) if sources else x

    def gated(self, x, h, i):
        if self.gate_kind == "sigmoid_scalar":
            g = self.p["gate_value"][i].sigmoid()
        elif self.gate_kind == "sigmoid_vector":
            g = (x @ self.p["gate_weight"][i].T + self.p["gate_bias"][i]).sigmoid()
        elif self.gate_kind == "learnable_alpha":
            g = self.p["gate_value"][i]
        else:
            return h
        return (1 - g) * x + g * h

    def reads(self):
        """The read of every sublayer ({way: read} where the values are read apart) and of the readout."""
        x, found = self.embed, []
        blocks = [x] if self.dialect in "AB" else []
        start = x
        value = (self.p.get("value_query"), self.p.get("value_key_norm"))
        mode, L = self.mode, self.model.cfg.n_layers
        for layer in range(L):
            at_start = list(blocks)
            for half in (0, 1):
                i, out = 2 * layer + half, self.outs[2 * layer + half]
                # the read
                if mode in ("block", "full"):
                    sources = [*blocks, x]
                    h = self.gated(x, self.replaced(sources, i), i)
                elif mode == "full_v":
                    h = self.gated(x, self.replaced([*blocks, x], i), i)
                    if half == 0:
                        h = {"q": h, "k": h, "v": self.gated(x, self.replaced([*blocks, x], layer, value), i)}
                elif mode == "delta_v":
                    h = self.gated(x, self.added(x, blocks, i), i)
                    if half == 0:
                        h = {"q": h, "k": h, "v": self.gated(x, self.added(x, blocks, layer, value), i)}
                elif mode == "delta_replace":
                    h = self.gated(x, self.replaced([*blocks, x], i), i)
                elif mode == "first_layer":
                    h = self.replaced([x, at_start[2]], i) if len(at_start) >= 3 else x
                elif mode == "pre_gated":
                    g = (x @ self.p["filter_weight"][i].T + self.p["filter_bias"][i]).sigmoid()
                    h = self.added(x, [g * s for s in blocks], i)
                else:
                    h = self.gated(x, self.added(x, blocks, i), i)
                found.append(h)
                # the write
                boundary = half == 0 and layer % self.per_block == 0
                if mode == "block" and self.dialect != "A" and boundary and (layer > 0 or self.dialect == "C"):
                    blocks, x = [*blocks, x], torch.zeros_like(x)
                if mode == "full" and self.dialect == "C":
                    blocks, x = [*blocks, x], torch.zeros_like(x)
                if mode == "delta_block" and self.dialect == "C" and boundary:
                    blocks = [*blocks, x - blocks[-1] if blocks else x]
                if mode == "delta" and self.dialect == "C" and not blocks:
                    blocks = [x]
                x = x + out
                if mode in ("delta", "delta_v", "delta_replace", "first_layer", "pre_gated"):
                    blocks = [*blocks, out]
                if (mode == "full" and self.dialect != "C") or mode in ("full_v", "full_additive"):
                    blocks = [*blocks, x]
            if (layer + 1) % self.per_block == 0:
                if mode == "block" and self.dialect == "A":
                    blocks = [*blocks, x]
                if mode == "delta_block" and self.dialect == "B":
                    blocks, start = [*blocks, x - start], x
        final = (mode == "block" and self.dialect in "BC") or (mode == "full" and self.dialect == "C")
        return [*found, self.replaced([*blocks, x], 2 * L) if final else x]


@pytest.mark.parametrize(("dialect", "mode"), MODES)
@pytest.mark.parametrize("gate", ["bias", "sigmoid_scalar", "sigmoid_vector", "learnable_alpha"])
def test_reads_follow_the_programs(dialect, mode, gate):
    if gate != "bias" and mode in ("first_layer", "pre_gated"):
        with pytest.raises(ValueError, match="no gate in mode"):
            OpenAttnRes(dialect=dialect, mode=mode, gate=gate)
        return
    for n_layers, n_blocks in ((5, 2), (3, 8)):
        residual = OpenAttnRes(dialect=dialect, mode=mode, n_blocks=n_blocks, gate=gate)
        model = tiny("standard", n_layers, residual=residual, n_layers=n_layers)
        if residual.scheme.only == "0.mlp":  # B's list starts with the embedding, so that its third is the MLP's write
            assert model.residual.sources(model.sites[-2])[0].atoms == ("0.mlp",)
        record = model.record(random_tokens(n_layers))
        for site, expected in zip(model.sites, Program(model, record).reads(), strict=True):
            for way, theirs in by_way(expected).items():
                ours = record.read(f"{site.name}.{way}" if way else site.name)
                assert torch.allclose(ours, theirs, atol=1e-11, rtol=0), (site.name, way)


@pytest.mark.parametrize(("dialect", "mode"), MODES)
def test_accounting_is_exact_in_every_mode(dialect, mode):
    """Also with a third sublayer in every block, which the programs do not have."""
    model = tiny("standard", 3, residual=OpenAttnRes(dialect=dialect, mode=mode, n_blocks=2), local=True)
    record = model.record(random_tokens(3))
    for read, share in contributions_by_read(model.residual, record):
        assert torch.allclose(share.sum(dim=0), record.reads[read.name], atol=1e-11, rtol=0)


def test_source_counts_are_those_of_the_programs():
    def counts(n_layers, **options):
        with torch.device("meta"):
            model = Transformer(tiny_config("standard", n_layers=n_layers, residual=OpenAttnRes(**options)))
        return [len(s) for s in model.sources().values()]

    assert sorted(set(counts(28, dialect="A", n_blocks=8)[:-1])) == [2, 3, 4, 5, 6, 7, 8]  # 7 blocks, not 8
    assert sorted(set(counts(12, dialect="A", n_blocks=4)[:-1])) == [2, 3, 4, 5]
    assert counts(28, dialect="B", n_blocks=8)[-1] == 8 and min(counts(28, dialect="B", n_blocks=8)) == 2
    assert counts(8, dialect="C", n_blocks=4)[:6] == [1, 2, 2, 2, 2, 3] and counts(8, dialect="C", n_blocks=4)[-1] == 5
    assert counts(4, dialect="C", mode="full") == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_duplicate_sources_have_names_of_their_own_and_show_that_they_are_equal():
    residual = tiny("standard", residual=OpenAttnRes(mode="full")).residual
    sources = residual.sources(residual.sites[3])
    assert [s.name for s in sources] == ["embed", "state@0.attn", "state@0.mlp", "state@1.attn", "stream"]
    assert sources[-1].atoms == sources[-2].atoms == ("embed", "0.attn", "0.mlp", "1.attn")
    first = residual.sources(residual.sites[0])
    assert [(s.name, s.atoms) for s in first] == [("embed", ("embed",)), ("stream", ("embed",))]


def test_alternating_sources_say_what_they_hold():
    residual = tiny("standard", n_layers=5, residual=OpenAttnRes(dialect="C", mode="delta_block", n_blocks=5)).residual
    held = {s.name: s.atoms for s in residual.sources(residual.sites[-2])}
    assert held == {
        "embed": ("embed",),
        "block1": ("0.attn", "0.mlp"),
        "block2+embed": ("embed", "1.attn", "1.mlp"),
        "block3+block1": ("0.attn", "0.mlp", "2.attn", "2.mlp"),
        "block4+block2+embed": ("embed", "1.attn", "1.mlp", "3.attn", "3.mlp"),
    }


def twin(model):
    """The plain transformer with the same weights."""
    plain = Transformer(tiny_config("standard", n_layers=model.cfg.n_layers)).to(model.embed.weight.dtype)
    plain.load_state_dict({n: p for n, p in model.state_dict().items() if not n.startswith("residual.")})
    return plain.eval()


@pytest.mark.parametrize("mode", ["block", "full"])
def test_a_huge_recency_bias_is_the_plain_residual(mode):
    model = t2lens.build(tiny_config("standard", residual=OpenAttnRes(mode=mode, bias_init=60.0)), seed=3).double()
    tokens = random_tokens(8)
    assert float((model(tokens) - twin(model)(tokens)).detach().abs().max()) < 1e-6
    model.residual.get_parameter("bias").data.zero_()
    assert float((model(tokens) - twin(model)(tokens)).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("dialect", ["A", "C"])
def test_a_learnable_alpha_starts_as_the_plain_residual(dialect):
    mode = "full" if dialect == "A" else "delta"
    residual = OpenAttnRes(dialect=dialect, mode=mode, gate="learnable_alpha")
    model = t2lens.build(tiny_config("standard", residual=residual), seed=1)
    assert torch.equal(model(random_tokens(1)), twin(model)(random_tokens(1)))


def test_cumulative_sources_can_only_damp_what_is_recent():
    """The coefficient of embed is 1, the others never grow with recency, and the readout is the plain sum."""
    model = tiny("standard", 5, n_layers=4, residual=OpenAttnRes(n_blocks=4))
    rows = t2lens.mixing_matrix(model, random_tokens(5))  # [batch, read, pos, atom]
    for site in model.sites[:-1]:
        row = rows[:, site.index, :, : site.seen + 1]
        assert torch.allclose(row[..., 0], torch.ones(()).double(), atol=1e-12)
        assert (row.diff(dim=-1) < 1e-12).all()
    assert torch.allclose(rows[:, -1], torch.ones(()).double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("n_layers", "n_blocks"), [(5, 2), (4, 4), (3, 1)])
def test_dialect_c_is_the_paper(n_layers, n_blocks):
    for mode in ("block", "full"):
        theirs = tiny("standard", 7, n_layers=n_layers, residual=OpenAttnRes(dialect="C", mode=mode, n_blocks=n_blocks))
        size = None if mode == "full" else 2 * -(-n_layers // n_blocks)
        ours = tiny("standard", n_layers=n_layers, residual=AttnRes(block_size=size))
        ours.load_state_dict(theirs.state_dict())
        assert ours.sources() == theirs.sources()
        assert torch.allclose(ours(random_tokens(7)), theirs(random_tokens(7)), atol=1e-12, rtol=0)


def test_delta_is_dialect_c_and_weighs_each_atom_with_one_plus_alpha():
    theirs = tiny("standard", 2, residual=OpenAttnRes(dialect="C", mode="delta"))
    ours = tiny("standard", residual=DeltaAttnRes())
    ours.load_state_dict(theirs.state_dict())
    tokens = random_tokens(2)
    assert torch.equal(ours(tokens), theirs(tokens))
    record, rows = ours.record(tokens), t2lens.mixing_matrix(ours, tokens)
    assert record.steps[0].gates == {}  # the first read has no source: the stream as it is
    for step in record.steps[1:-1]:
        weights = step.gates["weights"]
        assert torch.allclose(rows[:, step.site.index, :, : step.site.seen + 1], 1 + weights, atol=1e-12)
    assert torch.allclose(rows[:, -1], torch.ones(()).double(), atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_delta_block_reads_what_each_block_added(size):
    model = tiny("standard", 6, n_layers=4, residual=DeltaAttnRes(block_size=size))
    record = model.record(random_tokens(6))
    embed, *outs = record.atoms
    program = Program.__new__(Program)
    program.p, program.eps = dict(model.residual.named_parameters()), model.cfg.norm_eps
    for i in range(len(outs)):
        stream = embed + sum(outs[:i]) if i else embed
        blocks = [sum(outs[j : j + size]) for j in range(0, i - size + 1, size)]
        expected = program.added(stream, [embed, *blocks] if i else [], i)
        assert torch.allclose(record.read(model.sites[i].name), expected, atol=1e-11, rtol=0)


def test_edits_of_the_stream_and_of_the_gate_act():
    model, tokens = tiny("standard", residual=OpenAttnRes(gate="sigmoid_scalar")), random_tokens(1)
    plain = model(tokens)
    for name in ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.2.hook_resid_post"):
        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * torch.tensor([2.0] + [1.0] * 15))])
        assert not torch.allclose(edited, plain)
    off = model.run_with_hooks(
        tokens, fwd_hooks=[(lambda name: "depth_gate" in name, lambda x, hook: torch.zeros_like(x))]
    )
    assert torch.allclose(off, twin(model)(tokens), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OpenAttnRes(dialect="D"),  # type: ignore[arg-type]
            "must be one of A, B, C",
        ),
        (lambda: OpenAttnRes(dialect="A", mode="delta"), "dialect A has no mode 'delta'; it has block, full"),
        (lambda: OpenAttnRes(n_blocks=0), "at least 1"),
        (
            lambda: OpenAttnRes(gate="tanh"),  # type: ignore[arg-type]
            "must be one of bias, sigmoid_scalar",
        ),
        (lambda: DeltaAttnRes(block_size=0), "at least 1"),
    ],
)
def test_what_a_config_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
