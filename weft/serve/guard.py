"""The door of the server: every request passes it, on its way in and out.

In: addresses and tokens are checked. Out: every answer has a number and headers that keep browsers careful; whatever
goes wrong becomes one line with that number, and the details stay in the server's log.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.admission import Admission
from weft.serve.metrics import ServeMetrics
from weft.serve.refusal import Refusal
from weft.serve.settings import ServeSettings, is_loopback

OPEN = {"/", "/docs", "/openapi.json", "/health", "/ready"}  # need no token: they say nothing about models
PICTURES = {"/predict", "/explain"}  # requests that take room in the house
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}
log = logging.getLogger("weft.serve")


class Guard:
    """Wraps an application."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, metrics: ServeMetrics, admission: Admission, paths: set[str]
    ) -> None:
        self.app, self.settings, self.metrics, self.admission, self.paths = app, settings, metrics, admission, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, number, status = time.perf_counter(), secrets.token_hex(4), 0
        scope.setdefault("state", {})["number"] = number

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                own = {**HEADERS, "x-request-id": number}
                extra = [(k.encode(), v.encode()) for k, v in own.items() if k.encode() not in given]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            self.check(scope)
            await self.app(scope, receive, send_marked)
        except Exception as error:
            if status:
                raise
            await refusal_response(error, number)(scope, receive, send_marked)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - begun)

    def check(self, scope: Scope) -> None:
        """Raises for a client that may not come in."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.settings.token:
            self._check_local(headers)
        elif scope["path"] not in OPEN:
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(shown.strip().encode(), self.settings.token.encode())
            if scheme.lower() != "bearer" or not is_right:
                raise Refusal(401, "A token is needed: Authorization: Bearer TOKEN.")

    def _check_local(self, headers: Mapping[str, str]) -> None:
        """Without a token only this machine's own programs and our own page: no page of others, whatever its name."""
        host = headers.get("host", "")
        if not is_loopback(_host_of(f"//{host}")):
            raise Refusal(403, "Without a token only local addresses are answered, such as http://127.0.0.1.")
        origin = headers.get("origin", "")
        if origin and _address_of(origin) != host:
            raise Refusal(403, "Requests of other pages are not answered.")


def refusal_response(error: Exception, number: str) -> JSONResponse:
    """The answer to a request that has none; what nobody foresaw goes to the log."""
    if not isinstance(error, Refusal):
        log.error("request %s", number, exc_info=error)
        error = Refusal(500, "Something went wrong here; the server's log has it under this id.")
    headers: dict[str, str] = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    content: dict[str, Any] = {"error": error.line, "id": number}
    return JSONResponse(content, error.status, headers)


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _address_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
