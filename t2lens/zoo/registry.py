"""Models on disk: a folder with config.json, model.safetensors and, where they exist, tokenizer.json and record.json.

`list_models` and `load` know the bundled models by name; `load` also reads what others published
(`t2lens.checkpoints`), from the disk or from the Hugging Face hub. Nothing here unpickles; our own weights carry their
SHA-256, so that a damaged file is noticed and not merely loaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t2lens.config import ModelConfig
from t2lens.files import few, new_folder
from t2lens.zoo import hub

if TYPE_CHECKING:
    import torch

    from t2lens.model import Transformer
    from t2lens.zoo.published_tokenizer import PublishedTokenizer
    from t2lens.zoo.tokenizer import Tokenizer

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
    name_or_path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Transformer:
    """A trained model in eval mode, with its tokenizer where there is one.

    What a published checkpoint leaves open, and what was taken for granted, is printed (on stderr) and kept as
    `model.loaded_from`.

    Args:
        name_or_path: a bundled name (`list_models`); a folder that `save` wrote, or its model.safetensors; the folder
            or file of a published checkpoint in any format of `t2lens.checkpoints` (safetensors, sharded or not, or
            torch files of plain tensors); or a hub id "owner/name", of which safetensors and JSON are downloaded.
        device: where to put it; the CPU by default.
        dtype: a floating torch dtype or its name; float32 by default, whatever the file holds.
        options: of published checkpoints: `config` (a dict or JSON file in place of the checkpoint's own), `revision`
            (of a hub id), and what the format leaves open, under the names that its family knows.

    Raises:
        ValueError: unknown name (with the nearest ones), what is not a model, a weight file that is damaged, not safe
            to read, or does not fit its config; a hub that cannot be reached; one sentence each.

    Example:
        >>> import t2lens
        >>> model = t2lens.load("attnres-full")
        >>> model("In the beginning").shape[-1]
        2048
    """
    if not isinstance(name_or_path, str | Path):
        raise TypeError(f"load takes a name or a path, not {name_or_path!r} ({type(name_or_path).__name__}).")
    kind, revision = _dtype(dtype), options.pop("revision", None)
    _check_device(device)
    path = _locate(name_or_path, revision)
    folder = path if path.is_dir() else path.parent
    ours = _is_ours(path)
    if ours and options:
        raise ValueError(f"There is no option {min(options)!r} for a model that t2lens itself wrote.")
    import torch

    with torch.inference_mode(False):  # weights made under it could never have a gradient
        if ours:
            model = _load_ours(folder, device, kind)
            model.name = folder.absolute().name  # traces and pictures show it
        else:
            from t2lens.checkpoints.reading import read_checkpoint

            model = read_checkpoint(path, device, kind, **options)
            if path != Path(name_or_path):
                model.name = str(name_or_path).rpartition("/")[2]
    notes = []
    try:
        model.tokenizer = _tokenizer(folder)
    except ValueError as error:
        if model.loaded_from is None:
            raise
        notes.append(f"{error} The model takes token ids, not text.")
    if model.loaded_from is not None:
        if not notes and model.tokenizer is None:
            notes.append(f"It has no {TOKENIZER}: it takes token ids, not text.")
        _say(model, notes)
    return model


def _load_ours(folder: Path, device: str | torch.device | None, dtype: torch.dtype) -> Transformer:
    import torch

    cfg, sha256 = _read_config(folder)
    weights = _read_weights(folder / WEIGHTS, sha256)
    if cfg.n_layers > len(weights):  # before a model of so many layers is built
        raise ValueError(
            f"The weight file {str(folder / WEIGHTS)!r} does not fit the config: it has {len(weights)} weights for "
            f"{cfg.n_layers} layers."
        )

    from t2lens.model import Transformer

    with torch.device("meta"):
        model = Transformer(cfg)
    _check_fit(folder / WEIGHTS, model, weights)
    model.load_state_dict({name: _cast(weight, dtype) for name, weight in weights.items()}, assign=True)
    return model.requires_grad_(True).to(device or "cpu").eval()


def _cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, like the table of relative positions, stay what they are."""
    return weight.to(dtype) if weight.is_floating_point() else weight


def _tokenizer(folder: Path) -> Tokenizer | PublishedTokenizer | None:
    if not (folder / TOKENIZER).is_file():
        return None
    from t2lens.zoo.published_tokenizer import load_tokenizer

    return load_tokenizer(folder / TOKENIZER)


def _say(model: Transformer, notes: list[str]) -> None:
    """What a user of a published model must know, on stderr: as for progress, so that stdout stays what was asked."""
    from rich.console import Console

    source = model.loaded_from
    reasons: dict[str, list[str]] = {}
    for key, reason in source.ignored.items():
        reasons.setdefault(reason, []).append(key)
    lines = [f"Assumed: {sentence}" for sentence in source.assumed]
    lines += [f"Not used ({reason}): {few(sorted(keys))}" for reason, keys in reasons.items()]
    console = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
    console.print("\n  ".join([f"Loaded {source.path} as {source.family} ({model.cfg.describe()}).", *lines, *notes]))


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
        weights = {name: _cast(weight, _dtype(dtype)) for name, weight in weights.items()}
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


def _check_device(device: str | torch.device | None) -> None:
    """Before anything is read: ValueError where torch cannot put a tensor there."""
    if device is None:
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # no such device, or a torch that was built without it
        raise ValueError(f"The device {str(device)!r} cannot be used ({str(error).splitlines()[0]}).") from None


def _locate(name_or_path: str | Path, revision: str | None) -> Path:
    """The folder or file of a model: bundled, on the disk, or downloaded."""
    name, names = str(name_or_path), _bundled_names()
    bundled = isinstance(name_or_path, str) and name in names
    path = BUNDLED / name if bundled else Path(name_or_path)
    if bundled or (name and _exists(path)):
        if revision is not None:
            raise ValueError(f"The option revision is for models from the hub, and {name!r} is one on this machine.")
        return path
    if isinstance(name_or_path, str) and hub.is_id(name):
        return hub.download(name, revision)
    if "/" in name or "\\" in name:
        raise ValueError(f"There is no model folder {name!r}.")
    near = get_close_matches(name, names, n=2, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"bundled models are {', '.join(names) or 'none'}."
    )
    raise ValueError(f"There is no model and no folder called {name!r}; {hint}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for any file
        return False


def _is_ours(path: Path) -> bool:
    """Whether `save` wrote it (or something that says so, for `_read_config` to judge)."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    if not config.is_file() or (path.is_file() and path.name != WEIGHTS):
        return False
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # not JSON, not UTF-8
        return True
    return not isinstance(data, dict) or str(data.get("format", "")).startswith("t2lens")


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
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8
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
