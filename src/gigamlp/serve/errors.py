"""Refusals: what a request is answered with in place of its answer."""

from __future__ import annotations

__all__ = ["Gone", "Refused"]


class Refused(Exception):
    """A request that is not served. It never leaves `gigamlp.serve`: it becomes a response.

    Parameters
    ----------
    status : int
        The HTTP status.
    message : str
        What was wrong and what to do; the ``error`` of the answer.
    retry_after : int, optional
        Seconds after which it is worth trying again.
    dropped : str, optional
        Why, in a word, if the request was not at fault; metrics count it.
    """

    def __init__(
        self, status: int, message: str, *, retry_after: int | None = None, dropped: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after, self.dropped = status, message, retry_after, dropped


class Gone(Exception):
    """The client closed the connection: there is nobody to answer."""
