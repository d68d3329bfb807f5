"""Access control, and response headers that restrict the browser. Plain ASGI middleware.

A page of another site must not reach this server through the user's browser: requests whose Host is
not ours are refused (DNS rebinding), and so are those that another origin sends. Bound to anything
but this machine, the server also requires a token, which is part of the printed URL and kept in a
cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",  # another server at this address may use the same names
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
    """Checks every request, then hands it to `app`. Without `token`, only this machine has
    access."""

    def __init__(self, app: ASGIApp, *, token: str | None = None, port: int = 0):
        self.app, self.token, self.cookie = app, token, f"seecause-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":  # no websockets here
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = RUN_HEADERS if scope["path"].startswith(RUNS) else HEADERS
                MutableHeaders(scope=message).update(own)
            await send(message)

        response = self._refusal(Request(scope)) or self.app
        await response(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """None where the request is allowed. A token in the URL becomes a cookie; the rest of the
        link, behind #, is the browser's own and stays."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.token is None and not is_local(_name(host)):
            return _no(421, "this server answers to 127.0.0.1 and localhost only.")
        path, site = request.scope["path"], request.headers.get("sec-fetch-site")
        linked = site in ("cross-site", "same-site") and path != "/"
        if linked or (origin is not None and origin.partition("://")[2] != host):
            return _no(403, "a page of another site may not ask this server.")
        if self.token is None:
            return None
        if path == "/" and _same(request.query_params.get("token", ""), self.token):
            # lax: who follows a link to this page from another one comes with the cookie
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
            return response
        if _same(request.cookies.get(self.cookie, ""), self.token):
            return None
        return _no(401, "open the address that `seecause serve` printed: it carries the token.")


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server bound to `host`."""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def _no(status: int, words: str) -> Response:
    return JSONResponse({"error": words}, status_code=status)


def _name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def _same(token: str, other: str) -> bool:
    return hmac.compare_digest(token.encode(), other.encode())
