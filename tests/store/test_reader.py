"""The reader: exactly the bytes asked for, from a folder or a server, from any thread or process; damage is named."""

import gc
import json
import multiprocessing
import pickle
import random
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.store import Store, collect
from t2lens.store.wants import read_wants
from t2lens.zoo.text import sample_texts
from tests.store.servers import served

KEY = "blocks.3.hook_mlp_out"
WHAT = ["depth weights", "reads|norm", KEY, "*hook_pattern|mean:head|top:3", "hook_embed|norm|mean:pos"]


@pytest.fixture(scope="module")
def model() -> Any:
    return t2lens.load("attnres-block")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collect(model, sample_texts(8), tmp_path_factory.mktemp("runs"), WHAT, n_pos=16, sequences_per_shard=7)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def header_bytes(run: Path, shard: int) -> int:
    return 8 + int.from_bytes((run / f"shards/{shard:06d}.safetensors").read_bytes()[:8], "little")


def test_a_slice_over_http_fetches_its_bytes_and_each_header_once(run: Path) -> None:
    local = Store(run)
    with served(run) as (url, traffic):
        store = Store(url)
        assert dict(store.plan.tensors) == dict(local.plan.tensors)
        before = traffic.n_bytes
        got = store[KEY][9, 3:7]
        assert torch.equal(got, local[KEY][9, 3:7])
        header = header_bytes(run, 1)
        assert traffic.n_bytes - before == header + 4 * 128 * 4
        before = traffic.n_bytes
        assert torch.equal(store[KEY][8, 5], local[KEY][8, 5])
        assert traffic.n_bytes - before == 128 * 4
        # many sequences, over two shards: every range once, several at a time
        before = traffic.n_bytes
        assert torch.equal(store[KEY][2:12, :5], local[KEY][2:12, :5])
        assert traffic.n_bytes - before == header_bytes(run, 0) + 10 * 5 * 128 * 4
        before, requests = traffic.n_bytes, len(traffic.sent)
        assert torch.equal(store[KEY][0:14], local[KEY][0:14])
        assert (traffic.n_bytes - before, len(traffic.sent) - requests) == (14 * 16 * 128 * 4, 2)
        assert store.check() == []
        assert store.token_strings(store["tokens"][0]).tolist() == local.token_strings(local["tokens"][0]).tolist()
        np.testing.assert_array_equal(store.documents, local.documents)
        store.close()


def test_what_a_server_lacks_or_cannot_do_is_a_sentence(copy: Path) -> None:
    (copy / "shards/000000.json").unlink()
    with served(copy) as (url, traffic):
        store = Store(url)
        assert store.missing == (0,)
        with pytest.raises(ValueError, match="lies in shard 0, which is not finished"):
            store[KEY][3]
        traffic.ranges = False
        with pytest.raises(OSError, match="must know ranges"):
            store[KEY][8]
        traffic.ranges = True
        (copy / "shards/000001.safetensors").unlink()
        with pytest.raises(ValueError, match=r"shards/000001\.safetensors is gone"):
            store[KEY][8]
        traffic.failing = "json"
        with pytest.raises(Exception, match="500"):  # a server in trouble is not a run with shards missing
            Store(url)
        traffic.failing = ""
        with pytest.raises(ValueError, match="is no run of t2lens capture"):
            Store(f"{url}/shards")
        store.close()


def test_a_shard_of_a_server_that_is_longer_or_shorter_than_its_record_is_damaged(copy: Path) -> None:
    file = copy / "shards/000001.safetensors"
    data, damaged = file.read_bytes(), ["shard 1 is damaged: its SHA-256 is not that of its record"]
    with served(copy) as (url, _), Store(url) as store:
        for changed, faults in ((data, []), (data + b"x", damaged), (data[:-1], damaged), (data[:100], damaged)):
            file.write_bytes(changed)
            assert store.check() == faults
            assert Store(copy).check() == faults
        for rows in (13, slice(8, 14)):  # behind the end of a file that is cut off, alone and with others
            with pytest.raises(ValueError, match=r"shards/000001\.safetensors is cut off"):
                store[KEY][rows, 3]


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_any_file_system_of_fsspec_is_read(run: Path, protocol: str) -> None:
    import fsspec

    url = f"file://{run}"
    if protocol == "memory":
        url = "memory://runs/one"
        fsspec.filesystem("memory").put(str(run), "/runs/one", recursive=True)
    assert torch.equal(Store(url)[KEY][3:9, 2:4], Store(run)[KEY][3:9, 2:4])


