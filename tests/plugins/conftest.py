"""What tests inside other engines need: they run where one is installed beside Allotrope (`make test-vllm`,
`make test-sglang`), else are skipped.

vLLM's environment is set before it is imported: one process, little memory, no cache of an earlier version's classes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "allotrope-test-vllm"),
    # Lets vLLM's CPU platform cut prompts of latent attention into chunks and reuse prefixes.
    "VLLM_MLA_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def in_vllm() -> Iterator[None]:
    """The environment of a process that runs vLLM. Skips where there is none."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-vllm` runs this in an environment of its own")
    os.environ.update(ENVIRONMENT)
    yield


@pytest.fixture(scope="session")
def in_sglang() -> None:
    """Skips where there is no SGLang, which runs in processes of its own."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: `make test-sglang` runs this in an environment of its own")
