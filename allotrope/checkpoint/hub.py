"""Finds a hub id in the local Hugging Face cache, or downloads it.

Owns the choice of files and the message of a failure. `huggingface_hub` itself reads `HF_HOME`, `HF_HUB_CACHE` and
`HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import re
from pathlib import Path

from allotrope.errors import ModelError

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_WEIGHT_FILES = ["*.safetensors"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def find_snapshot(model: str, revision: str | None, *, with_weights: bool, cache: str | None = None) -> Path:
    """The directory of the hub repository `model` at `revision` (None: its main branch).

    Raises `ModelError` with the cache's path and the remedy if the repository is neither cached nor downloadable.
    """
    if _REPOSITORY.fullmatch(model) is None or model.endswith(".gguf"):
        raise ModelError(f"cannot find the model {model!r}", ["there is no such file or directory"])
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    offline, where = constants.is_offline_mode(), cache or constants.HF_HUB_CACHE
    try:
        directory = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache,
            allow_patterns=_SMALL_FILES + (_WEIGHT_FILES if with_weights else []),
            # Some repositories have other formats, and copies for other tools, in sub-folders.
            ignore_patterns=["*/*", "consolidated*"],
            local_files_only=offline,
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        # LocalEntryNotFoundError is an OSError, and a malformed id raises a ValueError. Network errors may be either.
        at = f" at revision {revision!r}" if revision is not None else ""
        why = "HF_HUB_OFFLINE is set, so nothing is downloaded" if offline else f"the download failed: {_brief(error)}"
        raise ModelError(
            f"cannot find the model {model!r}{at}",
            [
                "there is no such file or directory here",
                f"as a hub id, it is not in the cache {where} (set HF_HOME to look elsewhere)",
                why,
                f"fetch it with 'hf download {model}' where there is a network, or give the path of a local copy",
            ],
        ) from error
    return Path(directory)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}"
