"""Who may ask, and what a browser may do with the answer. Plain ASGI, around everything else.

A page of another site must not reach this server through the user's browser: requests whose Host is
not ours are refused (DNS rebinding), and so are those that another origin sends. Bound to anything
but this machine, the server also wants a token, which the printed URL carries and a cookie keeps.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.responses import JSONResponse, RedirectResponse, Response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",  # the next server at this address names its own things alike
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

# Pages of results come from files, which may hold any script: each is a sandbox without an origin,
# from which nothing can be asked. Only our own page may frame them; a sandbox cannot have an opener
# policy.
RUNS = "/runs/"
RUN_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"
)
RUN_HEADERS = {
    **HEADERS,
    "content-security-policy": RUN_POLICY,
    "cross-origin-opener-policy": "unsafe-none",
}


class AccessMiddleware:
    """Checks every request, then hands it to `app`. `token` None: only this machine may ask."""

    def __init__(self, app: Any, *, token: str | None = None, port: int = 0):
        self.app, self.token, self.cookie = app, token, f"seecause-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            return
        headers = RUN_HEADERS if scope["path"].startswith(RUNS) else HEADERS
        refusal, send = self._refusal(scope), _with_headers(send, headers)
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        host = headers.get("host", "")
        if self.token is None and not is_local(_name(host)):
            return _no(421, "this server answers to 127.0.0.1 and localhost only.")
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host:
            return _no(403, "a page of another site may not ask this server.")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            return _no(403, "a page of another site may not ask this server.")
        return None if self.token is None else self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """None where the token is there. A token in the URL becomes a cookie; the rest of the link,
        behind #, is the browser's own and stays."""
        assert self.token is not None
        offered = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and _same(offered, self.token):
            # lax: who follows a link to this page from another one comes with the cookie
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
            return answer
        if _same(_cookie(headers.get("cookie", ""), self.cookie), self.token):
            return None
        return _no(401, "open the address that `seecause serve` printed: it carries the token.")


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.encode(), value.encode()) for name, value in headers.items()]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sending


def _no(status: int, words: str) -> Response:
    return JSONResponse({"error": words}, status_code=status)


def _name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str | None:
    """Host and port of an Origin header; None where it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _same(token: str, other: str) -> bool:
    return hmac.compare_digest(token.encode("utf-8", "replace"), other.encode())


def _cookie(header: str, name: str) -> str:
    """Split by hand: other programs of this host set cookies that `http.cookies` gives up on."""
    for pair in header.split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            return value.strip('"')
    return ""
