"""Tables for the terminal: rows of a record, names and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gigamlp.record import Row
from gigamlp.report.layout import (
    ALL,
    CLOCK,
    DEVICE,
    ENQUEUE,
    P99,
    ROOF,
    THREADS,
    VARIANT,
    Column,
    clean,
    columns_in_use,
    footnotes,
)

__all__ = ["rows_table", "values_table"]

# what a narrow terminal goes without, the least telling first; the JSON always has everything
_DROPPED_FIRST = (CLOCK, THREADS, VARIANT, ENQUEUE, DEVICE, P99, ROOF)


def rows_table(title: str, rows: Sequence[Row], console: Console, columns: Sequence[Column] = ALL) -> RenderableType:
    """Return `rows` as a table, with numbered notes below for where quoted figures come from.

    On a terminal that is too narrow, columns are left out, and a line says which.
    """
    used = columns_in_use(columns, rows)
    dropped: list[str] = []
    table, notes = _table(title, rows, used)
    for column in _DROPPED_FIRST:
        if Measurement.get(console, console.options.update(width=10_000), table).maximum <= console.width:
            break
        if column in used:
            used.remove(column)
            dropped.append(column.title)
            table, notes = _table(title, rows, used)
    lines = [f"[{index}] {note}" for index, note in enumerate(notes, 1)]
    if dropped:
        lines.append(f"not shown on this narrow terminal: {', '.join(dropped)}")
    return Group(table, *(Text(line, style="dim") for line in lines))


def _table(title: str, rows: Sequence[Row], used: Sequence[Column]) -> tuple[Table, list[str]]:
    sources, notes = footnotes(rows)
    with_source = set(sources) != {"measured"}
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for index, column in enumerate(used):
        table.add_column(column.title, justify="right" if column.is_number else "left", overflow="fold")
        if index == 0 and with_source:
            table.add_column("source", overflow="fold")
    for row, source in zip(rows, sources, strict=True):
        cells = [column.text(row) for column in used]
        if with_source:
            cells.insert(1, source)
        table.add_row(*cells, style="dim italic" if row.quoted else None)
    return table, notes


def values_table(values: Mapping[str, Any], title: str | None = None) -> RenderableType:
    """Return names and values in two columns; what is None is left out."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2, 0, 0)
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        if value is not None:
            table.add_row(name, clean(str(value)))
    return table
