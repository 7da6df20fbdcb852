"""Models on disk: a folder with config.json, model.safetensors and, where they exist, tokenizer.json and record.json.

`list_models` and `load` know the bundled models by name. Nothing here unpickles; weights carry their SHA-256, so that a
damaged file is noticed and not merely loaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t2lens.config import ModelConfig
from t2lens.files import new_folder

if TYPE_CHECKING:
    import torch

    from t2lens.model import Transformer

BUNDLED = Path(__file__).parent / "models"
FORMAT = "t2lens-1"
CONFIG, WEIGHTS, TOKENIZER, RECORD = "config.json", "model.safetensors", "tokenizer.json", "record.json"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """One bundled model. Losses in nats per token on the held-out text; `tokens` seen in training."""

    name: str
    system: str
    n_params: int
    validation_loss: float
    bigram_loss: float
    tokens: int
    seed: int


def list_models() -> list[ModelInfo]:
    """The bundled models, by name. Reads small JSON files alone.

    Example:
        >>> import t2lens
        >>> [info.name for info in t2lens.list_models()][0]
        'attnres-block'
    """
    infos = []
    for folder in sorted(BUNDLED.glob("*/")):
        if not (folder / WEIGHTS).is_file():
            continue
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        infos.append(
            ModelInfo(
                name=folder.name,
                system=record["system"],
                n_params=record["n_params"],
                validation_loss=record["validation_loss"],
                bigram_loss=record["bigram_loss"],
                tokens=record["tokens_seen"],
                seed=record["budget"]["seed"],
            )
        )
    return infos


def load(
    name_or_path: str | Path, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> Transformer:
    """A trained model in eval mode with its tokenizer.

    Args:
        name_or_path: a bundled name (`list_models`), or a folder that `save` wrote, or its model.safetensors.
        device: where to put it; the CPU by default.
        dtype: a floating torch dtype or its name; float32 by default, whatever the file holds.

    Raises:
        ValueError: unknown name (with the nearest ones), a folder that is not a model, a weight file that is not
            safetensors, is damaged, or does not fit the config; one sentence each.

    Example:
        >>> import t2lens
        >>> model = t2lens.load("attnres-full")
        >>> model("In the beginning").shape[-1]
        2048
    """
    import torch

    kind = _dtype(dtype)
    folder = _folder(name_or_path)
    cfg, sha256 = _read_config(folder)
    weights = _read_weights(folder / WEIGHTS, sha256)

    from t2lens.model import Transformer

    with torch.device("meta"):
        model = Transformer(cfg)
    _check_fit(folder / WEIGHTS, model, weights)
    model.load_state_dict({name: weight.to(kind) for name, weight in weights.items()}, assign=True)
    if (folder / TOKENIZER).is_file():
        from t2lens.zoo.tokenizer import Tokenizer

        model.tokenizer = Tokenizer.load(folder / TOKENIZER)
    model.name = folder.absolute().name  # traces and pictures show it
    return model.requires_grad_(True).to(device or "cpu").eval()


def save(
    model: Transformer,
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    record: dict[str, Any] | None = None,
) -> Path:
    """Write a model folder that `load` reads; it appears complete or not at all.

    Args:
        path: a folder that does not exist yet.
        dtype: of the weights on disk; that of the model by default.
        record: how the model was trained, kept as record.json.

    Raises: ValueError when `path` exists.
    """
    from safetensors.torch import save_file

    weights = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
    if dtype is not None:
        weights = {name: weight.to(_dtype(dtype)) for name, weight in weights.items()}
    with new_folder(path) as folder:
        save_file(weights, str(folder / WEIGHTS), metadata={"format": FORMAT})
        sha256 = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        _write_json(folder / CONFIG, {"format": FORMAT, "weights_sha256": sha256, "model": model.cfg.to_dict()})
        if record is not None:
            _write_json(folder / RECORD, record)
        tokenizer = model.tokenizer
        if tokenizer is not None:
            tokenizer.save(folder / TOKENIZER)  # type: ignore[attr-defined]
    return Path(path)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _bundled_names() -> list[str]:
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{WEIGHTS}"))


def _folder(name_or_path: str | Path) -> Path:
    names = _bundled_names()
    if isinstance(name_or_path, str) and name_or_path in names:
        return BUNDLED / name_or_path
    path = Path(name_or_path)
    if str(name_or_path) and path.is_dir():
        return path
    if path.is_file():
        if path.name != WEIGHTS:
            raise ValueError(f"{str(path)!r} is not a model: expected a bundled name, a model folder or its {WEIGHTS}.")
        return path.parent
    if "/" in str(name_or_path) or "\\" in str(name_or_path):
        raise ValueError(f"There is no model folder {str(name_or_path)!r}.")
    near = get_close_matches(str(name_or_path), names, n=2, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"bundled models are {', '.join(names) or 'none'}."
    )
    raise ValueError(f"There is no model and no folder called {str(name_or_path)!r}; {hint}")


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    import torch

    kind = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if kind is None:
        return torch.float32
    if kind not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, float64, bfloat16 or float16, not {dtype!r}.")
    return kind


def _read_config(folder: Path) -> tuple[ModelConfig, str]:
    """(config, SHA-256 of the weight file)."""
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"The folder {str(folder)!r} is not a model: it has no {CONFIG}.") from None
    except ValueError as error:  # not JSON, not UTF-8
        raise ValueError(f"The config {str(path)!r} is not JSON ({error}).") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or set(data) != {"format", "weights_sha256", "model"}:
        raise ValueError(f"The config {str(path)!r} is not of the format {FORMAT!r} that t2lens writes.")
    try:
        return ModelConfig.from_dict(data["model"]), str(data["weights_sha256"])
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"The config {str(path)!r} describes no model: {error}") from None


def _read_weights(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"The folder {str(path.parent)!r} is not a model: it has no {WEIGHTS}.") from None
    try:
        weights = load(data)
    except SafetensorError as error:
        kind = "truncated" if "not fully covered" in str(error) else "damaged, or not safetensors at all"
        raise ValueError(f"The weight file {str(path)!r} ({len(data)} bytes) is {kind}: {error}.") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"The weight file {str(path)!r} is damaged: its SHA-256 is not the one in {CONFIG}.")
    return weights


def _check_fit(path: Path, model: Transformer, weights: dict[str, torch.Tensor]) -> None:
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    wrong = [name for name in sorted(set(expected) & set(weights)) if expected[name] != list(weights[name].shape)]
    faults = [f"{word} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for word, names in
              (("it lacks", missing), ("it has the unexpected", extra)) if names]  # fmt: skip
    faults += [f"{name} has the shape {list(weights[name].shape)} and not {expected[name]}" for name in wrong[:3]]
    if faults:
        raise ValueError(f"The weight file {str(path)!r} does not fit the config: {'; '.join(faults)}.")
