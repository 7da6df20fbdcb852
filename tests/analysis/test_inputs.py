"""What analyses are given."""

import pytest
import torch

import t2lens
from t2lens.analysis.inputs import read_batch
from tests.systems import tiny


def test_texts_of_different_lengths_are_padded_on_the_right_with_a_mask() -> None:
    model = t2lens.load("standard")
    batch = read_batch(model, ["In the beginning", "And God said, Let there be light"], losses=True)
    assert batch.mask is not None
    for row, text in enumerate(["In the beginning", "And God said, Let there be light"]):
        alone = model.to_tokens(text)[0]
        n = len(alone)
        assert batch.tokens[row, :n].tolist() == alone.tolist()
        assert batch.valid[row].tolist() == [True] * n + [False] * (batch.tokens.shape[1] - n)
        assert batch.predicts[row].sum() == n - 1
        logits = model(batch.tokens, batch.mask).detach()
        expected = model(alone[None], return_type="loss").detach()
        got = batch.losses(logits)[row].sum() / (n - 1)
        assert abs(float(got - expected)) < 1e-5


def test_what_is_beyond_the_context_is_cut_off_with_a_notice() -> None:
    batch = read_batch(tiny("standard"), torch.randint(50, (2, 40)))
    assert batch.tokens.shape == (2, 32)
    assert batch.notices == ("The longest prompt has 40 tokens; what is beyond the context of 32 is cut off.",)


@pytest.mark.parametrize(
    ("given", "words"),
    [("", "prompt is empty"), ("  ", "prompt is empty"), ([], "prompt is empty"), ([99], "outside the vocabulary")],
)
def test_bad_input_is_one_sentence(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_batch(tiny("standard"), given)


def test_losses_need_a_next_token_and_a_causal_model() -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        read_batch(tiny("standard"), [3], losses=True)
