"""Logs for machines: one JSON object a line on stderr."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from gigamlp.measure.clock import timestamp

__all__ = ["event", "set_up"]

_LOGGER = "gigamlp.serve"


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        line["pid"] = record.process
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up() -> None:
    """Send gigamlp's and uvicorn's records to stderr as JSON; the root logger is left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name, level in ((_LOGGER, logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def event(what: str, *, level: str = "info", error: BaseException | None = None, **fields: Any) -> None:
    """Log that something happened.

    Parameters
    ----------
    what : str
        One or a few words, always the same for the same kind of event.
    level : {"info", "warning", "error"}
    error : BaseException, optional
        Its traceback is logged.
    **fields
        What belongs to it.
    """
    logger = logging.getLogger(_LOGGER)
    logger.log(logging.getLevelNamesMapping()[level.upper()], what, exc_info=error, extra={"fields": fields})
