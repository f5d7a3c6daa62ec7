"""`gigamlp train --recipe distill`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from gigamlp.cli.context import Context, UsageError, check_out
from gigamlp.cli.tables import values_table
from gigamlp.report.layout import percent

if TYPE_CHECKING:
    from gigamlp.data import Dataset
    from gigamlp.train import Distillation

__all__ = ["Wanted", "columns_of", "distill"]

Wanted = dict[str, Any]


def columns_of(window: int | None, crop: str | None, segments: int | None) -> Any:
    """Return what --window, --crop or --segments asks for; None is whole rows."""
    if sum(each is not None for each in (window, crop, segments)) > 1:
        raise UsageError("--window, --crop and --segments exclude each other")
    found = None if crop is None else re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", crop)
    if crop is not None and found is None:
        raise UsageError(f"--crop {crop}: height and width, as in 20x20")
    from gigamlp.train import Crop, Segments, Window

    if found is not None:
        return Crop(int(found[1]), int(found[2]))
    if window is not None:
        return Window(window)
    return None if segments is None else Segments(segments)


def distill(dataset: Dataset, wanted: Wanted, out: Path, dtype: str, *, resume: bool, context: Context) -> None:
    """Train students of every width, write the chosen one of each, and show what came out.

    Parameters
    ----------
    dataset : Dataset
        Only its training rows are trained on and chosen by; its test rows are answered by the saved models at the end.
    wanted : dict
        Keyword arguments of `gigamlp.train.distill`.
    out : Path
        The file, or for several widths what the files' names begin with.
    """
    from gigamlp.mlp import load
    from gigamlp.train import distill as train

    hidden = wanted["hidden"]
    if len(set(hidden)) != len(hidden):
        raise UsageError(f"--hidden names a width twice: {','.join(map(str, hidden))}")
    paths = {width: _named(out, width, several=len(hidden) > 1) for width in sorted(hidden)}
    for path in paths.values():
        check_out(path)
    state = out.with_name(f"{out.stem}.checkpoint")
    with context.progress("distillation") as progress:
        found = train(
            dataset.x,
            dataset.y,
            **wanted,
            image_shape=dataset.image_shape,
            progress=progress,
            checkpoint=state,
            resume=resume,
        )
    rows = []
    for width, path in paths.items():
        best = found.best(width)
        best.mlp.save(path, dtype)
        saved = load(path)  # what is measured is what the file holds
        own = [student for student in found.students if student.hidden == (width,)]
        rows.append(
            {
                "hidden": width,
                "name": saved.name,
                "out": str(path),
                "digest": saved.digest(),
                "seed": best.seed,
                "columns": None if saved.columns is None else [list(run) for run in saved.columns],
                "features_read": saved.features_read,
                "validation_accuracy": best.validation_accuracy,
                "validation_accuracies": {str(student.seed): student.validation_accuracy for student in own},
                "test_accuracy": None if dataset.x_test is None else _accuracy(saved, dataset.x_test, dataset.y_test),
            }
        )
    state.unlink(missing_ok=True)
    context.emit(_facts(found, dataset, rows))
    context.show(_summary(found, dataset), _table(rows))


def _named(out: Path, width: int, *, several: bool) -> Path:
    return out.with_name(f"{out.stem}-{width}{out.suffix}") if several else out


def _accuracy(mlp: Any, x: Any, y: Any) -> float:
    import numpy as np

    return float(np.mean(mlp.predict(x) == np.asarray(y)))


def _facts(found: Distillation, dataset: Dataset, rows: list[dict[str, Any]]) -> dict[str, Any]:
    settings = found.settings
    teacher = settings.teacher
    return {
        "schema": "gigamlp-distill/1",
        "data": dataset.name,
        "rows": settings.rows,
        "validation_rows": settings.validation_rows,
        "device": settings.device,
        "quick": settings.quick,
        "recipe": asdict(settings.recipe),
        "teacher": teacher if teacher is None or isinstance(teacher, str) else type(teacher).__name__,
        "teacher_accuracy": found.teacher_accuracy,
        "copies": len(settings.strengths),
        "pool_seconds": found.pool_seconds,
        "teacher_seconds": found.teacher_seconds,
        "selection_seconds": found.selection_seconds,
        "student_seconds": found.student_seconds,
        "models": rows,
    }


def _summary(found: Distillation, dataset: Dataset) -> Any:
    settings = found.settings
    teacher = None
    if settings.teacher is not None:
        teacher = f"{found.teacher_seconds:.1f} s"
        if found.teacher_accuracy is not None:
            teacher += f", validation accuracy {percent(found.teacher_accuracy)}"
    students = f"{len(found.students)} at once, {settings.recipe.epochs} epochs, {found.student_seconds:.1f} s"
    return values_table(
        {
            "trained on": f"{settings.rows:,} rows of {dataset.name}, chosen on {settings.validation_rows:,} others",
            "augmentation": f"{found.pool_seconds:.1f} s, {len(settings.strengths)} copies"
            if settings.augment is not None
            else "none",
            "teacher": teacher or "none",
            "reads": None
            if not found.chosen
            else "; ".join(
                f"{each.hidden[0]}: {', '.join(f'{start}-{stop}' for start, stop in each.columns)}"
                for each in found.chosen
            ),
            "students": students,
        }
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for title in ("hidden", "seed", "validation", "over the seeds", "test", "file"):
        table.add_column(title, justify="left" if title == "file" else "right", overflow="fold")
    for row in rows:
        known = [value for value in row["validation_accuracies"].values() if value is not None]
        spread = f"{percent(min(known))} to {percent(max(known))}" if known else "-"
        cells = [percent(row[key]) if row[key] is not None else "-" for key in ("validation_accuracy", "test_accuracy")]
        table.add_row(str(row["hidden"]), str(row["seed"]), cells[0], spread, cells[1], row["out"])
    return table
