"""What the server keeps: made once, bounded in bytes, nothing kept of what failed."""

from __future__ import annotations

import random
import threading
import time

import pytest

from t2lens.apps.memory import Memory


def test_it_never_keeps_more_than_its_limit_but_the_newest() -> None:
    rng = random.Random(time.time_ns())
    memory = Memory(limit=100, size=len)
    for _ in range(300):
        n = rng.choice([1, 5, 30, 60, 250])
        key = rng.randrange(40), n
        assert memory.get(key, lambda n=n: "x" * n) == "x" * n
        assert memory.bytes <= 100 or memory.bytes == n == 250
    memory.clear()
    assert memory.bytes == 0


def test_what_was_used_last_stays() -> None:
    memory, made = Memory(limit=3, size=lambda _: 1), []
    for key in "abcadb":  # d drops b, then b drops c
        memory.get(key, lambda key=key: made.append(key) or key)
    assert "".join(made) == "abcdb"
    assert memory.get("a", lambda: "again") == "a"
    assert memory.get("c", lambda: "again") == "again"


def test_many_who_ask_at_once_get_one_result() -> None:
    memory, made, got = Memory(limit=10, size=len), [], []

    def make() -> str:
        time.sleep(0.05)
        made.append(1)
        return "abc"

    threads = [threading.Thread(target=lambda: got.append(memory.get("key", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and got == ["abc"] * 8


def test_a_failure_is_raised_and_not_kept() -> None:
    memory = Memory(limit=10, size=len)

    def fail() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        memory.get("key", fail)
    assert memory.get("key", lambda: "yes") == "yes"
