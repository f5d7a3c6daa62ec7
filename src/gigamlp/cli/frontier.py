"""`gigamlp frontier`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators
from rich import box
from rich.table import Table

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, UsageError, check_out
from gigamlp.cli.options import (
    Batches,
    DataPath,
    Device,
    Engines,
    Fraction,
    InputDtypes,
    LabelsPath,
    Positive,
    Residences,
    Seed,
    Threads,
    Widths,
)
from gigamlp.report.layout import clean, number, percent

if TYPE_CHECKING:
    from gigamlp.frontier import Point
    from gigamlp.mlp import MLP

__all__ = ["frontier"]

_HELD = 5000


def frontier(
    *,
    models: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True, metavar="MODEL")] = (),
    hidden: Widths = (),
    precision: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ("w8", "float"),
    engine: Engines = None,
    batch: Batches = (65536,),
    input_dtype: InputDtypes = ("uint8",),
    residence: Residences = ("hot",),
    threads: Threads = None,
    repeats: Positive = 7,
    min_accuracy: Fraction = None,
    min_share_of_fastest: Fraction = None,
    data: DataPath = None,
    labels: LabelsPath = None,
    cascades: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    seed: Seed = 0,
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    plot: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    device: Device = "auto",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Measure networks of different accuracy and speed here, and say which ones no other one beats in both.

    Networks are compared by their accuracy on held-out training rows; the accuracy on test rows is shown beside it.

    Parameters
    ----------
    models
        .safetensors files, or names of shipped models. Default: all shipped models, or none with --hidden.
    hidden
        Train networks of these widths first, quickly, and measure them too.
    precision
        w8: int8 first layer; w8a8, w7: see gigamlp.quantise; float: weights as they are.
    repeats
        Timed repeats of each row.
    min_accuracy
        Name the fastest network of at least this validation accuracy.
    min_share_of_fastest
        Name the most accurate network of at least this share of the fastest one's speed.
    cascades
        Measure so many cascades of these networks too: those that their speeds alone promise most of.
    out
        Where the record goes, as JSON.
    plot
        Where the picture goes, as SVG.
    """
    if min_accuracy is not None and min_share_of_fastest is not None:
        raise UsageError("--min-accuracy and --min-share-of-fastest exclude each other")
    check_out(out)
    check_out(plot)
    from gigamlp._atomic import write_text
    from gigamlp.cli.rows import load_dataset, one_mlp, with_labels
    from gigamlp.data import hold_out
    from gigamlp.frontier import frontier as measure
    from gigamlp.frontier import pick
    from gigamlp.models import names as shipped
    from gigamlp.report.drawing import require_matplotlib

    if plot is not None:
        require_matplotlib()
    dataset = with_labels(load_dataset(data, labels))
    all_x: Any = dataset.x
    all_y: Any = dataset.y
    x, y, x_val, y_val = hold_out(all_x, all_y, rows=_HELD, seed=seed)
    found = [one_mlp(name) for name in (models or (() if hidden else shipped()))]
    if hidden:
        wanted = {"seed": seed, "device": device, "image_shape": dataset.image_shape}
        found += _trained(hidden, (x, y), (x_val, y_val), wanted, context)
    with context.progress("frontier") as progress:
        made = measure(
            found,
            (x_val, y_val),
            test=None if dataset.x_test is None or dataset.y_test is None else (dataset.x_test, dataset.y_test),
            calibration=x[:_HELD],
            precision=precision,
            engines=engine,
            batch=batch,
            input_dtype=input_dtype,
            residence=residence,
            threads=threads,
            device=device,
            repeats=repeats,
            cascades=cascades,
            command=context.command,
            progress=progress,
        )
    chosen = None
    if min_accuracy is not None or min_share_of_fastest is not None:
        chosen = pick(made, min_accuracy=min_accuracy, min_share_of_fastest=min_share_of_fastest)
    if out is not None:
        made.record.save(out)
    if plot is not None:
        from gigamlp.report.frontier import frontier_svg

        write_text(plot, frontier_svg(made.points, str(made.record.device.get("name"))))
    context.emit(made.record.to_json())
    context.show(_table(made.points, str(made.record.device.get("name"))))
    if chosen is not None:
        context.show(
            f"chosen: {clean(chosen.name)}, {chosen.scheme or 'float'}, {chosen.engine}, batch {chosen.batch:,}"
        )
    for each in made.record.extra["skipped"]:
        context.note(f"not run: {each['model']}, {each['precision']}, {each.get('engine', 'any')}: {each['reason']}")
    for path in filter(None, (out, plot)):
        context.note(f"written: {path}")


def _trained(
    widths: tuple[int, ...], rows: tuple[Any, Any], held: tuple[Any, Any], wanted: dict[str, Any], context: Context
) -> list[MLP]:
    from gigamlp.train import distill

    with context.progress("training") as progress:
        found = distill(*rows, widths, seeds=1, quick=True, validation=held, progress=progress, **wanted)
    return list(found.models.values())


def _table(points: tuple[Point, ...], device: str) -> Table:
    table = Table(title=clean(device), box=box.SIMPLE_HEAD, header_style="bold")
    titles = ("network", "hidden", "bytes", "scheme", "engine", "batch", "M samples/s", "validation", "test", "")
    for title in titles:
        table.add_column(
            title, justify="left" if title in ("network", "engine", "scheme") else "right", overflow="fold"
        )
    for point in points:
        table.add_row(
            clean(point.name),
            "-".join(map(str, point.hidden)),
            f"{point.bytes_read:,}",
            point.scheme or "float",
            point.engine,
            f"{point.batch:,}",
            number(point.samples_per_s / 1e6, 3),
            percent(point.validation_accuracy),
            percent(point.test_accuracy),
            "dominated" if point.dominated else "",
            style="dim" if point.dominated else "",
        )
    return table
