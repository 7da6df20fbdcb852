"""Every analysis by name, with its options: the command line and the dashboard are both made from this list.

Nothing is imported before an analysis runs, so that `t2lens --help` stays fast. To add one: a function
`(model, input, **options) -> Finding` in a file of this folder, and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

__all__ = ["ANALYSES", "Analysis", "Option", "analysis"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """An argument of an analysis.

    kind: "position" (an index into the sequence, negative from the end), "read" (name of a read, "3.attn.q"), "site",
    "token" (the text of one token), "text" (a second prompt), "word" (any text), "count" (a whole number), "number",
    "flag", or "choice" of `choices`. default: what holds when it is left out; None: the function's own default. most:
    of a count, what a page asks for at most, where more would keep other visitors waiting.
    """

    name: str
    kind: Literal["position", "read", "site", "token", "text", "word", "count", "number", "flag", "choice"]
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    most: int = 10_000


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis: `t2lens analyze KEY TEXT`, and a page entry of the dashboard.

    group: the page of the dashboard it stands on. what: one sentence. function: "module:name". texts: whether it runs
    on many texts; then so many bundled `passages` are its default input. systems: kinds of residual systems it is for
    (empty: all); what it cannot do on a model it refuses in a sentence when it runs.
    """

    key: str
    title: str
    group: Literal["attribution", "routes", "gates"]
    what: str
    function: str
    options: tuple[Option, ...] = ()
    texts: bool = False
    passages: int = 32
    systems: tuple[str, ...] = ()

    def run(self, model: Any, input: Any, **options: Any) -> Any:
        """The Finding of this analysis of `input`; options that are None are left out."""
        module, name = self.function.split(":")
        given = {key: value for key, value in options.items() if value is not None}
        return getattr(import_module(module), name)(model, input, **given)


_PATCHING = (
    Option(name="other", kind="text", help="The corrupted prompt, which takes activations of the clean one."),
    Option(
        name="what",
        kind="choice",
        help="What is patched.",
        default="atom",
        choices=("atom", "read", "depth_weight", "head", "stream"),
    ),
    Option(
        name="metric",
        kind="choice",
        help="What is measured.",
        default="logit_diff",
        choices=("logit_diff", "loss", "probability", "kl"),
    ),
    Option(name="answer", kind="token", help="The token that the clean prompt calls for (default: its likeliest)."),
    Option(name="wrong", kind="token", help="The token that the corrupted one calls for (default: its likeliest)."),
    Option(name="position", kind="position", help="Where the prediction is measured (default: after the last token)."),
    Option(
        name="alignment",
        kind="word",
        help="Prompts of different lengths: left, right, or clean:corrupted positions as 0:0,2:3.",
    ),
)
_SEEDS = 2**32 - 1
_SEED = Option(name="seed", kind="count", help="Of the bootstrap intervals.", default=0, most=_SEEDS)


_BY = Option(
    name="by",
    kind="choice",
    help="Whole atoms, or attention atoms in heads.",
    default="atom",
    choices=("atom", "head"),
)
_FORM = Option(
    name="form",
    kind="choice",
    help="How erasing is attributed; operator: Deep Delta Learning only.",
    default="additive",
    choices=("additive", "operator"),
)

