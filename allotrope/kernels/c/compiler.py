"""From a C source to a loaded library: compiled for this very CPU by its C compiler, once per machine, in a second.

Owns: the compiler's flags, where libraries are kept, and the checksum at the end of each. Must not know: what they
compute. Nothing needs them for right answers: who has no compiler computes the same with PyTorch, at half the speed or
less, and is told so.
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
from collections.abc import Iterator
from pathlib import Path

import torch

from allotrope.env import cache_folder

log = logging.getLogger("allotrope.kernels")

HEADERS = Path(__file__).parent
_FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", f"-I{HEADERS}",
)  # fmt: skip
# What `element.h` knows.
_ELEMENTS = (torch.float32, torch.bfloat16)
_X86_FLAGS = ("-march=native", "-mprefer-vector-width=512")
# A kept file is a library, then the SHA-256 of that library. The loader of shared objects ignores what follows them.
_CHECKSUM_BYTES = hashlib.sha256().digest_size


# Why a library whose `suits()` says no is not used; see `panel.h`.
UNSUITED = "the processor lacks AVX-512 (for bfloat16: AVX-512 BF16)"


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
    made_of = "\0".join((*command, *texts, _processor(), "sha256 at the end"))
    name = f"{source.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    reason = ""
    for folder in _folders():
        try:
            return _kept(folder / name) or _made(command, source, folder / name)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            log.warning("%s cannot be compiled and loaded in %s: %s", source.name, folder, said)
            reason = said.partition("\n")[0]
    return f"{compiler} could not compile {source.name}, or its library could not be loaded: {reason}"


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library that is kept at `path`; None where there is none that can be used, and why is logged.

    A damaged file is never mapped: reading beyond the end of a shortened one would end the process.
    """
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
            raise OSError(f"its checksum does not match its {len(data)} bytes")
        return ctypes.CDLL(str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("the compiled library %s is damaged (%s); it is compiled again", path, error)
        return None


def _made(command: list[str], source: Path, path: Path) -> ctypes.CDLL:
    """Compile to `path`, which other processes see whole or not at all, and load what this process made.

    Raises OSError if it cannot be written or loaded, CalledProcessError if the compiler refuses.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, linked = Path(scratch) / "code.o", Path(scratch) / "code.so"
        for step in ([*command, "-c", source, "-o", compiled], [command[0], "-shared", compiled, "-lm", "-o", linked]):
            subprocess.run([str(word) for word in step], check=True, capture_output=True, text=True)
        data = linked.read_bytes()
        linked.write_bytes(data + hashlib.sha256(data).digest())
        # Loaded before it is moved: a process that makes the same library at the same time may replace it meanwhile.
        library = ctypes.CDLL(str(linked))
        linked.replace(path)
    return library


def _folders() -> Iterator[Path]:
    """Where libraries are kept: the user's cache, then a folder of this process where that cannot be used."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("%s cannot be made (%s); compiled libraries are kept for this process alone", folder, error)
    else:
        if os.access(folder, os.W_OK):
            yield folder
    yield _scratch()


@functools.cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="allotrope-"))


def _processor() -> str:
    """What `native` means here: a library for other instructions must not be found in a shared cache."""
    facts = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in facts if line.startswith(("model name", "flags", "CPU part", "Features")))
