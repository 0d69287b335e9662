"""In a warm-up kernels are compiled and not launched, and what they would have written is zeros."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.kernels.warmup import warming_up, warmup
from allotrope.layers.parallel import Parallel
from allotrope.ops.rms_norm.triton import rms_norm

CPU = torch.device("cpu")
# In a process of its own: Triton decides once, at import, whether kernels are compiled or interpreted. The chip is none
# that is here: a launch gets as far as loading what was compiled.
PROGRAM = """
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from allotrope.kernels import pdl
from allotrope.kernels.warmup import warmup
from allotrope.ops.rms_norm import triton as norm_triton

class Loaded(Exception):
    pass

def load(*_):
    raise Loaded

launches = []
properties = {"max_shared_mem": 1 << 20, "max_num_regs": 1 << 16, "multiprocessor_count": 132, "warpSize": 32}
utils = SimpleNamespace(load_binary=load, get_device_properties=lambda _: properties)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda _: 0,
    launcher_cls=lambda *_: lambda *given: launches.append(given),
    utils=utils,
))
pdl._pdl_launches = lambda: True
compiled = []
plain = triton.runtime.JITFunction._do_compile
triton.runtime.JITFunction._do_compile = lambda self, *rest: compiled.append(self.__name__) or plain(self, *rest)

def norm(size):
    norm_triton.rms_norm(torch.ones(3, size), torch.ones(size), 1e-6)

def launched(size):
    try:
        norm(size)
    except Exception as error:
        return type(error)

with warmup(2, torch.device("cpu")) as found:
    norm(32), norm(64), norm(32)
assert (found.kernels, found.failed) == (2, 0), found
before = len(compiled)
assert launched(32) is launched(64) is Loaded
assert len(compiled) == before, "what was warmed up was compiled again"

loads, chosen = [], []
torch.cuda.set_device = chosen.append
utils.load_binary = lambda name, *_: loads.append(name) or (1, 1, 32, 0, 1024)
with warmup(2, torch.device("cuda", 1)) as found:
    norm(256), norm(512)
assert (found.kernels, found.failed, len(loads), set(chosen)) == (2, 0, 2, {1}), (found, loads, chosen)
norm(256), norm(512)
assert len(launches) == len(loads) == 2, "what was warmed up was loaded again"

def broken(*_, **__):
    raise ZeroDivisionError

norm_triton.norm_kernel.compile = broken
with warmup(2, torch.device("cpu")) as found:
    norm(32), norm(128)
assert (found.kernels, found.failed) == (0, 1), found
assert launched(128) is ZeroDivisionError
print("as it should be")
"""


def test_what_was_warmed_up_is_not_compiled_again(tmp_path: object) -> None:
    """And a kernel that cannot be compiled fails where it is launched."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["as it should be"], done.stderr[-4000:]


def test_nothing_is_launched() -> None:
    x, factors = torch.ones(3, 16, device=DEVICE), torch.full((16,), 8.0, device=DEVICE)
    with warmup(1, CPU):
        warmed_up = rms_norm(x, factors, 0.0)
    assert warmed_up.shape == x.shape and not warmed_up.any()
    assert torch.equal(rms_norm(x, factors, 0.0), 2 * x)


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that is not initialised holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


UNWRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((4, 3), (1, 4), dtype=x.dtype, device=x.device),
    "new_empty": lambda x: x.new_empty(5),
    "new_empty_strided": lambda x: x.new_empty_strided((4, 3), (1, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", UNWRITTEN)
@pytest.mark.parametrize("inference", [True, False], ids=["inference", "plain"])
def test_unwritten_memory_is_zeros(name: str, dtype: torch.dtype, inference: bool, poison: None) -> None:
    x = torch.ones(4, 3, device=DEVICE).to(dtype)
    with torch.inference_mode(inference):
        assert dtype == torch.float8_e4m3fn or UNWRITTEN[name](x).any(), "the poison does nothing"
        with warmup(1, CPU):
            made = UNWRITTEN[name](x)
            assert made.dtype == dtype and not made.float().any()
            assert x.float().all()


def test_only_the_thread_that_warms_up_does() -> None:
    seen: list[bool] = []
    with warmup(1, CPU):
        assert warming_up()
        other = threading.Thread(target=lambda: seen.append(warming_up()))
        other.start()
        other.join()
    assert seen == [False] and not warming_up()


def test_what_goes_wrong_inside_ends_the_warm_up() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), warmup(1, CPU):
            raise ZeroDivisionError
        assert not warming_up()


def test_ranks_do_not_wait_for_each_other() -> None:
    """There is no process group here: asking one would fail."""
    x, two = torch.ones(3, 4), Parallel(0, 2)
    with warmup(1, CPU):
        assert torch.equal(two.all_reduce(x), torch.ones(3, 4))
        assert torch.equal(two.all_reduce_max(x), torch.ones(3, 4))
        assert two.gather_logits(x).shape == (3, 8)
        assert Parallel(1, 2).gather_logits(x).shape == (3, 4)
    with pytest.raises((ValueError, RuntimeError)):
        two.all_reduce(x)
