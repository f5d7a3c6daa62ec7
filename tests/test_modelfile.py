"""The model file: exact round trips, and a named error for every malformed one. Nothing in a file is executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

import gigamlp
from gigamlp import MLP, Layer, Scheme
from gigamlp.errors import FileFormatError, ModelError
from gigamlp.modelfile import FORMAT_VERSION, pack, unpack
from tests.models import mlps

Header = dict[str, Any]
Tensors = dict[str, Any]


def sample() -> MLP:
    rng = np.random.default_rng(0)
    return MLP(
        [Layer(rng.normal(size=(4, 3)), rng.normal(size=4), "relu"), Layer(rng.normal(size=(2, 4)))],
        input_scale=[0.5, 1.0, 2.0],
        input_offset=-0.25,
        classes=["no", "yes"],
        columns=[(1, 2), (5, 7)],
        features=9,
        scheme=Scheme("w8", {"scale.0": np.ones(4)}),
        name="sample",
    )


def parts(data: bytes) -> tuple[Header, Tensors]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["gigamlp"]), load_tensors(data)


def joined(header: Any, tensors: Tensors) -> bytes:
    return save_tensors(tensors, metadata={"gigamlp": json.dumps(header)})


def assert_same(a: MLP, b: MLP) -> None:
    """Field by field, so that a mistake in `digest` cannot hide one in the file."""
    assert len(a.layers) == len(b.layers)
    for x, y in zip(a.layers, b.layers, strict=True):
        assert x.weight.tobytes() == y.weight.tobytes()
        assert x.weight.shape == y.weight.shape
        assert (x.bias is None) == (y.bias is None)
        assert x.bias is None or y.bias is None or x.bias.tobytes() == y.bias.tobytes()
        assert x.activation == y.activation
    for field in ("input_scale", "input_offset"):
        x, y = getattr(a, field), getattr(b, field)
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y, strict=True)
    assert (a.head, a.columns, a.features, a.name) == (b.head, b.columns, b.features, b.name)
    assert (a.classes is None) == (b.classes is None)
    assert a.classes is None or b.classes is None or (a.classes.tolist() == b.classes.tolist())
    assert a.classes is None or b.classes is None or a.classes.dtype.kind == b.classes.dtype.kind
    assert (a.scheme is None) == (b.scheme is None)
    if a.scheme is not None and b.scheme is not None:
        assert a.scheme.name == b.scheme.name
        assert list(a.scheme.arrays) == list(b.scheme.arrays)
        for key, value in a.scheme.arrays.items():
            np.testing.assert_array_equal(value, b.scheme.arrays[key], strict=True)


@given(mlp=mlps())
def test_round_trip(mlp: MLP) -> None:
    data = pack(mlp)
    other = unpack(data)
    assert_same(mlp, other)
    assert mlp == other
    assert pack(other) == data


@given(mlp=mlps())
def test_float16_rounds_weights_and_nothing_else(mlp: MLP) -> None:
    other = unpack(pack(mlp, "float16"))

    def rounded(array: Any) -> Any:
        return None if array is None else array.astype(np.float16)

    layers = [Layer(rounded(layer.weight), rounded(layer.bias), layer.activation) for layer in mlp.layers]
    assert_same(mlp.with_(layers=tuple(layers)), other)
    assert other.layers[0].weight.dtype == np.float32
    assert pack(other, "float16") == pack(mlp, "float16")


def test_float16_overflow_is_refused() -> None:
    for layer in (Layer([[65520.0]]), Layer([[1.0]], [-1e6])):
        with pytest.raises(ModelError, match=r"layer 0's (weight|bias) exceeds the float16 range"):
            pack(MLP([layer]), "float16")
    assert unpack(pack(MLP([Layer([[65504.0]])]), "float16")).layers[0].weight[0, 0] == 65504


def test_float16_halves_the_file() -> None:
    mlp = MLP([Layer(np.ones((512, 784), np.float32))])
    assert len(pack(mlp, "float16")) / len(pack(mlp)) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "", None, np.float32])
def test_other_storage_types_are_refused(dtype: Any) -> None:
    with pytest.raises(ModelError, match="dtype must be 'float32' or 'float16'"):
        pack(sample(), dtype)


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m.safetensors"
    sample().save(path)
    assert gigamlp.load(path) == sample()
    assert gigamlp.load(os.fspath(path)).name == "sample"
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]
    with pytest.raises(FileNotFoundError, match="no model file at"):
        gigamlp.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        gigamlp.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    sample().save(path)
    with pytest.raises(ModelError):
        MLP([Layer([[1e6]])]).save(path, "float16")
    assert gigamlp.load(path) == sample()


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"<html>")
    with pytest.raises(FileFormatError, match=r"bad\.safetensors: 6 bytes are too few"):
        gigamlp.load(path)
    header, tensors = parts(pack(sample()))
    path.write_bytes(joined({**header, "activations": ["relu", "swish"]}, tensors))
    with pytest.raises(ModelError, match=r"bad\.safetensors: unknown activation 'swish'"):
        gigamlp.load(path)


def test_packing_is_the_same_in_every_process() -> None:
    code = "import sys; from tests.test_modelfile import *; sys.stdout.buffer.write(pack(sample()))"
    root = Path(__file__).parent.parent
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=root, env=env)
        assert done.stdout == pack(sample())


def test_loading_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    sample().save(path)
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing torch now raises ImportError
        "import gigamlp, numpy\n"
        "print(gigamlp.load(sys.argv[1]).predict(numpy.ones((2, 9))).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sample().predict(np.ones((2, 9))).tolist())


# ---- malformed files ---------------------------------------------------------------------------------------------


def test_newer_format_versions_are_refused_before_anything_else_is_read() -> None:
    header, tensors = parts(pack(sample()))
    for version in (FORMAT_VERSION + 1, 99, 10**30):
        with pytest.raises(FileFormatError, match=f"format version {version} is newer than {FORMAT_VERSION}.*upgrade"):
            unpack(joined({"format": "gigamlp-mlp", "format_version": version, "shape": "of things to come"}, tensors))
    for wrong in (0, -1, True, 1.0, "1", None, [1]):
        with pytest.raises(FileFormatError, match="is not a positive whole number"):
            unpack(joined({**header, "format_version": wrong}, tensors))


def edited(**changes: Any) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: header.update(changes)


def put(key: str, value: Any) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: tensors.__setitem__(key, np.asarray(value))


def without(key: str) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: (header if key in header else tensors).__delitem__(key)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        # a tensor that the header does not account for would change the answers without a word
        (put("layers.2.weight", np.ones((2, 2), np.float32)), "belong to no part of the model: layers.2.weight"),
        (put("layers.1.bais", np.ones(2, np.float32)), r"belong to no part of the model: layers\.1\.bais"),
        (edited(activations=["relu"], classes=None), r"belong to no part of the model: layers\.1\.weight"),
        (edited(scheme=None), r"belong to no part of the model: scheme\.scale\.0"),
        (edited(per_feature={"scale": False, "offset": False}), r"input\.scale must hold one number"),
        (put("input.offset", np.ones((1, 1), np.float32)), r"input\.offset must hold one number"),
        (put("layers.0.weight", np.ones((4, 3))), "layer 0 is stored as float64"),
        (put("layers.0.bias", np.ones(4, np.int32)), "layer 0 is stored as int32"),
        (put("layers.0.weight", np.full((4, 3), np.nan, np.float32)), "layer weight holds NaN"),
        (put("layers.0.weight", np.full((4, 3), np.inf, np.float16)), "layer weight holds NaN or infinite"),
        (put("layers.0.weight", np.ones((5, 3), np.float32)), r"layer bias must have shape \[5\]"),
        (put("layers.1.weight", np.ones((2, 5), np.float32)), "layer 1 takes 5 inputs, but layer 0 gives 4"),
        (put("input.scale", np.ones(4, np.float32)), "input_scale must be one number or have shape"),
        (put("scheme.scale.7", np.ones(4, np.float32)), "names layer 7"),
        (put("scheme.colour", np.ones(4, np.float32)), "unknown scheme array 'colour'"),
        (without("layers.1.weight"), "incomplete or malformed.*layers.1.weight"),
        (without("input.scale"), "incomplete or malformed.*input.scale"),
        *((without(key), f"incomplete or malformed.*{key}") for key in sorted(parts(pack(sample()))[0])
          if not key.startswith("format") and key != "name"),
        (without("name"), "incomplete or malformed.*name"),
        (without("format"), "not one that gigamlp saved"),
        (without("format_version"), "format version None"),
        (edited(activations="relu"), "activations must be a list"),
        (edited(activations=[["relu"], None]), "unknown activation"),
        (edited(activations=[]), "at least one layer"),
        (edited(activations={"0": "relu"}), "activations must be a list"),
        (edited(head="oracle"), "unknown head 'oracle'"),
        (edited(head=["softmax"]), "unknown head"),
        (edited(head="sigmoid"), "exactly one logit"),
        (edited(head="regression"), "has no classes"),
        (edited(classes=["a"]), "1 classes for 2 outputs"),
        (edited(classes=["a", 1]), "flat sequence of integers or of strings"),
        (edited(classes=[0, 10**40]), "flat sequence"),
        (edited(classes="ab"), "flat sequence"),
        (edited(classes={"a": 1, "b": 2}), "flat sequence"),
        (edited(columns=[[0, 4]]), "columns hold 4 features, but the first layer reads 3"),
        (edited(columns=[[1, 2], [5, 1e999]]), "columns must be pairs"),
        (edited(columns="all"), "columns must be pairs"),
        (edited(features=1e999), "all whole"),
        (edited(features="9"), "all whole"),
        (edited(features=6), "past the row width 6"),
        (edited(columns=None), "features=9, but the first layer reads 3"),
        (edited(per_feature=None), "incomplete or malformed"),
        (edited(scheme="w2"), "unknown quantisation scheme"),
        (edited(scheme=["w8"]), "unknown quantisation scheme"),
        (edited(name=3), "non-empty string"),
        (edited(name=""), "non-empty string"),
    ],
)  # fmt: skip
def test_malformed(edit: Callable[[Header, Tensors], None], message: str) -> None:
    header, tensors = parts(pack(sample()))
    edit(header, tensors)
    with pytest.raises((FileFormatError, ModelError), match=message):
        unpack(joined(header, tensors))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (b"\xff" * 16, "not a safetensors file, or truncated"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file, or truncated"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "not one that gigamlp saved"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe", "not a safetensors file"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "not a safetensors file"),
        (save_tensors({"w": np.ones(2)}), "not one that gigamlp saved"),
        (save_tensors({"w": np.ones(2)}, {"gigamlp": "[]"}), "not one that gigamlp saved"),
        (save_tensors({"w": np.ones(2)}, {"gigamlp": "{"}), "not a safetensors file"),
        (save_tensors({"w": np.ones(2)}, {"gigamlp": '{"format": "other"}'}), "not one that gigamlp saved"),
    ],
)
def test_files_of_another_kind(data: bytes, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        unpack(data)


def test_truncated_at_every_byte() -> None:
    data = pack(sample())
    for cut in range(len(data)):
        with pytest.raises(FileFormatError):
            unpack(data[:cut])
    with pytest.raises(FileFormatError):
        unpack(data + b"\0")


def accepts_or_refuses(data: bytes) -> None:
    """Whatever comes, the result is an MLP that packs again, or one of the two errors."""
    try:
        mlp = unpack(data)
    except (FileFormatError, ModelError):
        return
    assert unpack(pack(mlp)) == mlp


@given(mlp=mlps(), flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1))
def test_changed_bytes(mlp: MLP, flips: list[tuple[float, int]]) -> None:
    data = bytearray(pack(mlp))
    for position, value in flips:
        data[int(position * len(data))] ^= value
    accepts_or_refuses(bytes(data))


@given(data=st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for candidate in (data, len(data).to_bytes(8, "little") + data):
        with pytest.raises((FileFormatError, ModelError)):
            unpack(candidate)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
HEADER_KEYS = sorted(parts(pack(sample()))[0])


@given(mlp=mlps(), changes=st.dictionaries(st.sampled_from(HEADER_KEYS), json_values, min_size=1, max_size=2))
def test_any_header_values(mlp: MLP, changes: Header) -> None:
    header, tensors = parts(pack(mlp))
    accepts_or_refuses(joined({**header, **changes}, tensors))


@given(mlp=mlps(), data=st.data())
def test_any_tensors(mlp: MLP, data: st.DataObject) -> None:
    header, tensors = parts(pack(mlp))
    key = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8", "i1", "u1", "i8", "?"]))
    value = data.draw(st.sampled_from([0, 1, -1, 100]))
    tensors[key] = np.full(shape, value).astype(dtype)
    accepts_or_refuses(joined(header, tensors))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F4", "I64", "U64", "BOOL", "C64", "X"])
def test_every_safetensors_dtype(dtype: str) -> None:
    data = pack(MLP([Layer(np.ones((2, 2)))]))
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    for entry in outer.values():
        if entry.get("dtype") == "F32":
            entry["dtype"] = dtype
    text = json.dumps(outer).encode()
    with pytest.raises((FileFormatError, ModelError)):
        unpack(len(text).to_bytes(8, "little") + text + data[8 + length :])
