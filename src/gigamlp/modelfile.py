"""The model file: safetensors with a small JSON header in its metadata. Nothing in it is executed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from gigamlp._atomic import write_bytes
from gigamlp.cascade import Calibration, Cascade
from gigamlp.errors import FileFormatError, ModelError
from gigamlp.mlp import MLP, Layer, Scheme

__all__ = ["FORMAT_VERSION", "load", "pack", "save", "unpack"]

FORMAT = "gigamlp-mlp"
FORMAT_VERSION = 2  # the newest that is read; an MLP is written as 1, a cascade as 2
_THRESHOLDS = "cascade.thresholds"

Tensors = dict[str, "np.ndarray[Any, Any]"]


def pack(model: MLP | Cascade, dtype: str = "float32") -> bytes:
    """Return the bytes of the model file for `model`, the same bytes for equal models."""
    if dtype not in ("float32", "float16"):
        raise ModelError(f"dtype must be 'float32' or 'float16', got {dtype!r}")
    if isinstance(model, MLP):
        own, tensors = _parts(model, dtype)
        header = {"format": FORMAT, "format_version": 1, **own}
    else:
        tensors = {_THRESHOLDS: np.asarray(model.thresholds, np.float32)}
        stages = []
        for index, stage in enumerate(model.stages):
            own, arrays = _parts(stage, dtype)
            stages.append(own)
            tensors.update({f"stages.{index}.{key}": array for key, array in arrays.items()})
        header = {
            "format": FORMAT,
            "format_version": 2,
            "kind": "cascade",
            "name": model.name,
            "stages": stages,
            "calibration": None if model.calibration is None else asdict(model.calibration),
        }
    return save_tensors(tensors, metadata={"gigamlp": json.dumps(header, sort_keys=True)})


def _parts(mlp: MLP, dtype: str) -> tuple[dict[str, Any], Tensors]:
    """Return the header fields and the tensors of one MLP."""
    tensors: Tensors = {}
    for index, layer in enumerate(mlp.layers):
        tensors[f"layers.{index}.weight"] = _stored(layer.weight, dtype, f"layer {index}'s weight")
        if layer.bias is not None:
            tensors[f"layers.{index}.bias"] = _stored(layer.bias, dtype, f"layer {index}'s bias")
    tensors["input.scale"] = np.asarray(mlp.input_scale, np.float32).reshape(-1)
    tensors["input.offset"] = np.asarray(mlp.input_offset, np.float32).reshape(-1)
    if mlp.scheme is not None:
        tensors.update({f"scheme.{key}": np.asarray(value) for key, value in mlp.scheme.arrays.items()})
    header = {
        "name": mlp.name,
        "activations": [layer.activation for layer in mlp.layers],
        "head": mlp.head,
        "classes": None if mlp.classes is None else mlp.classes.tolist(),
        "columns": mlp.columns,
        "features": mlp.features,
        "per_feature": {"scale": np.ndim(mlp.input_scale) == 1, "offset": np.ndim(mlp.input_offset) == 1},
        "scheme": None if mlp.scheme is None else mlp.scheme.name,
        # only if there are any: files and digests of models without names stay what they were
        **({} if mlp.feature_names is None else {"feature_names": mlp.feature_names}),
    }
    return header, tensors


def _stored(array: Any, dtype: str, what: str) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, dtype=dtype)
    if not np.isfinite(stored).all():
        raise ModelError(f"{what} exceeds the float16 range (65,504); save as float32")
    return stored


def unpack(data: bytes, where: str = "model") -> MLP | Cascade:
    """Return the MLP or Cascade in `data`. `where` names the source in error messages.

    Raises
    ------
    FileFormatError
        If the bytes are not a gigamlp model file, or of a newer format version than this program knows.
    ModelError
        If the file is sound but what it describes is no MLP or Cascade.
    """
    header = _header(data, where)
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise FileFormatError(f"{where}: damaged safetensors file: {error}") from error
    try:
        model = _mlp(header, tensors) if header["format_version"] == 1 else _cascade(header, tensors)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"{where}: the model header is incomplete or malformed: {error!r}") from error
    if tensors:
        raise FileFormatError(f"{where}: tensors that belong to no part of the model: {', '.join(sorted(tensors))}")
    return model


def _cascade(header: dict[str, Any], tensors: dict[str, Any]) -> Cascade:
    """Build the Cascade, taking each tensor that belongs to it out of `tensors`."""
    if header["kind"] != "cascade":
        raise ValueError(f"kind {header['kind']!r} is not known; version 2 has 'cascade'")
    stages = []
    for index, described in enumerate(header["stages"]):
        prefix = f"stages.{index}."
        own = {key.removeprefix(prefix): tensors.pop(key) for key in [k for k in tensors if k.startswith(prefix)]}
        stages.append(_mlp(described, own))
        tensors.update({prefix + key: array for key, array in own.items()})  # what no part took
    thresholds = tensors.pop(_THRESHOLDS)
    if thresholds.dtype != np.float32 or thresholds.ndim != 1:
        raise ValueError(f"{_THRESHOLDS} must be float32 [stages - 1], not {thresholds.dtype} {list(thresholds.shape)}")
    given = header["calibration"]
    calibration = None if given is None else Calibration(**given)
    return Cascade(tuple(stages), tuple(thresholds.tolist()), calibration, header["name"])


def _mlp(header: dict[str, Any], tensors: dict[str, Any]) -> MLP:
    """Build the MLP, taking each tensor that belongs to it out of `tensors`."""
    activations = header["activations"]
    if not isinstance(activations, list):
        raise TypeError(f"activations must be a list, not {activations!r}")
    layers = []
    for index, activation in enumerate(activations):
        weight, bias = tensors.pop(f"layers.{index}.weight"), tensors.pop(f"layers.{index}.bias", None)
        for array in (weight,) if bias is None else (weight, bias):
            if array.dtype not in (np.float32, np.float16):
                raise TypeError(f"layer {index} is stored as {array.dtype}, not as float32 or float16")
        layers.append(Layer(weight, bias, activation))
    scheme = None
    if header["scheme"] is not None:
        keys = [key for key in tensors if key.startswith("scheme.")]
        scheme = Scheme(header["scheme"], {key.removeprefix("scheme."): tensors.pop(key) for key in keys})
    names = header.get("feature_names")
    if not isinstance(names, list | None):
        raise TypeError(f"feature_names must be a list, not {names!r}")
    return MLP(
        tuple(layers),
        input_scale=_input(header, tensors, "scale"),
        input_offset=_input(header, tensors, "offset"),
        head=header["head"],
        classes=header["classes"],
        columns=header["columns"],
        features=header["features"],
        scheme=scheme,
        name=header["name"],
        feature_names=None if names is None else tuple(names),
    )


def _input(header: dict[str, Any], tensors: dict[str, Any], which: str) -> Any:
    array = tensors.pop(f"input.{which}")
    if header["per_feature"][which]:
        return array
    if array.shape != (1,):
        raise ValueError(f"input.{which} must hold one number, it has shape {list(array.shape)}")
    return float(array[0])


def _header(data: bytes, where: str) -> dict[str, Any]:
    """Read the JSON header before any tensor, so that a newer version is refused as such."""
    if len(data) < 8:
        raise FileFormatError(f"{where}: {len(data)} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise FileFormatError(f"{where}: not a safetensors file, or truncated ({len(data)} bytes, header of {length})")
    try:
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        header = json.loads(metadata["gigamlp"]) if "gigamlp" in metadata else None
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{where}: not a safetensors file: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise FileFormatError(f"{where}: a safetensors file, but not one that gigamlp saved")
    version = header.get("format_version")
    if type(version) is not int or version < 1:
        raise FileFormatError(f"{where}: format version {version!r} is not a positive whole number")
    if version > FORMAT_VERSION:
        raise FileFormatError(
            f"{where}: format version {version} is newer than {FORMAT_VERSION}, the newest this gigamlp reads; upgrade"
        )
    return header


def save(model: MLP | Cascade, path: str | os.PathLike[str], dtype: str = "float32") -> None:
    """Write `model` to `path` atomically, weights as `dtype` (float32 or float16)."""
    write_bytes(path, pack(model, dtype))


def load(path: str | os.PathLike[str]) -> MLP | Cascade:
    """Read an MLP or Cascade from a file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    FileFormatError, ModelError
        See `unpack`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model file at {os.fspath(path)}")
    return unpack(Path(path).read_bytes(), os.fspath(path))
