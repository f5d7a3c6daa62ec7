"""Records for people: how rows are arranged and written, and the self-contained ``report.html``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gigamlp.report.html import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        from gigamlp.report.html import write_report

        return write_report
    raise AttributeError(f"module 'gigamlp.report' has no attribute {name!r}")
