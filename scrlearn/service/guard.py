"""What stands before every request: who may ask, how much at once, what headers go out, and that no error leaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from scrlearn.errors import InputError
from scrlearn.service.metrics import Metrics
from scrlearn.service.problems import Problem
from scrlearn.service.settings import Limits

log = logging.getLogger("scrlearn.service")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/healthz", "/openapi.json", "/docs")
OPEN_FOLDER = "/page/"
SHORTEST_TOKEN = 16
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=(), payment=(), usb=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """Who may ask.

    With a token, whoever has it. Without one, only programs on this machine: the request must name this machine as its
    host, and a page of another origin must not have sent it; else any web site could reach a service on localhost
    through its visitor's browser.

    Parameters
    ----------
    token
        The secret, at least 16 printable characters; None: no token is asked for.
    hosts
        Further host names that requests without a token may come to (those of a proxy).

    Examples
    --------
    >>> Access(token="short")
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: The token has 5 characters; use at least 16, for instance: openssl rand -hex 32
    """

    token: str | None = field(default=None, repr=False)
    hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.token is None:
            return
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise InputError("The token must be printable ASCII without spaces, for instance: openssl rand -hex 32")
        if len(self.token) < SHORTEST_TOKEN:
            raise InputError(
                f"The token has {len(self.token)} characters; use at least {SHORTEST_TOKEN}, for instance: "
                "openssl rand -hex 32"
            )

    def check(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise a `Problem` for a request that may not be made."""
        if self.token is None:
            self._check_local(method, headers)
        elif path not in OPEN and not path.startswith(OPEN_FOLDER):
            self._check_token(headers.get(b"authorization", b""))

    def _check_token(self, authorization: bytes) -> None:
        scheme, _, given = authorization.partition(b" ")
        # digests: comparing them takes the same time for any two tokens, of any length
        mine, other = (hashlib.sha256(text).digest() for text in (str(self.token).encode(), given.strip()))
        if not hmac.compare_digest(mine, other) or scheme.lower() != b"bearer":
            raise Problem("unauthorised", 'Send the header "Authorization: Bearer TOKEN" with the server\'s token.')

    def _check_local(self, method: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        name = _hostname(f"//{host}")
        if not is_loopback(name) and name not in self.hosts:
            raise Problem(
                "forbidden",
                f'The request is for host "{name[:100]}", and this server has no token, so it answers to this machine '
                "only. Start it with --token-file, or allow the name with --allow-host.",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and method not in ("GET", "HEAD") and urlsplit_netloc(origin) != host:
            raise Problem("forbidden", "The request was sent by a web page of another origin.")


def urlsplit_netloc(url: str) -> str:
    """Host and port of a URL; empty where it has none."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware around the whole application.

    Parameters
    ----------
    app
        The application.
    access, limits, metrics
        Who may ask, how much at once, and where it is counted.
    """

    def __init__(self, app: App, access: Access, limits: Limits, metrics: Metrics) -> None:
        self.app, self.access, self.limits, self.metrics = app, access, limits, metrics
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            await self._handle(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:  # there are no web sockets here
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        begun = time.perf_counter()
        try:
            try:
                self._check(scope)
            except Problem as problem:
                await answer.problem(problem, lambda: self._let_it_come(scope, receive))
                return
            with self._counted():
                await self.app(scope, receive, answer)
        except Problem as problem:
            await answer.problem(problem)
        except Exception:
            log.exception("A request failed.")
            await answer.problem(Problem("internal", "Something went wrong here; the server's log says more."))
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE", "HEAD") else "other"
            self.metrics.observe(method, path, answer.status, time.perf_counter() - begun)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        self.access.check(scope["method"], scope["path"], headers)
        if self.active >= self.limits.requests and scope["path"] != "/healthz":
            raise Problem("busy", f"{self.active} requests are being handled already.", retry_after=1)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.limits.body_bytes:
            raise Problem("too-large", f"The body is larger than {self.limits.body_bytes:,} bytes.")

    async def _let_it_come(self, scope: Scope, receive: Receive) -> None:
        """Throw the body of a refused request away, for as long as a body may take.

        Many clients send all of it before they read. Were the connection closed at once, they would not see the answer.
        """
        headers = dict(scope["headers"])
        if headers.get(b"expect", b"").lower() == b"100-continue":  # it waits for the answer, and sends nothing
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.body_seconds):
                while (await receive()).get("more_body", False):
                    pass


class _Answer:
    """Passes an answer on, with the headers that every answer has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name.lower() for name, _ in message["headers"]}
            more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in given]
            message = {**message, "headers": [*message["headers"], *more]}
        await self._send(message)

    async def problem(self, problem: Problem, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Answer with a problem, unless another answer has begun; `then` is done before its end."""
        if self.status:
            return
        body = json.dumps(problem.document()).encode()
        headers = {"content-type": "application/problem+json", "content-length": str(len(body)), **problem.headers()}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": problem.status, "headers": raw})
        await self({"type": "http.response.body", "body": body, "more_body": then is not None})
        if then is not None:
            await then()
            await self({"type": "http.response.body", "body": b""})
