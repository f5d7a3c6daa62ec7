"""The Open Inference Protocol, version 2: requests to rows, answers to bytes; nothing is read or sent here.

Source: the protocol's HTTP/REST description and its binary tensor data extension (kserve and Triton documentation).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gigamlp.serve.errors import Refused
from gigamlp.serve.served import Served

__all__ = [
    "EXTENSIONS",
    "Asked",
    "Query",
    "check_raw_size",
    "dumps",
    "encode",
    "error_body",
    "numbers",
    "parse",
    "parse_raw",
]

Array = NDArray[Any]
EXTENSIONS = ("binary_tensor_data", "model_repository")


@dataclass(frozen=True)
class Asked:
    """An output that was asked for, and whether as binary."""

    name: str
    binary: bool


@dataclass(frozen=True)
class Query:
    """A request for answers.

    Attributes
    ----------
    rows : ndarray, shape [n, features]
        Of the model's dtype; it may be a view of the body.
    outputs : tuple of Asked
    id : str or None
    """

    rows: Array
    outputs: tuple[Asked, ...]
    id: str | None = None

    @property
    def kind(self) -> str:
        """What the engine must give: ``class`` if that is all that was asked for, else ``logits``."""
        return "class" if all(each.name == "class" for each in self.outputs) else "logits"


def error_body(message: str) -> bytes:
    """Return the protocol's error object."""
    return orjson.dumps({"error": message})


def parse_raw(body: bytes | bytearray | memoryview, model: Served, max_rows: int) -> Array:
    """Return a body of nothing but rows as an array [n, features], without a copy.

    Raises
    ------
    Refused
        400 if it is not a whole number of rows, 413 if there are too many.
    """
    check_raw_size(len(body), model, max_rows)
    return np.frombuffer(body, model.dtype).reshape(-1, model.features)


def check_raw_size(size: int, model: Served, max_rows: int) -> None:
    """Refuse a raw body of `size` bytes that cannot be rows, before it is read."""
    rows, rest = divmod(size, model.row_bytes)
    if rest:
        raise Refused(
            400,
            f"{size} bytes are not a whole number of rows: a row of {model.name!r} is {model.features} x "
            f"{model.datatype} = {model.row_bytes} bytes",
        )
    _check_rows(rows, max_rows)