def test_every_kind_of_index_gives_what_torch_gives(run: Path) -> None:
    store, dice = Store(run), random.Random(0)
    for key in (*store, "tokens"):
        stored, whole = store[key], store[key][:]
        assert whole.shape == stored.shape
        assert whole.dtype == stored.dtype
        n = len(whole)
        mask = torch.arange(n) % 3 == 0
        for rows in (0, -1, slice(2, 9), slice(None, None, 4), slice(9, 2, -3), [4, 1, 1, n - 1], mask, slice(5, 5)):
            # torch does not index backwards
            expected = whole[list(range(n))[rows]] if isinstance(rows, slice) else whole[rows]
            assert torch.equal(stored[rows], expected), (key, rows)
            if whole.ndim > 1:
                a = dice.randrange(-16, 16)
                for along in (a, slice(a, None), slice(3, 9), slice(9, 3)):
                    kept = (along,) if isinstance(rows, int) else (slice(None), along)
                    assert torch.equal(stored[rows, along], expected[kept]), (key, rows, along)
        assert torch.equal(torch.stack(list(stored)), whole)
    assert torch.equal(store[KEY][2:9, 3:5, [0, 7]], store[KEY][:][2:9, 3:5, [0, 7]])
    assert torch.equal(store[KEY][2:9, 3, ::2], store[KEY][:][2:9, 3, ::2])


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ((10**6,), "There is no sequence 1000000; there are"),
        ((0, 16), "There is no pos 16; there are 16"),
        ((0, slice(0, 9, 2)), "one piece is read"),
        ((0, [1, 2]), "one piece is read"),
        (([0.5],), "a number, a slice, a list of numbers or a mask"),
        (([True, False],), "a number, a slice, a list of numbers or a mask"),
        ((0, 0, 0, 0), "has 3 axes; 4 were indexed"),
    ],
)
def test_a_bad_index_is_a_sentence(run: Path, index: Any, words: str) -> None:
    with pytest.raises(IndexError, match=words):
        Store(run)[KEY][index]


def test_an_unknown_key_names_the_nearest(run: Path) -> None:
    with pytest.raises(KeyError, match=r"did you mean 'blocks\.3\.hook_mlp_out'"):
        Store(run)["blocks.3.hook_mlp_uot"]


def test_a_damaged_shard_is_refused_by_name(copy: Path) -> None:
    file = copy / "shards/000001.safetensors"
    data = file.read_bytes()

    def stored(changed: bytes, verify: bool = False) -> Store:
        file.write_bytes(changed)
        return Store(copy, verify=verify)

    assert stored(data[:-1]).missing == (1,)  # of another size than its record says: not there
    garbage = data[:40] + b"\0" * 20 + data[60:]
    long = (2**40).to_bytes(8, "little") + data[8:]
    swapped = data.replace(b'"shape":[7,16,128]', b'"shape":[7,128,16]', 1)
    renamed = data.replace(KEY.encode(), KEY.replace("3", "4").encode(), 1)
    for changed in (garbage, long, swapped, renamed):
        assert changed != data
        with pytest.raises(ValueError, match=r"shards/000001\.safetensors is damaged: its header"):
            stored(changed)[KEY][8]
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    assert stored(flipped)[KEY][8].shape == (16, 128)
    with pytest.raises(ValueError, match=r"shards/000001\.safetensors is damaged: its SHA-256"):
        stored(flipped, verify=True)[KEY][8]
    assert Store(copy).check() == ["shard 1 is damaged: its SHA-256 is not that of its record"]
    store = stored(data, verify=True)
    assert torch.equal(store[KEY][3], store[KEY][:][3])
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"shards/000001\.safetensors is cut off"):
        store[KEY][13]
    assert store.check() == ["shard 1 is damaged: its SHA-256 is not that of its record"]
    file.unlink()
    assert store.check() == ["shard 1 has a record and no file"]
    store.close()
    assert store.check() == ["shard 1 has a record and no file"]
    with pytest.raises(ValueError, match=r"shards/000001\.safetensors is gone"):
        store[KEY][8]


def test_an_unfinished_run_is_never_taken_for_a_whole_one(copy: Path) -> None:
    (copy / "shards/000001.json").unlink()
    store = Store(copy)
    assert store.n_sequences == len(store.sequences) == store.plan.n_sequences - 7
    with pytest.raises(ValueError, match="lies in shard 1"):
        list(store[KEY])
    for file in (copy / "shards").glob("*.json"):
        file.unlink()
    with pytest.raises(ValueError, match="no finished shard yet"):
        Store(copy)


