"""The protocol: what is read and written, for models of every kind, and what is refused with which words."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp import MLP
from gigamlp.serve.errors import Refused
from gigamlp.serve.protocol import encode, parse, parse_raw
from gigamlp.serve.served import Served, natural_input
from tests.models import mlps
from tests.serve.helpers import served, tiny

NUMPY = {"INT64": "<i8", "FP32": "<f4"}


def request(
    model: Served, rows: np.ndarray, *, binary: bool = False, outputs: Any = None, **more: Any
) -> tuple[bytes, int]:
    tensor: dict[str, Any] = {"name": "rows", "datatype": model.datatype, "shape": list(rows.shape)}
    data = rows.astype(model.dtype).tobytes()
    if binary:
        tensor["parameters"] = {"binary_data_size": len(data)}
    else:
        tensor["data"] = rows.ravel().tolist()
    head = json.dumps({"inputs": [tensor], **({} if outputs is None else {"outputs": outputs}), **more}).encode()
    return (head + data if binary else head), len(head)


def decoded(body: bytes, head: int | None) -> dict[str, Any]:
    """Read a response as a client would, by the protocol alone."""
    answer = json.loads(body[:head])
    at = len(body) if head is None else head
    found = {}
    for output in answer["outputs"]:
        if "data" in output:
            values = output["data"]
        else:
            size = output["parameters"]["binary_data_size"]
            values = _tensor(body[at : at + size], output["datatype"])
            at += size
        found[output["name"]] = np.array(values).reshape(output["shape"])
    assert at == len(body)
    return found


def _tensor(data: bytes, datatype: str) -> Any:
    if datatype != "BYTES":
        return np.frombuffer(data, NUMPY[datatype])
    texts = []
    while data:
        (n,) = struct.unpack("<I", data[:4])
        texts.append(data[4 : 4 + n].decode())
        data = data[4 + n :]
    return texts


@given(mlp=mlps(), n=st.integers(0, 5), binary=st.booleans(), data=st.data())
def test_answers_are_the_models(mlp: MLP, n: int, binary: bool, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["uint8", "float32"]))
    rng = np.random.default_rng(n)
    rows = rng.integers(0, 4, (n, mlp.features)).astype(dtype)
    model = served(mlp, dtype=dtype)
    names = [each.name for each in model.outputs]
    asked = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(names), min_size=1, unique=True)))
    outputs = None if asked is None else [{"name": name, "parameters": {"binary_data": binary}} for name in asked]
    body, head = request(model, rows, binary=binary, outputs=outputs, id="7")
    query = parse(body, head if binary else None, model, 10)
    np.testing.assert_array_equal(query.rows, rows)
    answers = (
        model.run(query.kind, query.rows) if n else np.empty((0, *([mlp.outputs] if query.kind == "logits" else [])))
    )
    if query.kind == "class":
        answers = answers.astype(np.int64)
    response, size = encode(model, query, answers)
    assert json.loads(response[:size])["id"] == "7"
    got = decoded(response, size)
    assert list(got) == (names if asked is None else asked)
    logits = mlp.logits(rows)
    want: dict[str, Any] = {"logits": logits, names[0]: mlp.answers(logits)}
    if mlp.head != "regression":
        want["proba"] = mlp.probabilities(logits)
    for name, values in got.items():
        assert values.shape == want[name].shape
        if want[name].dtype.kind == "f":
            np.testing.assert_allclose(values, want[name], rtol=1e-5, atol=1e-6)
        else:
            assert values.tolist() == want[name].tolist()


def test_metadata_says_what_is_answered() -> None:
    words = served(tiny(classes=["a", "b", "ü", "d"])).metadata(["1"])
    assert words["inputs"] == [{"name": "rows", "datatype": "UINT8", "shape": [-1, 3]}]
    assert words["outputs"][0] == {"name": "class", "datatype": "BYTES", "shape": [-1]}
    assert served(tiny()).metadata(["1"])["outputs"][0]["datatype"] == "INT64"
    assert served(tiny(head="regression")).outputs[0].width == 4
    assert served(tiny(head="regression", outputs=1)).outputs[0].width is None


def test_class_alone_does_without_logits() -> None:
    model = served(tiny())
    body, _ = request(model, np.ones((1, 3)), outputs=[{"name": "class"}])
    assert parse(body, None, model, 10).kind == "class"


def test_nested_data_is_taken_too() -> None:
    model = served(tiny(), dtype="float32")
    tensor = {"name": "rows", "datatype": "FP32", "shape": [2, 3], "data": [[1, 2.5, 3], [4, 5, 6]]}
    rows = parse(json.dumps({"inputs": [tensor]}).encode(), None, model, 10).rows
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, [[1, 2.5, 3], [4, 5, 6]])


GOOD = {"name": "rows", "datatype": "UINT8", "shape": [1, 3], "data": [1, 2, 3]}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 5000, 400, "not JSON"),
        ([], 400, "an array"),
        ({"inputs": None}, 400, "array of one object"),
        ({"inputs": [GOOD, GOOD]}, 400, "array of one object"),
        ({"inputs": [{**GOOD, "name": "x"}]}, 400, "no input 'x'"),
        ({"inputs": [{**GOOD, "datatype": "FP32"}]}, 400, "datatype 'FP32'"),
        ({"inputs": [{**GOOD, "shape": [3]}]}, 400, "shape"),
        ({"inputs": [{**GOOD, "shape": [1, 4]}]}, 400, "4 features"),
        ({"inputs": [{**GOOD, "shape": [-1, 3]}]}, 400, "shape"),
        ({"inputs": [{**GOOD, "shape": [True, 3]}]}, 400, "shape"),
        ({"inputs": [{**GOOD, "shape": [10**12, 3]}]}, 413, "rows in one request"),
        ({"inputs": [{**GOOD, "data": [1, 2]}]}, 400, "holds 2 numbers"),
        ({"inputs": [{**GOOD, "data": [1, 2, 256]}]}, 400, "0..255"),
        ({"inputs": [{**GOOD, "data": [1, 2, -1]}]}, 400, "0..255"),
        ({"inputs": [{**GOOD, "data": [1, 2, 10**30]}]}, 400, "0..255"),
        ({"inputs": [{**GOOD, "data": [1, 2, 2.5]}]}, 400, "whole numbers"),
        ({"inputs": [{**GOOD, "data": [1, 2, None]}]}, 400, "whole numbers"),
        ({"inputs": [{**GOOD, "data": ["1", "2", "3"]}]}, 400, "whole numbers"),
        ({"inputs": [{**GOOD, "data": [[1, 2], [3]]}]}, 400, "one shape"),
        ({"inputs": [{**GOOD, "data": [[1], [2], [3]]}]}, 400, "nested"),
        ({"inputs": [{**GOOD, "data": "123"}]}, 400, "a string"),
        ({"inputs": [{**GOOD, "data": None}]}, 400, "null"),
        ({"inputs": [{**GOOD, "parameters": 3}]}, 400, "parameters"),
        ({"inputs": [{**GOOD, "parameters": {"binary_data_size": 3}}]}, 400, "one of them"),
        ({"inputs": [{**GOOD, "parameters": {"shared_memory_region": "x"}}]}, 400, "shared_memory"),
        ({"inputs": [GOOD], "id": 3}, 400, "id must be"),
        ({"inputs": [GOOD], "outputs": 3}, 400, "outputs must be"),
        ({"inputs": [GOOD], "outputs": [3]}, 400, "an output must be"),
        ({"inputs": [GOOD], "outputs": [{"name": []}]}, 400, "no output"),
        ({"inputs": [GOOD], "outputs": [{"name": "class"}, {"name": "class"}]}, 400, "twice"),
        ({"inputs": [GOOD], "outputs": [{"name": "class", "parameters": {"classification": 2}}]}, 400, "no classif"),
        ({"inputs": [GOOD], "outputs": [{"name": "class", "parameters": {"binary_data": 1}}]}, 400, "binary_data"),
        ({"inputs": [GOOD], "parameters": {"binary_data_output": 1}}, 400, "binary_data_output"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(body: Any, status: int, words: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refused, match=words) as caught:
        parse(data, None, served(tiny()), 10)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("size", "tail", "words"),
    [
        (3, b"12", "2 bytes follow"),
        (3, b"1234", "4 bytes follow"),
        (2, b"12", "is 3 bytes"),
        ("3", b"123", "is 3 bytes"),
    ],
)
def test_binary_lengths_must_agree(size: Any, tail: bytes, words: str) -> None:
    tensor = {"name": "rows", "datatype": "UINT8", "shape": [1, 3], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    with pytest.raises(Refused, match=words):
        parse(head + tail, len(head), served(tiny()), 10)


def test_bytes_that_no_input_has_are_refused() -> None:
    head = json.dumps({"inputs": [GOOD]}).encode()
    with pytest.raises(Refused, match="no input has a binary_data_size"):
        parse(head + b"1", len(head), served(tiny()), 10)


def test_raw_bodies_are_whole_rows() -> None:
    model = served(tiny())
    body = bytes(range(6))
    assert parse_raw(body, model, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(Refused, match="whole number of rows"):
        parse_raw(body[:5], model, 2)
    with pytest.raises(Refused) as caught:
        parse_raw(body + body, model, 3)
    assert caught.value.status == 413


def test_which_rows_a_model_takes() -> None:
    assert natural_input(tiny().with_(input_scale=1 / 255)) == "uint8"
    assert natural_input(tiny()) == "float32"
