"""The page at /: what it holds as a file, and what it does in a browser with a real server behind it.

The browser is the system's Chromium, or the one that ALLOTROPE_CHROMIUM names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_process import API_KEY, MODEL_NAME, ServerProcess, wait_until_idle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Request, Route

HTML = {"accept": "text/html"}
QUESTION = "the cat sat"
# Requests that a server under a restart does not answer are in the console; nothing else may be.
UNANSWERED = ("Failed to load resource",)
# How the page writes `text`, as its reader sees it.
WRITTEN = """
    const view = block('assistant', ''); write(view.text, text);
    const shown = view.text.innerText; view.whole.remove(); return shown;
"""
SEVERE = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium. Skips, with the reason, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    path = os.environ.get("ALLOTROPE_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on the PATH, and ALLOTROPE_CHROMIUM names none")
    with playwright.sync_playwright() as running:
        # Root, as in a container, has no sandbox.
        launched = running.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser session without history. The test fails if its pages ask another host or write an error."""
    session = browser.new_context(viewport={"width": 1280, "height": 900})
    session.set_default_timeout(60_000)
    faults: list[str] = []
    hosts: set[str] = set()
    session.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    session.on("weberror", lambda error: faults.append(str(error.error)))
    session.on("request", lambda request: hosts.add(httpx.URL(request.url).host))
    yield session
    session.close()
    assert [fault for fault in faults if not fault.startswith(UNANSWERED)] == []
    assert hosts <= {"127.0.0.1", ""}


def load_page(context: BrowserContext, url: str) -> Page:
    """The page of the server at `url`, once it shows figures."""
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#tiles dd")
    return page


def say(page: Page, text: str, **settings: float) -> None:
    """Send a message with settings of the form, such as temperature."""
    if settings:
        page.locator("#more").evaluate("details => { details.open = true; }")
    for name, value in settings.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answers(page: Page) -> list[str]:
    """The answers in the conversation, once none is under way."""
    page.wait_for_selector("#stop", state="hidden")
    return [article.locator(".text").last.inner_text() for article in page.locator("article.assistant").all()]


def sent_bodies(page: Page) -> list[dict[str, Any]]:
    """Bodies of the generating requests that the page sends from now on; the list grows."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            bodies.append(request.post_data_json)

    page.on("request", note)
    return bodies


def until(page: Page, condition: str, timeout: float = 30.0) -> None:
    """Wait until an expression holds. Playwright's own way needs `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + timeout
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(100)


