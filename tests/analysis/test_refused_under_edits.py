"""What is refused inside `t2lens.edited`, in a sentence, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import t2lens
from t2lens.analysis.catalog import analysis
from t2lens.analysis.under_edits import check_under_edits
from t2lens.edits import edited, read_edits
from tests.analysis.test_under_edits import IDS, passed
from tests.systems import tiny

REFUSED = {
    "stream": {"target": "stream", "operation": "scale", "site": "1.attn", "value": 0.5},
    "read": {"target": "read", "operation": "zero", "site": "out"},
    "norm": {"target": "hook", "operation": "scale", "name": "ln_final.hook_normalized", "value": 2},
    "mean": {"target": "atom", "operation": "freeze_mean", "site": "1.mlp"},
    "plain": {"target": "read", "operation": "plain_sum", "site": "1.mlp"},
    "head": {"target": "head", "operation": "scale", "site": "1.attn", "heads": [0], "value": 0.5},
}


@pytest.mark.parametrize(
    ("edit", "key", "options", "words"),
    [
        ("stream", "logits", {}, "no sum of writes gives what is read from 1.attn on"),
        ("read", "loss", {}, "replaces what is read at out"),
        ("norm", "lens", {}, "between the last read and the logits"),
        ("norm", "logits", {}, "between the last read and the logits"),
        ("mean", "rollout", {}, "give it a prompt"),
        ("mean", "effects", {}, "give it a prompt"),
        ("plain", "patch", {}, "taken up in the middle"),
        ("plain", "paths", {}, "replaces what is read at 1.mlp"),
        ("head", "advantage", {}, "no mixture of values"),
        ("stream", "an analysis of tomorrow", {}, "no sum of writes"),
    ],
)
def test_what_is_not_right_is_refused_in_a_sentence(edit: str, key: str, options: dict[str, Any], words: str) -> None:
    edits = read_edits(REFUSED[edit])
    with pytest.raises(ValueError, match="This analysis is not right under the edit") as caught:
        check_under_edits(tiny("standard"), edits, key, options)
    assert words in str(caught.value) and edits[0].describe() in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "key", "options"),
    [
        ("stream", "lens", {}),
        ("mean", "logits", {}),
        ("head", "advantage", {"axis": "depth"}),
        ("plain", "lens", {}),
        ("plain", "attribution-patch", {}),
        ("norm", "rollout", {}),
    ],
)
def test_what_is_right_is_not_refused(edit: str, key: str, options: dict[str, Any]) -> None:
    check_under_edits(tiny("standard"), read_edits(REFUSED[edit]), key, options)


def test_texts_share_passes_so_that_a_mean_over_a_pass_is_no_number_of_theirs() -> None:
    edits = read_edits(REFUSED["mean"])
    check_under_edits(tiny("standard"), edits, "loss")
    with pytest.raises(ValueError, match="give it a prompt"):
        check_under_edits(tiny("standard"), edits, "loss", texts=True)


def test_shown_without_the_rule_the_numbers_would_be_wrong() -> None:
    """Why there is a rule: each of these has an answer that the pass itself contradicts."""
    model, edits = tiny("standard", 3), read_edits(REFUSED["stream"])
    with edited(model, edits), torch.no_grad():
        with pytest.raises(ValueError, match="contributions miss the read"):
            analysis("logits").run(model, IDS)
        record = model.record([IDS])
        assert not torch.allclose(model.resume(record, 2), model([IDS]), atol=1e-3)
    edits = read_edits(REFUSED["mean"])
    with edited(model, edits):
        rollout = analysis("rollout").run(model, IDS, pos=0)
    assert float(rollout["absorbed"][1:].sum()) == 0.0  # a mean over later positions reads them, and this says not
    assert float((passed(model, edits, [*IDS[:-1], 20])[0][0] - passed(model, edits)[0][0]).abs().max()) > 1e-3
    t2lens.verify(model)
