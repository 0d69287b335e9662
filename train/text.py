"""The text that models read: Debian's packages of Python's documentation and of the King James Bible.

    python -m train.text .cache/train/text.xz

fetches both with `apt-get download`, keeps their text, and writes it as one file of about 4 MB, which can be carried to
a machine without a network. Python's documentation may be copied under the PSF licence; the copyright of the Bible's
translation has expired.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import lzma
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("python3.11-doc", "bible-kjv-text", "bible-kjv")
# Between documents; no text has it.
BORDER = b"\0"
VERSES_A_DOCUMENT = 40
# One document of so many is held out.
HELD_OUT = 20


def fetch() -> list[bytes]:
    """Downloads and unpacks the packages. Returns the documents."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, capture_output=True, text=True)
        archives = sorted(root.glob("*.deb"))
        if done.returncode or len(archives) != len(PACKAGES):
            raise SystemExit(
                f"apt-get download {' '.join(PACKAGES)} failed with {done.returncode}: {done.stderr.strip()[-500:]}\n"
                "These are packages of Debian 12. On another system, write text.xz there and copy it here."
            )
        for archive in archives:
            subprocess.run(["dpkg", "-x", archive.name, "tree"], cwd=root, check=True)
        sources = sorted((root / "tree").glob("usr/share/doc/python3.11/html/_sources/**/*.rst.txt"))
        verses = subprocess.run(
            [root / "tree/usr/bin/bible", "-f", "-d", "bible.data", "gen1:1-rev22:21"],
            cwd=root / "tree/usr/lib",
            check=True,
            capture_output=True,
        ).stdout.splitlines()
        pages = [source.read_bytes() for source in sources]
    chapters = [b"\n".join(verses[i : i + VERSES_A_DOCUMENT]) for i in range(0, len(verses), VERSES_A_DOCUMENT)]
    return [document.strip() + b"\n" for document in pages + chapters if BORDER not in document]


def write(path: Path) -> None:
    """Fetches the text and writes it."""
    documents = fetch()
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(BORDER.join(documents), preset=9)
    path.write_bytes(packed)
    size = sum(map(len, documents))
    print(f"{path}: {len(documents)} documents, {size / 1e6:.1f} MB of text, {len(packed) / 1e6:.1f} MB")


@functools.lru_cache(maxsize=2)
def read(path: Path, held_out: bool) -> bytes:
    """The text for training, or the part that no model sees. A document's own bytes decide where it belongs."""
    if not path.is_file():
        raise SystemExit(f"there is no {path}: `python -m train.text {path}` makes it")
    documents = lzma.decompress(path.read_bytes()).split(BORDER)
    return b"".join(text for text in documents if (_share(text) == 0) == held_out)


# Of the held-out part, for evaluation: evenly spaced pieces, from the beginning of a line on.
PIECES, PIECE = 48, 2048


def sample(path: Path) -> bytes:
    """Pieces of the part that no model sees."""
    text = read(path, held_out=True)
    starts = [text.index(b"\n", i * (len(text) - 2 * PIECE) // PIECES) + 1 for i in range(PIECES)]
    return b"".join(text[start : text.index(b"\n", start + PIECE) + 1] for start in starts)


def _share(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % HELD_OUT


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--sample", type=Path, metavar="FILE", help="for pieces of what no model sees")
    options = parser.parse_args()
    if options.path.is_file():
        print(f"{options.path} is there")
    else:
        write(options.path)
    if options.sample is not None:
        options.sample.write_bytes(sample(options.path))
