"""A folder of text: what is read, how it is split, and what is said when it cannot be used."""

import numpy as np
import pytest

from t2lens.zoo.text import encode_split, read_corpus, split_text
from t2lens.zoo.tokenizer import Tokenizer


def lines(n: int) -> str:
    return "".join(f"line {i} of the text\n" for i in range(n))


def test_the_split_is_at_a_line_boundary_and_loses_nothing() -> None:
    for n in (2, 3, 20, 333):
        train, validation = split_text(lines(n))
        assert train + validation == lines(n)
        assert train.endswith("\n") and len(validation) >= 0.05 * len(lines(n)) - 1
        assert len(validation) < 0.05 * len(lines(n)) + 30
    one_line = "x" * 1000
    assert split_text(one_line) == ("x" * 950, "x" * 50)
    early = "a\n" + "x" * 1000  # the only newline lies far in front of the last 5%
    assert "".join(split_text(early)) == early


def test_hash_depends_on_contents_alone(tmp_path) -> None:
    for folder, names in (("a", ("1.txt", "2.txt")), ("b", ("x.txt", "y/z.txt"))):
        for name, text in zip(names, ("first\n", "second\n"), strict=True):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (tmp_path / "b" / "empty.txt").touch()
    (tmp_path / "b" / "image.png").write_bytes(b"\xff\xfe")
    a, b = read_corpus(tmp_path / "a"), read_corpus(tmp_path / "b")
    assert a.sha256 == b.sha256 and a.n_bytes == b.n_bytes == 13
    assert b.names == ("x.txt", "y/z.txt")
    (tmp_path / "a" / "1.txt").write_text("First\n")
    assert read_corpus(tmp_path / "a").sha256 != b.sha256


def test_every_bad_file_is_named(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("good\n")
    (tmp_path / "in" / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(ValueError, match=r"2 text file.*latin\.txt: not UTF-8 \(byte 0xE9 at offset 3\)") as caught:
        read_corpus(tmp_path / "in")
    assert "link.txt: it is a link to a file outside" in str(caught.value)


def test_no_folder_and_no_text_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        read_corpus(tmp_path / "none")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"holds no \.txt file with text"):
        read_corpus(tmp_path)


def test_tokens_are_those_of_the_split_texts(tmp_path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + lines(300).encode())  # with a byte order mark
    (tmp_path / "a.txt").write_text("caf\u00e9 \U0001f600\n" * 50, encoding="utf-8")
    corpus = read_corpus(tmp_path)
    tokenizer = Tokenizer.train(corpus.texts("train"), n_vocab=280)
    train, validation = encode_split(corpus, tokenizer, "train"), encode_split(corpus, tokenizer, "validation")
    assert train.dtype == validation.dtype == np.uint16
    assert tokenizer.decode(train) == "".join(corpus.texts("train"))
    assert tokenizer.decode(np.concatenate([validation])) == "".join(corpus.texts("validation"))
    whole = ("caf\u00e9 \U0001f600\n" * 50) + lines(300)
    assert len("".join(corpus.texts("train"))) + len("".join(corpus.texts("validation"))) == len(whole)
    tokenizer.n_vocab = 1 << 17
    assert encode_split(corpus, tokenizer, "train").dtype == np.uint32
