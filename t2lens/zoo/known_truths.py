"""Known truths: hand-wired models in which the answer is known by construction, to try analyses on.

Each function takes a seed and gives a `KnownTruth`. Sizes, heads, vocabulary, the basis of the stream and which
sublayers play which part are drawn from the seed, so that nothing can be right by remembering. Float64, and exact: what
a docstring calls zero is zero to rounding.

How they are wired: the stream has an orthonormal basis of random directions, one per feature. A sublayer is a list of
(reads, writes, gain): it writes gain * <reads, normed read> along `writes`. An MLP does that with gates held open by
their bias, attention with one head that sees one position (its own, through a window of 1, where nothing else is said).
Sublayers without a part write noise along directions that nothing reads, so that they are there.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from t2lens.config import MLP, Attention, ModelConfig, Norm, ResidualConfig
from t2lens.mixing import mixing_matrix
from t2lens.model import Transformer, build
from t2lens.residual import (
    AttnRes,
    DeepDelta,
    DenseFormer,
    HyperConnections,
    Standard,
)

__all__ = [
    "GALLERY",
    "KnownTruth",
    "cancelling_paths",
    "erasing_gate",
    "idle_route",
    "planted_path",
    "quiet_route",
    "selective_read",
    "single_carrier",
    "stream_copy",
    "write_only_gate",
]

_OPEN = 2.0  # bias of the gate of a hand-wired MLP
_UNIT = Norm(eps=1e-20)  # RMSNorm that does not see the size of its input
_NO_NORM = Norm(kind="none", weight=False, eps=1e-20)


@dataclass(frozen=True)
class KnownTruth:
    """A model with its answer; nothing changes it after it was made, so passes can be compared.

    model: hand-wired, float64. tokens [batch, pos]: a prompt that shows the truth. truth: named facts, as the function
    that made it says; sublayers by their names ("2.mlp"), tokens by their ids. draw(seed): another such prompt.
    """

    model: Transformer
    tokens: Tensor
    truth: dict[str, Any]
    draw: Callable[[int], Tensor]


class _Wiring:
    """A silent model of random sizes, and the ways to put a circuit into it."""

    def __init__(
        self,
        seed: int,
        residual: ResidualConfig,
        *,
        norm: Norm = _UNIT,
        window: int | None = 1,
        mid_norm: Norm | None = None,
    ) -> None:
        self.dice = dice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        groups = dice.choice((1, 2))
        heads = Attention(
            n_heads=groups * dice.choice((1, 2, 3)),
            n_kv_heads=groups,
            d_head=dice.choice((4, 5, 6)),
            rope=None,
            window=window,
        )
        cfg = ModelConfig(
            d_vocab=dice.randint(14, 24),
            n_ctx=40,
            d_model=dice.randint(24, 40),
            n_layers=dice.randint(2, 5),
            attention=heads,
            mlp=MLP(d_mlp=dice.randint(6, 12), bias=True, mid_norm=mid_norm),
            residual=residual,
            norm=norm,
            tied=False,
        )
        self.model = build(cfg, seed).double().requires_grad_(False)
        for name, p in self.model.named_parameters():  # norms and the residual system stay as they start
            if name.startswith(("embed.", "unembed.")) or ".attn." in name or ".mlp." in name:
                p.zero_()
        self.sites = [site.name for site in self.model.sites]
        self.writers = self.sites[:-1]
        basis = torch.randn(cfg.d_model, cfg.d_model, generator=self.generator, dtype=torch.float64)
        self._basis = list(torch.linalg.qr(basis).Q.T)
        self.constant, self.noise = self.direction(), self.direction()  # what every token has, and what nobody reads
        ids = list(range(cfg.d_vocab))
        dice.shuffle(ids)
        self._ids = ids
        own = torch.stack([self.direction() for _ in range(3)])  # a token's own part, which nobody reads either
        amounts = torch.randn(cfg.d_vocab, 3, generator=self.generator, dtype=torch.float64)
        self.model.embed.weight += self.constant + 0.3 * amounts @ own

    def direction(self) -> Tensor:
        """A unit vector of the stream that nothing else uses."""
        return self._basis.pop()

    def ids(self, n: int) -> list[int]:
        """Token ids that nothing else uses."""
        return sorted(self._ids.pop() for _ in range(n))

    def give(self, ids: Sequence[int], vector: Tensor) -> None:
        """Add to the embeddings of some tokens."""
        self.model.embed.weight[list(ids)] += vector

    def answer(self, token: int, vector: Tensor) -> None:
        """Add to the direction that the logit of one token reads."""
        self.model.unembed.weight[token] += vector

    def wire(self, site: str, *rules: tuple[Tensor, Tensor]) -> None:
        """Let a sublayer write, for each (reads, writes), <reads, normed read> * writes."""
        layer, kind = site.split(".")
        block: Any = self.model.blocks[int(layer)]
        if kind == "mlp":
            block.mlp.gate.bias.fill_(_OPEN)
            opened = float(torch.nn.functional.silu(torch.tensor(_OPEN, dtype=torch.float64)))
            for i, (reads, writes) in enumerate(rules):
                block.mlp.input.weight[i] = reads
                block.mlp.output.weight[:, i] = writes / opened
            return
        cfg = self.model.cfg.attention
        head = self.dice.randrange(cfg.n_heads)
        group = head // (cfg.n_heads // cfg.n_kv_heads)
        for i, (reads, writes) in enumerate(rules):
            block.attn.value.weight[group * cfg.d_head + i] = reads
            block.attn.output.weight[:, head * cfg.d_head + i] = writes

    def look_at(self, site: str, marker: Tensor, strength: float) -> None:
        """Let every head of an attention sublayer see only positions that hold `marker`, if there are any."""
        attn: Any = self.model.blocks[int(site.split(".")[0])].attn
        k = self.model.cfg.attention.d_head
        attn.query.weight[::k] = strength * self.constant
        attn.key.weight[::k] = strength * marker

    def idle(self, *but: str) -> None:
        """Let every sublayer that has no part write noise."""
        for site in self.writers:
            if site not in but:
                self.wire(site, (self.constant, self.dice.uniform(0.5, 1.5) * self.noise))

    def scores(self, site: str, keys: Tensor, score: float) -> None:
        """AttnRes: a source that is written along `keys` alone scores `score` at this read, all others score 0."""
        residual: Any = self.model.residual
        residual.query[self.sites.index(site)] = score / self.model.cfg.d_model**0.5 * keys

    def done(self, truth: dict[str, Any], draw: Callable[[random.Random, tuple[int, int]], list[list[int]]]) -> Any:
        def prompt(seed: int) -> Tensor:
            dice = random.Random(seed)
            return torch.tensor(draw(dice, (dice.randint(2, 3), dice.randint(6, 10))))

        return KnownTruth(self.model, prompt(self.dice.randrange(10**6)), truth, prompt)


def _mixed(*classes: Sequence[int]) -> Callable[[random.Random, tuple[int, int]], list[list[int]]]:
    """Prompts in which every row has tokens of every class, in any order."""

    def draw(dice: random.Random, shape: tuple[int, int]) -> list[list[int]]:
        rows = []
        for _ in range(shape[0]):
            row = [dice.choice(c) for c in classes]
            row += [dice.choice(dice.choice(classes)) for _ in range(shape[1] - len(row))]
            dice.shuffle(row)
            rows.append(row)
        return rows

    return draw


def selective_read(seed: int) -> KnownTruth:
    """Attention Residuals in which one read depends on the token: class A reads one earlier sublayer, class B another.

    Both sublayers write the direction that the read's query scores, but each only for its own class; what they write
    otherwise, and all others write always, scores 0. A score of 16 against 0 is a weight above 0.999. The two also
    write a mark of their own, which the reader hands on, and the last read takes the reader alone: so the route decides
    the prediction.

    truth: read, classes {A, B: token ids}, sources {A, B: name}, least_weight, answers {A, B: token id that the route
    makes the likeliest}.
    """
    w = _Wiring(seed, AttnRes())
    reader = w.dice.choice(w.sites[2:])
    at = w.sites.index(reader)
    first, second = w.dice.sample(w.writers[:at], 2)
    scored, handed = w.direction(), w.direction()
    classes = {"A": w.ids(3), "B": w.ids(3)}
    answers, marks, features = {}, {}, {}
    for name in classes:
        features[name], marks[name] = w.direction(), w.direction()
        w.give(classes[name], features[name])
        (answers[name],) = w.ids(1)
    for site, own, other in ((first, "A", "B"), (second, "B", "A")):
        w.wire(site, (features[own], scored + marks[own]), (features[other], w.noise))
    w.scores(reader, scored, 16 * 2**0.5)  # each also writes a mark of the same length
    if reader == "out":
        final = marks
    else:
        final = {name: w.direction() for name in classes}
        w.wire(reader, *((marks[name], handed + final[name]) for name in classes))
        w.scores("out", handed, 16 * 2**0.5)
    for name in classes:
        w.answer(answers[name], 3 * final[name])
    w.idle(first, second, reader)
    truth = {
        "read": reader,
        "classes": classes,
        "sources": {"A": first, "B": second},
        "least_weight": 0.999,
        "answers": answers,
    }
    return w.done(truth, _mixed(classes["A"], classes["B"]))


def idle_route(seed: int) -> KnownTruth:
    """Attention Residuals with a route of large mass and no effect at all, whatever an ablation does with the mass.

    One MLP gives most of its depth weight to a source whose (long) vector lies along a direction that no sublayer and
    no logit reads. There are no norms before sublayers, whose scale would see it. What the MLP does read is the sign of
    another source, of small mass, and its neurons are normed: removing the idle source changes nothing, and neither
    does sharing its mass among the others. The source of small mass decides the prediction. Because the reader only
    sees a sign, gradients at that route are near zero too: a saturated route, which only an ablation finds.

    truth: read, idle, idle_mass, telling, telling_mass, classes {plus, minus: token ids}, answers {plus, minus: id}.
    """
    return _routes(seed, saturated=True)


def quiet_route(seed: int) -> KnownTruth:
    """`idle_route` without the norm on the neurons, so that the logit is linear in the depth weights.

    The route of small mass carries all of the logit: its gradient times its weight is its effect, exactly. The route of
    large mass has no effect as long as its mass is dropped; shared among the others it makes the quiet one louder.

    truth: as in `idle_route`, and `effect`: the size of the logit that is lost with the telling route.
    """
    return _routes(seed, saturated=False)


def _routes(seed: int, *, saturated: bool) -> KnownTruth:
    mid_norm = Norm(weight=False, eps=1e-10) if saturated else None
    w = _Wiring(seed, AttnRes(), norm=_NO_NORM, mid_norm=mid_norm)
    reader = w.dice.choice([s for s in w.writers[2:] if s.endswith("mlp")])
    at = w.sites.index(reader)
    idle, telling = w.dice.sample(w.writers[:at], 2)
    unread, sign, told, out = (w.direction() for _ in range(4))
    classes = {"plus": w.ids(3), "minus": w.ids(3)}
    w.give(classes["plus"], sign)
    w.give(classes["minus"], -sign)
    mass = w.dice.uniform(0.85, 0.97)
    w.wire(idle, (w.constant, w.dice.uniform(4, 8) * unread))
    w.wire(telling, (sign, told))
    w.wire(reader, (1e4 * told, out / 1e4))  # neurons of a size at which eps is not seen, while it hides rounding
    w.scores(reader, unread, float(torch.logit(torch.tensor(mass))) + float(torch.tensor(float(at)).log()))
    answers = dict(zip(classes, w.ids(2), strict=True))
    w.idle(idle, telling, reader)
    prompt = w.done({}, _mixed(*classes.values()))
    along = (copy.deepcopy(w.model).record(prompt.tokens).read("out") @ out).abs()
    size = w.dice.uniform(3, 6)
    for name, way in (("plus", 1), ("minus", -1)):
        w.answer(answers[name], way * size / along.mean() * out)
    truth = {
        "read": reader,
        "idle": idle,
        "idle_mass": mass,
        "telling": telling,
        "telling_mass": (1 - mass) / at,
        "classes": classes,
        "answers": answers,
        "effect": size,
    }
    return KnownTruth(w.model, prompt.tokens, truth, prompt.draw)


def erasing_gate(seed: int) -> KnownTruth:
    """Deep Delta Learning in which one gate erases a planted feature: k is its direction, beta is 1 and v is 0.

    X' = X + beta k (v - k^T X) then has nothing left along k. Another sublayer overwrites a second direction with one
    value; all other gates are shut (beta below 1e-15). The logit of one token reads the planted feature: it is zero,
    where the write-only control of the same weights (`write_only_gate`) predicts that token.

    truth: eraser, writer, idle (names), beta {name: value}, value {name: v}, direction [d_model] (of the feature),
    overwritten [d_model], classes {with, without: token ids}, token (whose logit reads the feature), erased (bool).
    """
    return _gates(seed, "delta")


def write_only_gate(seed: int) -> KnownTruth:
    """The twin of `erasing_gate` with the same weights and X' = X + beta k v^T: nothing is erased, the feature stays.

    truth: as in `erasing_gate`.
    """
    return _gates(seed, "write_only")


def _gates(seed: int, edit: Any) -> KnownTruth:
    w = _Wiring(seed, DeepDelta(value_form="linear_of_normed", edit=edit))
    eraser, writer = w.dice.sample(w.writers, 2)
    planted, overwritten = w.direction(), w.direction()
    classes = {"with": w.ids(4), "without": w.ids(4)}
    for token in classes["with"]:
        w.give([token], w.dice.uniform(1, 3) * planted)
    for token in classes["with"] + classes["without"]:
        w.give([token], w.dice.uniform(-1, 1) * overwritten)
    residual: Any = w.model.residual
    for p in residual.parameters():
        p.zero_()
    residual.beta_bias.fill_(-40.0)  # 2 sigmoid(-40) < 1e-16
    value = w.dice.uniform(1, 2)
    for site, along, v in ((eraser, planted, 0.0), (writer, overwritten, value)):
        w.wire(site, (w.constant, w.dice.uniform(5, 20) * along))
        residual.beta_bias[w.sites.index(site)] = 0.0  # beta = 1
        residual.value_bias[w.sites.index(site)] = v
    (token,) = w.ids(1)
    w.answer(token, 4 * planted)
    w.idle(eraser, writer)
    truth = {
        "eraser": eraser,
        "writer": writer,
        "idle": [site for site in w.writers if site not in (eraser, writer)],
        "beta": {site: float(site in (eraser, writer)) for site in w.writers},
        "value": {site: value if site == writer else 0.0 for site in w.writers},
        "direction": planted,
        "overwritten": overwritten,
        "classes": classes,
        "token": token,
        "erased": edit == "delta",
    }
    return w.done(truth, _mixed(*classes.values()))


def cancelling_paths(seed: int) -> KnownTruth:
    """Two sublayers write the same amount of one direction with opposite signs, in a system drawn from the seed.

    Both read the same feature of the token; gains are set from the mixing matrix, so that the logit shares of the two
    are +share and -share: each is the largest of all, their sum is zero, and without either of them the logit moves by
    the whole share. No norms, so that it holds without any frozen scale.

    truth: plus, minus (names), token (whose logit they write), share (logit), classes {with, without: token ids}.
    """
    dice = random.Random(seed)
    residual = dice.choice((Standard(), AttnRes(), DenseFormer(), HyperConnections(n_streams=3, coefficients="static")))
    w = _Wiring(seed, residual, norm=_NO_NORM)
    plus, minus = w.dice.sample(w.writers, 2)
    feature, written = w.direction(), w.direction()
    classes = {"with": w.ids(4), "without": w.ids(4)}
    w.give(classes["with"], feature)
    (token,) = w.ids(1)
    prompt = w.done({}, _mixed(*classes.values()))
    mixing = mixing_matrix(copy.deepcopy(w.model), prompt.tokens)[0, :, 0]  # [read, atom], the same everywhere
    share = w.dice.uniform(4, 8)
    reads = [read.name for read in w.model.reads]
    for site, way in ((plus, 1), (minus, -1)):
        seen, kept = mixing[reads.index(site), 0], mixing[-1, 1 + w.sites.index(site)]
        w.wire(site, (feature, way * share / (seen * kept) * written))
    w.answer(token, written)
    for other in w.ids(2):  # something else to predict, straight from the embedding
        w.answer(other, w.dice.uniform(0.5, 1) * feature)
    w.idle(plus, minus)
    truth = {"plus": plus, "minus": minus, "token": token, "share": share, "classes": classes}
    return KnownTruth(w.model, prompt.tokens, truth, prompt.draw)


def planted_path(seed: int) -> KnownTruth:
    """A logit that comes through one path of three sublayers over two positions, in a system drawn from the seed.

    Each prompt holds one marker. There an MLP turns its feature into a second one; an attention sublayer of a later
    block, of which every head looks at the marker alone, takes that to its own position as a third; an MLP there turns
    it into a fourth, and the logit of one token reads the fourth only. Every other direct contribution to that logit is
    zero, and so is the logit before the marker.

    truth: path (names, embed first), markers (token ids; the source position is where one stands), token (whose logit
    it is), least_logit (at the marker and after it).
    """
    dice = random.Random(seed)
    residual = dice.choice((Standard(), AttnRes(), DenseFormer()))
    w = _Wiring(seed, residual, norm=dice.choice((_NO_NORM, _UNIT)), window=None)
    n = w.model.cfg.n_layers
    middle = w.dice.randrange(1, n)
    path = [f"{w.dice.randrange(middle)}.mlp", f"{middle}.attn", f"{w.dice.randrange(middle, n)}.mlp"]
    marker = w.direction()
    steps = [marker, *(w.direction() for _ in path)]
    markers, others = w.ids(3), w.ids(6)
    w.give(markers, marker)
    for site, reads, writes in zip(path, steps, steps[1:], strict=False):
        w.wire(site, (reads, writes))
    w.look_at(path[1], marker, 300.0)
    (token,) = w.ids(1)
    w.idle(*path)

    def draw(dice: random.Random, shape: tuple[int, int]) -> list[list[int]]:
        rows = [[dice.choice(others) for _ in range(shape[1])] for _ in range(shape[0])]
        for row in rows:
            row[dice.randrange(1, shape[1] - 2)] = dice.choice(markers)
        return rows

    prompt = w.done({}, draw)
    w.answer(token, steps[-1])
    logits = copy.deepcopy(w.model)(prompt.tokens)[..., token]
    after = torch.isin(prompt.tokens, torch.tensor(markers)).cumsum(dim=1).bool()
    w.model.unembed.weight[token] *= w.dice.uniform(4, 8) / logits[after].min()
    truth = {"path": ["embed", *path], "markers": markers, "token": token, "least_logit": 2.0}
    return KnownTruth(w.model, prompt.tokens, truth, prompt.draw)


def stream_copy(seed: int) -> KnownTruth:
    """Hyper-Connections in which two streams hold the same and are read alike, and all others are dead.

    Everything is written to both in the same amount, and reads take half of each; norms do not see the size of what is
    read. So either of the two can go and nothing changes; without both, the prediction is gone, and each alone brings
    it back. A dead stream holds the embedding, and is neither written to nor read.

    truth: carrier, copy (indices of streams), dead (indices), path (names, embed first), token (whose logit the path
    writes), classes {with, without: token ids}, redundant (bool: whether the copy is read as well).
    """
    return _streams(seed, redundant=True)


def single_carrier(seed: int) -> KnownTruth:
    """`stream_copy` in which only the carrier is read: without it the prediction is gone, and the copy, which holds the
    same, brings it back when it is put in its place; without the copy nothing changes.

    truth: as in `stream_copy`.
    """
    return _streams(seed, redundant=False)


def _streams(seed: int, *, redundant: bool) -> KnownTruth:
    n = random.Random(seed).randint(3, 5)
    w = _Wiring(seed, HyperConnections(n_streams=n, coefficients="static", res="static", readout="head"))
    order = list(range(n))
    w.dice.shuffle(order)
    carrier, twin, *dead = order
    residual: Any = w.model.residual
    used = [carrier, twin] if redundant else [carrier]
    residual.static_pre.zero_()[:, used] = 1 / len(used)
    residual.static_post.zero_()[:, [carrier, twin]] = 1.0
    residual.head_static.fill_(-40.0)[used] = 40.0  # sigmoid: 0 and 1
    path = sorted(w.dice.sample(w.writers, 2), key=w.writers.index)
    steps = [w.direction() for _ in range(3)]
    classes = {"with": w.ids(4), "without": w.ids(4)}
    w.give(classes["with"], steps[0])
    for site, reads, writes in zip(path, steps, steps[1:], strict=False):
        w.wire(site, (reads, writes))
    (token,) = w.ids(1)
    w.answer(token, 4 * steps[-1])
    w.idle(*path)
    truth = {
        "carrier": carrier,
        "copy": twin,
        "dead": sorted(dead),
        "path": ["embed", *path],
        "token": token,
        "classes": classes,
        "redundant": redundant,
    }
    return w.done(truth, _mixed(*classes.values()))


#: name -> function of a seed
GALLERY: dict[str, Callable[[int], KnownTruth]] = {
    make.__name__: make
    for make in (
        selective_read,
        idle_route,
        quiet_route,
        erasing_gate,
        write_only_gate,
        cancelling_paths,
        planted_path,
        stream_copy,
        single_carrier,
    )
}
