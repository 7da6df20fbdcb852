"""Exactness of the tokenizer: every text comes back, nothing a user types becomes a special token."""

import random

import pytest

from t2lens.zoo.tokenizer import Tokenizer, chunks

TEXT = "In the beginning God created the heaven and the earth.\nAnd the earth was without form, and void;\n" * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], n_vocab=300)


def random_text(rng: random.Random) -> str:
    """Letters, white space of every kind, control characters, and any code point that UTF-8 can hold."""
    pieces = (
        "the",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\x00",
        "\x1c",
        "'s",
        "<|bos|>",
        "<|pad|>",
        "12",
        ",",
        "!?",
        ".'s",
    )
    out = []
    for _ in range(rng.randrange(60)):
        code = rng.choice((rng.randrange(0x110000), rng.randrange(0x300), rng.randrange(0x1F600, 0x1F650)))
        out.append(rng.choice(pieces) if rng.random() < 0.6 or 0xD800 <= code < 0xE000 else chr(code))
    return "".join(out)


def test_any_text_comes_back_exactly(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode("utf-8")
        assert not {tokenizer.bos_id, tokenizer.pad_id} & set(ids)


def test_a_long_text_is_encoded_in_parts_to_the_same_ids(tokenizer: Tokenizer) -> None:
    rng = random.Random()
    for text in (TEXT * 100, "".join(random_text(rng) for _ in range(5000)), "ab,cd;" * 30_000, "a" * 100_000):
        assert len(text) > 70_000
        assert tokenizer.encode(text) == tokenizer._core.encode(text, add_special_tokens=False).ids


def test_every_byte_comes_back(tokenizer: Tokenizer) -> None:
    text = bytes(range(256)).decode("latin-1")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    singles = {tokenizer.decode_bytes([token]) for token in range(2, tokenizer.n_vocab)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def test_special_strings_in_a_text_are_plain_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|bos|>b<|pad|>")
    assert 0 not in ids and 1 not in ids
    assert tokenizer.decode([0, *ids, 1]) == "a<|bos|>b<|pad|>"
    assert tokenizer.str_tokens([0, 1]) == ["<|bos|>", "<|pad|>"]
    assert tokenizer.encode_pieces(["<|bos|>"]) == [tokenizer.encode("<|bos|>")]


def test_pieces_of_a_text_encode_like_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for size in (1, 2, 7, 40):
        for _ in range(100):
            text = random_text(rng) + TEXT[: rng.randrange(200)]
            pieces = list(chunks(text, size))
            assert "".join(pieces) == text
            assert [token for ids in tokenizer.encode_pieces(pieces) for token in ids] == tokenizer.encode(text)
    assert len(list(chunks(TEXT, 40))) > 20
    assert len(list(chunks(TEXT.replace("\n", "\r\n"), 40))) > 20


def test_bytes_that_are_no_character_are_spelled(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600 \n")
    assert "".join(tokenizer.str_tokens(ids)) == "<0xF0><0x9F><0x98><0x80> \n"
    assert tokenizer.str_token(0) == "<|bos|>"
    assert "".join(tokenizer.str_tokens(tokenizer.encode("the earth"))) == "the earth"


def test_training_is_deterministic_and_the_file_round_trips(tokenizer: Tokenizer, tmp_path) -> None:
    assert Tokenizer.train([TEXT], n_vocab=300).to_json() == tokenizer.to_json()
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(TEXT + "<|pad|>") == tokenizer.encode(TEXT + "<|pad|>")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_bad_ids_and_bad_text_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.n_vocab):
        with pytest.raises(ValueError, match=f"Token id {token} is out of range: the tokenizer has ids 0 to 299"):
            tokenizer.decode([5, token])
    with pytest.raises(ValueError, match="out of range"):
        tokenizer.str_token(-1)
    assert tokenizer.str_token(tokenizer.n_vocab) == "<300>"  # a model may have more ids than its tokenizer
    with pytest.raises(ValueError, match=r"lone surrogate .* at character 1"):
        tokenizer.encode("a\ud800b")


def test_files_that_are_no_tokenizer_of_ours_are_refused(tokenizer: Tokenizer, tmp_path) -> None:
    good = tokenizer.to_json()
    bad = {
        "empty": "",
        "text": "hello",
        "other json": '{"a": 1}',
        "truncated": good[: len(good) // 2],
        "renamed special": good.replace("<|bos|>", "<s>"),
        "not byte-level": '{"model": {"type": "BPE", "vocab": {"<|bos|>": 0, "<|pad|>": 1, "a": 2}, "merges": []}}',
    }
    for name, text in bad.items():
        path = tmp_path / "tokenizer.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer file .*tokenizer\.json") as caught:
            Tokenizer.load(path)
        assert "\n" not in str(caught.value), name
    with pytest.raises(ValueError, match="cannot be used"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="at least 258"):
        Tokenizer.train([TEXT], n_vocab=257)
