"""How rows of a record are arranged and written: shared by the terminal's tables and ``report.html``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gigamlp.record import Record, Row

__all__ = [
    "MISSING",
    "Column",
    "article_rows",
    "clean",
    "columns_in_use",
    "extra_rows",
    "footnotes",
    "labels",
    "number",
    "percent",
    "row_of_samples",
    "source",
    "throughput",
]

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Return `value` with about `digits` significant digits and thousands separators.

    Examples
    --------
    >>> number(1068.27), number(9.2241), number(0.012344), number(None)
    ('1,068', '9.224', '0.01234', '–')
    """
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else -_leading_zeros(abs(value))
    return f"{value:,.{min(max(digits - whole, 0), 12)}f}"


def _leading_zeros(value: float) -> int:
    count = 0
    while value < 0.1 and count < 12:
        value, count = value * 10, count + 1
    return count


def throughput(row: Row) -> str:
    """Return the row's throughput in millions of samples a second."""
    return number(None if row.samples_per_s is None else row.samples_per_s / 1e6, 3)


def percent(fraction: float | None, digits: int = 2) -> str:
    """Return a fraction as a percentage.

    Examples
    --------
    >>> percent(0.9679), percent(None)
    ('96.79 %', '–')
    """
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"


def clean(text: str) -> str:
    r"""Return `text` with its control characters escaped, so that a name cannot steer a terminal.

    Examples
    --------
    >>> clean("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def footnotes(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return for each row ``measured`` or ``quoted`` with the number of its note, and the notes in that order."""
    notes: list[str] = []
    cells = []
    for row in rows:
        text = source(row)
        word, _, note = text.partition("; " if text.startswith("measured") else ": ")
        if note and note not in notes:
            notes.append(note)
        cells.append(f"{word} [{notes.index(note) + 1}]" if note else word)
    return cells, notes


def source(row: Row) -> str:
    """Return where the row's figures come from: ``measured``, or ``quoted: ...`` with its origin."""
    note = "" if row.note is None else clean(row.note)
    if row.quoted:
        return "quoted: " + (note.removeprefix("quoted:").strip() or "origin not given")
    if row.samples_per_s is None and row.wall_us is None and row.p50_us is None:
        return f"not measured: {note.removeprefix('not measured:').strip()}" if note else "not measured"
    return f"measured; {note}" if note else "measured"


