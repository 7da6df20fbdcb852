"""Where a training run keeps itself, so that it can be killed at any moment and go on to the same bits.

A run folder holds run.json (what is trained, on what: written once), tokenizer.json, and after every few steps
step-N.safetensors (weights and optimizer moments) followed by state.json, the commit record, which names it. Each is
written to a temporary file, synced and renamed, so state.json always names a complete file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from t2lens.files import write_file

STATE, RUN = "state.json", "run.json"


def open_run(folder: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Begin or continue the run in `folder`; the state of its last checkpoint, or None at the beginning.

    Errors: ValueError when the folder holds a run with other facts (config, corpus, budget, ...), naming them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RUN).is_file():
        if any(file for file in folder.iterdir() if not file.name.endswith(".tmp")):
            raise ValueError(f"The folder {str(folder)!r} is not empty and holds no training run.")
        write_file(folder / RUN, json.dumps(facts, indent=1).encode())
        return None
    try:
        begun = json.loads((folder / RUN).read_text(encoding="utf-8"))
        state = json.loads((folder / STATE).read_text(encoding="utf-8")) if (folder / STATE).is_file() else None
    except ValueError as error:
        raise ValueError(f"The training run in {str(folder)!r} has a damaged record ({error}).") from None
    facts = json.loads(json.dumps(facts))
    other = [name for name in facts if begun.get(name) != facts[name]]
    if other:
        raise ValueError(
            f"The folder {str(folder)!r} holds a training run with another {' and another '.join(other)}; "
            "finish it as it was begun, delete it, or choose another output folder."
        )
    return state


def write_checkpoint(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any]) -> None:
    """Commit the run at `state["step"]`, then drop what older steps left."""
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight/{name}"] = weight.detach()
        for key, value in _owner(optimizers, weight).state[weight].items():
            tensors[f"{key}/{name}"] = value
    file = f"step-{state['step']}.safetensors"
    write_file(folder / file, save(tensors))
    write_file(folder / STATE, json.dumps(state | {"file": file}).encode())
    for old in folder.glob("*step-*.safetensors*"):
        if old.name != file:
            old.unlink(missing_ok=True)


def read_checkpoint(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any]) -> None:
    """Put weights and moments of the committed step back. Tensors are copied, so that they lie aligned as before.

    Errors: ValueError when the file is missing or damaged.
    """
    try:
        tensors = load((folder / state["file"]).read_bytes())
        for name, weight in model.named_parameters():
            weight.data.copy_(tensors.pop(f"weight/{name}"))
            keys = [key for key in tensors if key.endswith(f"/{name}")]
            moments = {key.split("/")[0]: tensors.pop(key).clone() for key in keys}
            _owner(optimizers, weight).state[weight] = moments
    except Exception as error:  # safetensors, missing file, missing key: whatever it is, the run cannot go on
        raise ValueError(f"The checkpoint of the training run in {str(folder)!r} cannot be read ({error}).") from None


def _owner(optimizers: Sequence[Optimizer], weight: Tensor) -> Optimizer:
    return next(o for o in optimizers if any(p is weight for group in o.param_groups for p in group["params"]))
