"""Statistics of a whole corpus that lie beside the weights of a model; the bundled models all have them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t2lens.analysis.finding import Finding, read_finding
from t2lens.files import write_file
from t2lens.store.report import charts_of, report
from t2lens.store.statistics import tally
from t2lens.zoo.registry import BUNDLED, CONFIG, load
from t2lens.zoo.text import sample_texts

if TYPE_CHECKING:
    from t2lens.store.tally import Tally

__all__ = ["STATISTICS", "corpus_statistics", "write_corpus_statistics"]

STATISTICS = "statistics.json.gz"
_DIGITS = 5
_N_TOKENS = 12


def corpus_statistics(name: str | Path) -> Finding:
    """What depth weights, gates and norms of a model do over a whole corpus: mean, spread, quantiles, shares.

    Of a bundled model: over all of the held-out text (the last 5% of its corpus, 155,000 tokens), which nobody was
    trained on; the notes say of what else. Nothing runs: the numbers lie beside the weights, to five digits.

    Args:
        name: a bundled model, or the folder of one (its statistics are what `t2lens store bundle` wrote).

    Returns:
        Finding as of `t2lens.store.statistics`: weight_* (read, source), norm_* (read), other_* (entry), share and
        norm_share (read, part), where the model has such. Positions stand together as "0", "1", "2-3", "4-7", ...
        (coordinate pos). Beside them, weight_, norm_ and other_passages: the same mean over the bundled passages alone
        (`t2lens.zoo.text.sample_texts`, each by itself with a BOS in front).

    Raises:
        ValueError: no such model, none beside it, or statistics of other weights than those that lie there.

    Example:
        >>> from t2lens.store import corpus_statistics
        >>> found = corpus_statistics("attnres-full")
        >>> found["weight_mean"].dims, round(float(found["weight_mean"].sel(read="3.mlp").sum()), 3)
        (('read', 'source'), 1.0)
    """
    folder = _folder(name)
    file = folder / STATISTICS
    if not file.is_file():
        raise ValueError(f"There are no statistics of a corpus beside {folder.name}: it has no {STATISTICS}.")
    try:
        plain = json.loads(gzip.decompress(file.read_bytes()))
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged ({error}).") from None
    if not isinstance(plain, dict) or plain.get("weights_sha256") != _weights_of(folder):
        raise ValueError(f"{file} holds statistics of other weights than those of {folder.name}.")
    found = read_finding(plain, str(file))
    return replace(found, charts=charts_of(found.dataset))


def write_corpus_statistics(seen: Tally, name: str | Path, of: str) -> Path:
    """Write what was counted beside the weights of its model, for `corpus_statistics`; returns the file.

    Args:
        seen: of this very model. of: the text that it was counted over, in words: it becomes the first note.

    Raises ValueError: no such model, or a tally of another one.
    """
    from t2lens.store.plan import fingerprint

    folder = _folder(name)
    model = load(folder)
    if fingerprint(model) != seen.model:
        raise ValueError(f"These statistics are of other weights than those of {folder.name}.")
    found = report(seen, model, n_tokens=_N_TOKENS, positions="octaves")
    passages = report(tally(model, sample_texts(), what=[part.key for part in seen.parts]), model)
    data = found.dataset
    for family in ("weight", "norm", "other"):
        if f"{family}_mean" in data:
            mean = passages[f"{family}_mean"]
            attrs = mean.attrs | {"meaning": f"{mean.attrs['meaning']}, of the bundled passages alone"}
            data[f"{family}_passages"] = mean.assign_attrs(attrs)
    for variable in data.data_vars.values():
        variable.values = _rounded(variable.values)
    rows = tuple(tuple(_short(cell) for cell in row) for row in found.rows)
    notes = (f"Over {of}.", *found.notes, f"Numbers to {_DIGITS} digits.")
    plain = json.loads(replace(found, dataset=data, rows=rows, notes=notes).to_json())
    plain["weights_sha256"] = _weights_of(folder)
    return write_file(folder / STATISTICS, gzip.compress(json.dumps(plain, sort_keys=True).encode(), mtime=0))


def _folder(name: str | Path) -> Path:
    """Of a model that t2lens wrote."""
    folder = BUNDLED / name if isinstance(name, str) and (BUNDLED / name).is_dir() else Path(name)
    if not (folder / CONFIG).is_file():
        near = get_close_matches(str(name), sorted(path.name for path in BUNDLED.glob("*/")), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"There is no bundled model and no model folder {str(name)!r}{hint}")
    return folder


def _weights_of(folder: Path) -> str:
    return json.loads((folder / CONFIG).read_bytes())["weights_sha256"]


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _rounded(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind != "f":
        return values
    return np.array([_short(x) for x in values.ravel().tolist()]).reshape(values.shape)
