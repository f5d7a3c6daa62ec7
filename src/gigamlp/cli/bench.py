"""`gigamlp bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, UsageError, check_out
from gigamlp.cli.options import (
    Batches,
    DataPath,
    Device,
    Engines,
    InputDtypes,
    LabelsPath,
    Outputs,
    Positive,
    Residences,
    Seed,
    Threads,
)
from gigamlp.cli.tables import rows_table

if TYPE_CHECKING:
    from gigamlp.cascade import Cascade, Model
    from gigamlp.mlp import MLP
    from gigamlp.record import Record

__all__ = ["bench"]

Rows = tuple[Any, Any] | None
GATE_ROWS = 5000


def bench(
    *model: str,
    engine: Engines = None,
    batch: Batches = (1024,),
    input_dtype: InputDtypes = ("uint8",),
    output: Outputs = ("class",),
    residence: Residences = ("hot",),
    threads: Threads = None,
    repeats: Positive = 7,
    full: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    max_disagreement: float = 0.001,
    data: DataPath = None,
    labels: LabelsPath = None,
    seed: Seed = 0,
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    device: Device = "auto",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Time models: every engine, batch, input, output and residence that is asked for, the best variant of each.

    The accuracy beside a speed is that of the timed answers, on MNIST's test rows or on those of --data.

    Parameters
    ----------
    model
        .safetensors files that gigamlp wrote; or the word ridge, a ridge-ELM of 512 fitted first. A cascade of
        byte rows is timed on random bytes and other images too.
    repeats
        Timed repeats of each row.
    full
        Try every variant of each engine, not only the promising ones.
    max_disagreement
        Share of rows for which a variant may give another class than the float32 model, and still be timed.
    out
        Where the record goes, as JSON.
    """
    if not model:
        raise UsageError("name at least one MODEL: a .safetensors file, or the word ridge")
    check_out(out)
    from gigamlp.bench import bench as measure

    records = []
    with context.progress("reading") as progress:
        for mlp, rows, gate in _models(model, data=data, labels=labels, seed=seed, device=device, context=context):
            record = measure(
                mlp,
                engines=engine,
                batch=batch,
                input_dtype=input_dtype,
                output=output,
                residence=residence,
                threads=threads,
                data=rows,
                validation=gate,
                device=device,
                repeats=repeats,
                full=full,
                max_disagreement=max_disagreement,
                command=context.command,
                progress=progress,
            )
            records.append(record)
    record = _join(records)
    if out is not None:
        record.save(out)
    context.emit(record.to_json())
    context.show(rows_table(f"{record.device.get('name')}", record.rows, context.out))
    for skipped in record.extra.get("skipped", ()):
        context.note(f"not run: {skipped['engine']}, {skipped['spec']}: {skipped['reason']}")
    if record.extra.get("no_roofs"):
        context.note(record.extra["no_roofs"])
    if out is not None:
        context.note(f"record in {out}")


def _models(
    names: tuple[str, ...], *, data: Path | None, labels: Path | None, seed: int, device: str, context: Context
) -> list[tuple[Model, Rows, Any]]:
    """Return each model, the rows to feed it, and training rows to judge its variants on.

    Two models of one name are called after their files.
    """
    from gigamlp.cascade import Cascade
    from gigamlp.cli.rows import accuracy_rows, load_dataset
    from gigamlp.mlp import load

    loaded = {name: None if name == "ridge" else load(name) for name in dict.fromkeys(names)}
    dataset = load_dataset(data, labels)
    out: list[tuple[Model, Rows, Any]] = []
    files: list[str] = []
    apart = None if dataset.x_test is None else dataset.x[:GATE_ROWS]
    for name, mlp in loaded.items():
        if mlp is None:
            out.append((*_ridge(dataset, seed, device), apart))
            files.append(name)
            continue
        rows = accuracy_rows(mlp, dataset, named=data is not None)
        if rows is None:
            context.note(f"{name}: not a model for MNIST; random rows, no accuracy (name its rows with --data)")
        out.append((mlp, rows, None if rows is None else apart))
        files.append(name)
        if isinstance(mlp, Cascade):
            others = _other_rows(mlp, rows, apart)
            out += others
            files += [name] * len(others)
    called = [mlp.name for mlp, _, _ in out]
    return [
        (mlp if called.count(mlp.name) == 1 else mlp.with_(name=f"{mlp.name} ({name})"), rows, gate)
        for name, (mlp, rows, gate) in zip(files, out, strict=True)
    ]


def _other_rows(cascade: Cascade, rows: Rows, gate: Any) -> list[tuple[Cascade, Rows, Any]]:
    """Return what a cascade is timed on beside its own rows, as its speed depends on them: see docs/cascade.md."""
    import numpy as np

    from gigamlp.data.synthetic import garment_images, random_bytes

    if rows is None or np.asarray(rows[0]).dtype != np.uint8:
        return []
    n, name = len(rows[0]), cascade.name
    found: list[tuple[Cascade, Rows, Any]] = []
    found.append((cascade.with_(name=f"{name}, random bytes"), (random_bytes(n, cascade.features), None), gate))
    if cascade.features == 784:
        found.append((cascade.with_(name=f"{name}, garments"), (garment_images(n), None), gate))
    return found


def _ridge(dataset: Any, seed: int, device: str) -> tuple[MLP, Rows]:
    """Fit a ridge-ELM, and return it with rows that it was not fitted on."""
    from gigamlp.cli.rows import with_labels
    from gigamlp.data import hold_out
    from gigamlp.train import ridge

    with_labels(dataset)
    x, y, x_test, y_test = dataset.x, dataset.y, dataset.x_test, dataset.y_test
    if x_test is None:
        x, y, x_test, y_test = hold_out(x, y, seed=seed)
    return ridge(x, y, hidden=512, seed=seed, device=device).with_(name="ridge-512"), (x_test, y_test)


def _join(records: list[Record]) -> Record:
    """Put the rows of all models into one record."""
    extra = dict(records[0].extra)
    for record in records[1:]:
        samples, skipped = record.extra.get("latency_samples", {}), record.extra.get("skipped", [])
        extra["latency_samples"] = extra.get("latency_samples", {}) | samples
        extra["skipped"] = extra.get("skipped", []) + [s for s in skipped if s not in extra.get("skipped", [])]
    return replace(records[0], rows=[row for record in records for row in record.rows], extra=extra)