# ---- columns --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of a table of rows.

    Attributes
    ----------
    title : str
    text : callable
        Row -> the cell's text.
    is_number : bool
        Whether cells are aligned right.
    """

    title: str
    text: Callable[[Row], str]
    is_number: bool = True


def _path(row: Row) -> str:
    if row.input_dtype is None and row.output is None:
        return MISSING
    return f"{row.input_dtype or '?'} → {row.output or '?'}"


def _wall(row: Row) -> str:
    return number(row.wall_us) + ("" if row.iqr is None or row.wall_us is None else f" ± {number(row.iqr, 2)}")


def _engine(row: Row) -> str:
    return clean(" ".join(part for part in (row.engine, row.scheme) if part)) or MISSING


NAME = Column("network", lambda r: clean(r.name), is_number=False)
ENGINE = Column("engine", _engine, is_number=False)
VARIANT = Column("variant", lambda r: clean(r.variant or "") or MISSING, is_number=False)
BATCH = Column("batch", lambda r: MISSING if r.batch is None else f"{r.batch:,}")
PATH = Column("input → output", _path, is_number=False)
RESIDENCE = Column("residence", lambda r: r.residence or MISSING, is_number=False)
THREADS = Column("threads", lambda r: MISSING if r.threads is None else str(r.threads))
SAMPLES = Column("M samples/s", throughput)
ACCURACY = Column("accuracy", lambda r: percent(r.accuracy))
WALL = Column("wall µs ± IQR", _wall)
DEVICE = Column("device µs", lambda r: number(r.device_us))
P50 = Column("p50 µs", lambda r: number(r.p50_us, 3))
P99 = Column("p99 µs", lambda r: number(r.p99_us, 3))
H2D = Column("H2D µs", lambda r: number(r.h2d_us, 3))
COMPUTE = Column("compute µs", lambda r: number(r.device_us))
D2H = Column("D2H µs", lambda r: number(r.d2h_us, 3))
ENQUEUE = Column("enqueue µs", lambda r: number(r.enqueue_us, 3))
ROOF = Column("of the roof", lambda r: "<0.1 %" if 0 < (r.roof_share or 0.0) < 0.001 else percent(r.roof_share, 1))
CLOCK = Column("clock MHz", lambda r: number(r.clock_mhz, 5))

ARTICLE = (NAME, BATCH, PATH, ENGINE, VARIANT, ACCURACY, SAMPLES, P50, P99, ROOF)
SPLIT = (NAME, ENGINE, BATCH, PATH, RESIDENCE, SAMPLES, WALL, H2D, COMPUTE, D2H, ENQUEUE, P50, P99, ACCURACY, ROOF)
ALL = (
    *(NAME, ENGINE, VARIANT, BATCH, PATH, RESIDENCE, THREADS, SAMPLES, WALL, DEVICE, P50, P99, H2D, D2H, ENQUEUE),
    *(ACCURACY, ROOF, CLOCK),
)


def columns_in_use(columns: Iterable[Column], rows: Sequence[Row]) -> list[Column]:
    """Return the columns that say something about at least one of `rows`; all of them if there are no rows."""
    return [c for c in columns if not rows or any(c.text(row) != MISSING for row in rows)]


# ---- rows -----------------------------------------------------------------------------------------------------------


def article_rows(record: Record) -> list[Row]:
    """Return the rows of the article's table: resident float input, and what is quoted, grouped by network.

    Within a network the measured rows come first, then the quoted ones.
    """
    rows = [r for r in record.rows if r.quoted or not _is_extra(r)]
    order = {name: index for index, name in enumerate(dict.fromkeys(r.name for r in rows))}
    return sorted(rows, key=lambda r: (order[r.name], r.quoted))


def extra_rows(record: Record) -> list[Row]:
    """Return the measured rows that the article leaves out: cold, from raw bytes, or from host memory."""
    return [r for r in record.rows if not r.quoted and _is_extra(r)]


def _is_extra(row: Row) -> bool:
    return row.residence not in (None, "hot") or row.input_dtype in ("uint8", "int8")


def labels(rows: Sequence[Row]) -> list[str]:
    """Return a short label for each row: its name, and of what differs between the rows as much as tells them apart."""
    parts: list[Callable[[Row], str]] = [
        lambda r: "" if r.batch is None else f"batch {r.batch:,}",
        lambda r: "" if r.input_dtype is None and r.output is None else _path(r),
        lambda r: r.residence or "",
    ]
    spare: list[Callable[[Row], str]] = [
        lambda r: clean(r.engine or ""),
        lambda r: "" if r.threads is None else f"{r.threads} threads",
        lambda r: clean(r.variant or ""),
    ]

    def differ(part: Callable[[Row], str]) -> bool:
        return len({part(r) for r in rows}) > 1

    def written(used: Sequence[Callable[[Row], str]]) -> list[str]:
        return [" · ".join(filter(None, [clean(r.name), *(part(r) for part in used)])) for r in rows]

    def told_apart(used: Sequence[Callable[[Row], str]]) -> int:
        return len(set(zip(written(used), (r.quoted for r in rows), strict=True)))

    used = [part for part in parts if differ(part)]
    for part in spare:
        if told_apart([*used, part]) > told_apart(used):
            used.append(part)
    return written(used)


def row_of_samples(record: Record, key: str) -> Row | None:
    """Return the row that the latency samples called `key` belong to (see `gigamlp.jobs.Job.key`), if there is one."""
    for row in record.rows:
        begins = f"{row.name} {row.engine} {row.variant} "
        parts = (f" batch={row.batch} ", f" {row.input_dtype} ", f"-> {row.output}")
        if key.startswith(begins) and key.endswith(f" {row.residence}") and all(part in key for part in parts):
            return row
    return None
