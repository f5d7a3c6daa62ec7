"""`gigamlp reproduce`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, check_out
from gigamlp.cli.options import Budget, Device, Seed
from gigamlp.cli.tables import rows_table
from gigamlp.errors import Unsupported
from gigamlp.report.layout import ARTICLE, SPLIT, article_rows, clean, extra_rows

if TYPE_CHECKING:
    from gigamlp.record import Record
    from gigamlp.reproduce import Reproduction

__all__ = ["reproduce"]


def reproduce(
    *,
    quick: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    grid: Literal["default", "full"] = "default",
    budget: Budget = None,
    seed: Seed = 0,
    out: Annotated[Path, Parameter(metavar="DIR")] = Path("results/reproduce"),
    device: Device = "auto",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Run the article's story on this machine, from raw MNIST to its table.

    A ridge-ELM at every width, every way to run it timed, the fast enough ones fine-tuned, the best chosen on held-out
    rows; then the rows that the article leaves out: cold, from raw bytes, from host memory. Figures of the article's
    hardware stand beside ours, labelled as quoted.

    Parameters
    ----------
    quick
        Fewer widths, epochs and repeats, and no compilation.
    grid
        full also compiles every variant and keeps every survivor.
    out
        Where reproduce.json, report.html, the plans and the models go. Files of an earlier run are replaced.
    """
    from gigamlp.report.drawing import require_matplotlib
    from gigamlp.reproduce import reproduce as run

    check_out(out, folder=True)
    try:
        require_matplotlib()
    except Unsupported as error:
        context.note(f"there will be no report.html: {error.reason}", style="yellow")
    with context.progress("reading MNIST") as progress:
        story = run(
            device=device,
            quick=quick,
            seed=seed,
            grid=grid,
            budget_s=budget,
            command=context.command,
            progress=progress,
        )
    record = _write(story, out, context)
    context.emit(record.to_json())
    _show(record, context)
    for name in record.extra["files"]:
        context.note(str(out / name))


def _write(story: Reproduction, out: Path, context: Context) -> Record:
    """Write everything, ``reproduce.json`` last: it lists the files that belong to it."""
    from gigamlp.report import write_report

    rows = {row.name for row in story.record.rows}
    files: list[str] = []
    for name, mlp in story.models.items():
        if name in rows:
            files.append(f"{_file_name(name)}.safetensors")
            mlp.save(out / files[-1])
    for name, plan in story.plans.items():
        files.append(f"plan-{_file_name(name)}.json")
        plan.save(out / files[-1])
    extra = {**story.record.extra, "summary": story.summary}
    try:
        write_report(story.record, out / "report.html", plans=story.plans, extra=story.summary)
        files.append("report.html")
    except Unsupported as error:
        extra["report"] = error.reason
        context.note(f"no report.html: {error.reason}", style="yellow")
    record = replace(story.record, extra={**extra, "files": [*files, "reproduce.json"]})
    record.save(out / "reproduce.json")
    return record


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def _show(record: Record, context: Context) -> None:
    where = clean(str(record.device.get("name")))
    article, others = article_rows(record), extra_rows(record)
    context.show(rows_table(f"The article's table: measured on {where}, beside quoted", article, context.out, ARTICLE))
    if others:
        context.show(rows_table("Cold, from raw bytes, from host memory", others, context.out, SPLIT))
    missing = sum(r.samples_per_s is None and not r.quoted for r in record.rows)
    if missing:
        context.note(f"{missing} rows were not measured; their notes say why", style="yellow")
    if "seconds" in record.extra:
        context.note(f"{record.extra['seconds']:.0f} s")
