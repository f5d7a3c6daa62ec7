"""The model file: safetensors with a small JSON header in its metadata. Nothing in it is executed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from gigamlp._atomic import write_bytes
from gigamlp.errors import FileFormatError, ModelError
from gigamlp.mlp import MLP, Layer, Scheme

__all__ = ["FORMAT_VERSION", "load", "pack", "save", "unpack"]

FORMAT = "gigamlp-mlp"
FORMAT_VERSION = 1


def pack(mlp: MLP, dtype: str = "float32") -> bytes:
    """Return the bytes of the model file for `mlp`, the same bytes for equal MLPs."""
    if dtype not in ("float32", "float16"):
        raise ModelError(f"dtype must be 'float32' or 'float16', got {dtype!r}")
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for index, layer in enumerate(mlp.layers):
        tensors[f"layers.{index}.weight"] = _stored(layer.weight, dtype, f"layer {index}'s weight")
        if layer.bias is not None:
            tensors[f"layers.{index}.bias"] = _stored(layer.bias, dtype, f"layer {index}'s bias")
    tensors["input.scale"] = np.asarray(mlp.input_scale, np.float32).reshape(-1)
    tensors["input.offset"] = np.asarray(mlp.input_offset, np.float32).reshape(-1)
    if mlp.scheme is not None:
        tensors.update({f"scheme.{key}": np.asarray(value) for key, value in mlp.scheme.arrays.items()})
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
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
    return save_tensors(tensors, metadata={"gigamlp": json.dumps(header, sort_keys=True)})


def _stored(array: Any, dtype: str, what: str) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, dtype=dtype)
    if not np.isfinite(stored).all():
        raise ModelError(f"{what} exceeds the float16 range (65,504); save as float32")
    return stored


def unpack(data: bytes, where: str = "model") -> MLP:
    """Return the MLP in `data`. `where` names the source in error messages.

    Raises
    ------
    FileFormatError
        If the bytes are not a gigamlp model file, or of a newer format version than this program knows.
    ModelError
        If the file is sound but what it describes is not an MLP.
    """
    header = _header(data, where)
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise FileFormatError(f"{where}: damaged safetensors file: {error}") from error
    try:
        mlp = _mlp(header, tensors)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"{where}: the model header is incomplete or malformed: {error!r}") from error
    if tensors:
        raise FileFormatError(f"{where}: tensors that belong to no part of the model: {', '.join(sorted(tensors))}")
    return mlp


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


def save(mlp: MLP, path: str | os.PathLike[str], dtype: str = "float32") -> None:
    """Write `mlp` to `path` atomically, weights as `dtype` (float32 or float16)."""
    write_bytes(path, pack(mlp, dtype))


def load(path: str | os.PathLike[str]) -> MLP:
    """Read an MLP from a file.

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
