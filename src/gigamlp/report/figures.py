"""The report's figures as SVG text, by matplotlib's object API: no pyplot, no display, no global state left behind."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gigamlp.record import Record, Row
from gigamlp.report.drawing import MUTED, SERIES, legend_above, log_scale, plain_ticks, shorten, svg
from gigamlp.report.layout import clean, labels, percent, row_of_samples, source, throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BARS_MAX", "CURVES_MAX", "accuracy_figure", "latency_figure", "throughput_figure"]

BARS_MAX = 24
CURVES_MAX = 8
NAMES_MAX = 14


def throughput_figure(record: Record, prefix: str = "throughput") -> str | None:
    """Return bars of samples a second, each with its row's roof, as SVG; None if no row has a throughput.

    Parameters
    ----------
    record : Record
    prefix : str
        What the SVG's ids begin with; it must differ between the figures of one page.
    """
    rows = [r for r in record.rows if r.samples_per_s]
    rows = [r for r in rows if r.batch != 1] or rows
    if not rows:
        return None
    rows = _quickest(rows, BARS_MAX)
    speeds = [_million(r) for r in rows]
    roofs = [s / r.roof_share if r.roof_share and not r.quoted else None for s, r in zip(speeds, rows, strict=True)]

    def draw(ax: Axes) -> None:
        places = range(len(rows))
        is_log = log_scale(ax, [*speeds, *(v for v in roofs if v is not None)])
        for is_quoted, name in ((False, "measured here"), (True, "quoted, not measured here")):
            picked = [i for i in places if rows[i].quoted == is_quoted]
            if picked:
                ax.barh(
                    picked,
                    [speeds[i] for i in picked],
                    height=0.62,
                    color="none" if is_quoted else SERIES[0],
                    edgecolor=MUTED if is_quoted else SERIES[0],
                    linestyle="--" if is_quoted else "-",
                    label=name,
                )
        known = [(i, roof) for i, roof in enumerate(roofs) if roof is not None]
        if known:
            ax.vlines(
                [roof for _, roof in known],
                [i - 0.42 for i, _ in known],
                [i + 0.42 for i, _ in known],
                color=SERIES[1],
                linewidth=2.2,
                label="roof: what this machine's measured limits allow that row",
            )
        for i, row in enumerate(rows):
            share = "" if row.roof_share is None or row.quoted else f"  ({percent(row.roof_share, 0)} of its roof)"
            # in a column of their own, where neither a bar nor a roof crosses them
            ax.annotate(throughput(row) + share, (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        ax.set_yticks(list(places), [_name_of(label, row) for label, row in zip(labels(rows), rows, strict=True)])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("million samples per second" + (", logarithmic" if is_log else ""))
        legend_above(ax)

    return svg(draw, height=1.4 + 0.34 * len(rows), prefix=prefix)


def accuracy_figure(record: Record, prefix: str = "accuracy") -> str | None:
    """Return accuracy against samples a second as SVG; None if no row has both."""
    rows = [r for r in record.rows if r.samples_per_s and r.accuracy is not None]
    rows = [r for r in rows if r.batch != 1] or rows
    if not rows:
        return None

    def draw(ax: Axes) -> None:
        best = {r.name: r.accuracy or 0.0 for r in sorted(rows, key=lambda r: r.accuracy or 0.0)}
        kept = sorted(best, key=lambda name: -best[name])[:NAMES_MAX]
        names = [name for name in dict.fromkeys(r.name for r in rows) if name in kept]
        for index, name in enumerate(names):
            color = SERIES[index % len(SERIES)]
            for is_quoted, tail in ((False, ""), (True, " (quoted)")):
                group = [r for r in rows if r.name == name and r.quoted == is_quoted]
                if not group:
                    continue
                ax.plot(
                    [_million(r) for r in group],
                    [100 * (r.accuracy or 0.0) for r in group],
                    marker="o" if index < len(SERIES) else "s",
                    markersize=7,
                    linestyle="none",
                    color=color,
                    markerfacecolor="none" if is_quoted else color,
                    markeredgewidth=1.4,
                    label=shorten(clean(name), 28) + tail,
                )
        rest = [r for r in rows if r.name not in kept]
        if rest:
            places = [_million(r) for r in rest], [100 * (r.accuracy or 0.0) for r in rest]
            ax.plot(*places, ".", color=MUTED, label=f"{len(best) - len(kept)} other networks", zorder=1)
        ax.margins(x=0.08, y=0.14)
        ax.set_xscale("log")
        plain_ticks(ax)
        ax.set_xlabel("million samples per second, logarithmic")
        ax.set_ylabel("accuracy, %")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)

    return svg(draw, height=4.2, prefix=prefix)


def latency_figure(record: Record, prefix: str = "latency") -> str | None:
    """Return how long calls take from issue to answer as SVG; None if nothing is known of that.

    With ``record.extra["latency_samples"]`` (row key -> microseconds of each call) it is the share of calls that took
    at most so long; without, the range from p50 to p99 of each row.
    """
    curves = _curves(record)
    if curves:
        return svg(lambda ax: _draw_curves(ax, curves), height=4.2 + 0.1 * len(curves), prefix=prefix)
    rows = [r for r in record.rows if r.p50_us and r.p99_us][:BARS_MAX]
    if not rows:
        return None

    def draw(ax: Axes) -> None:
        places = list(range(len(rows)))
        ax.hlines(
            places, [r.p50_us or 0.0 for r in rows], [r.p99_us or 0.0 for r in rows], color=SERIES[0], linewidth=3
        )
        ax.plot([r.p50_us or 0.0 for r in rows], places, "o", color=SERIES[0], label="p50")
        ax.plot([r.p99_us or 0.0 for r in rows], places, "|", color=SERIES[0], markersize=12, label="p99")
        is_log = log_scale(ax, [v for r in rows for v in (r.p50_us, r.p99_us) if v])
        ax.set_yticks(places, [shorten(label) for label in labels(rows)])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_xlabel("µs from issue to answer" + (", logarithmic" if is_log else ""))
        legend_above(ax)

    return svg(draw, height=1.4 + 0.34 * len(rows), prefix=prefix)


def _curves(record: Record) -> list[tuple[str, list[float]]]:
    """Return (label, sorted microseconds) of the rows whose latency says most: one row a call first, then the rest."""
    found = record.extra.get("latency_samples")
    if not isinstance(found, Mapping):
        return []
    known: list[tuple[Row | None, str, list[float]]] = []
    for key, values in found.items():
        taken = sorted(float(v) for v in values if v is not None and 0 < float(v) < math.inf)
        if taken:
            known.append((row_of_samples(record, str(key)), clean(str(key)), taken))
    known.sort(key=lambda item: (item[0] is None or item[0].batch != 1, item[2][len(item[2]) // 2]))
    known = known[:CURVES_MAX]
    rows = [row for row, _, _ in known if row is not None]
    short = dict(zip(map(id, rows), labels(rows), strict=True))
    return [(shorten(key if row is None else short[id(row)], 52), taken) for row, key, taken in known]


def _draw_curves(ax: Axes, curves: Sequence[tuple[str, list[float]]]) -> None:
    ends: list[float] = []
    for index, (label, taken) in enumerate(curves):
        # at most 400 points a curve: more cannot be seen and swell the file
        step = max(1, len(taken) // 400)
        picked = sorted({*range(0, len(taken), step), len(taken) - 1})
        x = [taken[i] for i in picked]
        ax.step(
            x, [100 * (i + 1) / len(taken) for i in picked], where="post", color=SERIES[index % 8], lw=1.7, label=label
        )
        ends += [taken[0], taken[min(len(taken) - 1, math.ceil(0.995 * len(taken)))]]
    is_log = log_scale(ax, ends)
    ax.set_xlim(min(ends) * (0.9 if is_log else 0.95), max(ends) * (1.15 if is_log else 1.05))
    for level in (50, 99):
        ax.axhline(level, color=MUTED, linewidth=0.8, linestyle=":")
    ax.set_yticks([0, 25, 50, 75, 99])
    ax.set_ylim(0, 101)
    ax.set_xlabel("µs from issue to answer" + (", logarithmic" if is_log else ""))
    ax.set_ylabel("calls that took at most so long, %")
    legend_above(ax, columns=2)


def _million(row: Row) -> float:
    return (row.samples_per_s or 0.0) / 1e6


def _quickest(rows: Sequence[Row], count: int) -> list[Row]:
    """Keep the `count` quickest rows, in their order; quoted rows and a network's best row are kept first."""
    best = {r.name: r for r in sorted(rows, key=_million) if not r.quoted}
    ranked = sorted(rows, key=lambda r: (not r.quoted, best.get(r.name) is not r, -_million(r)))
    kept = {id(r) for r in ranked[:count]}
    return sorted((r for r in rows if id(r) in kept), key=lambda r: [q.name for q in rows].index(r.name))


def _name_of(label: str, row: Row) -> str:
    return f"{shorten(label)} (quoted: {_where(row)})" if row.quoted else shorten(label)


def _where(row: Row) -> str:
    """Return the card that a quoted row names, or the beginning of its note."""
    note = source(row)
    card = re.search(r"(Tesla T4|RTX \d{4}|H\d00|A\d{3}|V100)", note)
    return card.group(1) if card else shorten(note.removeprefix("quoted: "), 24)
