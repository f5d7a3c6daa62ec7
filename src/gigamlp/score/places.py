"""Paths and URIs: what is meant by either, and the few ways in which scoring writes to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gigamlp._atomic import write_bytes

__all__ = ["Place", "is_uri", "place", "replace_text"]

Place = Any  # a Path or a Remote, which has those methods of it that are called


def is_uri(text: str) -> bool:
    """Return whether `text` is a URI and no path.

    Examples
    --------
    >>> is_uri("s3://bucket/rows.npy"), is_uri("rows.npy")
    (True, False)
    """
    return "://" in text


def place(text: str | os.PathLike[str]) -> Any:
    """Return the `Path` or, for a URI, the `Remote` of that name."""
    if isinstance(text, str) and is_uri(text):
        from gigamlp.score.remote import Remote

        return Remote(text)
    return Path(text)


def replace_text(where: Any, text: str) -> None:
    """Write `text`; a reader sees the old content or this."""
    if isinstance(where, Path):
        write_bytes(where, text.encode("utf-8"))
    else:
        where.write_bytes(text.encode("utf-8"))
