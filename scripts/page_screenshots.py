"""Serve MODEL on this machine, give it some requests, and take the pictures of its page that docs/server.md shows.

Needs the dev extra and a Chromium: `chromium` of the system, or another by --browser.
"""

from __future__ import annotations

import argparse
import io
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

SIZES = {1280: 1150, 390: 844}
# Those of a phone are drawn at twice the width, as phones do.
SCALES = {1280: 1, 390: 2}
MAX_BYTES = 200_000
QUESTIONS_OF_THE_PAGE = ("What is a cache? Answer in two sentences.", "Write a Python function that adds two numbers.")
SYSTEM = "You are a helpful assistant who answers briefly, in plain words, and says so when something is not known."
QUESTIONS = (
    "Why is the sky blue?",
    "Name three uses of graphite.",
    "Explain attention to a child.",
    "Write a limerick about a cat.",
    "What is a mutex?",
    "How do tides work?",
)


def serve(model: str, name: str, port: int) -> subprocess.Popen[bytes]:
    """A server for `model` in a process of its own, once it answers. Raises `RuntimeError` if it ends first."""
    command = [sys.executable, "-m", "allotrope", "serve", model, "--served-model-name", name, "--port", str(port)]
    command += ["--threads", "2", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "600MB", "--max-model-len", "2048"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the server ended before it answered")


def keep_busy(port: int, ended: threading.Event, seed: int) -> None:
    """Send one chat after the other, with pauses, until `ended`."""
    rng = random.Random(seed)
    while not ended.is_set():
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rng.choice(QUESTIONS)}]
        body = {"messages": messages, "max_tokens": rng.randint(10, 60), "temperature": 0.7}
        httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120)
        ended.wait(rng.expovariate(1 / 4))


def open_page(browser: Browser, port: int, width: int, scheme: str) -> Page:
    """The page in a window of `width` pixels, with questions answered."""
    window = {"width": width, "height": SIZES[width]}
    context = browser.new_context(
        viewport=window, device_scale_factor=SCALES[width], color_scheme=scheme, locale="en-GB"
    )
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    page.click("#more summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "90")
    page.click("#more summary")
    for question in QUESTIONS_OF_THE_PAGE:
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector("#send")
    return page


def save(page: Page, path: Path, whole: bool) -> None:
    """Write a picture of `page` with a palette. Raises `RuntimeError` if it is larger than pages should load."""
    image = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
    # This method keeps the colours of small things, such as that of the state.
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RuntimeError(f"{path} has {size} bytes; at most {MAX_BYTES} are wanted")
    print(path, size)


def main() -> None:
    """Read the command line and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the model to serve, with a chat template")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="its name on the page")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "docs" / "images")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="path of a Chromium")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--seconds", type=float, default=150, help="for how long requests come before the pictures")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    server = serve(args.model, args.name, args.port)
    ended = threading.Event()
    clients = [threading.Thread(target=keep_busy, args=(args.port, ended, seed)) for seed in range(4)]
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
            for client in clients:
                client.start()
            looks = [(width, scheme) for width in SIZES for scheme in ("light", "dark")]
            pages = [open_page(browser, args.port, *look) for look in looks]
            pages[0].wait_for_timeout(1000 * args.seconds)
            for (width, scheme), page in zip(looks, pages, strict=True):
                # The picture is of a reader's page, without a cursor in the box.
                page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
                save(page, args.folder / f"page-{width}-{scheme}.png", whole=width < 600)
            browser.close()
    finally:
        ended.set()
        server.terminate()
        server.wait()
        for client in clients:
            if client.ident is not None:
                client.join()


if __name__ == "__main__":
    main()
