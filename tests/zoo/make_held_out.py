"""Write tests/data/held_out.safetensors: `python -m tests.zoo.make_held_out CORPUS_FOLDER`.

It holds every eighth of the validation windows behind the losses in the records of the bundled models, as
tokens, and the bigram model of those records (fit on the whole training part), cut down to the pairs that
occur in these windows: so the tests compute both losses and do not merely quote them.
"""

import sys
from pathlib import Path

import numpy as np

from t2lens.files import read_arrays, write_arrays
from t2lens.zoo.baseline import Bigram
from t2lens.zoo.recipes import BACKBONE
from t2lens.zoo.text import encode_split, read_corpus
from t2lens.zoo.tokenizer import Tokenizer
from t2lens.zoo.training import windows

FILE = Path(__file__).parents[1] / "data" / "held_out.safetensors"
EVERY = 8
COUNTS = ("pairs", "counts", "total", "distinct")
SHARES = ("before", "unigram")


def read() -> tuple[np.ndarray, Bigram, str]:
    """(windows [row, pos], bigram model, SHA-256 of the corpus) as `main` wrote them."""
    arrays, facts = read_arrays(FILE)
    rows = arrays.pop("rows").astype(np.int64)
    bigram = Bigram(n_vocab=int(facts["n_vocab"]), discount=float(facts["discount"]), **arrays)
    return rows, bigram, facts["corpus_sha256"]


def main(folder: str) -> None:
    corpus = read_corpus(folder)
    tokenizer = Tokenizer.train(corpus.texts("train"))
    bigram = Bigram.fit(encode_split(corpus, tokenizer, "train"), tokenizer.n_vocab)
    validation = encode_split(corpus, tokenizer, "validation")
    rows = windows(validation, BACKBONE.n_ctx, tokenizer.bos_id)[::EVERY]
    used = np.isin(bigram.pairs, np.unique(rows[:, 1:-1] * bigram.n_vocab + rows[:, 2:]))
    counts = {name: getattr(bigram, name).astype(np.int32) for name in COUNTS}
    counts |= {name: counts[name][used] for name in ("pairs", "counts")}
    arrays = {"rows": rows.astype(np.uint16), **counts, **{name: getattr(bigram, name) for name in SHARES}}
    facts = {"discount": str(bigram.discount), "n_vocab": str(bigram.n_vocab), "corpus_sha256": corpus.sha256}
    write_arrays(FILE, arrays, facts)
    assert read()[1].loss(rows) == bigram.loss(rows)


if __name__ == "__main__":
    main(sys.argv[1])
