"""Golden folders: tiny models in the format of a published implementation, and what that implementation computed.

`tests/data/golden` holds one per format, packed without loss: the four bytes of each number lie in four planes, which
xz makes smaller. `python -m tests.checkpoints.golden FOLDER...` packs. More lie where T2LENS_GOLDEN says, or in
../shared/golden beside the repository.
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
from pathlib import Path

PACKED = Path(__file__).parents[1] / "data" / "golden"
FILES = ("config.json", "golden.json", "model.safetensors", "golden.safetensors")


def more_folders() -> Path | None:
    """Where the whole collection lies, where it does."""
    named = os.environ.get("T2LENS_GOLDEN")
    beside = Path(__file__).parents[3] / "shared" / "golden"
    return Path(named) if named else beside if beside.is_dir() else None


def pack(folder: Path) -> None:
    out = PACKED / folder.name
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        data = (folder / name).read_bytes()
        if name.endswith(".json"):
            (out / name).write_bytes(data)
        else:
            planes = b"".join(data[i::4] for i in range(4))
            (out / f"{name}.xz").write_bytes(lzma.compress(planes, preset=9 | lzma.PRESET_EXTREME))


def unpack(name: str, out: Path) -> Path:
    """The folder as the implementation's files were, written to `out`."""
    out.mkdir(parents=True)
    for file in FILES:
        if file.endswith(".json"):
            shutil.copyfile(PACKED / name / file, out / file)
            continue
        planes = lzma.decompress((PACKED / name / f"{file}.xz").read_bytes())
        data, start = bytearray(len(planes)), 0
        for i in range(4):
            length = len(data[i::4])
            data[i::4] = planes[start : start + length]
            start += length
        (out / file).write_bytes(data)
    return out


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        pack(Path(argument))
