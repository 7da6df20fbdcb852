"""What a residual system is, for somebody who has never heard of it: its equation, one paragraph, its paper.

One table for everything that explains a model; `explain` puts the parts that a config has together.
"""

from __future__ import annotations

from dataclasses import dataclass

from t2lens.config import ModelConfig
from t2lens.residual import DeepDelta, HyperConnections

__all__ = ["SYSTEMS", "VARIANTS", "Explanation", "explain"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """title; equation: LaTeX, without dollar signs; words: one paragraph; paper: "arXiv NUMBER", or another source in
    words, or ""; section: where in it the equation stands."""

    title: str
    equation: str
    words: str
    paper: str = ""
    section: str = ""

    @property
    def link(self) -> str:
        """The address of the paper, or ""."""
        kind, _, number = self.paper.partition(" ")
        where = {"arXiv": "https://arxiv.org/abs/", "OpenReview": "https://openreview.net/forum?id="}
        return where[kind] + number if kind in where else ""


SYSTEMS: dict[str, Explanation] = {
    "standard": Explanation(
        title="Residual stream",
        equation=r"x_{l+1} = x_l + f_l(\mathrm{norm}(x_l))",
        words="The baseline. Every sublayer reads the running sum of all that was written before it, and adds its "
        "own output. Nothing can be taken back, and every earlier write counts exactly once: depth has no "
        "choice to make.",
    ),
    "scaled": Explanation(
        title="Scaled and gated streams",
        equation=r"x' = \mathrm{N}\bigl((1-g)\,(a\,x + c\,x_0) + g\,b\,f(x) + L(x)\bigr)",
        words="The small relatives of the residual stream (ReZero, LayerScale, Highway, DeepNet, LAuReL): the "
        "same sum, in which what is carried and what is written are scaled, gated or normalised by learned "
        "numbers.",
    ),
    "attnres": Explanation(
        title="Attention Residuals",
        equation=r"h_l = \sum_j \alpha_{l,j}\, v_j,\qquad "
        r"\alpha_l = \mathrm{softmax}_j\bigl(w_l \cdot \mathrm{RMSNorm}(v_j)\bigr)",
        words="There is no running sum. Every sublayer looks back over depth as attention looks back over a text: "
        "a learned query w of the reader scores every earlier write, and what it reads is their weighted "
        "mean. The weights depend on the token, so two tokens may read the same sublayer from quite "
        "different depths.",
        paper="arXiv 2603.15031",
        section="section 3",
    ),
    "delta-attnres": Explanation(
        title="Delta Attention Residuals",
        equation=r"x_{l+1} = x_l + f_l,\qquad h_l = x_l + \sum_j \mathrm{softmax}_j\bigl(w_l \cdot "
        r"\mathrm{RMSNorm}(v_j)\bigr)\, v_j",
        words="The running sum stays, and on top of it a sublayer reads a weighted mean of single earlier writes. "
        "So an attended write counts more than once in what is read, and no write can be left out.",
        paper="arXiv 2605.18855",
    ),
    "open-attnres": Explanation(
        title="Open ports of Attention Residuals",
        equation=r"h_l = (1-\gamma)\,x + \gamma\,h,\quad h = m_l\ \mathrm{or}\ x + m_l,\quad "
        r"m_l = \sum_j \mathrm{softmax}_j(s_{l})_j\, v_j",
        words="Programs that were published before the authors' own, and differ from the paper and from each "
        "other: in what the sources are (sums that hold the embedding twice, or single writes), whether the "
        "mixture replaces the stream or adds to it, and a gate between the two.",
        paper="arXiv 2605.18855",
        section="and the published code",
    ),
    "ddl": Explanation(
        title="Deep Delta Learning",
        equation=r"X' = X + \beta\,k\,\bigl(v^\top - k^\top X\bigr),\qquad \beta \in (0, 2)",
        words="A write may also erase. The sublayer's output gives a direction k; along it, what the state holds "
        "moves towards a new value v, by as much as the gate beta says: at 0 nothing happens, at 1 the old "
        "value is replaced, towards 2 it is reflected. All other directions stay as they are.",
        paper="arXiv 2601.00417",
        section="section 3",
    ),
    "depth-swa": Explanation(
        title="Depth ShortSWA",
        equation=r"z = \mathrm{softmax}\bigl(q k^\top / \sqrt{d_k}\bigr)\, W W_V,\qquad "
        r"W = [h^{(l-K+1)}, \dots, h^{(l)}]",
        words="Short sliding-window attention, turned by a right angle: a token attends over its own last K "
        "states, with layers in the place of positions. Queries, keys and values are all projections of the "
        "states themselves.",
        paper="arXiv 2603.16039",
        section="section 2",
    ),
    "denseformer": Explanation(
        title="DenseFormer",
        equation=r"Y_i = \sum_{j \le i} a_{ij}\, X_j,\qquad X_i = \mathrm{block}_i(Y_{i-1})",
        words="After every block the stream is replaced by a weighted average of the embedding and all block "
        "outputs so far. The weights are learned numbers, the same for every token, and may be negative: a "
        "later block can take an earlier one back.",
        paper="arXiv 2402.02622",
        section="section 3",
    ),
    "elc-bert": Explanation(
        title="ELC-BERT",
        equation=r"h_i = \sum_{j<i} \mathrm{softmax}(p_i)_j\, H_j",
        words="Every Layer Counts: each block reads a learned average of the outputs of all blocks before it, "
        "with weights that sum to 1 and are the same for every token. What a block wrote goes on only "
        "through such averages.",
        paper="arXiv 2311.02265",
        section="section 3",
    ),
    "vertical-attention-reconstructed": Explanation(
        title="Vertical Attention, a reconstruction",
        equation=r"h_l = \sum_{j<l} \mathrm{softmax}(p_l)_j\, \mathrm{N}(H_j)",
        words="Each block reads an average over the normalised outputs of all blocks before it, with learned "
        "weights. The public text does not give the equations: this is built from its abstract and reviews, "
        "and says so.",
        paper="OpenReview A6uabXKiXc",
    ),
    "muddformer": Explanation(
        title="MUDDFormer",
        equation=r"\mathrm{way}_c = \sum_{j \le i} \bigl(A_i + W_2\,\mathrm{gelu}(W_1 \tfrac{X_i}{\mathrm{rms}(X_i)})"
        r"\bigr)_{c,j}\, X_j,\qquad c \in \{q, k, v, r\}",
        words="Queries, keys, values and the carried stream of a block are four different mixtures of all earlier "
        "block outputs. A small network computes the weights anew for every token; they are signed and sum "
        "to nothing in particular.",
        paper="arXiv 2502.12170",
        section="sections 2.2 to 2.4",
    ),
    "dca": Explanation(
        title="DeepCrossAttention",
        equation=r"q, k, v = \mathrm{GRN}^{Q,K,V}(f),\qquad "
        r"\mathrm{GRN}(f) = \sum_j \bigl(b_{:,j} + \mathrm{relu}(w \cdot f_j)\bigr) \odot f_j",
        words="Queries, keys and values of a block are three separate mixtures of what the embedding and all "
        "blocks wrote. Every weight is a learned vector over channels plus a gate that looks at the source.",
        paper="arXiv 2502.06785",
        section="sections 3 and 4",
    ),
    "hyper-connections": Explanation(
        title="Hyper-Connections",
        equation=r"h = \sum_i \mathrm{pre}_i\, X_i,\qquad "
        r"X'_j = \sum_i \mathrm{res}_{ji}\, X_i + \mathrm{post}_j\, f(h)",
        words="Several streams run side by side in the place of one. Every sublayer reads a mixture of them, "
        "writes its output to each with a weight of its own, and mixes the streams among themselves. All "
        "weights are computed from the streams, token by token.",
        paper="arXiv 2409.19606",
        section="Algorithm 2",
    ),
}
"""Kind of a residual system, as config files have it -> what it is."""

VARIANTS: dict[str, Explanation] = {
    "blocks": Explanation(
        title="in blocks",
        equation=r"v_b = \sum_{l \in \mathrm{block}\ b} f_l",
        words="Writes are summed within a block of sublayers, and a reader chooses among the embedding, the sums "
        "of finished blocks, and the sum of its own block so far.",
        paper="arXiv 2603.15031",
        section="section 4",
    ),
    "expanded": Explanation(
        title="an expanded state",
        equation=r"X \in \mathbb{R}^{d \times V},\qquad v \in \mathbb{R}^V",
        words="The state is a matrix of several channels: a write puts a whole row of values along its direction, "
        "and a small convolution reads the matrix back into one vector for the next sublayer.",
        paper="arXiv 2601.00417",
        section="section 3",
    ),
    "write-only": Explanation(
        title="the control that only writes",
        equation=r"X' = X + \beta\,k\,v^\top",
        words="The same model without the erasing term, everything else equal: what it does not lose is not owed "
        "to erasing. The paper asks for this control and does not report it.",
        paper="arXiv 2601.00417",
        section="section 5 asks for it",
    ),
    "manifold": Explanation(
        title="kept on a manifold",
        equation=r"\mathrm{res} = \mathrm{Sinkhorn}\bigl(\exp(\mathrm{logits})\bigr)",
        words="The matrix that mixes the streams is made doubly stochastic, rows and columns sum to 1, so that "
        "mixing neither amplifies nor loses what is carried (mHC).",
        paper="arXiv 2512.24880",
        section="section 4",
    ),
    "short-swa": Explanation(
        title="ShortSWA in the sequence",
        equation=r"f = \mathrm{attention\ over\ the\ last\ } K \mathrm{\ tokens}",
        words="Every block begins with one more sublayer, an attention that sees only a few tokens back. It is "
        "the same operator along the text that depth ShortSWA is along the layers.",
        paper="arXiv 2603.16039",
        section="Algorithm 1",
    ),
    "canon": Explanation(
        title="Canon layers",
        equation=r"h'_t = h_t + \sum_{i=0}^{K-1} w_i \odot h_{t-i}",
        words="Short convolutions within the sublayers: what attention and MLP take in is mixed with that of the "
        "few tokens before, channel by channel.",
        paper="arXiv 2512.17351",
    ),
}
"""What a config may have beside the plain form of its system."""


def explain(cfg: ModelConfig) -> tuple[Explanation, ...]:
    """The system of a model, and then what it has besides. KeyError for a system without an explanation.

    Example:
        >>> import t2lens
        >>> from t2lens.zoo.explanations import explain
        >>> [each.title for each in explain(t2lens.load("ddl-write-only").cfg)]
        ['Deep Delta Learning', 'an expanded state', 'the control that only writes']
    """
    residual, more = cfg.residual, []
    if getattr(residual, "block_size", None) is not None and residual.kind == "attnres":
        more.append("blocks")
    if isinstance(residual, DeepDelta):
        more += ["expanded"] if residual.value_channels > 1 else []
        more += ["write-only"] if residual.edit == "write_only" else []
    if isinstance(residual, HyperConnections) and residual.res == "sinkhorn":
        more.append("manifold")
    more += ["short-swa"] if cfg.local is not None else []
    more += ["canon"] if cfg.canon is not None else []
    return (SYSTEMS[residual.kind], *(VARIANTS[each] for each in more))
