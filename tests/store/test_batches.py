"""Batches: every row once, with what it is, in an order that the seed decides, from any number of workers."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import t2lens
from t2lens.store import Store, collect
from t2lens.store.batches import Batches
from t2lens.zoo.text import sample_texts

KEY, WEIGHTS, PATTERN = "blocks.1.hook_mlp_out|norm", "blocks.3.hook_depth_attn_mlp", "blocks.1.attn.hook_pattern"
N_POS = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    what, folder = [KEY, WEIGHTS, PATTERN, "hook_embed|pos:2:5"], tmp_path_factory.mktemp("runs")
    return Store(
        collect(t2lens.load("attnres-full"), sample_texts(8), folder, what, n_pos=N_POS, sequences_per_shard=7)
    )


def places(batches: Any) -> list[tuple[int, int]]:
    """(sequence, pos) of every row, in the order in which they come."""
    return [pair for batch in batches for pair in zip(batch["sequence"].tolist(), batch["pos"].tolist(), strict=True)]


def every(store: Store) -> list[tuple[int, int]]:
    return [(i, j) for i in range(store.plan.n_sequences) for j in range(N_POS)]


@pytest.mark.parametrize("mixing", [1, 100, 10**6, None])
@pytest.mark.parametrize("batch_size", [1, 33])
def test_every_token_comes_once_with_what_it_is(store: Store, mixing: int | None, batch_size: int) -> None:
    batches = store.batches([WEIGHTS, KEY, PATTERN], batch_size, mixing=mixing, seed=random.randrange(99))
    seen = list(batches)
    assert [len(batch[KEY]) for batch in seen[:-1]] == [batch_size] * (len(seen) - 1)
    rows = {name: torch.cat([batch[name] for batch in seen]) for name in seen[0]}
    where = list(zip(rows["sequence"].tolist(), rows["pos"].tolist(), strict=True))
    assert sorted(where) == every(store)
    assert where != every(store)
    assert batches.n_rows == len(where)
    i, j = rows["sequence"], rows["pos"]
    assert torch.equal(rows["token"], store["tokens"][:][i, j].long())
    assert torch.equal(rows[WEIGHTS], store[WEIGHTS][:][i, j])
    assert torch.equal(rows[KEY], store[KEY][:][i, j])
    assert torch.equal(rows[PATTERN], store[PATTERN][:][i, :, j])  # [head, query, key]: a row is a query
    np.testing.assert_array_equal(rows["document"].numpy(), store.document_of(i, j))


def test_the_seed_and_the_epoch_decide_the_order(store: Store) -> None:
    def order(**options: Any) -> list[tuple[int, int]]:
        return places(store.batches(KEY, 8, **{"mixing": 64, **options}))

    assert order(seed=3) == order(seed=3)
    assert len({tuple(order(seed=s, epoch=e)) for s in (3, 4) for e in (0, 1)}) == 4
    batches = store.batches(KEY, 8, mixing=64, seed=3)
    batches.set_epoch(1)
    assert places(batches) == order(seed=3, epoch=1)
    assert order(seed=None) == every(store)


def test_rows_are_mixed_beyond_their_sequence(store: Store) -> None:
    per_batch = [len(set(batch["sequence"].tolist())) for batch in store.batches(KEY, 32, mixing=640)]
    assert np.mean(per_batch[:-1]) > 10  # 2 in the order of the corpus
    first = [batch["sequence"].float().mean().item() for batch in store.batches(KEY, 64, mixing=640)]
    assert np.std(first) < store.plan.n_sequences / 6  # and no batch is of one end of the corpus


@pytest.mark.parametrize("rows", ["tokens", "sequences"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on fewer processors
def test_workers_share_the_rows(store: Store, rows: Any, workers: int) -> None:
    def order(n: int) -> list[Any]:
        batches = store.batches(KEY, 5, rows=rows, mixing=40, seed=1)
        loaded = DataLoader(batches, batch_size=None, num_workers=n)
        return places(loaded) if rows == "tokens" else [i for batch in loaded for i in batch["sequence"].tolist()]

    found = order(workers)
    assert sorted(found) == (every(store) if rows == "tokens" else list(range(store.plan.n_sequences)))
    assert found == order(workers)


def test_processes_share_the_rows(store: Store) -> None:
    shares = [places(store.batches(KEY, 7, mixing=50, rank=rank, world=3)) for rank in range(3)]
    assert sorted(place for share in shares for place in share) == every(store)
    assert all(shares)


def test_sequences_come_whole(store: Store) -> None:
    seen = list(store.batches([PATTERN, KEY, "hook_embed|pos:2:5"], 4, rows="sequences", mixing=8))
    rows = {name: torch.cat([batch[name] for batch in seen]) for name in seen[0]}
    i = rows["sequence"]
    assert sorted(i.tolist()) == list(range(store.plan.n_sequences))
    for key in (PATTERN, KEY, "hook_embed|pos:2:5"):
        assert torch.equal(rows[key], store[key][:][i])
    assert torch.equal(rows["token"], store["tokens"][:][i].long())
    assert rows["document"].shape == rows["token"].shape


def test_a_split_by_document_shares_no_document(store: Store) -> None:
    held_out = np.arange(len(store.documents)) % 4 == 0
    train, test = store.batches(KEY, 9, documents=~held_out), store.batches(KEY, 9, documents=np.flatnonzero(held_out))
    seen = [Counter(i for batch in part for i in batch["document"].tolist()) for part in (train, test)]
    assert not seen[0].keys() & seen[1].keys()
    assert sorted(places(train) + places(test)) == every(store)
    assert (train.n_rows, test.n_rows) == (seen[0].total(), seen[1].total())
    for document, n in (seen[0] | seen[1]).items():
        start, length = store.documents[document].tolist()
        assert n == min(length, store.plan.n_sequences * N_POS - start)


def test_chosen_sequences_and_full_batches_alone(store: Store) -> None:
    chosen = [4, 9, 2]
    assert sorted(places(store.batches(KEY, 5, sequences=chosen))) == [(i, j) for i in (2, 4, 9) for j in range(N_POS)]
    sizes = [len(batch["token"]) for batch in store.batches(KEY, 5, sequences=slice(0, 3), drop_last=True)]
    assert sizes == [5] * 9


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_narrow_dtypes_come_as_stored_or_as_asked(tmp_path: Path, dtype: str) -> None:
    run = collect(t2lens.load("attnres-full"), sample_texts(2), tmp_path, "hook_embed", n_pos=N_POS, dtype=dtype)
    narrow = Store(run)
    documents = [0]
    for asked in (None, torch.float32):
        for batch in narrow.batches("hook_embed", 16, mixing=32, dtype=asked, documents=documents):
            expected = narrow["hook_embed"][:][batch["sequence"], batch["pos"]] if dtype == "bfloat16" else None
            assert batch["hook_embed"].dtype == (asked or getattr(torch, dtype))
            if expected is not None:
                assert torch.equal(batch["hook_embed"].float(), expected.float())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "must be at least 1"),
        ({"mixing": 0}, "must be at least 1"),
        ({"keys": "hook_embed|pos:2:5"}, r"has no axis of all positions \(pos, d_model\)"),
        ({"rows": "words"}, "rows must be tokens or sequences"),
        ({"documents": [0], "rows": "sequences"}, "rows must be tokens"),
        ({"documents": []}, "No row is left"),
        ({"sequences": [1, 1]}, "names one twice"),
        ({"rank": 2, "world": 2}, r"rank must lie in 0\.\.1"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(store: Store, options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"keys": KEY, "batch_size": 4} | options
    with pytest.raises(ValueError, match=words):
        list(store.batches(given.pop("keys"), given.pop("batch_size"), **given))


def test_a_run_that_goes_on_gives_what_was_there(store: Store, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(store._files.root, tmp_path / "run"))
    (copy / "shards/000001.json").unlink()
    part = Store(copy)
    assert sorted({i for i, _ in places(part.batches(KEY, 8))}) == part.sequences.tolist()
    with pytest.raises(ValueError, match="lies in shard 1"):
        part.batches(KEY, 8, sequences=[7])
    assert isinstance(part.batches(KEY, 8), Batches)
