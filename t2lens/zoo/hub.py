"""Models from the Hugging Face hub by id: safetensors and JSON files, never pickles, never code."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["download", "is_id"]

_WANTED = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")


def is_id(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII))


def download(id: str, revision: str | None = None) -> Path:
    """The folder of a hub model in the cache of huggingface_hub, which also answers without a network.

    Errors: ValueError in one sentence: no such model, a gated one, no safetensors in it, or no network.
    """
    from huggingface_hub import errors, snapshot_download

    elsewhere = f"download it where there is one (hf download {id} --local-dir FOLDER) and give the path of that folder"
    try:
        folder = Path(snapshot_download(id, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        raise ValueError(
            f"The hub model {id!r} is gated: accept its licence on its page and log in (hf auth login)."
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"The hub model {id!r} has no revision {revision!r}.") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"There is no folder {id!r}, nor a public hub model of that id.") from None
    except (OSError, getattr(errors, "HTTPError", OSError)) as error:  # no network, offline mode, a proxy, a full disk
        raise ValueError(
            f"There is no folder {id!r}, and without a network ({type(error).__name__}) the hub cannot be asked for a "
            f"model of that id; {elsewhere}."
        ) from None
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"The hub model {id!r} has no safetensors, and a torch file is not downloaded unasked: fetch it yourself "
            f"(hf download {id} --local-dir FOLDER) and give the path of that folder; tensors alone are read from it."
        )
    return folder
