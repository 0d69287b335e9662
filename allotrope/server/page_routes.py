"""Routes of the two HTML pages: the server's state with a chat, and the API.

Each page is one file that is the same for every model; it asks the other routes for what it shows.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from allotrope.server.guard import DOCS, PAGE

_FOLDER = Path(__file__).parent
_PLAIN = "Allotrope. The API is under /v1, described at /docs and /openapi.json. A browser shows the state here.\n"


def add_page_routes(router: APIRouter) -> None:
    """Add the pages to `router`."""

    @router.get(PAGE, include_in_schema=False)
    async def page(http: HttpRequest) -> Response:
        """A page that shows the server's state and chats; one line of text for clients that ask for no HTML."""
        if "text/html" in http.headers.get("accept", ""):
            return _html("page.html")
        return Response(_PLAIN, headers={"vary": "accept"}, media_type="text/plain")

    @router.get(DOCS, include_in_schema=False)
    async def docs() -> Response:
        """A page that shows /openapi.json and sends requests."""
        return _html("docs.html")


def _html(name: str) -> Response:
    """The page in file `name`. Its policy forbids the browser to load anything from other hosts."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    text = (_FOLDER / name).read_text("utf-8").replace("{nonce}", nonce)
    # Without no-cache a browser may show the page of an older version, or reuse a nonce.
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "vary": "accept"}
    return Response(text, headers=headers, media_type="text/html")
