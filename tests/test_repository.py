"""Rules for every file under version control."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = {".py", ".js", ".css", ".html", ".toml", ".sh", ""}  # "": Makefile, .ci/run, LICENSE, ...
TEXT = CODE | {".md", ".ipynb", ".txt", ".json", ".yml", ".yaml", ".cfg"}

# An absolute path on somebody's machine, and where that machine gets packages from: neither holds elsewhere.
MACHINE = re.compile(r"(?<![\w.:/-])/(?:home|root|Users|work|mnt|opt|srv|private)/\w|\b[A-Z]:\\\\?Users\b")
REGISTRY = re.compile(r"(?:extra-)?index[-_]url|find[-_]links|https?://\S+/simple\b", re.IGNORECASE)


def git_files(*options: str) -> list[str]:
    command = ["git", "ls-files", "-z", *options]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.split("\0")[:-1]


def tracked() -> list[Path]:
    # Neither the symlinks to folders nor files that are being deleted.
    return [path for name in git_files() if (path := ROOT / name).is_file()]


def machine_bound(text: str) -> list[str]:
    return [line for line in text.splitlines() if MACHINE.search(line) or REGISTRY.search(line)]


def test_code_files_have_at_most_500_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in tracked() if path.suffix in CODE}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 500} == {}


def test_code_is_ascii():
    code = [path for path in tracked() if path.suffix in CODE]
    assert [str(path.relative_to(ROOT)) for path in code if not path.read_bytes().isascii()] == []


def test_nothing_is_bound_to_one_machine():
    found = {}
    for path in tracked():
        if path.suffix in TEXT and (lines := machine_bound(path.read_text())):
            found[str(path.relative_to(ROOT))] = lines[:3]
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "open('" + "/home" + "/ann/model')",
        "cd " + "/work" + "/main",
        "pip install --" + "index-" + "url URL",
        "https://host.example/" + "simple",
    ],
)
def test_a_planted_path_or_index_is_caught(line: str):
    assert machine_bound(line) == [line]


def test_an_ordinary_url_or_route_passes():
    assert machine_bound("https://example.org/home/page or ../shared/work/x or /models/home/x") == []


def test_package_links_are_committed_as_links():
    links = {line.split("\t")[1] for line in git_files("--stage", "t2lens") if line.startswith("120000")}
    assert links == {"t2lens/hooks", "t2lens/apps"}
