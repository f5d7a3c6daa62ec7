"""`gigamlp info`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gigamlp.cli.context import DEFAULTS, Common, Given
from gigamlp.cli.tables import values_table

if TYPE_CHECKING:
    from gigamlp.cascade import Cascade

__all__ = ["describe", "info", "words"]


def info(model: Path, /, *, common: Common = DEFAULTS, context: Given) -> None:
    """Show what a model file holds.

    Parameters
    ----------
    model
        A .safetensors file that gigamlp wrote, or the name of a shipped model.
    """
    found = describe(model)
    context.emit(found)
    if not context.as_json:
        context.show(values_table(words(found)))


def describe(path: Path) -> dict[str, Any]:
    """Return what the model file at `path` holds, as JSON-ready values."""
    import json

    import numpy as np
    from safetensors import safe_open

    from gigamlp import models
    from gigamlp.cascade import Cascade
    from gigamlp.mlp import load

    mlp = load(path)  # this checks the file; what follows only reads what the MLP does not keep
    if isinstance(mlp, Cascade):
        return _describe_cascade(mlp, path)
    path = path if path.is_file() else models.path(str(path))
    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()["gigamlp"])
        stored = file.get_slice("layers.0.weight").get_dtype()

    def numbers(value: Any) -> Any:
        if np.ndim(value) == 0:
            return float(value)
        return {"minimum": float(np.min(value)), "maximum": float(np.max(value)), "values": len(value)}

    return {
        "schema": "gigamlp-info/1",
        "path": str(path),
        "bytes": path.stat().st_size,
        "format_version": header["format_version"],
        "stored_as": {"F32": "float32", "F16": "float16"}.get(stored, stored),
        "name": mlp.name,
        "digest": mlp.digest(),
        "features": mlp.features,
        "features_read": mlp.features_read,
        "columns": None if mlp.columns is None else [list(run) for run in mlp.columns],
        "input_scale": numbers(mlp.input_scale),
        "input_offset": numbers(mlp.input_offset),
        "layers": [
            {
                "inputs": layer.weight.shape[1],
                "outputs": layer.weight.shape[0],
                "bias": layer.bias is not None,
                "activation": layer.activation,
            }
            for layer in mlp.layers
        ],
        "parameters": mlp.parameters,
        "macs": mlp.macs,
        "head": mlp.head,
        "classes": None if mlp.classes is None else mlp.classes.tolist(),
        "scheme": None if mlp.scheme is None else mlp.scheme.name,
    }


def _describe_cascade(cascade: Cascade, path: Path) -> dict[str, Any]:
    return {
        "schema": "gigamlp-info/1",
        "path": str(path),
        "bytes": path.stat().st_size,
        "format_version": 2,
        "name": cascade.name,
        "digest": cascade.digest(),
        "features": cascade.features,
        "features_read": cascade.features_read,
        "parameters": cascade.parameters,
        "macs": cascade.macs,
        "head": cascade.head,
        "classes": cascade.classes.tolist(),
        "stages": [repr(stage) for stage in cascade.stages],
        "thresholds": [each if each < float("inf") else None for each in cascade.thresholds],
        "calibration": None if cascade.calibration is None else asdict(cascade.calibration),
    }


def _words_of_cascade(found: dict[str, Any]) -> dict[str, Any]:
    calibration = found["calibration"]
    return {
        "name": found["name"],
        **{f"stage {index}": stage for index, stage in enumerate(found["stages"])},
        "thresholds": ", ".join("all go on" if t is None else f"{t:.4g}" for t in found["thresholds"]),
        "calibration": None
        if calibration is None
        else f"at most {calibration['max_loss']:.3%} of the rows lost, confidence {calibration['confidence']:.0%}, "
        f"from {calibration['rows']:,} rows{'' if calibration['labelled'] else ' without labels'}",
        "unsure then": None
        if calibration is None
        else ", ".join(f"{count / calibration['rows']:.2%}" for count in calibration["unsure"]),
        "parameters": f"{found['parameters']:,}",
        "multiply-accumulates": f"{found['macs']:,} a row that goes through all stages",
        "head": found["head"],
        "features": f"{found['features']:,}, of which {found['features_read']:,} are read",
        "file": f"{found['path']}, {found['bytes']:,} bytes, format {found['format_version']}",
        "digest": found["digest"],
    }


def words(found: dict[str, Any]) -> dict[str, Any]:
    """Return the same as one line of text a name."""
    if "stages" in found:
        return _words_of_cascade(found)

    def numbers(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        return f"{value['minimum']:.6g} to {value['maximum']:.6g}, one for each of {value['values']} features"

    layers = [
        f"{layer['inputs']:,} → {layer['outputs']:,} {layer['activation']}{'' if layer['bias'] else ', no bias'}"
        for layer in found["layers"]
    ]
    classes = found["classes"]
    shown = None if classes is None else ", ".join(map(str, classes[:20])) + (" …" if len(classes) > 20 else "")
    columns = found["columns"]
    return {
        "name": found["name"],
        "layers": "; ".join(layers),
        "parameters": f"{found['parameters']:,}",
        "multiply-accumulates": f"{found['macs']:,} a row",
        "head": found["head"],
        "classes": None if shown is None else f"{len(classes)}: {shown}",
        "features": f"{found['features']:,}, of which {found['features_read']:,} are read",
        "columns": None if columns is None else ", ".join(f"{start}-{stop}" for start, stop in columns),
        "input scale": numbers(found["input_scale"]),
        "input offset": numbers(found["input_offset"]),
        "scheme": found["scheme"] or "none (float)",
        "file": f"{found['path']}, {found['bytes']:,} bytes, {found['stored_as']}, format {found['format_version']}",
        "digest": found["digest"],
    }