def _check_rows(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise Refused(413, f"{rows:,} rows in one request; this server takes {max_rows:,} at most: send them in parts")


def parse(body: bytes | memoryview, header_length: int | None, model: Served, max_rows: int) -> Query:
    """Read a request for answers.

    Parameters
    ----------
    body : bytes or memoryview
    header_length : int or None
        Bytes of JSON at the beginning of the body, where binary tensors follow; None: all of it is JSON.
    model : Served
    max_rows : int

    Raises
    ------
    Refused
        400 if it is not such a request or its rows are not the model's, 413 if there are too many.
    """
    head = body if header_length is None else body[:header_length]
    tail = b"" if header_length is None else memoryview(body)[header_length:]
    try:
        request = orjson.loads(head)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the request is not JSON: {error}") from None
    if type(request) is not dict:
        raise Refused(400, f"the request must be a JSON object, not {_kind(request)}")
    name = request.get("id")
    if name is not None and type(name) is not str:
        raise Refused(400, f"id must be a string, not {_kind(name)}")
    outputs = _asked(request, model)
    return Query(_rows(request, tail, model, max_rows), outputs, name)


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def _asked(request: dict[str, Any], model: Served) -> tuple[Asked, ...]:
    binary = _parameters(request, "the request").get("binary_data_output", False)
    if type(binary) is not bool:
        raise Refused(400, f"binary_data_output must be true or false, not {_kind(binary)}")
    outputs = request.get("outputs")
    if outputs is None or outputs == []:
        return tuple(Asked(each.name, binary) for each in model.outputs)
    if type(outputs) is not list:
        raise Refused(400, f"outputs must be an array, not {_kind(outputs)}")
    known = [each.name for each in model.outputs]
    asked: dict[str, Asked] = {}
    for each in outputs:
        if type(each) is not dict:
            raise Refused(400, f"an output must be an object with a name, not {_kind(each)}")
        name = each.get("name")
        if name not in known:
            raise Refused(400, f"{model.name!r} has no output {name!r}; it has {', '.join(known)}")
        if name in asked:
            raise Refused(400, f"output {name!r} is asked for twice")
        parameters = _parameters(each, f"output {name!r}")
        for refused in ("classification", "shared_memory_region"):
            if parameters.get(refused):
                raise Refused(400, f"output {name!r}: this server has no {refused} extension; leave that parameter out")
        own = parameters.get("binary_data", binary)
        if type(own) is not bool:
            raise Refused(400, f"output {name!r}: binary_data must be true or false, not {_kind(own)}")
        asked[name] = Asked(name, own)
    return tuple(asked.values())


def _parameters(of: dict[str, Any], what: str) -> dict[str, Any]:
    found = of.get("parameters")
    if found is None:
        return {}
    if type(found) is not dict:
        raise Refused(400, f"parameters of {what} must be an object, not {_kind(found)}")
    return found


def _rows(request: dict[str, Any], tail: bytes | memoryview, model: Served, max_rows: int) -> Array:
    want = f"{model.name!r} takes one input, 'rows', {model.datatype} [n, {model.features}]"
    inputs = request.get("inputs")
    if type(inputs) is not list or len(inputs) != 1 or type(inputs[0]) is not dict:
        raise Refused(400, f"inputs must be an array of one object: {want}")
    tensor = inputs[0]
    if tensor.get("name") != "rows":
        raise Refused(400, f"there is no input {tensor.get('name')!r}: {want}")
    if tensor.get("datatype") != model.datatype:
        raise Refused(400, f"input 'rows' has datatype {tensor.get('datatype')!r}: {want}")
    shape = tensor.get("shape")
    if type(shape) is not list or len(shape) != 2 or any(type(n) is not int or n < 0 for n in shape):
        raise Refused(400, f"input 'rows' has shape {str(shape)[:80]}: {want}")
    if shape[1] != model.features:
        raise Refused(400, f"input 'rows' has {shape[1]} features: {want}")
    _check_rows(shape[0], max_rows)
    parameters = _parameters(tensor, "input 'rows'")
    if parameters.get("shared_memory_region"):
        raise Refused(400, "input 'rows': this server has no shared_memory_region extension; send the data")
    size = parameters.get("binary_data_size")
    if size is None:
        if len(tail):
            raise Refused(400, f"{len(tail)} bytes follow the JSON, but no input has a binary_data_size")
        return _from_json(tensor, shape[0], model)
    if "data" in tensor:
        raise Refused(400, "input 'rows' has data as well as binary_data_size; send one of them")
    need = shape[0] * model.row_bytes
    if type(size) is not int or size != need:
        raise Refused(400, f"binary_data_size is {size!r}, but shape {shape} of {model.datatype} is {need} bytes")
    if len(tail) != need:
        raise Refused(400, f"{len(tail)} bytes follow the JSON, but binary_data_size is {need}")
    return np.frombuffer(tail, model.dtype).reshape(shape)


def _from_json(tensor: dict[str, Any], n: int, model: Served) -> Array:
    data = tensor.get("data")
    if type(data) is not list:
        raise Refused(400, f"input 'rows' needs data, an array of {n * model.features} numbers, not {_kind(data)}")
    try:
        numbers = np.array(data)
    except (ValueError, OverflowError, RecursionError):
        raise Refused(400, "input 'rows': data is not an array of numbers of one shape") from None
    if numbers.size != n * model.features:
        raise Refused(400, f"input 'rows': data holds {numbers.size} numbers, shape [{n}, {model.features}] takes "
                           f"{n * model.features}")  # fmt: skip
    if numbers.size == 0:
        return np.empty((n, model.features), model.dtype)
    if numbers.shape not in ((numbers.size,), (n, model.features)):
        raise Refused(
            400, f"input 'rows': data is nested as {list(numbers.shape)}, not [{n}, {model.features}] or flat"
        )
    if model.dtype.kind in "ui":
        limits = np.iinfo(model.dtype)
        whole = numbers.dtype.kind in "ui" or (numbers.dtype.kind == "f" and bool((numbers == np.rint(numbers)).all()))
        if not whole or numbers.min() < limits.min or numbers.max() > limits.max:
            raise Refused(400, f"input 'rows': {model.datatype} data is whole numbers in {limits.min}..{limits.max}")
    elif numbers.dtype.kind not in "uif":
        raise Refused(400, f"input 'rows': {model.datatype} data is numbers only")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is refused
        return numbers.astype(model.dtype, copy=False).reshape(n, model.features)


def numbers(model: Served, query: Query, *, json_only: bool = False) -> int:
    """Return how many numbers the answer to `query` holds, or how many of them as JSON."""
    widths = {each.name: each.width or 1 for each in model.outputs}
    return len(query.rows) * sum(widths[each.name] for each in query.outputs if not (json_only and each.binary))


def encode(model: Served, query: Query, answers: Array) -> tuple[bytes, int | None]:
    """Return the body of the response, and how many bytes of JSON it begins with if binary tensors follow.

    Parameters
    ----------
    model : Served
    query : Query
    answers : ndarray
        What `Served.run` gave for ``query.kind``.
    """
    outputs: list[dict[str, Any]] = []
    tail: list[bytes] = []
    declared = {each.name: each for each in model.outputs}
    for asked in query.outputs:
        values = model.finish(asked.name, query.kind, answers)
        entry: dict[str, Any] = {
            "name": asked.name,
            "datatype": declared[asked.name].datatype,
            "shape": list(values.shape),
        }
        if asked.binary:
            data = _bytes(values)
            entry["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            entry["data"] = values.ravel().tolist()
        outputs.append(entry)
    head: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
    if query.id is not None:
        head["id"] = query.id
    head["outputs"] = outputs
    body = orjson.dumps(head)
    return (body, None) if not tail else (b"".join((body, *tail)), len(body))


def _bytes(values: Array) -> bytes:
    """Return a tensor as the binary extension has it: little-endian, strings after their length."""
    if values.dtype.kind == "U":
        texts = [text.encode() for text in values.tolist()]
        return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def dumps(value: Any) -> bytes:
    """Return a value as JSON."""
    return orjson.dumps(value)
