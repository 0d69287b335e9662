"""What several test folders need: the real model, where it is at hand, and a writer of small GGUF files.

Without a GPU, Triton's kernels run in its interpreter; it has to be told before Triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allotrope.engine.ranks.worker_process import keep_worker_processes
from allotrope.kernels.backend import best_backend
from allotrope.ops.matmul.gguf import GGUF_BLOCKS

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter  # noqa: F401

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # How long an example takes says more about the machine than about the code.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")

GgufFactory = Callable[..., str]


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The SmolLM2-135M-Instruct GGUF file: `ALLOTROPE_SMOLLM2`, else the one in `.cache/models`."""
    named = os.environ.get("ALLOTROPE_SMOLLM2")
    folder = Path(__file__).parent.parent / ".cache" / "models"
    found = [Path(named)] if named else sorted(folder.glob("*.gguf"))
    if not found or not found[0].is_file():
        pytest.skip(f"no real model: ALLOTROPE_SMOLLM2={named!r}, and {folder} has none (`make demo` fetches it)")
    return str(found[0])


@pytest.fixture
def own_choices() -> Iterator[None]:
    """For tests that change what is chosen: choices that a process keeps for its life are made anew, then forgotten."""
    best_backend.cache_clear()
    yield
    best_backend.cache_clear()


@pytest.fixture(scope="module")
def kept_workers() -> Iterator[None]:
    """Engines of a module take over each other's worker processes: a new one imports for seconds."""
    with keep_worker_processes():
        yield


@pytest.fixture(scope="session")
def write_gguf() -> GgufFactory:
    """Writes a GGUF file: `write(path, architecture, metadata, tensors, kinds)`, `kinds`: tensor → type to store as."""
    return _write_gguf


def _write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> str:
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, array in (tensors or {}).items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        try:
            stored = gguf.quants.quantize(array.astype(np.float32), kind)
        except NotImplementedError:
            # The package only reads some types.
            format = GGUF_BLOCKS[kind.name.lower()]
            stored = format.quantize(torch.from_numpy(array.astype(np.float32))).values.numpy()
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
