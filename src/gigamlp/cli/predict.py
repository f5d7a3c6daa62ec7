"""`gigamlp predict`."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, UsageError
from gigamlp.cli.options import Device

if TYPE_CHECKING:
    from gigamlp.mlp import MLP

__all__ = ["predict"]

_CHUNK_ROWS = 262_144  # between two moves of the progress bar


def predict(
    model: Path,
    rows: Annotated[Path, Parameter(name="INPUT")],
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FILE")] = Path("-"),
    proba: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    logits: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    plan: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    device: Device = "auto",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Answer every row of a file, one label a line.

    Parameters
    ----------
    model
        A .safetensors file that gigamlp wrote, or the name of a shipped model, as mnist-40.
    rows
        Rows: .npy, .npz, .idx (.gz) or a folder of IDX files.
    out
        Where the answers go: .npy, .csv (with a header line), or - for stdout.
    proba
        Probabilities, one column a class, instead of labels.
    logits
        Logits, one column an output, instead of labels.
    plan
        A plan that `gigamlp optimize` wrote for this model on this machine.
    """
    if proba and logits:
        raise UsageError("--proba and --logits exclude each other")
    if str(out) != "-" and out.suffix.lower() not in (".npy", ".csv"):
        raise UsageError(f"--out {out}: the name must end in .npy or .csv, or be - for stdout")
    from gigamlp.data import load_arrays
    from gigamlp.mlp import load
    from gigamlp.plan import Plan
    from gigamlp.session import Session

    mlp = load(model)
    x = load_arrays(rows).x
    kind = "proba" if proba else "logits" if logits else "class"
    with Session(mlp, None if plan is None else Plan.load(plan), device=device) as session:
        ask = {"class": session.predict, "proba": session.predict_proba, "logits": session.logits}[kind]
        answers = _in_chunks(ask, mlp.check_rows(x), context)
    head = _head(mlp, kind, answers)
    if str(out) != "-":
        _write(out, answers, head)
        context.note(f"{len(answers):,} answers in {out}")
    elif not context.as_json:
        sys.stdout.write(_csv(answers, None))
    values = answers.tolist() if str(out) == "-" else None
    context.emit(
        {
            "schema": "gigamlp-predict/1",
            "model": mlp.name,
            "rows": len(answers),
            "output": kind,
            "columns": head,
            "out": None if str(out) == "-" else str(out),
            "values": values,
        }
    )


def _in_chunks(ask: Any, x: Any, context: Context) -> Any:
    import numpy as np

    parts = []
    with context.progress("predicting") as progress:
        for begin in range(0, len(x), _CHUNK_ROWS):
            parts.append(ask(x[begin : begin + _CHUNK_ROWS]))
            if progress is not None:
                progress(min(begin + _CHUNK_ROWS, len(x)), len(x), f"{min(begin + _CHUNK_ROWS, len(x)):,} rows")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _head(mlp: MLP, kind: str, answers: Any) -> list[str]:
    """Return the names of the answers' columns."""
    if answers.ndim == 1:
        return ["label" if mlp.classes is not None else "output"]
    classes = [] if mlp.classes is None else mlp.classes.tolist()
    names = classes if len(classes) == answers.shape[1] else range(answers.shape[1])
    return [f"{kind}_{name}" for name in names]


def _csv(answers: Any, head: list[str] | None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if head is not None:
        writer.writerow(head)
    writer.writerows([value] if answers.ndim == 1 else value for value in answers.tolist())
    return text.getvalue()


def _write(path: Path, answers: Any, head: list[str]) -> None:
    import numpy as np

    from gigamlp._atomic import atomic_write, write_text

    if path.suffix.lower() == ".csv":
        write_text(path, _csv(answers, head))
        return
    with atomic_write(path) as file:
        np.save(file, answers, allow_pickle=False)
