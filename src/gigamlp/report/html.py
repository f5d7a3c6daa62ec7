"""``report.html``: one self-contained page that asks no server for anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from gigamlp import __version__
from gigamlp._atomic import write_text
from gigamlp.errors import InvalidInput
from gigamlp.plan import Candidate, Plan, objective
from gigamlp.record import Record, Row
from gigamlp.report.compare import Comparison, Pair, compare
from gigamlp.report.drawing import require_matplotlib
from gigamlp.report.figures import (
    BARS_MAX,
    CURVES_MAX,
    accuracy_figure,
    latency_figure,
    throughput_figure,
)
from gigamlp.report.layout import (
    ALL,
    ARTICLE,
    MISSING,
    SPLIT,
    Column,
    article_rows,
    clean,
    columns_in_use,
    extra_rows,
    footnotes,
    labels,
    number,
    percent,
    throughput,
)
from gigamlp.report.roofline import limits, meaning, roofline_figure
from gigamlp.spec import Spec

__all__ = ["render", "write_report"]

_NOTES_MAX = 6  # more are folded away

Plans = Plan | Mapping[str, Plan] | Iterable[Plan]


def write_report(
    record: Record | Sequence[Record],
    path: str | os.PathLike[str],
    *,
    plans: Plans | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `record` as one self-contained HTML page, atomically.

    Parameters
    ----------
    record : Record or sequence of Record
        Each becomes a part of the page. Each after the first is compared with the first.
    path : path-like
    plans : Plan, mapping of str to Plan, or iterable of Plan, optional
        Every candidate is shown with its times or the reason of its rejection.
    extra : mapping, optional
        Names and values shown at the top, for example ``Reproduction.summary``.

    Raises
    ------
    Unsupported
        If matplotlib is not installed.
    InvalidInput
        If there is no record at all.
    """
    write_text(path, render(record, plans=plans, extra=extra))