ANALYSES: tuple[Analysis, ...] = (
    Analysis(
        key="logits",
        title="Logit attribution",
        group="attribution",
        what="What each atom, or each head, adds to the logit of one token; the shares and a bias sum to it.",
        function="t2lens.analysis.attribution:attribute_logits",
        options=(
            Option(name="pos", kind="position", help="Which position predicts; -1 is the last.", default=-1),
            Option(name="token", kind="token", help="The token; left out: the likeliest next one."),
            Option(name="against", kind="token", help="Another token: attribute the logit difference to it."),
            _BY,
            _FORM,
        ),
    ),
    Analysis(
        key="loss",
        title="Loss attribution",
        group="attribution",
        what="What each atom, or each head, adds to every token's loss; with log V the shares sum to it.",
        function="t2lens.analysis.attribution:attribute_loss",
        options=(_BY, _FORM),
        texts=True,
    ),
    Analysis(
        key="lens",
        title="Logit lens",
        group="attribution",
        what="What every read, and every stream, would predict if the readout read it.",
        function="t2lens.analysis.lens:logit_lens",
        options=(
            Option(name="top", kind="count", help="How many of the likeliest tokens are kept.", default=5),
            Option(name="target", kind="token", help="Follow this token; left out: the true next one."),
            Option(name="last", kind="token", help="Without target, what is followed last; left out: the likeliest."),
        ),
    ),
    Analysis(
        key="profile",
        title="Averaged depth maps",
        group="routes",
        what="What every read holds of earlier writes, over tokens: weights, mixing, contributions; spread, look-back.",
        function="t2lens.analysis.depth_maps:depth_profile",
        texts=True,
        options=(
            Option(name="start", kind="flag", help="Count the first token of every sequence too.", default=False),
            _FORM,
            Option(name="n_boot", kind="count", help="Draws of sequences for the intervals.", default=1000),
            _SEED,
        ),
    ),
    Analysis(
        key="continuation",
        title="Continuation",
        group="attribution",
        what="The next tokens, and for each its probability, rank, the likeliest others and the entropy.",
        function="t2lens.analysis.continuation:continue_text",
        options=(
            Option(name="n", kind="count", help="How many tokens are added at most.", default=20, most=256),
            Option(name="temperature", kind="number", help="0 takes the likeliest; otherwise samples.", default=0.0),
            Option(name="top_k", kind="count", help="Sample among so many of the likeliest only."),
            Option(name="seed", kind="count", help="Of the samples.", default=0, most=_SEEDS),
            Option(name="top", kind="count", help="How many of the likeliest are kept at each step.", default=5),
        ),
    ),
    Analysis(
        key="content",
        title="Content dependence",
        group="routes",
        what="What each read's weights follow: nothing, token, position or context; entropy, sinks, shuffled texts.",
        function="t2lens.analysis.content:content_dependence",
        texts=True,
        options=(
            Option(
                name="over",
                kind="choice",
                help="Depth weights or coefficients of atoms (default: what the system has).",
                choices=("source", "mixing"),
            ),
            Option(name="n_shuffles", kind="count", help="How often every text is shuffled.", default=1, most=20),
            Option(name="n_boot", kind="count", help="Draws of sequences for the intervals.", default=200),
            Option(name="seed", kind="count", help="Of shuffles and draws.", default=0, most=_SEEDS),
        ),
    ),
    Analysis(
        key="statistics",
        title="Statistics over texts",
        group="routes",
        what="Mean, spread, quantiles of every depth weight, gate and norm over all tokens, and what they follow.",
        function="t2lens.store.statistics:statistics",
        texts=True,
        options=(
            Option(name="what", kind="word", help="Other tensors than depth weights, gates and norms: a name or glob."),
            Option(name="n_tokens", kind="count", help="How many frequent tokens have means of their own.", default=20),
        ),
    ),
    Analysis(
        key="paths",
        title="Paths through depth",
        group="attribution",
        what="Which paths (atom by atom, back to a token) carry most of a logit; all of them sum to it.",
        function="t2lens.analysis.paths:top_paths",
        options=(
            Option(name="pos", kind="position", help="Which position predicts; -1 is the last.", default=-1),
            Option(name="token", kind="token", help="The token; left out: the likeliest next one."),
            Option(name="against", kind="token", help="Another token: follow the logit difference to it."),
            Option(name="n", kind="count", help="How many paths are listed.", default=20, most=1000),
            Option(name="max_expansions", kind="count", help="How many leaves are followed on at most.", default=200),
            Option(
                name="by_position", kind="flag", help="An atom at two positions is two nodes of a path.", default=True
            ),
            _FORM,
        ),
    ),
    Analysis(
        key="rollout",
        title="Two-axis rollout",
        group="attribution",
        what="Where what is read at one place comes from, over depth and positions: a share of every node.",
        function="t2lens.analysis.flow:rollout",
        options=(
            Option(name="pos", kind="position", help="Which position reads; -1 is the last.", default=-1),
            Option(name="site", kind="site", help="Where it reads.", default="out"),
            Option(name="way", kind="word", help="Which read of the site, where it has several (q, k, v, r)."),
            Option(
                name="by",
                kind="choice",
                help="Size of a contribution: its length, or its part along the whole.",
                default="norm",
                choices=("norm", "projection"),
            ),
            _FORM,
        ),
    ),
    Analysis(
        key="advantage",
        title="Routing advantage",
        group="routes",
        what="Which routes training would strengthen or weaken: dL/ds of each attention score, on both axes.",
        function="t2lens.analysis.advantage:routing_advantage",
        options=(
            Option(
                name="axis", kind="choice", help="Which axis.", default="both", choices=("both", "sequence", "depth")
            ),
            Option(name="position", kind="position", help="L is the loss of the prediction here (default: the mean)."),
        ),
    ),
    Analysis(
        key="effects",
        title="Mass and effect",
        group="routes",
        what="What every route into every read carries, and what becomes of the predictions without it.",
        function="t2lens.analysis.effects:measure_effects",
        options=(
            Option(
                name="over",
                kind="choice",
                help="Sources that depth weights run over, or atoms (default: what the system has).",
                choices=("source", "atom"),
            ),
            Option(name="reads", kind="read", help="Of this read alone (default: of all)."),
            Option(name="token", kind="token", help="Follow the logit of this token (default: of the true next one)."),
            Option(name="fast", kind="flag", help="The gradient's estimate, without ablations.", default=False),
        ),
        texts=True,
        passages=8,
    ),
    Analysis(
        key="writes",
        title="Writes: share and effect",
        group="routes",
        what="Take each write away: what becomes of the prediction, beside the write's share of the logit?",
        function="t2lens.analysis.writes:ablate_writes",
        options=(
            Option(name="pos", kind="position", help="Which position predicts; -1 is the last.", default=-1),
            Option(name="token", kind="token", help="Follow this token; left out: the likeliest next one."),
            Option(
                name="by",
                kind="choice",
                help="What a write becomes everywhere.",
                default="zero",
                choices=("zero", "mean"),
            ),
        ),
        texts=True,
        passages=8,
    ),
    Analysis(
        key="families",
        title="Source families: mass and effect",
        group="routes",
        what="Mask one family of sources in all reads of one kind and depth: does its mass say what it does?",
        function="t2lens.analysis.families:ablate_families",
        options=(_SEED,),
        texts=True,
        passages=8,
    ),
    Analysis(
        key="streams",
        title="Streams: ablate and rescue",
        group="routes",
        what="Take the streams of Hyper-Connections away and let others stand in: does similarity say who can?",
        function="t2lens.analysis.streams:ablate_streams",
        options=(
            Option(
                name="by",
                kind="choice",
                help="What an ablated stream becomes.",
                default="zero",
                choices=("zero", "mean"),
            ),
            _SEED,
        ),
        texts=True,
        passages=8,
        systems=("hyper-connections",),
    ),
    Analysis(
        key="patch",
        title="Activation patching",
        group="routes",
        what="Put activations of one prompt into the run on another, place by place: what brings its answer back?",
        function="t2lens.analysis.patching:patch_activations",
        options=(
            *_PATCHING,
            Option(
                name="positions",
                kind="choice",
                help="Each position for itself, or all at once.",
                default="each",
                choices=("each", "all"),
            ),
        ),
    ),
    Analysis(
        key="attribution-patch",
        title="Attribution patching",
        group="routes",
        what="The gradient's estimate of activation patching, everywhere at once.",
        function="t2lens.analysis.patching:attribution_patching",
        options=(
            *_PATCHING,
            Option(name="compare", kind="flag", help="Patch as well, and report how far the two agree.", default=False),
        ),
    ),
    Analysis(
        key="ddl",
        title="DDL audit",
        group="gates",
        what="Regimes of beta, errors and energies, reuse of directions, transport to the readout, counterfactuals.",
        function="t2lens.analysis.ddl_audit:audit_ddl",
        options=(
            Option(name="counterfactuals", kind="flag", help="Run other gates in place of the model's.", default=True),
        ),
        texts=True,
        systems=("ddl",),
    ),
    Analysis(
        key="gates-tokens",
        title="Gates by token",
        group="gates",
        what="Every write of every token: beta and its regime, what it erases and writes, how the state lies along k.",
        function="t2lens.analysis.ddl_tokens:gate_tokens",
        texts=True,
        passages=8,
        systems=("ddl",),
    ),
    Analysis(
        key="gates-spectrum",
        title="Spectrum of the steps at a token",
        group="gates",
        what="The eigenvalue of every step I - beta k k^T at one token, and the singular values of their products.",
        function="t2lens.analysis.ddl_tokens:gate_spectrum",
        options=(Option(name="pos", kind="position", help="Which token; -1 is the last.", default=-1),),
        systems=("ddl",),
    ),
    Analysis(
        key="gates-curve",
        title="Another gate",
        group="gates",
        what="The gate of one sublayer over its whole range: what becomes of a prediction and of the loss.",
        function="t2lens.analysis.gate_curves:gate_curve",
        options=(
            Option(name="site", kind="site", help="The sublayer whose gate is set.", default="0.attn"),
            Option(name="pos", kind="position", help="Whose prediction is compared; -1 is the last.", default=-1),
            Option(
                name="at",
                kind="choice",
                help="Where it is set: at all positions, or at this one alone.",
                default="all",
                choices=("all", "position"),
            ),
            Option(name="stream", kind="word", help="Of Hyper-Connections: which one (default: all)."),
            Option(name="low", kind="number", help="The lowest value (default: of the gate)."),
            Option(name="high", kind="number", help="The highest value (default: of the gate)."),
            Option(name="steps", kind="count", help="Steps of the grid between them.", default=20, most=200),
            Option(name="top", kind="count", help="How many of the likeliest tokens of each point.", default=8),
        ),
        systems=("ddl", "hyper-connections", "scaled"),
    ),
    Analysis(
        key="gates-writes",
        title="Gates on writes",
        group="gates",
        what="What every write of every token is multiplied by, in any system with such gates; streams: mixing too.",
        function="t2lens.analysis.gates:write_gates",
        texts=True,
        passages=8,
        systems=("ddl", "hyper-connections", "scaled"),
    ),
)


def analysis(key: str) -> Analysis:
    """The analysis named `key`; KeyError names the nearest."""
    found = {entry.key: entry for entry in ANALYSES}
    if key not in found:
        near = get_close_matches(key, found, n=1)
        raise KeyError(f"No analysis {key!r}; {f'did you mean {near[0]!r}?' if near else f'there are {list(found)}.'}")
    return found[key]
