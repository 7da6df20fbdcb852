"""Traces of edited passes: checks that stay honest, what the reader is told, files, and the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis.export import to_csv, to_json
from t2lens.cli import app
from t2lens.edits import edits_to_json
from t2lens.viz.page import page
from tests.edits.make import edits_of
from tests.systems import SYSTEMS, random_tokens, tiny


@pytest.mark.parametrize("system", SYSTEMS)
def test_traces_of_edited_passes_pass_their_checks(system: str) -> None:
    seed = random.randrange(1000)
    dice, model = random.Random(seed), tiny(system, seed)
    ids = random_tokens(seed)[0]
    edits = list(edits_of(model, dice, positions=dice.sample(range(len(ids)), 2)).values())
    apart = [e for e in edits if e.target != "stream"]
    for wanted in (apart, edits, [dice.choice(edits)]):
        trace = t2lens.trace(model, ids, edits=wanted)
        assert trace.verify(), (seed, wanted, str(trace.verify()))
        assert trace.edits == tuple(wanted)
        assert trace.notices[: len(wanted)] == [f"Edited: {edit.describe()}" for edit in wanted]
        with torch.no_grad(), t2lens.edited(model, wanted):
            logits = model(ids)
        assert np.allclose(trace.dataset["next_logprob"][:, 0], logits[0].log_softmax(-1).max(-1).values, atol=1e-10)


def test_no_edits_are_the_plain_trace() -> None:
    model, ids = tiny("attnres-full", 1), random_tokens(1)[0]
    plain, none = t2lens.trace(model, ids), t2lens.trace(model, ids, edits=[])
    assert none.dataset.identical(plain.dataset) and none.edits == () and none.notices == plain.notices


def test_weights_and_gates_of_the_trace_are_the_edited_ones(tmp_path: Path) -> None:
    model = tiny("attnres-full", 2)
    one = {"target": "depth_weight", "operation": "one", "site": "1.mlp", "sources": ["0.attn"], "positions": [1]}
    trace = t2lens.trace(model, [0, 7, 3], edits=one)
    row = trace.dataset["depth_weight"].sel(read="1.mlp", pos=1).dropna("source")
    assert dict(zip(row["source"].values, row.values, strict=True)) == {
        "embed": 0,
        "0.attn": 1,
        "0.mlp": 0,
        "1.attn": 0,
    }
    assert trace.dataset["mixing"].sel(read="1.mlp", pos=1, atom="0.attn") == 1
    half = [{"target": "depth_weight", "operation": "scale", "site": "1.mlp", "value": 0.5}]
    checks = t2lens.trace(model, [0, 7, 3], edits=half).verify()
    assert checks and "that was not edited" in str(checks["depth weights sum to 1"])
    off = {"target": "gate", "operation": "set", "site": "*", "name": "beta", "value": 0}
    trace = t2lens.trace(tiny("ddl", 2), [0, 7, 3], edits=off)
    assert trace.dataset["gate"].values.max() == 0 and trace.dataset["mixing"].sel(read="out", atom="embed").min() == 1
    again = t2lens.load_trace(trace.save(tmp_path / "t.safetensors"))
    assert (
        again.edits == trace.edits
        and again.notices == trace.notices
        and "Sets the gate beta at every site" in repr(again)
    )


def test_an_edited_read_is_told_apart_from_what_was_there() -> None:
    model, ids = tiny("attnres-full", 3), [0, 7, 3]
    edit = {"target": "read", "operation": "plain_sum", "site": "out"}
    trace, plain = t2lens.trace(model, ids, edits=edit), t2lens.trace(model, ids)
    checks = trace.verify()
    assert checks and "the edit's share" in str(checks["logit shares"])
    assert "Mixing and contributions at out are of the read before it was edited." in trace.notices
    assert np.array_equal(trace.dataset["mixing"], plain.dataset["mixing"], equal_nan=True)
    assert not np.allclose(
        trace.dataset["residual_norm"].sel(read="out"), plain.dataset["residual_norm"].sel(read="out")
    )


@pytest.mark.parametrize("system", ["standard", "hyper-connections", "denseformer", "muddformer"])
def test_behind_an_edited_stream_no_contribution_is_claimed(system: str) -> None:
    model, ids = tiny(system, 4, local=True), [0, 7, 3]
    trace = t2lens.trace(model, ids, edits={"target": "stream", "operation": "scale", "site": "1.mlp", "value": 0.5})
    assert trace.verify() and "logit shares" not in [check.name for check in trace.verify()]
    assert "The stream was edited, so from 1.mlp on no sum of writes gives what is read." in trace.notices
    reads = [str(read) for read in trace.dataset["read"].values]
    for name in ("mixing", "contribution_norm"):
        gone = [bool(np.isnan(trace.dataset[name].sel(read=read)).all()) for read in reads]
        assert gone == [read == "out" or read.startswith(("1.mlp", "2.")) for read in reads]
    # everything that shows a trace still does
    assert "1.mlp" in repr(trace) and len(to_csv([trace])) and json.loads(to_json([trace]))
    for quantity in ("residual_norm", "depth_entropy"):
        assert "The stream was edited" in page(trace, quantity=quantity)
    trace.plot("residual_norm")


def test_the_carried_read_of_several_is_the_stream() -> None:
    model = tiny("muddformer", 5)
    trace = t2lens.trace(
        model, [0, 7, 3], edits={"target": "read", "operation": "plain_sum", "site": "1.attn", "way": "r"}
    )
    assert trace.verify()
    mixing = trace.dataset["mixing"]
    assert not np.isnan(mixing.sel(read="1.attn.q")).all() and np.isnan(mixing.sel(read="1.attn.r")).all()


def test_an_edit_of_the_final_norm_leaves_the_shares_of_logits_out() -> None:
    edit = {"target": "hook", "operation": "scale", "name": "ln_final.hook_normalized", "value": 2}
    names = [check.name for check in t2lens.trace(tiny("standard"), [0, 7, 3], edits=edit).verify()]
    assert "recombination" in names and "logit shares" not in names


def test_an_edit_that_the_trace_cannot_have_is_refused() -> None:
    model = tiny("standard")
    with pytest.raises(ValueError, match="no position 3: the longest sequence has 3 tokens"):
        t2lens.trace(model, [0, 7, 3], edits={"target": "atom", "operation": "zero", "site": "0.mlp", "positions": [3]})
    with pytest.raises(KeyError, match="did you mean"):
        t2lens.trace(model, [0, 7, 3], edits={"target": "atom", "operation": "zero", "site": "0.mpl"})


EDIT = '{"target": "atom", "operation": "zero", "site": "1.mlp"}'


def test_the_command_line_takes_edits_as_json_and_as_files(tmp_path: Path) -> None:
    file, saved = tmp_path / "edits.json", tmp_path / "t.safetensors"
    file.write_text(edits_to_json([json.loads(EDIT)]))
    two = '[{"target": "depth_weight", "operation": "one", "site": "2.mlp", "sources": ["embed"], "positions": [-1]}]'
    arguments = ["trace", "the king", "--edit", str(file), "--edit", two, "--save", str(saved)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "note: Edited: Sets what 1.mlp writes to zero." in result.output
    trace = t2lens.load_trace(saved)
    assert [edit.site for edit in trace.edits] == ["1.mlp", "2.mlp"]
    assert trace.dataset["depth_weight"].sel(read="2.mlp", pos=len(trace.tokens) - 1, source="embed") == 1
    assert not trace.dataset["atom_norm"].sel(atom="1.mlp").any()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("nothing.json", "takes JSON or the path of a file, and there is no file 'nothing.json'"),
        ("{", "The edits are not JSON"),
        ('{"target": "atom", "operation": "zero", "sit": "1.mlp"}', "An edit has no 'sit'; did you mean 'site'"),
        (EDIT.replace("1.mlp", "11.mlp"), "no atom '11.mlp'; did you mean '1.mlp'"),
        (EDIT.replace("}", ', "positions": [99]}'), "no position 99: the longest sequence has 3 tokens"),
    ],
)
def test_the_command_line_refuses_edits_in_one_sentence(edit: str, words: str) -> None:
    result = CliRunner().invoke(app, ["trace", "the king", "--edit", edit])
    assert result.exit_code == 2 and result.stdout == ""
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_a_saved_trace_cannot_be_edited() -> None:
    result = CliRunner().invoke(app, ["trace", "--load", "t.safetensors", "--edit", EDIT])
    assert result.exit_code == 2 and "nothing can be edited" in result.stderr
