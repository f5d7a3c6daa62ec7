"""`gigamlp cascade`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given, UsageError, check_out
from gigamlp.cli.options import DataPath, Fraction, LabelsPath, Seed
from gigamlp.cli.tables import values_table

if TYPE_CHECKING:
    from gigamlp.cascade import Cascade

__all__ = ["cascade"]

_HELD = 5000


def cascade(
    *stage: str,
    out: Annotated[Path, Parameter(metavar="FILE")],
    max_loss: Fraction = 0.001,
    confidence: Fraction = 0.95,
    name: str = "",
    data: DataPath = None,
    labels: LabelsPath = None,
    seed: Seed = 0,
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Join models to a cascade: each answers the rows that it is sure of, and the next one is asked about the rest.

    How sure is sure enough is found on rows that no model was trained on: all rows of --data, or the MNIST training
    rows that the shipped models left out.

    Parameters
    ----------
    stage
        Two models or more, the quickest first: .safetensors files, or names of shipped models.
    out
        Where the cascade goes: one .safetensors file, which every command takes like a model.
    max_loss
        The most rows, as a fraction, that may be answered wrong where the last model alone is right. Without labels:
        that may be answered otherwise.
    confidence
        How probable it shall be, over the draw of the rows, that this holds.
    name
        What tables call it. Default: the models' names joined with +.
    """
    if len(stage) < 2:
        raise UsageError("name at least two models, the quickest first")
    check_out(out)
    from gigamlp.calibration import calibrate
    from gigamlp.cli.rows import load_dataset, one_mlp
    from gigamlp.data import hold_out

    stages = [one_mlp(each) for each in stage]
    dataset = load_dataset(data, labels)
    x, y = dataset.x, dataset.y
    if data is None:
        assert y is not None
        x, y = hold_out(x, y, rows=_HELD, seed=seed)[2:]
    assert max_loss is not None
    assert confidence is not None
    made = calibrate(stages, x, y, max_loss=max_loss, confidence=confidence, name=name)
    made.save(out)
    found = _describe(made, x, y)
    if dataset.x_test is not None:
        found["test"] = _shares(made, dataset.x_test, dataset.y_test)
    context.emit({"schema": "gigamlp-cascade/1", "out": str(out), **found})
    if not context.as_json:
        context.show(values_table(_words(found)))
    context.note(f"cascade in {out}")


def _describe(made: Cascade, x: Any, y: Any) -> dict[str, Any]:
    calibration = made.calibration
    assert calibration is not None
    return {
        "name": made.name,
        "stages": [stage.name for stage in made.stages],
        "thresholds": [each if each < float("inf") else None for each in made.thresholds],
        "max_loss": calibration.max_loss,
        "confidence": calibration.confidence,
        "labelled": calibration.labelled,
        "validation": {"rows": calibration.rows, **_shares(made, x, y)},
    }


def _shares(made: Cascade, x: Any, y: Any) -> dict[str, Any]:
    """Return the shares of rows that go on from each stage, and with labels the accuracy of cascade and last stage."""
    import numpy as np

    from gigamlp.calibration import scheme_logits

    ids, deciding = made.decide(x, scheme_logits)
    out: dict[str, Any] = {"unsure": [float(np.mean(deciding > index)) for index in range(len(made.stages) - 1)]}
    if y is not None:
        last = made.stages[-1]
        out["accuracy"] = float(np.mean(made.labels(ids) == y))
        out["last_stage_accuracy"] = float(np.mean(last.answers(scheme_logits(last, x)) == y))
    return out


def _words(found: dict[str, Any]) -> dict[str, Any]:
    what = "lost" if found["labelled"] else "answered otherwise"
    words = {
        "stages": ", then ".join(found["stages"]),
        "thresholds": ", ".join("all go on" if t is None else f"{t:.4g}" for t in found["thresholds"])
        + " (margin of logits)",
        "promise": f"at most {found['max_loss']:.3%} of the rows {what}, confidence {found['confidence']:.0%}, "
        f"from {found['validation']['rows']:,} rows",
    }
    for part in ("validation", "test"):
        if part not in found:
            continue
        shares = found[part]
        words[f"unsure, {part} rows"] = ", ".join(f"{share:.2%}" for share in shares["unsure"])
        if "accuracy" in shares:
            words[f"accuracy, {part} rows"] = (
                f"{shares['accuracy']:.2%}; the last stage alone {shares['last_stage_accuracy']:.2%}"
            )
    return words
