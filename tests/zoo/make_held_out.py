"""Write tests/data/held_out.txt and held_out_bigram.safetensors: `python -m tests.zoo.make_held_out CORPUS_FOLDER`.

The text is the beginning of the held-out part of each file of the corpus that the bundled models were trained on. The
bigram model is the one of the training records (fit on the whole training part), cut down to the pairs that occur in
the text, so that its loss there is recomputed by the tests and not merely quoted.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from t2lens.files import write_arrays, write_file
from t2lens.zoo.baseline import Bigram
from t2lens.zoo.text import encode_split, read_corpus
from t2lens.zoo.tokenizer import Tokenizer
from t2lens.zoo.training import windows

DATA = Path(__file__).parents[1] / "data"
TEXT, BIGRAM = DATA / "held_out.txt", DATA / "held_out_bigram.safetensors"
N_CHARS = 30_000  # per file
ARRAYS = ("pairs", "counts", "total", "distinct", "before", "unigram")


def held_out_rows(tokenizer: Tokenizer, n_ctx: int) -> np.ndarray:
    """[row, n_ctx] windows over the text in the repository."""
    return windows(np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))), n_ctx, tokenizer.bos_id)


def main(folder: str) -> None:
    corpus = read_corpus(folder)
    tokenizer = Tokenizer.train(corpus.texts("train"))
    text = "".join(part[: part.rindex("\n", 0, N_CHARS) + 1] for part in corpus.texts("validation"))
    write_file(TEXT, text.encode())
    bigram = Bigram.fit(encode_split(corpus, tokenizer, "train"), tokenizer.n_vocab)
    rows = held_out_rows(tokenizer, 256)
    used = np.isin(bigram.pairs, np.unique(rows[:, 1:-1].astype(np.int64) * bigram.n_vocab + rows[:, 2:]))
    small = replace(bigram, pairs=bigram.pairs[used], counts=bigram.counts[used])
    assert small.loss(rows) == bigram.loss(rows)
    facts = {"discount": str(small.discount), "n_vocab": str(small.n_vocab), "corpus_sha256": corpus.sha256}
    arrays = {name: getattr(small, name) for name in ARRAYS}
    arrays = {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in arrays.items()}
    write_arrays(BIGRAM, arrays, facts)


if __name__ == "__main__":
    main(sys.argv[1])
