"""From a C source to a loaded library: compiled for this very CPU by its C compiler, once per machine, in a second.

Owns: the compiler's flags and where libraries are kept. Must not know: what they compute. Nothing needs them for right
answers: who has no compiler computes the same with PyTorch, at half the speed or less, and is told so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("allotrope.cpu")

HEADERS = Path(__file__).parent
_FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", f"-I{HEADERS}",
)  # fmt: skip
# What `element.h` knows.
_ELEMENTS = (torch.float32, torch.bfloat16)
_X86_FLAGS = ("-march=native", "-mprefer-vector-width=512")


# Why a library whose `suits()` says no is not used; see `panel.h`.
UNSUITED = (
    "the processor lacks AVX-512 (for bfloat16: AVX-512 BF16), or has AMX, with which PyTorch's own products are faster"
)


class CannotCompile(Exception):
    """There is no library; the text is the reason."""


def load(source: Path, element: torch.dtype, **defines: int) -> ctypes.CDLL:
    """The library made of `source` for this type of `element` with these macros defined. Raises CannotCompile."""
    if element not in _ELEMENTS:
        raise CannotCompile(f"dtype={element} (needs {' or '.join(map(str, _ELEMENTS))})")
    defines["ELEMENT_BFLOAT16"] = int(element == torch.bfloat16)
    found = _load(source, tuple(sorted(defines.items())))
    if isinstance(found, str):
        raise CannotCompile(found)
    return found


@functools.cache
def _load(source: Path, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL | str:
    """The library, or why there is none: asked for by every layer, so tried once."""
    compiler = os.environ.get("ALLOTROPE_CC", "cc")
    if not sys.platform.startswith("linux"):
        return f"system={sys.platform} (needs linux)"
    if shutil.which(compiler) is None:
        return f"C compiler {compiler!r} is not installed (ALLOTROPE_CC names another)"
    native = _X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)
    command = [compiler, *_FLAGS, *native, *(f"-D{name}={value}" for name, value in defines)]
    texts = [path.read_text() for path in (source, *sorted(HEADERS.glob("*.h")))]
    made_of = "\0".join((*command, *texts, _processor()))
    path = _folder() / f"{source.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        try:
            _compile(command, source, path)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            log.warning("%s cannot be compiled: %s", source.name, said.strip())
            return f"{compiler} could not compile {source.name}"
    return ctypes.CDLL(str(path))


def _compile(command: list[str], source: Path, path: Path) -> None:
    """Make `path`, in one step that other processes see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, linked = Path(scratch) / "code.o", Path(scratch) / "code.so"
        for step in ([*command, "-c", source, "-o", compiled], [command[0], "-shared", compiled, "-lm", "-o", linked]):
            subprocess.run([str(word) for word in step], check=True, capture_output=True, text=True)
        linked.replace(path)


def _folder() -> Path:
    """Where libraries are kept: the user's cache, or a folder of this process where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allotrope"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _scratch()
    return folder if os.access(folder, os.W_OK) else _scratch()


@functools.cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="allotrope-"))


def _processor() -> str:
    """What `native` means here: a library for other instructions must not be found in a shared cache."""
    facts = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in facts if line.startswith(("model name", "flags", "CPU part", "Features")))
