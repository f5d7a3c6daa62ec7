"""Bytes in and out of ASGI: bodies read under limits, responses sent, callers that hang up noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar

import numpy as np

from gigamlp.serve.errors import Gone, Refused
from gigamlp.serve.protocol import error_body

__all__ = [
    "JSON",
    "OCTETS",
    "Bodies",
    "Body",
    "Receive",
    "Scope",
    "Send",
    "header",
    "respond",
    "respond_refused",
    "unless_gone",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Pairs = Iterable[tuple[bytes, bytes]]
Body = bytes | memoryview
T = TypeVar("T")

JSON = b"application/json"
OCTETS = b"application/octet-stream"
_LONG = 1 << 16  # bytes
_PATIENCE_S = 0.01  # a wait shorter than this is not watched: a watcher costs more than most waits


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def whole_number(value: bytes | None, what: str) -> int | None:
    """Return a header's value as a whole number >= 0; None if there is none."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise Refused(400, f"{what} must be a whole number, got {value[:40].decode('latin-1')!r}")
    return int(value)


class Bodies:
    """Reads bodies, and knows how many bytes of bodies the process holds.

    Parameters
    ----------
    limit : int
        Bytes of one body, at most.
    total : int
        Bytes of all bodies that are held at the same time, at most.
    """

    def __init__(self, limit: int, total: int) -> None:
        self.limit, self._total = limit, total
        self.held = 0

    def admit(self, scope: Scope) -> int | None:
        """Refuse a body by the length that its head gives, before any of it is read; return that length."""
        length = whole_number(header(scope, b"content-length"), "Content-Length")
        if length is not None and length > self.limit:
            raise self._too_long()
        return length

    def _too_long(self) -> Refused:
        return Refused(413, f"the body is longer than {self.limit:,} bytes, the most this server takes")

    async def read(self, receive: Receive, length: int | None = None) -> Body:
        """Return the body; its bytes count as held until `release`.

        `length` is what `admit` gave: a body of several parts is then put together as it comes, not at its end, where
        tens of megabytes would stop the loop for as many milliseconds.

        Raises
        ------
        Refused
            413 if it is too long, 503 if all bodies together are.
        Gone
        """
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body: bytes = message.get("body", b"")
        self._hold(len(body), 0)
        return await self._rest(receive, body, length) if message.get("more_body", False) else body

    async def _rest(self, receive: Receive, first: bytes, length: int | None) -> Body:
        parts, size = [first], len(first)
        whole = None if length is None else np.empty(length, np.uint8).data  # no page of it is touched before
        try:
            if whole is not None:
                whole[:size] = first
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                self._hold(len(part), size)
                begin, size = size, size + len(part)
                if whole is None:
                    parts.append(part)
                elif size <= len(whole):
                    whole[begin:size] = part
                if not message.get("more_body", False):
                    if whole is not None and size != len(whole):
                        raise Refused(400, f"Content-Length is {len(whole)}, but the body has {size} bytes")
                    return b"".join(parts) if whole is None else whole
        except BaseException:
            self.release(size)
            raise

    def _hold(self, more: int, before: int) -> None:
        if before + more > self.limit:
            raise self._too_long()
        if self.held + more > self._total:
            message = "this server holds as many bytes of requests as it can; try again"
            raise Refused(503, message, retry_after=1, dropped="bodies_full")
        self.held += more

    def keep(self, size: int) -> None:
        """Count an answer of `size` bytes as held, until `release`: who does not read his holds it too."""
        self.held += size

    def release(self, size: int) -> None:
        """Say that `size` bytes of bodies are held no more."""
        self.held -= size


async def respond(send: Send, status: int, body: bytes, content: bytes = JSON, headers: Pairs = ()) -> None:
    """Send a whole response; a long one is done when the caller has taken most of it."""
    pairs = [(b"content-type", content), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    if len(body) > _LONG:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b""  # uvicorn takes the next part when the caller has read enough of this one
    await send({"type": "http.response.body", "body": body})


async def respond_refused(send: Send, refused: Refused) -> None:
    """Send the answer that a refused request gets."""
    headers = []
    if refused.retry_after is not None:
        headers.append((b"retry-after", b"%d" % refused.retry_after))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await respond(send, refused.status, error_body(refused.message), JSON, headers)


async def unless_gone(answer: asyncio.Future[T], receive: Receive) -> T:
    """Wait for an answer; cancel it if the caller hangs up meanwhile.

    Raises
    ------
    Gone
    """
    await asyncio.wait((answer,), timeout=_PATIENCE_S)
    if answer.done():
        return answer.result()
    hung_up: asyncio.Task[None] = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((answer, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        raise Gone
    finally:
        hung_up.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
