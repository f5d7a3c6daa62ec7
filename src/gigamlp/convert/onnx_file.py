"""ONNX files: read without executing anything, external data only from beside the file, constants as NumPy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from gigamlp.errors import ConversionError, FileFormatError, InvalidInput

__all__ = ["OLDEST_OPSET", "constant", "decoded", "read_model"]

OLDEST_OPSET = 7  # before it, arithmetic had other rules of broadcasting
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")


def read_model(source: Any) -> tuple[onnx.ModelProto, str]:
    """Return the model, all data in it, and what to call it in messages.

    Raises
    ------
    FileFormatError
        If it is no ONNX model, breaks the rules of ONNX, or its external data is missing or lies elsewhere.
    ConversionError
        If it needs operators that are unknown here.
    """
    if isinstance(source, onnx.ModelProto):
        model, where, folder = onnx.ModelProto(), "the ONNX model", None
        model.CopyFrom(source)
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"no ONNX file at {path}")
        where, folder = str(path), path.parent
        model = _parsed(path.read_bytes(), where)
    elif isinstance(source, bytes):
        where, folder = "the ONNX bytes", None
        model = _parsed(source, where)
    else:
        raise InvalidInput(f"from_onnx takes a path, bytes or a ModelProto, got a {type(source).__name__}")
    _check_opsets(model, where)
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _load_external(tensor, folder, where)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise FileFormatError(f"{where}: not a valid ONNX model: {_one_line(error)}") from error
    return model, where


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _parsed(data: bytes, where: str) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise FileFormatError(f"{where}: not an ONNX file, or damaged: {error}") from error
    if not model.graph.node or not model.opset_import:
        raise FileFormatError(f"{where}: not an ONNX file, or damaged: it holds no graph")
    return model


def _check_opsets(model: onnx.ModelProto, where: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and not OLDEST_OPSET <= opset.version <= newest:
            raise ConversionError(
                f"{where}: opset {opset.version} is not supported, {OLDEST_OPSET} to {newest} are; "
                f"{'upgrade onnx' if opset.version > newest else 'export it again with a newer one'}"
            )
    if model.functions:
        name = model.functions[0].name
        raise ConversionError(f"{where}: its own functions ({name}) are not supported")
    for node in model.graph.node:
        if node.domain not in _DOMAINS:
            raise ConversionError(f"{where}: {node.op_type} of the domain {node.domain!r} is not supported")


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t


def _load_external(tensor: onnx.TensorProto, folder: Path | None, where: str) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise FileFormatError(f"{where}: {tensor.name!r} is in a file apart ({location!r}); pass the path of the model")
    target = (folder / location).resolve()
    if not location or not target.is_relative_to(folder.resolve()):
        raise FileFormatError(f"{where}: {tensor.name!r} is in {location!r}, outside the folder of the model: not read")
    if not target.is_file():
        raise FileFormatError(f"{where}: {tensor.name!r} is in {location!r}, which is missing beside the model")
    begin, length = (int(entries.get(key) or 0) for key in ("offset", "length"))
    if begin < 0 or length < 0 or begin + length > target.stat().st_size:
        raise FileFormatError(f"{where}: {tensor.name!r} lies beyond the end of {location!r}: the file was cut")
    try:
        load_external_data_for_tensor(tensor, str(folder))
    except (onnx.checker.ValidationError, ValueError, OSError) as error:
        raise FileFormatError(
            f"{where}: {tensor.name!r} cannot be read from {location!r}: {_one_line(error)}"
        ) from error
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def constant(tensor: onnx.TensorProto, where: str) -> Any:
    """Return a tensor as NumPy; texts as str."""
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise FileFormatError(f"{where}: the constant {tensor.name!r} is damaged: {_one_line(error)}") from error
    if tensor.data_type == onnx.TensorProto.STRING:
        return decoded(array)
    if array.dtype.kind == "V" or array.dtype.kind not in "buif":
        array = np.asarray(array.astype(np.float64))  # bfloat16 and narrower
    return array


def decoded(texts: Any) -> Any:
    """Return bytes or str as an array of str."""
    flat = np.asarray(texts, dtype=object)
    words = [word.decode("utf-8") if isinstance(word, bytes) else str(word) for word in flat.ravel()]
    return np.array(words, dtype=str).reshape(flat.shape)
