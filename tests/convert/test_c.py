"""to_c: compiled with gcc, and compared bit for bit with the same arithmetic in NumPy; to_numpy_script: run."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import gigamlp as gm
from gigamlp.convert.c_text import comment, float_literal, identifier, string_literal
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.quantize import integer_form
from tests.models import mlps

GCC = shutil.which("gcc") or shutil.which("cc")
needs_gcc = pytest.mark.skipif(GCC is None, reason="no C compiler on this machine")
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
for _name in ("tanhf", "expf", "erff"):
    getattr(LIBM, _name).argtypes, getattr(LIBM, _name).restype = [ctypes.c_float], ctypes.c_float


def libm(name, x):
    call = getattr(LIBM, name)
    return np.array([call(float(each)) for each in x.ravel()], np.float32).reshape(x.shape)


def _logistic(x):
    e = libm("expf", -np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(np.float32)


F = np.float32
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: np.where(x > 0, x, F(0)),
    "tanh": lambda x: libm("tanhf", x),
    "logistic": _logistic,
    "gelu": lambda x: F(0.5) * x * (1 + libm("erff", x * F(0.70710678))),
    "gelu_tanh": lambda x: F(0.5) * x * (1 + libm("tanhf", F(0.79788456) * (x + F(0.044715) * x * x * x))),
    "silu": lambda x: x * _logistic(x),
}


def sums(h, weight, dtype):
    """Return ``h @ weight.T``, each product and each sum rounded, in the order of the features."""
    total = np.zeros((len(h), len(weight)), dtype)
    for k in range(h.shape[1]):
        total = total + h[:, k, None].astype(dtype) * weight[None, :, k].astype(dtype)
    return total


def float_mirror(mlp, x):
    h = mlp.read_columns(x.astype(np.float32)) * F(1) * np.asarray(mlp.input_scale, F) + np.asarray(mlp.input_offset, F)
    for layer in mlp.layers:
        z = sums(h, layer.weight, np.float32)
        h = ACTIVATIONS[layer.activation](z if layer.bias is None else z + layer.bias).astype(np.float32)
    return h


def int8_mirror(mlp, x):
    form = integer_form(mlp, "uint8")
    acc = form.reference_accumulators(x).astype(np.float32)
    h = ACTIVATIONS[form.activation](acc * form.scale + form.bias).astype(np.float32)
    for layer in form.layers:
        z = sums(h.astype(np.float16), layer.weight.astype(np.float16), np.float64) + layer.bias.astype(np.float64)
        h = ACTIVATIONS[layer.activation](z.astype(np.float32)).astype(np.float32)
    return h


def compiled(mlp, folder, dtype, *flags):
    """Write, compile without a warning, and load."""
    code, _ = gm.to_c(mlp, folder / f"net_{dtype}.c", dtype=dtype, name="net")
    library = code.with_suffix(".so")
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-O2", *flags]
    done = subprocess.run(
        [GCC, *strict, str(code), "-o", str(library), "-lm"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def answers(library, mlp, x, dtype):
    x = np.ascontiguousarray(x, np.float32 if dtype == "float32" else np.uint8)
    logits = np.empty((len(x), mlp.outputs), np.float32)
    classes = []
    for row, out in zip(x, logits, strict=True):
        library.net_logits(row.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
        if mlp.head == "multilabel":
            labels = np.empty(mlp.outputs, np.int32)
            library.net_predict(row.ctypes.data_as(ctypes.c_void_p), labels.ctypes.data_as(ctypes.c_void_p))
            classes.append(labels)
        elif mlp.head != "regression":
            classes.append(library.net_predict(row.ctypes.data_as(ctypes.c_void_p)))
    return logits, np.array(classes)


def check(mlp, folder, dtype, x):
    library = compiled(mlp, folder, dtype)
    logits, classes = answers(library, mlp, x, dtype)
    mirror = (float_mirror if dtype == "float32" else int8_mirror)(mlp, x)
    assert np.array_equal(logits, mirror)
    if mlp.head == "multilabel":
        assert np.array_equal(classes, mirror > 0)
    elif mlp.head != "regression":
        assert np.array_equal(classes, mlp.class_ids(mirror))
    return logits


def network(widths, activations, seed=0, **fields):
    rng = np.random.default_rng(seed)
    layers = [
        gm.Layer(rng.normal(size=(o, i)) / math.sqrt(i), rng.normal(size=o) / 3, act)
        for i, o, act in zip(widths, widths[1:], [*activations, "identity"], strict=False)
    ]
    return gm.MLP(layers, **fields)


# ---- C -----------------------------------------------------------------------------------------------------------


@needs_gcc
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_bit_for_bit(tmp_path, dtype, activation):
    mlp = network([23, 17, 9, 4], [activation, activation], input_scale=1 / 255, input_offset=-0.3)
    x = np.random.default_rng(1).integers(0, 256, (200, 23)).astype(np.uint8)
    logits = check(mlp, tmp_path, dtype, x)
    if dtype == "float32":
        np.testing.assert_allclose(logits, mlp.reference_logits(x), rtol=1e-4, atol=1e-5)
    else:
        reference = integer_form(mlp).reference_logits(x)
        np.testing.assert_allclose(logits, reference, rtol=1e-3, atol=1e-3)
        near = np.diff(np.sort(reference, 1)[:, -2:])[:, 0] < 1e-3
        assert np.array_equal(mlp.class_ids(logits)[~near], mlp.class_ids(reference)[~near])


@needs_gcc
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_mnist_784_40_10_gives_the_classes_of_the_reference(tmp_path, dtype):
    mlp = network([784, 40, 10], ["relu"], input_scale=1 / 255)
    x = gm.data.load_mnist()[2][:300]
    logits = check(mlp, tmp_path, dtype, x)
    if dtype == "int8":
        form = integer_form(mlp)
        assert np.array_equal(logits, form.reference_logits(x))  # sums of 40 float64 in another order: the same float32
        assert np.array_equal(mlp.class_ids(logits), mlp.class_ids(form.reference_logits(x)))


@needs_gcc
@settings(max_examples=15)
@given(mlps(), st.sampled_from(["float32", "int8"]))
def test_any_mlp(tmp_path_factory, mlp, dtype):
    mlp = mlp.with_(scheme=None)
    if dtype == "int8":
        try:
            integer_form(mlp)
        except Unsupported:  # may leave float16
            reject()
    x = np.random.default_rng(0).integers(0, 100, (7, mlp.features)).astype(np.uint8)
    check(mlp, tmp_path_factory.mktemp("c"), dtype, x)


@needs_gcc
def test_half_rounds_as_numpy_does(tmp_path):
    identity = gm.MLP([gm.Layer([[1.0]]), gm.Layer([[1.0]])], head="regression")
    code, _ = gm.to_c(identity, tmp_path / "net.c", dtype="int8", name="net")
    code.write_text(code.read_text().replace("static float to_half", "float to_half"))
    subprocess.run([GCC, "-std=c99", "-shared", "-fPIC", str(code), "-o", str(tmp_path / "h.so"), "-lm"], check=True)
    to_half = ctypes.CDLL(str(tmp_path / "h.so")).to_half
    to_half.argtypes, to_half.restype = [ctypes.c_float], ctypes.c_float
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    edges = np.float32(
        [
            0,
            -0.0,
            2**-24,
            2**-25,
            1.5 * 2**-25,
            3 * 2**-25,
            2**-14,
            65504,
            65519.9,
            65520,
            1,
            1 + 2**-11,
            1 + 3 * 2**-11,
        ]
    )
    halves = rng.normal(size=4000).astype(np.float32) * np.exp2(rng.integers(-26, 17, 4000)).astype(np.float32)
    x = np.concatenate([bits[~np.isnan(bits)], edges, -edges, halves])
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16).astype(np.float32)
    found = np.array([to_half(float(each)) for each in x], np.float32)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


@needs_gcc
def test_a_program_and_cpp_can_use_it(tmp_path):
    mlp = network(
        [4, 3], [], classes=['a"\\', "%d é", "??/\n"], name="my net */ #error", columns=[(0, 1), (2, 5)], features=6
    )
    code, header = gm.to_c(mlp, tmp_path / "m.c", name="m")
    main = '#include <stdio.h>\n#include "m.h"\nint main(void) {\n float x[M_FEATURES] = {1, 9, 2, 3, 4, 9};\n'
    main += ' puts(m_classes[m_predict(x)]);\n printf("%d %d\\n", M_OUTPUTS, M_CLASSES);\n return 0;\n}\n'
    for suffix, compiler in ((".c", GCC), (".cpp", shutil.which("g++"))):
        if compiler is None:
            continue
        (tmp_path / f"main{suffix}").write_text(main)
        subprocess.run([GCC, "-std=c99", "-Wall", "-Werror", "-c", str(code), "-o", str(tmp_path / "m.o")], check=True)
        parts = [str(tmp_path / f"main{suffix}"), str(tmp_path / "m.o"), "-o", str(tmp_path / "main")]
        subprocess.run([compiler, "-Wall", "-Werror", *parts], check=True)
        done = subprocess.run([str(tmp_path / "main")], capture_output=True, check=True)
        label = mlp.predict(np.float32([[1, 9, 2, 3, 4, 9]]))[0]
        assert done.stdout.decode() == f"{label}\n3 3\n"
    assert "#error" not in [line.strip() for line in code.read_text().splitlines()]
    assert header.name == "m.h"


@needs_gcc
@pytest.mark.parametrize("classes", [[-(2**63), 2**63 - 1], [5, -7]])
def test_whole_number_labels(tmp_path, classes):
    mlp = network([2, 2], [], classes=classes)
    library = compiled(mlp, tmp_path, "float32")
    assert list((ctypes.c_longlong * 2).in_dll(library, "net_classes")) == classes


def test_what_c_cannot_take(tmp_path):
    mlp = network([3, 2], [])
    for changes, message in [
        ({"path": tmp_path / "net.h"}, "must be of plain letters and end in .c"),
        ({"path": tmp_path / 'a".c'}, "must be of plain letters"),
        ({"dtype": "float16"}, "dtype must be one of float32, int8"),
        ({"name": "2 nets"}, "is no name for C functions; 'mlp_2_nets' would be one"),
        ({"name": "int"}, "'mlp_int' would be one"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            gm.to_c(mlp, **{"path": tmp_path / "net.c"} | changes)
    with pytest.raises(Unsupported):
        gm.to_c(network([70_000, 1], [], head="regression"), tmp_path / "net.c", dtype="int8")
    assert list(tmp_path.iterdir()) == []


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_literals_keep_every_bit(value):
    assert float.fromhex(float_literal(value).removesuffix("f")) == value


@given(st.text())
def test_text_cannot_leave_comments_strings_and_names(text):
    assert "*/" not in comment(text)
    assert "\n" not in comment(text)
    literal = string_literal(text)
    assert literal.isascii()
    assert not set('"\n\r?') & set(literal[1:-1])
    assert identifier(text).isidentifier()
    assert identifier(identifier(text)) == identifier(text)


# ---- the script --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(mlps())
def test_the_script_answers_as_the_mlp(tmp_path_factory, mlp):
    path = tmp_path_factory.mktemp("script") / "net.py"
    space = {"__name__": "net"}
    exec(gm.to_numpy_script(mlp, path), space)
    x = np.random.default_rng(0).integers(0, 100, (7, mlp.features)).astype(np.uint8)
    wanted = mlp.reference_logits(x)
    scale = 1e-4 * (1 + np.abs(wanted).max())
    np.testing.assert_allclose(space["logits"](x), wanted, rtol=1e-4, atol=scale)
    sure = np.full(len(x), True) if mlp.outputs == 1 else np.diff(np.sort(wanted, 1)[:, -2:])[:, 0] > scale
    sure &= np.abs(wanted).min(1) > scale
    if mlp.head != "regression":
        assert np.array_equal(np.asarray(space["predict"](x))[sure], np.asarray(mlp.predict(x))[sure])


def test_the_script_runs_with_numpy_alone(tmp_path):
    mlp = network([3, 4, 2], ["silu"], classes=["no", "yes"], name='"""\nimport os')
    gm.to_numpy_script(mlp, tmp_path / "net.py")
    x = np.random.default_rng(0).normal(size=(5, 3))
    np.save(tmp_path / "x.npy", x)
    code = "import sys, runpy; sys.modules['gigamlp'] = None; sys.argv = ['net.py', 'x.npy']; "
    code += "runpy.run_path('net.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == mlp.predict(x).tolist()
