"""The roofline of a record: samples a second against the bytes that a row costs, under what the memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gigamlp.record import Record, Row
from gigamlp.report.drawing import MUTED, SERIES, legend_above, plain_ticks, shorten, svg
from gigamlp.report.layout import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["limits", "meaning", "roofline_figure"]

# (key of the measured limits, what the line says, the residences that it bounds)
_LINES = (
    ("read_bytes_s", "memory, read", ("hot", "cold")),
    ("h2d_pinned_bytes_s", "bus, from pinned host memory", ("host-pinned",)),
    ("h2d_pageable_bytes_s", "bus, from pageable host memory", ("host-pageable", "mmap")),
)
_MARKS = {"hot": "s", "cold": "o", "host-pinned": "^", "host-pageable": "v", "mmap": "D"}
_MOST = 8  # networks with a colour of their own


def roofline_figure(record: Record, prefix: str = "roofline") -> str | None:
    """Return the roofline as SVG; None if the record has no measured limits or no row that they bound.

    Both axes are logarithmic: a bandwidth is a straight line that falls with the bytes of a row. Rows that stay in a
    cache (``hot``) may lie above the line of the memory.

    Parameters
    ----------
    record : Record
        With ``extra["roofs"]``, as `gigamlp.measure.roofline` measures them.
    prefix : str
        What the SVG's ids begin with; it must differ between the figures of one page.
    """
    found = {key: float(value) for key, value in limits(record).items() if isinstance(value, int | float)}
    rows = [r for r in record.rows if not r.quoted and r.samples_per_s and r.features_read_bytes and r.batch != 1]
    rows = [r for r in rows if r.residence in _MARKS]
    lines = [line for line in _LINES if found.get(line[0]) and any(r.residence in line[2] for r in rows)]
    if not rows or not lines:
        return None
    names = list(dict.fromkeys(r.name for r in sorted(rows, key=lambda r: -(r.samples_per_s or 0.0))))[:_MOST]

    def draw(ax: Axes) -> None:
        bytes_of = [float(r.features_read_bytes or 1) for r in rows]
        span = (min(bytes_of) / 1.6, max(bytes_of) * 1.6)
        for index, (key, words, _) in enumerate(lines):
            speed = found[key]
            ax.plot(
                span,
                [speed / span[0] / 1e6, speed / span[1] / 1e6],
                color=MUTED,
                linestyle=("-", "--", ":")[index % 3],
                linewidth=1.6,
                label=f"{words}: {speed / 1e9:,.4g} GB/s",
            )
        seen = set()
        for row in rows:
            color = SERIES[names.index(row.name)] if row.name in names else MUTED
            label = shorten(clean(row.name), 26) if row.name in names and row.name not in seen else None
            seen.add(row.name)
            place = [float(row.features_read_bytes or 1)], [(row.samples_per_s or 0.0) / 1e6]
            ax.plot(*place, _MARKS[row.residence or "hot"], color=color, markersize=6, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(*span)
        plain_ticks(ax)
        plain_ticks(ax, "y")
        ax.set_xlabel("bytes of a row that the run reads, logarithmic")
        ax.set_ylabel("million samples per second, logarithmic")
        legend_above(ax)

    return svg(draw, height=5.0, prefix=prefix)


def limits(record: Record) -> Mapping[str, Any]:
    """Return the measured limits in a record; of those by numbers of threads, the ones with most bandwidth."""
    found = record.extra.get("roofs")
    if not isinstance(found, Mapping):
        return {}
    if "read_bytes_s" not in found:
        return max((each for each in found.values() if isinstance(each, Mapping)), key=_read, default={})
    return found


def _read(limits: Mapping[str, object]) -> float:
    value = limits.get("read_bytes_s")
    return float(value) if isinstance(value, int | float) else 0.0


def meaning(rows: Sequence[Row]) -> str:
    """Return what the marks of `rows` mean, in words."""
    words = {"s": "squares", "o": "circles", "^": "triangles", "v": "triangles pointing down", "D": "diamonds"}
    used = dict.fromkeys(r.residence for r in rows if r.residence in _MARKS and not r.quoted)
    return ", ".join(f"{words[_MARKS[each]]}: {each}" for each in used if each is not None)
