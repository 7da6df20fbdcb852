"""What analyses are given."""

import pytest
import torch
import xarray as xr

import t2lens
import t2lens.analysis
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
    [
        ("", "prompt is empty"),
        ("  ", "prompt is empty"),
        ([], "prompt is empty"),
        ([99], "outside the vocabulary"),
        (None, "numbers in rows of one length"),
        ({"a": 1}, "numbers in rows of one length"),
        (b"abc", "numbers in rows of one length"),
        ([3, "a"], "numbers in rows of one length"),
        ([[1, 2], [3]], "numbers in rows of one length"),
    ],
)
def test_bad_input_is_one_sentence(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_batch(tiny("standard"), given)


def test_losses_need_a_next_token_and_a_causal_model() -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        read_batch(tiny("standard"), [3], losses=True)


@pytest.mark.parametrize(
    ("tokens", "mask", "words"),
    [
        ([[1, 2, 3]], [[0, 0, 0]], "Sequence 0 is padding throughout"),
        ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [0, 0, 0]], "Sequence 1 is padding throughout"),
        ([[1, 2, 3]], [[0.0, -1e9, -1e9]], "holds 1 at tokens and 0 at padding, nothing else; it has -1e\\+09"),
        ([[1, 2, 3]], [[1, float("nan"), 1]], "nothing else; it has nan"),
        ([[1, 2, 3]], "111", "attention_mask must be numbers"),
        ([[1] * 40], [[0] * 39 + [1]], "40 places are more than the context of 32 holds; pad on the right"),
        ("a text", [[1, 1]], "Texts bring their own mask"),
    ],
)
def test_wrong_masks_are_one_sentence(tokens: object, mask: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_batch(tiny("standard"), tokens, mask)


def test_padding_between_tokens_is_said() -> None:
    model = tiny("standard")
    assert read_batch(model, [[1, 2, 3]], [[0, 1, 1]]).notices == ()
    batch = read_batch(model, [[1, 2, 3, 4, 5]], [[0, 1, 0, 1, 1]])
    assert "padding between tokens" in batch.notices[0]
    assert batch.predicts.tolist() == [[False, False, False, True, False]]
    assert [batch.count(column) for column in range(5)] == [0, 0, 1, 1, 2]


ANALYSES = {
    "attribute_logits": {"by": "head"},
    "attribute_loss": {},
    "logit_lens": {},
    "top_paths": {"max_expansions": 5},
    "rollout": {},
    "routing_advantage": {},
    "measure_effects": {"fast": True},
    "attribution_patching": {"other": [1, 4, 3, 2]},
}


@pytest.mark.parametrize("name", ANALYSES)
def test_analyses_are_the_same_in_every_mode_of_gradients(name: str) -> None:
    model, tokens, analysis = tiny("ddl-tc-ec", 1), [1, 2, 3, 1], getattr(t2lens.analysis, name)
    expected = analysis(model, tokens, **ANALYSES[name]).dataset
    found = [analysis(tiny("ddl-tc-ec", 1).requires_grad_(False), torch.tensor(tokens), **ANALYSES[name])]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            found.append(analysis(model, torch.tensor(tokens), **ANALYSES[name]))
    for each in found:
        xr.testing.assert_allclose(each.dataset, expected, rtol=1e-9, atol=1e-12)


def test_models_made_in_inference_mode_have_weights_that_gradients_pass() -> None:
    with torch.inference_mode():
        made = [t2lens.build(tiny("standard").cfg), t2lens.load("standard")]
        converted = tiny("standard")  # moved and converted in here
    assert not any(p.is_inference() for model in made for p in model.parameters())
    for name in ("top_paths", "rollout", "routing_advantage", "measure_effects"):
        with pytest.raises(ValueError, match="so that no gradient can pass them; load"):
            getattr(t2lens.analysis, name)(converted, [1, 2, 3])


@pytest.mark.parametrize("name", ["attribute_logits", "attribute_loss", "top_paths", "rollout"])
def test_a_pass_that_is_not_finite_has_no_shares(name: str) -> None:
    model, tokens, analysis = tiny("attnres-full", 1), torch.tensor([[1, 2, 3, 4]]), getattr(t2lens.analysis, name)
    model.blocks[1].mlp.output.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="at 4 of 4 tokens are NaN or infinite, so"):
        analysis(model, tokens)
    with pytest.raises(ValueError, match="at 3 of 3 tokens"):
        analysis(model, tokens, attention_mask=[[0, 1, 1, 1]])
