"""A store as an xarray.Dataset that reads on demand, and as files of other programs."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import t2lens
from t2lens.store import Store, collect
from t2lens.zoo.text import sample_texts
from tests.store.servers import served

WHAT = [
    "depth weights",
    "residual norms",
    "blocks.1.hook_mlp_out",
    "*attn.hook_pattern|mean:head|top:3",
    "hook_embed|pos:2:5",
]
WHAT += ["hook_embed|norm|mean:pos"]
WEIGHTS, OUT = "blocks.3.hook_depth_attn_mlp", "blocks.1.hook_mlp_out"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("runs")
    model = t2lens.load("attnres-full")
    return Store(collect(model, sample_texts(6), folder, WHAT, n_pos=16, sequences_per_shard=7))


def test_the_view_is_labelled_and_holds_what_is_stored(store: Store) -> None:
    view = store.to_xarray()
    assert set(view.data_vars) == set(store)
    for key in store:
        values, expected = view[key].values, store[key][:].numpy()
        if "source" in view[key].dims:
            values = values[..., ~np.isnan(values[0, 0])]
            assert view[key].dropna("source", how="all").source.values.tolist() == store.about(key)["labels"]["source"]
        np.testing.assert_array_equal(values, expected)
    assert view["source"].values.tolist()[:3] == ["embed", "0.attn", "0.mlp"]
    assert view[WEIGHTS].attrs == {"meaning": "depth weights of the read at 3.mlp", "unit": "weight", "read": "3.mlp"}
    tokens = store["tokens"][:]
    np.testing.assert_array_equal(view["token_id"].values, tokens.numpy())
    np.testing.assert_array_equal(view["token"].values, store.token_strings(tokens))
    assert view["document"].values.max() == len(store.documents) - 1
    assert view["hook_embed|pos:2:5"].dims == ("sequence", "pos of hook_embed|pos:2:5", "d_model")
    assert view["pos of hook_embed|pos:2:5"].values.tolist() == [2, 3, 4]
    assert view["hook_embed|norm|mean:pos"].dims == ("sequence",)


def test_any_selection_is_that_of_the_whole(store: Store) -> None:
    view, dice = store.to_xarray([WEIGHTS, OUT]), random.Random(1)
    whole = store.to_xarray([WEIGHTS, OUT]).load()
    n = len(view.sequence)
    for _ in range(20):
        a, b, c = dice.randrange(n), dice.randrange(16), dice.randrange(128)
        for pick in (
            {"sequence": a, "pos": b},
            {"sequence": slice(a, None), "d_model": c},
            {"pos": slice(None, None, -2), "sequence": [a, 0, a]},
            {"sequence": slice(None, None, 3), "pos": [b, 1], "d_model": slice(c, c + 5)},
            {"sequence": slice(3, 3)},
        ):
            np.testing.assert_array_equal(view[OUT].isel(pick).values, whole[OUT].isel(pick).values)
    named = view[WEIGHTS].sel(source=["0.mlp", "embed"], pos=[4])
    np.testing.assert_array_equal(named.values, whole[WEIGHTS].sel(source=["0.mlp", "embed"], pos=[4]).values)
    the = view[OUT].isel(sequence=slice(2, 9))  # by the words of the tokens
    np.testing.assert_array_equal(
        the.where(the.token == " the").values, whole[OUT].isel(sequence=slice(2, 9)).where(the.token == " the").values
    )
    chosen = store.to_xarray(OUT, [3, 8])
    assert chosen.sequence.values.tolist() == [3, 8]
    np.testing.assert_array_equal(chosen[OUT].values, store[OUT][[3, 8]].numpy())


def test_only_what_is_asked_for_is_read(store: Store) -> None:
    with served(Path(store._files.root)) as (url, traffic):
        remote = Store(url)
        remote[OUT][0, 0]  # the header
        view, before = remote.to_xarray(), traffic.n_bytes
        value = view[OUT].isel(sequence=3, pos=slice(4, 6), d_model=7)
        assert traffic.n_bytes - before < 2_000  # documents
        before = traffic.n_bytes
        np.testing.assert_array_equal(value.values, store[OUT][3, 4:6, 7].numpy())
        assert traffic.n_bytes - before == 2 * 128 * 4
        remote.close()


def test_narrow_and_single_numbers(tmp_path: Path) -> None:
    model = t2lens.load("ddl")
    run = collect(model, sample_texts(2), tmp_path, ["gates"], n_pos=16, dtype="bfloat16")
    view = Store(run).to_xarray("blocks.2.ddl_mlp.hook_beta")
    beta = view["blocks.2.ddl_mlp.hook_beta"]
    assert beta.dims == ("sequence", "pos")
    assert beta.dtype == np.float32
    np.testing.assert_array_equal(beta.values, Store(run)["blocks.2.ddl_mlp.hook_beta"][:, :, 0].float().numpy())


def test_parquet_and_datasets_hold_every_token(store: Store, tmp_path: Path) -> None:
    import datasets
    import pyarrow.parquet

    file = store.export(tmp_path / "out" / "all.parquet", [WEIGHTS, OUT, "hook_read_final|norm"])
    folder = store.export(tmp_path / "data", [WEIGHTS, OUT, "hook_read_final|norm"])
    table, data = pyarrow.parquet.read_table(file), datasets.load_from_disk(str(folder))
    assert isinstance(data, datasets.Dataset)
    n = store.plan.n_sequences * 16
    assert table.num_rows == len(data) == n
    assert data.column_names == table.column_names
    tokens = store["tokens"][:].flatten()
    assert table["token_id"].to_pylist() == tokens.tolist() == data["token_id"][:]
    assert table["token"].to_pylist() == store.token_strings(tokens).tolist()
    assert table["document"].to_pylist()[-1] == len(store.documents) - 1
    for key in (WEIGHTS, OUT, "hook_read_final|norm"):
        expected = store[key][:].flatten(0, 1).numpy()
        np.testing.assert_array_equal(np.array(table[key].to_pylist(), np.float32), expected)
        np.testing.assert_array_equal(np.array(data.with_format("numpy")[key][:]), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_sequences_as_rows_in_pieces(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    from t2lens.store import views

    monkeypatch.setattr(views, "_READ", 1)  # one sequence at a time
    file = store.export(tmp_path / "all.parquet", rows="sequences")
    read = pyarrow.parquet.ParquetFile(file)
    assert read.num_row_groups == store.plan.n_sequences
    table = read.read()
    read.close()
    assert set(store) < set(table.column_names)
    np.testing.assert_array_equal(np.array(table[OUT].to_pylist(), np.float32), store[OUT][:].numpy())
    assert table["token"].to_pylist()[3] == store.token_strings(store["tokens"][3]).tolist()


def test_what_is_there_is_not_written_over_and_a_failure_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from t2lens.store import views

    file = store.export(tmp_path / "one.parquet", OUT, sequences=[0])
    with pytest.raises(ValueError, match="exists already"):
        store.export(file, OUT)
    column = views._column

    def failing(x: torch.Tensor) -> object:
        if x.ndim > 1:
            raise OSError(28, "No space left on device")
        return column(x)

    monkeypatch.setattr(views, "_column", failing)
    for name in ("two.parquet", "two"):
        with pytest.raises(OSError, match="No space left"):
            store.export(tmp_path / name, OUT)
    assert [path.name for path in tmp_path.iterdir()] == ["one.parquet"]
