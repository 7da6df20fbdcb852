"""A linear probe and a small top-k sparse autoencoder, trained from a store of activations, with held-out scores.

    python notebooks/probe_and_sae.py                          # under a minute on one core
    python notebooks/probe_and_sae.py --model ddl --out runs   # the store stays in runs and is found there again

The corpus is captured once; from there every row comes in shuffled batches, read from shards, so memory does not grow
with the corpus. Documents are split, not tokens: no document is on both sides. The probe says what a document is (its
"label" in the corpus: here, Bible or Shakespeare) from the activations of one token of it; the autoencoder rebuilds
them from the few latents that are on. `probe.ipynb` tells the story and draws the figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import t2lens
from t2lens.analysis.statistics import interval_of_mean
from t2lens.store import Store, collect
from t2lens.zoo.text import sample_texts


@dataclass(frozen=True)
class Split:
    """A store whose documents are labelled and split: label [document] 0 or 1, train and test [document] bool."""

    store: Store
    label: Tensor
    train: np.ndarray
    test: np.ndarray
    seed: int = 0
    workers: int = 0  # processes of the DataLoader; another number is another order

    def rows(self, key: str, documents: np.ndarray, batch_size: int = 4096, epoch: int = 0) -> Iterator[dict]:
        """One pass over the tokens of some documents, shuffled: the tensor of the key in float32, and what rows are."""
        batches = self.store.batches(
            key, batch_size, documents=documents, seed=self.seed, epoch=epoch, mixing=8 * 4096, dtype=torch.float32
        )
        return iter(DataLoader(batches, batch_size=None, num_workers=self.workers))


def write_corpus(file: Path) -> Path:
    """The bundled passages, which no bundled model was trained on: from the Bible and from Shakespeare in turn."""
    names = ("Bible", "Shakespeare")
    rows = [{"text": text, "label": names[i % 2]} for i, text in enumerate(sample_texts())]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def split(store: Store, seed: int = 0, workers: int = 0) -> Split:
    """Every fourth document of each label is held out."""
    labels = [str(more.get("label")) for more in store.metadata()]
    names = sorted(set(labels))
    if len(names) != 2:
        raise SystemExit(f"A linear probe tells two labels apart; the documents have {', '.join(names)}.")
    of = np.array([names.index(label) for label in labels])
    place = np.where(of == 1, np.cumsum(of == 1), np.cumsum(of == 0)) - 1  # among those of the same label
    test = place % 4 == 3
    return Split(store, torch.from_numpy(of).float(), ~test, test, seed, workers)


# --- the probe


def train_probe(data: Split, key: str, epochs: int = 20) -> Callable[[Tensor], Tensor]:
    """A logistic regression on single tokens; gives the logit of label 1 of activations [row, d]."""
    seen = next(data.rows(key, data.train))[key]
    mean, scale = seen.mean(dim=0), seen.std(dim=0) + 1e-6
    probe = nn.Linear(seen.shape[1], 1)
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=3e-3, weight_decay=0.1)
    for epoch in range(epochs):
        for batch in data.rows(key, data.train, 256, epoch):
            logit = probe((batch[key] - mean) / scale)[:, 0]
            loss = functional.binary_cross_entropy_with_logits(logit, data.label[batch["document"]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return lambda x: probe((x - mean) / scale)[:, 0].detach()


def accuracy(data: Split, key: str, probe: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
    """Share of held-out tokens that the probe gets right, and its 95% interval over documents (tokens of one document
    are no independent trials)."""
    right, n = (np.zeros(len(data.label)) for _ in range(2))
    for batch in data.rows(key, data.test):
        hit = (probe(batch[key]) > 0).float() == data.label[batch["document"]]
        np.add.at(right, batch["document"].numpy(), hit.numpy())
        np.add.at(n, batch["document"].numpy(), 1)
    low, high = interval_of_mean(right[n > 0].tolist(), n[n > 0].tolist())
    return float(right.sum() / n.sum()), float(low), float(high)


def baseline(data: Split) -> float:
    """Share of held-out tokens that are right when the more frequent label of the training side is always given."""
    n = data.store.documents[:, 1].astype(np.int64).copy()
    end = data.store.plan.n_sequences * data.store.plan.n_pos  # the last document may go beyond the last sequence
    n[-1] = min(n[-1], end - int(data.store.documents[-1, 0]))
    ones = data.label.numpy() == 1
    frequent = ones if n[data.train & ones].sum() > n[data.train & ~ones].sum() else ~ones
    return float(n[data.test & frequent].sum() / n[data.test].sum())


# --- the autoencoder


class Autoencoder(nn.Module):
    """x -> its k largest latents (never negative) -> x again. `mean` and `scale` bring x to mean 0 and length 1."""

    def __init__(self, mean: Tensor, scale: Tensor, latents: int, k: int, generator: torch.Generator) -> None:
        super().__init__()
        self.mean, self.scale, self.k = mean, scale, k
        start = functional.normalize(torch.randn(latents, len(mean), generator=generator), dim=1)
        self.decoder, self.encoder = nn.Parameter(start.clone()), nn.Parameter(start.T.clone())
        self.bias, self.middle = nn.Parameter(torch.zeros(latents)), nn.Parameter(torch.zeros(len(mean)))

    def latents(self, x: Tensor) -> Tensor:
        """[row, d] -> [row, latent], zero but for k."""
        every = ((x - self.mean) / self.scale - self.middle) @ self.encoder + self.bias
        top = every.topk(self.k, dim=1)
        return torch.zeros_like(every).scatter(1, top.indices, top.values.relu())

    def forward(self, x: Tensor) -> Tensor:
        return (self.latents(x) @ self.decoder + self.middle) * self.scale + self.mean


def train_autoencoder(
    data: Split, key: str, latents: int = 256, k: int = 16, epochs: int = 120
) -> tuple[Autoencoder, list[float]]:
    """The autoencoder of a tensor of the store, and the loss at every step."""
    seen = next(data.rows(key, data.train))[key]
    mean = seen.mean(dim=0)
    scale = (seen - mean).norm(dim=1).mean()
    sae = Autoencoder(mean, scale, latents, k, torch.Generator().manual_seed(data.seed))
    optimizer, losses = torch.optim.Adam(sae.parameters(), lr=2e-3), []
    for epoch in range(epochs):
        for batch in data.rows(key, data.train, 512, epoch):
            loss = ((sae(batch[key]) - batch[key]) ** 2).sum(dim=1).mean() / scale**2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sae.decoder.data = functional.normalize(sae.decoder.data, dim=1)
            losses.append(float(loss.detach()))
    return sae, losses


def principal_directions(data: Split, key: str, k: int) -> Callable[[Tensor], Tensor]:
    """Rebuilds from the k best directions of the training side (PCA): as many numbers per token as k latents."""
    seen = next(data.rows(key, data.train))[key]
    mean = seen.mean(dim=0)
    ways = torch.linalg.svd(seen - mean, full_matrices=False).Vh[:k]
    return lambda x: (x - mean) @ ways.T @ ways + mean


@torch.no_grad()
def explained(data: Split, key: str, rebuild: Callable[[Tensor], Tensor], documents: np.ndarray) -> float:
    """Share of the variance of some documents' tokens that is left in what is rebuilt of them."""
    lost, n, total, squares = 0.0, 0, torch.zeros(1), 0.0
    for batch in data.rows(key, documents):
        x = batch[key].double()
        lost += float(((rebuild(batch[key]) - x) ** 2).sum())
        n, total, squares = n + len(x), total + x.sum(dim=0), squares + float((x**2).sum())
    return 1 - lost / (squares - float((total**2).sum()) / n)