def render(
    record: Record | Sequence[Record], *, plans: Plans | None = None, extra: Mapping[str, Any] | None = None
) -> str:
    """Return the text of the page that `write_report` writes."""
    require_matplotlib()
    records = [record] if isinstance(record, Record) else list(record)
    if not records:
        raise InvalidInput("a report needs at least one record")
    title = f"gigamlp on {_device_name(records[0])}"
    body = [f"<h1>{_text(title)}</h1>", '<p class="lead">Small MLPs, measured; what is quoted is labelled so.</p>']
    if extra:
        body += [_definitions(extra)]
    for index, one in enumerate(records[1:], 2):
        body += _comparison(compare(records[0], one), records[0], one, index)
    for index, one in enumerate(records):
        body += _record(one, f"r{index}", alone=len(records) == 1)
    found = _plans(plans)
    if found:
        body.append("<h2>Plans: what was tried, and why it was chosen or not</h2>")
        body += [_plan(plan) for plan in found]
    body.append(_GLOSSARY)
    page = Template(resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8"))
    return page.substitute(version=escape(__version__), title=_text(title), body="\n".join(body))


_GLOSSARY = """<h2>How to read it</h2>
<p class="note">Wall and device times are per launch, over many back-to-back launches with one synchronise at the end;
the figure is the median of the repeats, with its interquartile range (IQR). p50 and p99 are from issue to answer,
synchronised each time. <em>hot</em>: the same input buffer again and again; <em>cold</em>: rotating buffers larger than
3x the last-level cache; <em>host</em>: from rows in host memory to answers in host memory. The accuracy beside a speed
is that of the answers of the timed runner itself. The roof of a row is the least time in which this machine's measured
bandwidth and multiply-accumulate rate could do the row's work.</p>"""


def _text(value: object) -> str:
    return escape(clean(str(value)))


def _device_name(record: Record) -> str:
    return str(record.device.get("name") or "an unnamed device")


# ---- parts ----------------------------------------------------------------------------------------------------------


def _record(record: Record, prefix: str, *, alone: bool) -> list[str]:
    out = [] if alone else [f"<h2>{_text(_device_name(record))}: {_text(record.command)}</h2>"]
    out += ["<h2>What was run</h2>", _ran(record)]
    if not record.rows:
        return [*out, "<p>The record holds no rows.</p>"]
    article, others = article_rows(record), extra_rows(record)
    if article:
        quoted = any(r.quoted for r in article)
        out.append(f"<h2>{'The article’s table: measured here beside quoted' if quoted else 'Resident input'}</h2>")
        if quoted:
            out.append('<p class="note">Grey rows in italics are quoted: other people’s figures on other hardware.</p>')
        out.append(_rows_table(article, ARTICLE))
    if others:
        out.append("<h2>Cold, from raw bytes, from host memory</h2>")
        out.append('<p class="note">H2D, compute, D2H and enqueue are the parts of a host-inclusive launch.</p>')
        out.append(_rows_table(others, SPLIT))
    out.append("<h2>Throughput and its roof</h2>")
    out.append(
        _figure(
            throughput_figure(record, f"{prefix}-throughput"),
            f"Samples per second of the rows of more than one row a batch (the {BARS_MAX} quickest if there are more), "
            "and, where known, the most that this machine’s measured limits allow.",
            "No row has a throughput.",
        )
    )
    line = roofline_figure(record, f"{prefix}-roofline")
    if line is not None:
        caption = (
            "What the measured bandwidths allow, and what was reached. Rows that stay in a cache may lie above the "
            f"memory's line. {meaning(record.rows).capitalize()}."
        )
        out += ["<h2>Roofline</h2>", _figure(line, caption, "")]
    out.append("<h2>Accuracy against speed</h2>")
    out.append(
        _figure(
            accuracy_figure(record, f"{prefix}-accuracy"),
            "Each mark is a row of more than one row a batch; open marks are quoted.",
            "No row has both an accuracy and a throughput.",
        )
    )
    out.append("<h2>Latency</h2>")
    out.append(
        _figure(
            latency_figure(record, f"{prefix}-latency"),
            f"From issue to answer, synchronised each time; the {CURVES_MAX} quickest rows, batch 1 first, where "
            "there are samples of each call.",
            "No latency was recorded.",
        )
    )
    table = _rows_table(record.rows, ALL)
    out.append(f"<details><summary>All {len(record.rows)} rows, every column</summary>{table}</details>")
    return out


def _comparison(found: Comparison, before: Record, after: Record, index: int) -> list[str]:
    """Return the part that compares record `index` with the first."""
    names = [_device_name(record) for record in (before, after)]
    out = [f"<h2>Compared: record {index} with record 1</h2>"]
    out.append(
        _definitions({"record 1": f"{names[0]}: {before.command}", f"record {index}": f"{names[1]}: {after.command}"})
    )
    if names[0] != names[1]:
        out.append('<p class="note">The records are of different machines.</p>')
    if not found.pairs:
        return [*out, "<p>No row of one did the same work as a row of the other.</p>"]
    mean = found.geometric_mean
    out.append(
        f'<p class="note">{len(found.pairs)} rows did the same work; geometric mean of the ratios {number(mean, 3)}. '
        "The ratio is of samples a second (without one, of p50), above 1 is faster. Noise is the spread of the "
        "repeats of both, which knows nothing of other days and other clocks. "
        f"Only in record 1: {len(found.only_before)} rows; only in record {index}: {len(found.only_after)}.</p>"
    )
    titles = ("before", "after", "ratio", "noise")
    heads = [("row", False), *((title, True) for title in titles), ("verdict", False)]
    texts = labels([pair.before for pair in found.pairs])
    lines = [_compared(text, pair) for text, pair in zip(texts, found.pairs, strict=True)]
    return [*out, _table(heads, lines)]


def _compared(text: str, pair: Pair) -> tuple[str, list[Cell]]:
    def speed(row: Row) -> str:
        return f"{throughput(row)} M/s" if row.samples_per_s is not None else f"p50 {number(row.p50_us, 3)} µs"

    noise = MISSING if pair.noise is None else f"± {percent(pair.noise, 1)}"
    cells = [(text, False), (speed(pair.before), True), (speed(pair.after), True)]
    cells += [(f"{pair.ratio:.3f}", True), (noise, True), (pair.verdict, False)]
    return ("rejected" if pair.verdict == "within noise" else ""), cells


def _ran(record: Record) -> str:
    values: dict[str, Any] = {"command": record.command}
    values |= {f"device {key}" if key != "name" else "device": value for key, value in record.device.items()}
    values["versions"] = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    if "seed" in record.extra:
        values["seed"] = record.extra["seed"]
    values["measured limits"] = ", ".join(_limit(str(k), v) for k, v in limits(record).items() if v)
    return _definitions(values)


def _limit(key: str, value: Any) -> str:
    """Return one of the measured roofs with its unit."""
    if isinstance(value, Mapping):
        return ", ".join(f"{dtype} {float(rate) / 1e12:.3g} TMAC/s" for dtype, rate in value.items() if rate)
    words = key.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    if key.endswith("_bytes_s"):
        return f"{words} {float(value) / 1e9:.4g} GB/s"
    return f"{words} {float(value) / 2**20:.4g} MiB" if key.endswith("_bytes") else f"{words} {_plain(value)}"


def _definitions(values: Mapping[str, Any]) -> str:
    items = []
    for key, value in values.items():
        shown = _plain(value)
        if shown:
            body = f"<code>{_text(shown)}</code>" if key == "command" else _text(shown)
            items.append(f"<dt>{_text(str(key).replace('_', ' '))}</dt><dd>{body}</dd>")
    return f"<dl>{''.join(items)}</dl>" if items else ""


def _plain(value: Any) -> str:
    """Return a JSON value in words; nested ones as ``key value`` pairs."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(part) for part in value)
    return str(value)


def _figure(svg: str | None, caption: str, without: str) -> str:
    if svg is None:
        return f'<p class="note">{_text(without)}</p>'
    return f"<figure>{svg}<figcaption>{_text(caption)} The tables of this page hold the numbers.</figcaption></figure>"


def _rows_table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    used = columns_in_use(columns, rows)
    sources, notes = footnotes(rows)
    with_source = set(sources) != {"measured"}
    heads = [(c.title, c.is_number) for c in used]
    if with_source:
        heads.insert(1, ("source", False))
    body = []
    for index, row in enumerate(rows):
        marks = ["quoted"] if row.quoted else []
        marks += ["first"] if index and rows[index - 1].name != row.name else []
        cells = [(c.text(row), c.is_number) for c in used]
        if with_source:
            cells.insert(1, (sources[index], False))
        body.append((" ".join(marks), cells))
    lines = "<br>".join(f"[{number}] {_text(note)}" for number, note in enumerate(notes, 1))
    if len(notes) > _NOTES_MAX:
        lines = f'<details><summary>{len(notes)} notes</summary><p class="note">{lines}</p></details>'
    elif lines:
        lines = f'<p class="note">{lines}</p>'
    return _table(heads, body) + lines


Cell = tuple[str, bool]


def _table(heads: Sequence[Cell], body: Iterable[tuple[str, Sequence[Cell]]]) -> str:
    head = "".join(f'<th scope="col" class="{"n" if n else "short"}">{_text(title)}</th>' for title, n in heads)
    lines = []
    for marks, cells in body:
        mark = f' class="{marks}"' if marks else ""
        texts = "".join(f"<td{_side(n, len(text))}>{_text(text)}</td>" for text, n in cells)
        lines.append(f"<tr{mark}>{texts}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{table}</div>'


def _side(is_number: bool, length: int) -> str:
    if is_number:
        return ' class="n"'
    return ' class="text"' if length > 22 else ' class="short"'


# ---- plans ----------------------------------------------------------------------------------------------------------


def _plans(plans: Plans | None) -> list[Plan]:
    if plans is None:
        return []
    if isinstance(plans, Plan):
        return [plans]
    return list(plans.values()) if isinstance(plans, Mapping) else list(plans)


def _plan(plan: Plan) -> str:
    specs = list(dict.fromkeys(c.spec for c in plan.candidates))
    out = [f"<details><summary>{_text(plan.mlp_name)}: {len(plan.candidates)} candidates</summary>"]
    out.append(_definitions({"machine": plan.machine, "model digest": plan.mlp_digest, "settings": plan.settings}))
    for spec in specs:
        out.append(f"<h3>{_text(spec.label)}, by {objective(spec)}</h3>")
        out.append(_candidates(plan, spec))
    return "".join([*out, "</details>"])


def _candidates(plan: Plan, spec: Spec) -> str:
    winner = plan.winner(spec)
    group = [c for c in plan.candidates if c.spec == spec]
    group.sort(key=lambda c: (c is not winner, c.rejected is not None, c.cost_us))
    numbers = ("M samples/s", "wall µs ± IQR", "p50 µs", "p99 µs", "build s", "accuracy", "differs")
    heads = [("engine", False), ("variant", False), *((title, True) for title in numbers), ("verdict", False)]
    return _table(heads, [_candidate(plan, c, c is winner) for c in group])


def _candidate(plan: Plan, c: Candidate, won: bool) -> tuple[str, list[Cell]]:
    launches = plan.break_even_launches(c)
    verdict = "chosen" if won else f"rejected: {c.rejected}" if c.rejected is not None else "slower"
    if launches is not None and c.build_s is not None and c.build_s > 1:
        verdict += f"; its build pays off after {launches:,.0f} launches"
    wall = number(c.wall_us) + ("" if c.iqr is None or c.wall_us is None else f" ± {number(c.iqr, 2)}")
    cells: list[Cell] = [
        (c.engine, False),
        (c.variant.label or MISSING, False),
        (number(None if c.samples_per_s is None else c.samples_per_s / 1e6), True),
        (wall, True),
        (number(c.p50_us), True),
        (number(c.p99_us), True),
        (number(c.build_s, 3), True),
        (percent(c.accuracy), True),
        (percent(c.disagreement), True),
        (verdict, False),
    ]
    return ("winner" if won else "rejected" if c.rejected is not None else ""), cells
