"""`gigamlp optimize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given, check_out
from gigamlp.cli.options import (
    Batches,
    Budget,
    DataPath,
    Device,
    Engines,
    Fraction,
    InputDtype,
    InputOns,
    LabelsPath,
    Output,
    Threads,
)

__all__ = ["optimize"]


def optimize(
    model: Path,
    /,
    *,
    batch: Batches = (1, 1024, 65536),
    input_dtype: InputDtype = "uint8",
    output: Output = "class",
    input_on: InputOns = None,
    engine: Engines = None,
    min_accuracy: Fraction = None,
    max_disagreement: Fraction = None,
    data: DataPath = None,
    labels: LabelsPath = None,
    threads: Threads = None,
    full: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    budget: Budget = None,
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    cache: Annotated[bool, Parameter(negative="--no-cache", show_default=False)] = True,
    device: Device = "auto",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Measure the promising ways to run a model on this machine and choose the fastest that answers right.

    Without --data, only ways whose logits agree with float64 within 1e-3 compete.

    Parameters
    ----------
    model
        A .safetensors file that gigamlp wrote, or the name of a shipped model, as mnist-40.
    min_accuracy
        The least accuracy on the rows of --data.
    max_disagreement
        The most rows of --data, as a fraction, that may be answered otherwise than in float32. Default: 0.001.
    full
        Try every variant of every engine, not only the promising ones.
    out
        Where the plan goes, as JSON.
    cache
        Whether the plan is also kept for every Session of this model on this machine that is given no plan.
    """
    from gigamlp.cli.rows import load_dataset
    from gigamlp.mlp import load
    from gigamlp.plancache import keep
    from gigamlp.tune import Effort
    from gigamlp.tune import optimize as tune

    check_out(out)
    mlp = load(model)
    validation = None
    if data is not None or labels is not None:
        dataset = load_dataset(data, labels)
        validation = (dataset.x, dataset.y)
    with context.progress("measuring") as progress:
        plan = tune(
            mlp,
            device,
            batch,
            input_dtype,
            output,
            validation=validation,
            input_on=input_on,
            threads=threads,
            min_accuracy=min_accuracy,
            max_disagreement=max_disagreement,
            engines=engine,
            effort=Effort(full=full),
            budget_s=budget,
            progress=progress,
            cache=False,
        )
    kept = keep(plan) if cache else None
    if out is not None:
        plan.save(out)
    context.emit(plan.to_json())
    context.show(plan.explain())
    if out is not None:
        context.note(f"plan in {out}")
    if kept is not None:
        context.note(
            f"kept in {kept}, for this model without a plan; only an open question, without --engine or "
            "--threads, runs there"
        )
    elif out is None:
        context.note("the plan is not kept; --out FILE keeps it")