# --- from the command line


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="attnres-full", help="a bundled name, or whatever t2lens.load takes")
    parser.add_argument("--corpus", type=Path, help=".jsonl of text and label (two of them); default: the passages")
    parser.add_argument("--out", type=Path, help="keep the store in this folder; default: a temporary one")
    parser.add_argument("--key", help="what the autoencoder rebuilds; default: what an MLP in the middle reads")
    parser.add_argument("--n-pos", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--probe-epochs", type=int, default=20)
    parser.add_argument("--sae-epochs", type=int, default=120)
    parser.add_argument("--latents", type=int, default=256)
    parser.add_argument("--k", type=int, default=16, help="latents that are on at a token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that read batches")
    given = parser.parse_args(arguments)

    model = t2lens.load(given.model)
    key = given.key or f"blocks.{model.cfg.n_layers * 5 // 8}.hook_read_mlp"
    keys = list(dict.fromkeys(["hook_embed", key, "hook_read_final"]))
    scores: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="t2lens-probe-") as temporary:
        corpus = given.corpus or write_corpus(Path(temporary) / "passages.jsonl")
        run = collect(model, corpus, given.out or temporary, keys, n_pos=given.n_pos, sequences_per_shard=8, quiet=True)
        with Store(run) as store:
            data = split(store, given.seed, given.workers)
            print(f"{store}\n{data.train.sum()} documents to train on, {data.test.sum()} held out")
            scores["baseline"] = baseline(data)
            print(f"\nlinear probe of the label from one token, held out (baseline {scores['baseline']:.3f})")
            for name in keys:
                scores[name], low, high = accuracy(data, name, train_probe(data, name, given.probe_epochs))
                print(f"  {name:24s} {scores[name]:.3f}   95% over documents {low:.3f} to {high:.3f}")
            sae, _ = train_autoencoder(data, key, given.latents, given.k, given.sae_epochs)
            print(f"\nautoencoder of {key}: {given.latents} latents, {given.k} on; share of the variance explained")
            pca = principal_directions(data, key, given.k)
            for name, way, documents in (
                ("train", sae, data.train),
                ("held out", sae, data.test),
                ("held out, PCA", pca, data.test),
            ):
                scores[name] = explained(data, key, way, documents)
                print(f"  {name:24s} {scores[name]:.3f}")
    return scores


if __name__ == "__main__":
    main()
