"""Uvicorn's HTTP connection with limits: the size of heads, and how long a request may take to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gigamlp.serve.protocol import error_body

__all__ = ["Connection", "close_stale"]

_MAX_HEAD = 1 << 16  # bytes


class Connection(HttpToolsProtocol):
    """One connection.

    Attributes
    ----------
    stuck_since : float or None
        The loop's time since when more of an answer waits to be read than may; None if it does not.
    waiting_since : float or None
        The loop's time since when a request arrives, or the first one is awaited; None if none is on its way.
    """

    def __init__(self, *args: Any, **own: Any) -> None:
        super().__init__(*args, **own)
        self.waiting_since: float | None = None
        self._head_bytes, self._in_head = 0, True
        self.stuck_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        self.waiting_since = self.loop.time()
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self.waiting_since, self._head_bytes, self._in_head = self.loop.time(), 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that a head is complete."""
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hand a part of a body over as it is: uvicorn copies it twice on the way, a third of a large body's time."""
        cycle = self.cycle
        if cycle.body or cycle.response_complete:
            super().on_body(body)
            return
        cycle.body = body  # type: ignore[assignment]  # what is there is added to or handed on, never changed
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Note that a request has arrived."""
        self.waiting_since = None
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Take what came, and refuse a head without end."""
        super().data_received(data)
        if self._in_head and self.waiting_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD and not self.transport.is_closing():
                self._refuse(431, f"the head of the request is longer than {_MAX_HEAD:,} bytes")

    def pause_writing(self) -> None:
        """Note that the caller does not read as fast as it is answered."""
        self.stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the caller reads."""
        self.stuck_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the protocol's form."""
        self._refuse(400, "this is not an HTTP/1.1 request")

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(message)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def give_up(self, timeout_s: float) -> None:
        """Close, as a request did not arrive in time."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._refuse(408, f"the request did not arrive within {timeout_s:g} s")
        else:
            self.transport.close()


def close_stale(connections: Iterable[Any], now: float, timeout_s: float) -> int:
    """Close connections whose request does not arrive or whose answer is not read in time; return how many."""
    stuck = [c for c in connections if c.stuck_since is not None and now - c.stuck_since > timeout_s]
    for each in stuck:
        each.transport.abort()  # closing would wait until it is read
    stale = [c for c in connections if c.waiting_since is not None and now - c.waiting_since > timeout_s]
    for each in stale:
        each.give_up(timeout_s)
    return len(stale) + len(stuck)