def test_a_shard_of_another_run_is_refused(copy: Path) -> None:
    record = copy / "shards/000001.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"plan": "0123456789abcdef"}))
    with pytest.raises(ValueError, match=r"shards/000001\.json of .* belongs to another run \(0123456789abcdef\)"):
        Store(copy)


def open_files() -> set[str]:
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_files_close_with_the_store(copy: Path) -> None:
    def held() -> int:
        return sum(name.startswith(str(copy)) for name in open_files())

    with Store(copy) as store:
        store[KEY][:]
        assert held() == store.plan.n_shards
    assert held() == 0
    assert store[KEY][3].shape == (16, 128)  # opens again
    del store
    gc.collect()
    assert held() == 0


def test_few_files_are_open_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from t2lens.store import ranges

    monkeypatch.setattr(ranges, "_MOST_OPEN", 2)
    store = Store(copy)
    whole = store[KEY][:]
    assert len(store._files._open) == 2
    with ThreadPoolExecutor(8) as pool:
        places = [random.Random(i).randrange(len(whole)) for i in range(200)]
        for place, got in zip(places, pool.map(lambda i: store[KEY][i, 2:5], places), strict=True):
            assert torch.equal(got, whole[place, 2:5])


def read_here(store: Store, row: int) -> list[float]:
    return store[KEY][row, 3].tolist()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_other_processes_read_the_same(run: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    # an executor, because a worker that cannot start raises there, and a Pool waits for it for ever
    with served(run) as (url, _), ProcessPoolExecutor(1, mp_context=context) as pool:
        for place in (str(run), url):
            store = Store(place)
            store[KEY][0]  # open before the copy is made
            assert pool.submit(read_here, store, 9).result() == store[KEY][9, 3].tolist()
            store.close()


def test_a_pickled_store_keeps_what_was_finished_when_it_was_opened(copy: Path) -> None:
    record = copy / "shards/000001.json"
    kept = record.read_bytes()
    record.unlink()
    store = Store(copy)
    record.write_bytes(kept)
    assert pickle.loads(pickle.dumps(store)).missing == (1,)
    assert Store(copy).missing == ()


def test_tokens_have_strings_and_documents(run: Path, model) -> None:
    store = Store(run)
    tokens = store["tokens"][:]
    assert store.token_strings(tokens[2]).tolist() == model.to_str_tokens(tokens[2].long())
    n, n_pos = tokens.shape
    found = store.document_of(np.arange(n)[:, None], np.arange(n_pos))
    bos = (tokens == model.tokenizer.bos_id).numpy()
    np.testing.assert_array_equal(found.ravel(), bos.ravel().cumsum() - 1)  # a BOS begins every document
    (run / "vocabulary.json").rename(run / "away.json")
    try:
        with pytest.raises(ValueError, match=r"vocabulary\.json is not there or damaged"):
            Store(run).token_strings([1])
    finally:
        (run / "away.json").rename(run / "vocabulary.json")


def test_a_run_of_bare_ids_has_ids_for_strings(tmp_path: Path) -> None:
    from tests.systems import tiny

    np.save(tmp_path / "ids.npy", np.arange(40).reshape(4, 10))
    store = Store(collect(tiny("attnres-full"), tmp_path / "ids.npy", tmp_path / "runs", "depth weights", n_pos=8))
    assert store.vocabulary is None
    assert store.token_strings([[3, 4]]).tolist() == [["3", "4"]]
    assert store.document_of(1, [1, 2]).tolist() == [0, 1]
    assert not (store._files.root and (Path(store._files.root) / "vocabulary.json").exists())


def test_keys_come_in_the_order_of_the_model(run: Path, model) -> None:
    keys = [key for key in Store(run) if not key.endswith("|index")]
    assert keys == [want.key for want in read_wants(model, WHAT)]
    assert keys != sorted(keys)


def test_the_plan_says_what_axes_are(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    about = plan["tensors"]["blocks.1.hook_depth_attn_mlp"]
    assert about["axes"] == ["pos", "source"]
    assert about["read"] == "1.mlp"
    assert about["labels"]["source"] == ["embed", "partial"]
    top = plan["tensors"]["blocks.1.attn.hook_pattern|mean:head|top:3"]
    assert top["axes"] == ["query_pos", "top"]
    assert plan["tensors"]["hook_embed|norm|mean:pos"]["axes"] == []
    assert all(len(entry["axes"]) == len(entry["shape"]) for entry in plan["tensors"].values())
