"""Runs `compiled.py` in a process of its own: what torch.compile does depends on what the process compiled before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_hooks_on_compiled_models():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hooks/compiled.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
