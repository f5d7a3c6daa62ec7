"""`gigamlp report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given, UsageError, check_out
from gigamlp.errors import FileFormatError

if TYPE_CHECKING:
    from gigamlp.plan import Plan
    from gigamlp.record import Record

__all__ = ["report"]


def report(
    *results: Annotated[Path, Parameter(metavar="RESULT")],
    out: Annotated[Path, Parameter(metavar="FILE")] = Path("report.html"),
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Write one self-contained HTML page from results: tables, roofline, accuracy against speed, latency, plans.

    Parameters
    ----------
    results
        JSON files that `reproduce`, `bench`, `frontier` or a benchmark wrote, and Plans that `optimize` wrote. With
        several records, each after the first is compared with the first: ratios, and whether they are more than noise.
    out
        Where the page goes.
    """
    if not results:
        raise UsageError("name at least one result: gigamlp report RESULT.json")
    check_out(out)
    from gigamlp.report import write_report
    from gigamlp.report.drawing import require_matplotlib

    require_matplotlib()
    records, plans = read_results(results)
    if not records:
        raise FileFormatError("a report needs at least one record; a Plan alone has `gigamlp optimize` to explain it")
    write_report(records, out, plans=plans)
    facts: dict[str, Any] = {
        "schema": "gigamlp-report/1",
        "out": str(out),
        "records": [str(record.command) for record in records],
        "rows": sum(len(record.rows) for record in records),
        "plans": [plan.mlp_name for plan in plans],
    }
    context.emit(facts)
    context.note(f"written: {out}")


def read_results(paths: tuple[Path, ...]) -> tuple[list[Record], list[Plan]]:
    """Return the records and the Plans that the files hold, in their order.

    Raises
    ------
    FileFormatError
        If a file is neither.
    """
    from gigamlp.plan import SCHEMA as PLAN
    from gigamlp.plan import Plan
    from gigamlp.record import SCHEMA as RECORD
    from gigamlp.record import Record

    records, plans = [], []
    for path in paths:
        try:
            schema = json.loads(path.read_text(encoding="utf-8")).get("schema")
        except (UnicodeDecodeError, ValueError, AttributeError, RecursionError) as error:
            raise FileFormatError(f"{path}: not a JSON object: {error}") from error
        if schema == PLAN:
            plans.append(Plan.load(path))
        elif schema == RECORD:
            records.append(Record.load(path))
        else:
            raise FileFormatError(f"{path}: schema is {schema!r}, expected {RECORD!r} or {PLAN!r}")
    return records, plans
