"""What tests inside other engines need: they run where one is installed beside Allotrope (`make test-vllm`,
`make test-sglang`), else are skipped.

vLLM's environment is set before it is imported: one process, little memory, no cache of an earlier version's classes.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "allotrope-test-vllm"),
    # Lets vLLM's CPU platform cut prompts of latent attention into chunks and reuse prefixes.
    "VLLM_MLA_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # What is compiled without a GPU is no model, but a sum in vLLM's log-probabilities, for five seconds a process.
    **({} if torch.cuda.is_available() else {"TORCHDYNAMO_DISABLE": "1"}),
}
# What most of an engine's start is spent on, if it is the first.
MODULES = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.model_loader",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    f"vllm.v1.worker.{'gpu' if torch.cuda.is_available() else 'cpu'}_worker",
)


@pytest.fixture(scope="session")
def in_vllm() -> Iterator[None]:
    """The environment of a process that runs vLLM. Skips where there is none."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-vllm` runs this in an environment of its own")
    os.environ.update(ENVIRONMENT)
    unfreeze = gc.unfreeze
    with pytest.MonkeyPatch.context() as patched:
        _ready_for_many_engines(patched)
        yield
    unfreeze()


def _ready_for_many_engines(patched: pytest.MonkeyPatch) -> None:
    """vLLM does for each engine what is enough once for all.

    Ten times an engine, it collects garbage: that passes over what is imported, and never over what engines made. And
    it looks in all modules for kernels that a CPU needs others for.
    """
    for module in MODULES:
        import_module(module)
    from vllm.platforms import current_platform

    name = "register_triton_kernel_overrides"
    if hasattr(current_platform, name):
        patched.setattr(current_platform, name, functools.cache(getattr(current_platform, name)))
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        patched.setattr(gc, name, lambda: None)


@pytest.fixture(scope="session")
def in_sglang() -> None:
    """Skips where there is no SGLang, which runs in processes of its own."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: `make test-sglang` runs this in an environment of its own")
