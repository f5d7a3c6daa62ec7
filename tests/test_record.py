"""The record schema: round trips, and a named error for everything that is not a record."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp import Record
from gigamlp.errors import FileFormatError
from gigamlp.record import RESIDENCES, SCHEMA, Row
from gigamlp.spec import OUTPUTS

# DESIGN.md's row, word for word; `note` is the one addition
WORDS = ["engine", "variant", "scheme"]
TIMES = ["samples_per_s", "wall_us", "device_us", "iqr", "p50_us", "p99_us", "h2d_us", "d2h_us", "enqueue_us"]
DESIGNED = [
    *("name", *WORDS, "hidden", "features_read_bytes", "batch", "batches_per_launch", "threads", "residence"),
    *("input_dtype", "output", *TIMES, "accuracy", "roof_share", "clock_mhz", "quoted", "note"),
]

numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
counts = st.none() | st.integers(0, 2**40)
words = st.none() | st.text(max_size=8)
rows = st.builds(
    Row,
    name=st.text(max_size=8),
    engine=words,
    variant=words,
    scheme=words,
    hidden=st.lists(st.integers(1, 9999), max_size=3),
    features_read_bytes=counts,
    batch=counts,
    batches_per_launch=st.integers(1, 99),
    threads=counts,
    residence=st.none() | st.sampled_from(RESIDENCES),
    input_dtype=words,
    output=st.none() | st.sampled_from(OUTPUTS),
    accuracy=st.none() | st.floats(0, 1),
    quoted=st.booleans(),
    note=words,
    **dict.fromkeys([*TIMES, "roof_share", "clock_mhz"], numbers),
)
records = st.builds(
    Record,
    device=st.dictionaries(st.text(max_size=5), words).map(lambda d: {**d, "name": "CPU"}),
    versions=st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
    command=st.text(max_size=9),
    rows=st.lists(rows, max_size=3),
    extra=st.dictionaries(st.text(max_size=5), numbers | words),
)


def sample() -> dict[str, Any]:
    return Record({"name": "CPU"}, {"numpy": "2"}, "gigamlp bench", [Row("a", accuracy=0.5), Row("b")]).to_json()


@given(record=records)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, record: Record) -> None:
    text = record.dumps()
    assert text.endswith("}\n")
    assert Record.from_json(json.loads(text)) == record
    path = tmp_path_factory.getbasetemp() / "record.json"
    record.save(path)
    assert Record.load(path) == record


def test_fields_are_those_of_the_design() -> None:
    assert [field.name for field in fields(Row)] == DESIGNED
    assert list(sample()) == ["schema", "device", "versions", "command", "rows"]
    assert sample()["schema"] == SCHEMA == "gigamlp-record/1"
    assert list(sample()["rows"][0]) == DESIGNED  # what does not apply is null, not left out


def test_numpy_scalars_become_json_numbers() -> None:
    row = Row("a", hidden=(np.int64(4), np.int32(5)), batch=np.int64(7), wall_us=np.float32(0.5), quoted=np.bool_(True))  # type: ignore[arg-type]
    record = Record({"name": "CPU"}, {}, "", [row])
    found = json.loads(record.dumps())["rows"][0]
    assert (found["hidden"], found["batch"], found["wall_us"], found["quoted"]) == ([4, 5], 7, 0.5, True)
    assert Record.from_json(json.loads(record.dumps())) == record


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"row 'a': wall_us is -?(nan|inf); what was not measured is None"):
        Row("a", wall_us=value)
    record = Record({"name": "CPU", "power_w": float(value)}, {}, "", [])
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.save(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"residence": "warm"}, "residence 'warm' is not one of"),
        ({"output": "probabilities"}, "output 'probabilities' is not one of"),
        ({"accuracy": 98.2}, "accuracy is a fraction in 0..1, got 98.2"),
        ({"accuracy": -0.1}, "accuracy is a fraction"),
    ],
)
def test_rows_that_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=f"row 'a': {message}"):
        Row("a", **kwargs)


@pytest.mark.parametrize("data", [None, [], "x", 3, {}, {"schema": None}, {"schema": "gigamlp-record/2"}])
def test_another_schema(data: Any) -> None:
    with pytest.raises(FileFormatError, match=r"here: schema is .*, expected 'gigamlp-record/1'"):
        Record.from_json(data, "here")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("device",), [], "'device' must be a dict, got list"),
        (("device",), {}, "device.name is missing"),
        (("device", "name"), 3, "device.name is missing"),
        (("versions",), None, "'versions' must be a dict"),
        (("command",), 1, "'command' must be a str, got int"),
        (("rows",), {}, "'rows' must be a list"),
        (("rows", 0), 7, "row 0: must be an object"),
        (("extra",), [1], "'extra' must be a dict, got list"),
        (("more",), 1, "unknown fields: more"),
        (("rows", 1, "speed"), 1, "row 1: unknown fields: speed"),
        (("rows", 0, "name"), None, "row 0: 'name' must be str, got None"),
        (("rows", 0, "batch"), 1.5, "row 0: 'batch' must be int | None, got 1.5"),
        (("rows", 0, "batch"), True, "'batch' must be int | None, got True"),
        (("rows", 0, "batches_per_launch"), None, "'batches_per_launch' must be int, got None"),
        (("rows", 0, "wall_us"), "1", "'wall_us' must be float | None, got '1'"),
        (("rows", 0, "wall_us"), False, "'wall_us' must be float | None, got False"),
        (("rows", 0, "quoted"), 1, "'quoted' must be bool, got 1"),
        (("rows", 0, "hidden"), None, "'hidden' must be a list of whole numbers"),
        (("rows", 0, "hidden"), [1, True], "'hidden' must be a list of whole numbers"),
        (("rows", 0, "residence"), "warm", "row 0: row 'a': residence 'warm'"),
        (("rows", 0, "accuracy"), 2, "row 0: row 'a': accuracy is a fraction"),
    ],
)
def test_malformed(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = sample()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(FileFormatError) as caught:
        Record.from_json(data, "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("key", DESIGNED)
def test_a_missing_field_is_named(key: str) -> None:
    data = sample()
    del data["rows"][1][key]
    with pytest.raises(FileFormatError, match=f"row 1: fields are missing: {key}"):
        Record.from_json(data)


@pytest.mark.parametrize("key", ["device", "versions", "command", "rows"])
def test_a_missing_top_level_field_is_named(key: str) -> None:
    data = sample()
    del data[key]
    with pytest.raises(FileFormatError, match=f"'{key}' must be a"):
        Record.from_json(data)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[" * 100000, b'{"a": NaN}', b'{"a": -Infinity}', b"<html>"],
    ids=["empty", "open", "not utf-8", "deep", "nan", "inf", "html"],
)
def test_files_that_are_not_json(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text)
    with pytest.raises(FileFormatError, match=r"r\.json: not JSON"):
        Record.load(path)
    with pytest.raises(FileNotFoundError):
        Record.load(tmp_path / "absent.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    top=st.dictionaries(st.sampled_from(["device", "versions", "command", "rows", "extra"]), json_values, max_size=2),
    changes=st.dictionaries(st.sampled_from(DESIGNED), json_values, max_size=3),
)
def test_any_values_raise_nothing_else(top: dict[str, Any], changes: dict[str, Any]) -> None:
    data = {**sample(), **top}
    if data["rows"] == sample()["rows"]:
        data["rows"][0].update(changes)
    try:
        record = Record.from_json(data)
    except FileFormatError:
        return
    assert [asdict(row) for row in record.rows] == data["rows"]