def stream(*deltas: dict[str, Any], finish_reason: str = "stop") -> str:
    """Server-sent events of a chat answer with `deltas`."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish_reason})
    chunks = [json.dumps({"choices": [choice]}) for choice in choices]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])


def answer_chats_with(page: Page, body: str) -> None:
    """Let the browser get `body` for every chat request: what the tiny model cannot be made to say."""

    def fulfil(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)


def test_the_page_needs_no_key_and_nothing_from_other_hosts(keyed_server: ServerProcess) -> None:
    first, second = (httpx.get(f"{keyed_server.url}/", headers=HTML) for _ in range(2))
    assert (first.status_code, first.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in first.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    nonce = re.fullmatch(r"'nonce-([\w-]{20,})'", policy["script-src"])
    assert nonce and first.text.count(f'nonce="{nonce[1]}"') == 2 and "{nonce}" not in first.text
    assert nonce[1] not in second.text
    text = first.text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?:|\bsrc\s*=|@import|url\(|\bimport\b", text)
    assert MODEL_NAME not in first.text and API_KEY not in first.text


def test_clients_that_ask_for_no_html_get_a_line(server: ServerProcess, http: httpx.Client) -> None:
    plain = http.get("/")
    assert plain.headers["content-type"] == "text/plain; charset=utf-8" and plain.text.count("\n") == 1
    assert plain.headers["vary"] == "accept"
    assert http.head("/", headers=HTML).headers["content-type"] == "text/html; charset=utf-8"
    assert "/" not in http.get("/openapi.json").json()["paths"]


def test_it_shows_what_the_server_says(server: ServerProcess, http: httpx.Client, context: BrowserContext) -> None:
    http.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 3})
    wait_until_idle(http)
    info = http.get("/server_info").json()
    page = load_page(context, server.url)
    assert page.title() == f"{MODEL_NAME} · Allotrope"
    assert page.inner_text("#state") == "Serving"
    total = re.search(r"^allotrope_generation_tokens_total\S* (\d+)", http.get("/metrics").text, re.MULTILINE)
    assert total is not None
    tiles = {
        tile.locator("dt").inner_text(): tile.locator("dd").inner_text() for tile in page.locator("#tiles > div").all()
    }
    assert f"{int(total[1]):,} in all" in tiles["Tokens generated"]
    assert tiles["Running"].startswith("0") and f"of {info['limits']['max_num_seqs']} sequences" in tiles["Running"]
    assert "Drafts accepted" not in tiles
    (group,) = info["model"]["groups"]
    memory = page.inner_text("#memory")
    assert f"{group['label']} cache" in memory and f"{group['pages']:,}" in memory
    assert info["model"]["architecture"] in page.inner_text("#facts")


def test_rates_and_percentiles(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    # 10 of 20 within 0.1 s, 10 more within 0.3 s; of these 5 came before.
    buckets = "[[0.1, 10], [0.3, 20], [Infinity, 20]]"
    assert page.evaluate(f"percentile([], {buckets}, 0.5)") == pytest.approx(0.1)
    assert page.evaluate(f"percentile([], {buckets}, 0.75)") == pytest.approx(0.2)
    assert page.evaluate(f"percentile([[0.1, 5], [0.3, 5], [Infinity, 5]], {buckets}, 0.5)") == pytest.approx(0.15)
    assert page.evaluate("percentile([], [[0.1, 0], [Infinity, 4]], 0.5)") == pytest.approx(0.1)
    assert page.evaluate("percentile([], [[0.1, 0], [Infinity, 0]], 0.5)") is None
    earlier, later = "{time: 1000, generated: 10}", "{time: 3000, generated: 40}"
    assert page.evaluate(f"perSecond({earlier}, {later}, 'generated')") == pytest.approx(15)
    for value, shown in ((0.00425, "4.25 ms"), (0.25, "250 ms"), (1.5, "1.5 s"), (90, "90 s"), (300, "5 min")):
        assert page.evaluate(f"written(seconds({value}))") == shown
    for value, shown in ((512, "512 B"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")):
        assert page.evaluate(f"written(bytes({value}))") == shown


def test_acceptance_is_shown_where_the_metrics_have_it(server: ServerProcess, context: BrowserContext) -> None:
    page = context.new_page()
    drafted = iter(range(0, 10_000, 100))

    def add(route: Route) -> None:
        answer = route.fetch()
        count = next(drafted)
        text = f'{answer.text()}allotrope_spec_decode_num_draft_tokens_total{{model_name="tiny"}} {count}.0\n'
        text += f'allotrope_spec_decode_num_accepted_tokens_total{{model_name="tiny"}} {count // 4}.0\n'
        route.fulfill(response=answer, body=text)

    page.route("**/metrics", add)
    page.goto(server.url)
    tile = page.locator("#tiles > div", has_text="Drafts accepted")
    tile.get_by_text("25%").wait_for()
    page.unroute_all(behavior="wait")


def test_why_a_server_with_figures_is_not_healthy(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    message = "The engine has ended no step for 12 s although requests are under way (--health-timeout 10)."
    body = json.dumps({"error": {"message": message}})
    page.route("**/health", lambda route: route.fulfill(status=503, content_type="application/json", body=body))
    page.locator("#state", has_text=message).wait_for()
    assert page.is_visible("#tiles")
    page.unroute_all(behavior="wait")
    page.locator("[data-state=serving]").wait_for()


def test_an_answer_shows_as_it_streams(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    page.evaluate(
        "() => { window.lengths = new Set(); new MutationObserver(() => lengths.add(byId('log').innerText.length))"
        ".observe(byId('log'), {childList: true, subtree: true, characterData: true}); }"
    )
    # On a busy machine a whole answer may come between two frames.
    for _ in range(5):
        page.evaluate("lengths.clear()")
        say(page, QUESTION, temperature=0, max_tokens=60)
        if page.evaluate("lengths.size") > 3:
            return
    pytest.fail("five answers came at once")


def test_a_chat_keeps_its_history(server: ServerProcess, http: httpx.Client, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    bodies = sent_bodies(page)
    say(page, QUESTION, temperature=0, max_tokens=60)
    first = answers(page)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}
    told = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert first == [page.evaluate(f"text => {{ {WRITTEN} }}", told)]
    assert "60 tokens" in page.inner_text("article.assistant .after")
    page.fill("#system", "be brief")
    say(page, "one two", max_tokens=5)
    assert len(answers(page)) == 2
    assert [(message["role"], message["content"]) for message in bodies[1]["messages"]] == [
        ("system", "be brief"), ("user", QUESTION), ("assistant", told), ("user", "one two"),
    ]  # fmt: skip
    assert (bodies[1]["temperature"], bodies[1]["max_tokens"]) == (0, 5)
    # A reload keeps the conversation; a new one begins without it.
    page.reload()
    page.wait_for_selector("#tiles dd")
    assert len(answers(page)) == 2
    page.click("#clear")
    assert answers(page) == []
    say(page, "three", max_tokens=2)
    assert len(answers(page)) == 1 and [message["content"] for message in bodies[2]["messages"]] == ["three"]


def test_markup_in_an_answer_is_text(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    hostile = "<img src=x onerror=alert(1)> **bold** `code`\n```py\n<b>1</b>\n```\nend"
    answer_chats_with(page, stream({"content": hostile[:9]}, {"content": hostile[9:]}))
    say(page, "hello")
    assert answers(page) == ["<img src=x onerror=alert(1)> bold code\n<b>1</b>\nend"]
    assert page.locator("article.assistant img").count() == 0
    assert page.inner_text("article.assistant pre") == "<b>1</b>"


def test_reasoning_is_folded(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    answer_chats_with(page, stream({"reasoning_content": "first "}, {"reasoning": "then"}, {"content": "so"}))
    bodies = sent_bodies(page)
    say(page, "hello")
    assert answers(page) == ["so"]
    reasoning = page.locator("article.assistant details")
    assert reasoning.get_attribute("open") is None and not reasoning.locator(".text").is_visible()
    reasoning.locator("summary").press("Enter")
    assert reasoning.locator(".text").inner_text() == "first then"
    say(page, "more")
    assert len(answers(page)) == 2
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "so"}


def test_a_refused_message_shows_the_reason(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    bodies = sent_bodies(page)
    say(page, "cat " * 2000)
    error = page.locator("article.assistant .error")
    error.wait_for()
    assert "tokens" in error.inner_text()
    page.click("text=Try again")
    page.locator("article.assistant .error").wait_for()
    assert len(bodies) == 2 and bodies[0] == bodies[1]
    assert page.locator("article.assistant").count() == 1


def test_the_key_is_asked_for(keyed_server: ServerProcess, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(keyed_server.url)
    page.wait_for_selector("#ask", state="visible")
    assert page.evaluate("document.activeElement.id") == "key"
    assert not page.is_visible("#chat") and MODEL_NAME not in page.title()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("does not accept this key").wait_for()
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#tiles dd")
    assert not page.is_visible("#ask") and page.evaluate("document.activeElement.id") == "prompt"
    say(page, QUESTION, max_tokens=3)
    assert len(answers(page)) == 1
    page.reload()
    page.wait_for_selector("#tiles dd")
    assert API_KEY in page.evaluate("JSON.stringify(sessionStorage)")
    assert API_KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.click("#forget")
    page.wait_for_selector("#ask", state="visible")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_key_of_any_letters_reaches_the_server(keyed_server: ServerProcess, context: BrowserContext) -> None:
    key = "schlüssel-ключ"
    page = context.new_page()
    page.goto(keyed_server.url)
    page.wait_for_selector("#ask", state="visible")
    page.fill("#key", key)
    page.keyboard.press("Enter")
    page.get_by_text("does not accept this key").wait_for()
    asked = page.evaluate("headers().authorization")
    page.goto(f"{keyed_server.url}/docs")
    page.fill("#key", key)
    # As curl sends it: the guard compares bytes.
    assert asked == page.evaluate("headers().authorization") == f"Bearer {key.encode().decode('latin-1')}"


def test_the_keyboard_is_enough(server: ServerProcess, http: httpx.Client, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    page.evaluate("byId('temperature').value = 0")
    press, focused = page.keyboard.press, "document.activeElement.id || document.activeElement.className"
    press("Tab")
    assert page.evaluate(focused) == "skip"
    press("Enter")
    assert page.evaluate(focused) == "prompt"
    page.keyboard.type("on and on")
    press("Shift+Enter")
    page.keyboard.type("and on")
    press("Enter")
    page.wait_for_selector("#stop", state="visible")
    press("Escape")
    page.locator(".after", has_text="stopped").wait_for()
    wait_until_idle(http)
    assert page.inner_text("article.user .text") == "on and on\nand on"
    assert page.evaluate(focused) == "prompt" and page.input_value("#prompt") == ""
    reached = set()
    for _ in range(20):
        press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"docs", "theme", "clear", "log", "prompt", "send", "range", "SUMMARY"} <= reached


def test_screen_readers_hear_states_and_whole_answers(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    assert page.get_attribute("#state", "role") == page.get_attribute("#announce", "role") == "status"
    say(page, QUESTION, temperature=0, max_tokens=6)
    (answer,) = answers(page)
    assert page.text_content("#announce").split() == ["Answer:", *answer.split()]
    for chart in page.locator("#charts svg").all():
        assert re.search(r"last \d+ s: now .*; at most ", chart.get_attribute("aria-label") or "")


def test_themes_and_motion(server: ServerProcess, context: BrowserContext) -> None:
    page = load_page(context, server.url)
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.select_option("#theme", "light")
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light and page.input_value("#theme") == "light"
    page.select_option("#theme", "auto")
    assert page.evaluate(ground) == dark
    animations = "byId('state-text').classList.add('caret'), document.getAnimations().length"
    assert page.evaluate(animations) == 1
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(animations) == 0


@pytest.mark.parametrize("width", [1280, 700, 390, 320])
def test_nothing_is_wider_than_the_window(server: ServerProcess, context: BrowserContext, width: int) -> None:
    page = load_page(context, server.url)
    page.set_viewport_size({"width": width, "height": 800})
    say(page, "w" * 150, max_tokens=40)
    answers(page)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_outlives_a_restart_of_the_server(tiny_model: Path, context: BrowserContext) -> None:
    """It says what is wrong, comes back by itself, and keeps its curves and the conversation."""
    first = ServerProcess(tiny_model, root_path="/llm")
    try:
        page = context.new_page()
        # The page is there before the model is, and waits for it.
        os.kill(first.engine_pid, signal.SIGSTOP)
        page.goto(f"{first.url}/llm/")
        page.locator("[data-state=loading]", has_text="loading the model").wait_for()
        os.kill(first.engine_pid, signal.SIGCONT)
        first.wait_until_ready()
        page.wait_for_selector("#tiles dd")
        say(page, QUESTION, max_tokens=5)
        assert len(answers(page)) == 1
        until(page, "points.length > 1")
        first.signal(signal.SIGTERM)
        assert first.wait(20) == 0
        page.locator("[data-state=unreachable]").wait_for()
        assert "does not answer since" in page.inner_text("#state")
        say(page, "one")
        page.get_by_text("The server does not answer.").wait_for()
    finally:
        first.close()
    again = ServerProcess(tiny_model, root_path="/llm", port=httpx.URL(first.url).port)
    try:
        again.wait_until_ready()
        page.locator("[data-state=serving]").wait_for()
        until(page, "run === 1 && points.some(point => point.run === 0)")
        page.click("text=Try again")
        assert len(answers(page)) == 2
        assert page.locator(".error:visible").count() == 0
    finally:
        again.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    server: ServerProcess, keyed_server: ServerProcess, context: BrowserContext, width: int, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = load_page(context, server.url)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    answer_chats_with(page, stream({"reasoning": "hm"}, {"content": "see `this`\n```\ncode\n```\n**now**"}))
    say(page, "hello")
    answers(page)
    page.unroute_all(behavior="wait")
    say(page, "cat " * 2000)
    page.locator("article.assistant .error").wait_for()
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    asking = context.new_page()
    asking.set_viewport_size({"width": width, "height": 900})
    asking.emulate_media(color_scheme=scheme)
    asking.goto(keyed_server.url)
    asking.wait_for_selector("#ask", state="visible")
    for one in (page, asking):
        found = axe.Axe().run(one).response
        assert len(found["passes"]) > 15
        severe = [violation for violation in found["violations"] if violation["impact"] in SEVERE]
        assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in severe] == []
