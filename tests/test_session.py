"""Session: any rows in, owned answers of the same kind out, whatever the batches."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gigamlp as gm
from gigamlp.choice import PlanChoice
from gigamlp.engines import registry
from gigamlp.errors import InvalidInput, PlanMismatch, Unsupported
from gigamlp.ladder import Ladder, Rung, default_batches
from gigamlp.measure.telemetry import machine_fingerprint
from gigamlp.plan import Candidate, Plan
from gigamlp.spec import Spec, Variant
from tests.fakes import FakeEngine, ManualClock, make_mlp

torch = pytest.importorskip("torch")

FEATURES, CLASSES = 13, 5
BATCH = 8
# 0 and 1; one less, equal, one more than a batch; two batches and a bit; a prime that needs both rungs
COUNTS = (0, 1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH + 3, 101)
ENGINES = ("numpy", "torch_eager")


@pytest.fixture(scope="module")
def mlp() -> gm.MLP:
    return make_mlp((FEATURES, 16, CLASSES))


@pytest.fixture(params=ENGINES)
def session(request: pytest.FixtureRequest, mlp: gm.MLP) -> Iterator[gm.Session]:
    with gm.Session(mlp, device="cpu", engine=request.param, batch=(3, BATCH)) as made:
        yield made


def rows(count: int, dtype: str = "uint8", features: int = FEATURES, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (count, features)).astype(dtype)


def close(z: Any, mlp: gm.MLP, x: np.ndarray) -> None:
    """Answers agree with float64: 16 sums of 13 terms of size one in float32 err by a few 1e-7 each."""
    np.testing.assert_allclose(z, mlp.reference_logits(x), rtol=1e-5, atol=1e-5)


# ---- how many rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_rows(session: gm.Session, mlp: gm.MLP, count: int) -> None:
    x = rows(count)
    z = session.logits(x)
    assert (z.shape, z.dtype) == ((count, CLASSES), np.float32)
    close(z, mlp, x)
    ids = session.class_ids(x)
    assert (ids.shape, ids.dtype) == ((count,), np.int64)
    np.testing.assert_array_equal(ids, mlp.reference_logits(x).argmax(axis=1))
    np.testing.assert_array_equal(session.predict(x), ids)
    proba = session.predict_proba(x)
    assert (proba.shape, proba.dtype) == ((count, CLASSES), np.float32)
    np.testing.assert_allclose(proba, mlp.probabilities(mlp.reference_logits(x)), atol=1e-6)


def test_rows_do_not_depend_on_their_batch(session: gm.Session, mlp: gm.MLP) -> None:
    """Every row gets the answer it gets alone: no row of padding or of an earlier call leaks in."""
    x = rows(41, "float32")
    session.logits(np.full((64, FEATURES), 90.0, np.float32))
    together = session.logits(x)
    np.testing.assert_allclose(together, np.concatenate([session.logits(row[None]) for row in x]), rtol=1e-5, atol=1e-5)


def test_millions_of_rows(mlp: gm.MLP) -> None:
    x = np.resize(rows(1009), (2_000_003, FEATURES))
    with gm.Session(mlp, device="cpu") as session:
        ids = session.predict(x)
    np.testing.assert_array_equal(ids, np.resize(mlp.class_ids(mlp.logits(x[:1009])), len(x)))


# ---- what comes in, what goes out -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", ">f4", ">f8", ">i4", ">f2", "g"]
)
@pytest.mark.parametrize("count", [2, BATCH, 21])
def test_numpy_dtypes(session: gm.Session, mlp: gm.MLP, dtype: str, count: int) -> None:
    x = rows(count).astype(dtype)
    z = session.logits(x)
    assert isinstance(z, np.ndarray)
    close(z, mlp, x.astype(np.float64))


TORCH_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_dtypes(mlp: gm.MLP, dtype: str) -> None:
    x = torch.from_numpy(rows(21).astype(np.int64)).to(getattr(torch, dtype))
    for engine in ENGINES:
        with gm.Session(mlp, device="cpu", engine=engine, batch=(3, BATCH)) as session:
            z = session.logits(x)
        assert isinstance(z, torch.Tensor)
        assert (z.dtype, z.device.type, z.requires_grad) == (torch.float32, "cpu", False)
        if dtype == "bfloat16" and engine == "torch_eager":  # computes in bfloat16: 8 bits, two layers
            np.testing.assert_allclose(z, mlp.reference_logits(x.double().numpy()), rtol=0.05, atol=0.1)
        else:
            close(z, mlp, x.double().numpy())


def strided() -> dict[str, np.ndarray]:
    x = rows(21, "float32")
    wide = np.zeros((21, 2 * FEATURES), np.float32)
    wide[:, ::2] = x
    tall = np.repeat(x, 2, axis=0)
    odd = np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(x),
        "columns": wide[:, ::2],
        "rows": tall[::2],
        "reversed": x[::-1, ::-1].copy()[::-1, ::-1],
        "unaligned": odd,
        "readonly": frozen,
        "broadcast": np.broadcast_to(x[:1], x.shape),
    }


@pytest.mark.parametrize("layout", sorted(strided()))
def test_memory_layouts(session: gm.Session, mlp: gm.MLP, layout: str) -> None:
    x = strided()[layout]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about read-only arrays
        close(session.logits(x), mlp, x)
        close(session.logits(x[:BATCH]), mlp, x[:BATCH])


def test_torch_layouts_and_gradients(session: gm.Session, mlp: gm.MLP) -> None:
    x = torch.from_numpy(rows(21, "float32"))
    for given_rows in (x.T.contiguous().T, x.repeat(1, 2)[:, :FEATURES], x.clone().requires_grad_(), x[::2]):
        close(session.logits(given_rows), mlp, given_rows.detach().numpy())


def test_lists_and_array_likes(session: gm.Session, mlp: gm.MLP) -> None:
    x = rows(3)

    class Frame:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return x.astype(np.float64)

    close(session.logits(x.tolist()), mlp, x)
    close(session.logits(Frame()), mlp, x)
    assert session.predict(tuple(map(tuple, x.tolist()))).shape == (3,)


def test_dlpack_of_the_host_gives_numpy(session: gm.Session, mlp: gm.MLP) -> None:
    class Foreign:
        def __init__(self, x: np.ndarray) -> None:
            self.x = x

        def __dlpack__(self, **options: Any) -> Any:
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.x.__dlpack_device__()

    x = rows(9, "float32")
    z = session.logits(Foreign(x))
    assert isinstance(z, np.ndarray)
    close(z, mlp, x)


def test_subnormal_and_huge_numbers_pass(session: gm.Session) -> None:
    """A row sum that overflows is no reason to refuse finite rows."""
    x = np.zeros((2000, FEATURES), np.float32)
    x[7], x[8] = 3e38, 1e-42
    assert session.predict(x).shape == (2000,)


# ---- ownership ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("count", [BATCH, 21])
def test_answers_are_owned(session: gm.Session, mlp: gm.MLP, kind: str, count: int) -> None:
    x = rows(count, "float32")
    given_rows = x.copy() if kind == "numpy" else torch.from_numpy(x.copy())
    found = [session.logits(given_rows), session.predict(given_rows), session.predict_proba(given_rows)]
    before = [np.asarray(a).copy() for a in found]
    given_rows[...] = 7  # the caller's memory changes
    session.logits(rows(count, "float32", seed=5))  # and the runner's
    session.predict(rows(count, "float32", seed=6))
    session.predict_proba(rows(count, "float32", seed=6))
    for a, b in zip(found, before, strict=True):
        np.testing.assert_array_equal(a, b)
    close(found[0], mlp, x)
    session.close()
    np.testing.assert_array_equal(found[0], before[0])


def test_rows_are_not_changed(session: gm.Session) -> None:
    x = rows(21, "float32")
    kept = x.copy()
    session.logits(x)
    np.testing.assert_array_equal(x, kept)


def test_three_inputs_through_one_buffer(session: gm.Session, mlp: gm.MLP) -> None:
    for seed in range(3):
        x = rows(BATCH, seed=seed)
        close(session.logits(x), mlp, x)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_out(session: gm.Session, mlp: gm.MLP, kind: str) -> None:
    x = rows(21)
    make = np.empty if kind == "numpy" else lambda shape, dtype: torch.from_numpy(np.empty(shape, dtype))
    given_rows = x if kind == "numpy" else torch.from_numpy(x)
    out = make((21, CLASSES), np.float32)
    assert session.logits(given_rows, out=out) is out
    close(out, mlp, x)
    ids = make((21,), np.int64)
    assert session.predict(given_rows, out=ids) is ids
    np.testing.assert_array_equal(ids, mlp.predict(x))
    proba = make((21, CLASSES), np.float32)
    assert session.predict_proba(given_rows, out=proba) is proba
    np.testing.assert_allclose(proba, mlp.predict_proba(x), atol=1e-6)
    wide = make((21, 2 * CLASSES), np.float32)
    session.logits(given_rows, out=wide[:, ::2])  # strided
    close(wide[:, ::2], mlp, x)


def test_out_with_a_reversed_view(session: gm.Session, mlp: gm.MLP) -> None:
    out = np.empty((21, CLASSES), np.float32)[::-1]
    session.logits(rows(21), out=out)
    close(out, mlp, rows(21))


def test_out_that_cannot_be_used(session: gm.Session) -> None:
    x = rows(4, "float32")
    frozen = np.empty((4, CLASSES), np.float32)
    frozen.flags.writeable = False
    square = np.zeros((4, FEATURES), np.float32)
    for out, word in (
        (np.empty((4, CLASSES)), "float64"),
        (np.empty((4, CLASSES), ">f4"), ">f4"),
        (np.empty((3, CLASSES), np.float32), r"\[3, 5\]"),
        ([], "list"),
        (torch.empty(4, CLASSES), "Tensor"),
        (frozen, "read-only"),
    ):
        with pytest.raises(InvalidInput, match=word):
            session.logits(x, out=out)
    with pytest.raises(InvalidInput, match="shares memory"):
        session.logits(square, out=square[:, :CLASSES])
    tensor = torch.zeros(4, FEATURES)
    for out, word in (
        (np.empty((4, CLASSES), np.float32), "ndarray"),
        (torch.empty(4, CLASSES, dtype=torch.float64), "float64"),
        (torch.empty(4, CLASSES, requires_grad=True), "gradients"),
        (torch.empty(4, CLASSES, device="meta"), "meta"),
        (tensor[:, :CLASSES], "shares memory"),
    ):
        with pytest.raises(InvalidInput, match=word):
            session.logits(tensor, out=out)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (np.zeros((3, FEATURES + 1)), "14 features"),
        (np.zeros(FEATURES), r"x\[None, :\]"),
        (np.zeros((2, 3, FEATURES)), "reshape"),
        (np.zeros((2, FEATURES), complex), "complex128"),
        (np.full((2, FEATURES), "1"), "must be numbers"),
        (np.full((2, FEATURES), None), "object"),
        (np.zeros((2, FEATURES), "M8[s]"), "datetime64"),
        (np.ma.masked_equal(np.zeros((2, FEATURES)), 0), "masked"),
        ([[1, 2], [3]], "cannot be read"),
        ("rows", "got a str"),
        ({}, "got a dict"),
        (None, "must be numbers"),
        (torch.zeros(3, FEATURES + 1), "14 features"),
        (torch.zeros(FEATURES), r"x\[None, :\]"),
        (torch.zeros(2, FEATURES, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, FEATURES).to_sparse(), "to_dense"),
        (torch.zeros(2, FEATURES, device="meta"), "meta"),
        (torch.zeros(2, FEATURES).to(torch.float8_e4m3fn), "float8"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_unusable_rows(session: gm.Session, x: Any, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        session.predict(x)
    assert session.predict(rows(2)).shape == (2,)  # it still works


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_located(session: gm.Session, dtype: str, value: float) -> None:
    x = rows(9001, "float32")  # the check reads blocks of 4,096 rows
    x[8200, 4] = value
    for part, row in ((x, 8200), (x[8190:], 10)):
        given_rows = torch.from_numpy(part).bfloat16() if dtype == "bfloat16" else part.astype(dtype)
        with pytest.raises(InvalidInput, match=f"row {row} holds {value} in feature 4"):
            session.predict(given_rows)


def test_non_finite_rows_on_request(mlp: gm.MLP) -> None:
    x = rows(9, "float32")
    x[3, 3] = np.nan
    with gm.Session(mlp, device="cpu", check_finite=False) as session:
        z = session.logits(x)
    good = np.delete(np.arange(9), 3)
    close(z[good], mlp, x[good])
    assert np.isnan(z[3]).any()


def test_numbers_beyond_float32_are_refused(session: gm.Session) -> None:
    x = rows(9, "float64")
    x[5, 2] = -1e300
    with pytest.raises(InvalidInput, match=r"row 5 holds -1e\+300 in feature 2: it does not fit float32"):
        session.predict(x)


def test_columns_that_are_not_read_may_hold_anything() -> None:
    mlp = make_mlp((6, 8, 3), columns=((1, 4), (6, 9)), features=10)
    x = rows(9, "float32", 10)
    x[:, [0, 4, 5, 9]] = np.nan
    for engine in ENGINES:
        with gm.Session(mlp, device="cpu", engine=engine, batch=4) as session:
            close(session.logits(x), mlp, x)
            x[4, 7] = np.nan
            with pytest.raises(InvalidInput, match="row 4 holds nan in feature 7"):
                session.logits(x)
            x[4, 7] = 1


def test_arguments() -> None:
    mlp = make_mlp()
    for options, error, word in (
        ({"engine": "warp"}, InvalidInput, "unknown engine 'warp'"),
        ({"engine": "torch_graph"}, Unsupported, "torch_graph"),
        ({"variant": {"op": "mm"}}, InvalidInput, "needs its engine"),
        ({"batch": ()}, InvalidInput, "empty"),
        ({"batch": 0}, InvalidInput, "batch"),
        ({"batch": (4, 2.5)}, InvalidInput, "batch"),
        ({"input_dtype": "int16"}, InvalidInput, "input_dtype"),
        ({"engine": "numpy", "input_dtype": "bfloat16"}, InvalidInput, "input_dtype"),
        ({"engine": "numpy", "threads": 2}, Unsupported, "OPENBLAS_NUM_THREADS"),
        ({"plan": {}}, InvalidInput, "Plan.load"),
        ({"device": "tpu"}, InvalidInput, "tpu"),
    ):
        with pytest.raises(error, match=word):
            gm.Session(mlp, **{"device": "cpu", **options})
    with pytest.raises(InvalidInput, match="runs an MLP"):
        gm.Session("model.safetensors")  # type: ignore[arg-type]
    with gm.Session(mlp, device="cpu", engine="torch_eager", variant={"op": "mm"}, batch=4) as session:
        assert "op=mm" in session.explain()


def test_closed_session(session: gm.Session) -> None:
    session.predict(rows(3))
    session.close()
    session.close()
    for call in (session.predict, session.class_ids, session.predict_proba, session.logits):
        with pytest.raises(InvalidInput, match="closed"):
            call(rows(3))
    assert "closed" in repr(session)


# ---- input dtypes ---------------------------------------------------------------------------------------------------


def test_asked_dtype_takes_whole_numbers_only(mlp: gm.MLP) -> None:
    with gm.Session(mlp, device="cpu", input_dtype="uint8") as session:
        for dtype in ("uint8", "int64", "float64", "float32", "float16", "bool"):
            x = rows(9).astype(dtype)
            close(session.logits(x), mlp, x)
        for dtype, value in (("float32", 0.5), ("float64", 256.0), ("int16", -1), ("uint64", 256), ("float32", np.nan)):
            x = rows(9).astype(dtype)
            x[6, 1] = value
            with pytest.raises(InvalidInput, match="row 6 holds"):
                session.logits(x)


def test_asked_dtype_rounds_floats_but_never_overflows(mlp: gm.MLP) -> None:
    with gm.Session(mlp, device="cpu", input_dtype="float16") as session:
        x = rows(9, "float32") + np.float32(0.123456)
        close(session.logits(x), mlp, x.astype(np.float16))
        for big in (x * 1000, np.full((2, FEATURES), 70_000), np.full((2, FEATURES), np.iinfo(np.int64).min)):
            with pytest.raises(InvalidInput, match="does not fit float16"):
                session.logits(big)


# ---- heads and labels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("head", "outputs"),
    [("softmax", 5), ("softmax", 1), ("sigmoid", 1), ("multilabel", 4), ("regression", 1), ("regression", 3)],
)
def test_heads(engine: str, kind: str, head: str, outputs: int) -> None:
    mlp = make_mlp((FEATURES, 16, outputs), head=head)
    x = rows(21)
    given_rows = x if kind == "numpy" else torch.from_numpy(x)
    z = mlp.reference_logits(x)
    want = mlp.answers(z)
    with gm.Session(mlp, device="cpu", engine=engine, batch=(2, BATCH)) as session:
        found = session.predict(given_rows)
        assert isinstance(found, np.ndarray if kind == "numpy" else torch.Tensor)
        assert tuple(found.shape) == want.shape
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
        again = np.zeros(want.shape, np.asarray(found).dtype)
        out = again if kind == "numpy" else torch.from_numpy(again)
        assert session.predict(given_rows, out=out) is out
        np.testing.assert_array_equal(again, found)
        close(session.logits(given_rows), mlp, x)
        assert "21 rows" in session.explain(21)
        if head == "regression":
            for rows_in in (given_rows, given_rows[:0]):
                with pytest.raises(InvalidInput, match="no probabilities"):
                    session.predict_proba(rows_in)
        else:
            np.testing.assert_allclose(session.predict_proba(given_rows), mlp.probabilities(z), atol=1e-6)
        if head in ("multilabel", "regression"):
            with pytest.raises(InvalidInput, match="no single class"):
                session.class_ids(given_rows)
        assert len(session.predict(given_rows[:0])) == 0


def test_string_labels() -> None:
    mlp = make_mlp((FEATURES, 16, 3), classes=["ant", "bee", "caterpillar"])
    x = rows(21)
    with gm.Session(mlp, device="cpu", batch=BATCH) as session:
        found = session.predict(x)
        np.testing.assert_array_equal(found, mlp.predict(x))
        assert found.dtype == mlp.classes.dtype
        out = np.empty(21, "U11")
        assert session.predict(x, out=out) is out
        np.testing.assert_array_equal(out, found)
        with pytest.raises(InvalidInput, match="U11"):
            session.predict(x, out=np.empty(21, "U3"))  # labels would be cut short
        with pytest.raises(InvalidInput, match="class_ids"):
            session.predict(torch.from_numpy(x))
        np.testing.assert_array_equal(session.class_ids(torch.from_numpy(x)), mlp.class_ids(mlp.logits(x)))


@pytest.mark.parametrize("classes", [[-7, 1 << 40, 3], [False, True, 2], [2, 1, 0]])
def test_integer_labels(classes: list[int]) -> None:
    mlp = make_mlp((FEATURES, 16, 3), classes=np.array(classes, dtype=np.int64))
    x = rows(21)
    with gm.Session(mlp, device="cpu", batch=BATCH) as session:
        np.testing.assert_array_equal(session.predict(x), mlp.predict(x))
        found = session.predict(torch.from_numpy(x))
        assert found.dtype == torch.int64
        np.testing.assert_array_equal(found, mlp.predict(x))


# ---- plans ----------------------------------------------------------------------------------------------------------


def make_plan(mlp: gm.MLP, *candidates: Candidate, **changes: Any) -> Plan:
    machine = machine_fingerprint("cpu")
    return replace(Plan(machine, {}, mlp.digest(), mlp.name, candidates), **changes)


def candidate(batch: int, wall_us: float = 100.0, engine: str = "numpy", **more: Any) -> Candidate:
    spec = Spec("cpu", batch, more.pop("input_dtype", "uint8"), more.pop("output", "class"))
    variant = more.pop(
        "variant",
        Variant.of(op="matmul", compute="float32") if engine == "numpy" else Variant.of(op="mm", compute="float32"),
    )
    return Candidate(spec, engine, variant, wall_us=wall_us, **more)


def test_a_plan_decides(mlp: gm.MLP) -> None:
    plan = make_plan(
        mlp,
        candidate(1, 5.0),
        candidate(1, 2.0, "torch_eager", rejected="too sloppy"),
        candidate(64, 40.0, "torch_eager"),
        candidate(64, 60.0),
    )
    with gm.Session(mlp, plan) as session:
        assert session.device == "cpu"
        text = session.explain(130)
        assert "2 x batch 64    torch_eager op=mm compute=float32, 40.0 us by the plan" in text
        assert "2 x batch 1     numpy" in text
        close(session.logits(rows(130)), mlp, rows(130))  # another output: the same engines, asked for logits
        assert "class" not in session.explain(output="logits")
        np.testing.assert_array_equal(session.predict(rows(130)), mlp.predict(rows(130)))
        assert {(rung.engine, rung.batch) for rung in session._runners._bound} == {("torch_eager", 64), ("numpy", 1)}


def test_rows_of_another_dtype_than_planned(mlp: gm.MLP) -> None:
    with gm.Session(mlp, make_plan(mlp, candidate(8))) as session:
        x = rows(9)
        for dtype in ("int64", "float64", "float16"):
            close(session.logits(x.astype(dtype)), mlp, x)  # whole numbers in 0..255: nothing is lost
        with pytest.raises(InvalidInput, match=r"row 0 holds 0\.5"):
            session.predict(np.full((2, FEATURES), 0.5))
        with pytest.raises(InvalidInput, match="row 0 holds -3"):
            session.predict(np.full((2, FEATURES), -3, np.int8))
    with gm.Session(mlp, make_plan(mlp, candidate(8, input_dtype="float16"))) as session:
        close(session.logits(x), mlp, x)  # float16 holds every uint8
        with pytest.raises(InvalidInput, match=r"convert them yourself.*input_dtype='float32'"):
            session.predict(x.astype(np.float32))
    with gm.Session(mlp, make_plan(mlp, candidate(8), candidate(8, input_dtype="float32"))) as session:
        session.predict(x.astype(np.float64))
        assert {rung.spec.input_dtype for rung in session._runners._bound} == {"float32"}


def test_a_plan_that_does_not_hold(mlp: gm.MLP) -> None:
    plan = make_plan(mlp, candidate(8))
    other = make_mlp((FEATURES, 16, CLASSES), seed=1)
    with pytest.raises(PlanMismatch, match="another model"):
        gm.Session(other, plan)
    with pytest.raises(PlanMismatch, match=r"is .* here, but was .*retune=True"):
        gm.Session(mlp, replace(plan, machine={**plan.machine, "device": "Cray-1"}))
    with pytest.raises(PlanMismatch, match="no winner"):
        gm.Session(mlp, make_plan(mlp, candidate(8, rejected="slow")))
    gpu = replace(plan, candidates=(replace(candidate(8), spec=Spec("cuda:7", 8)),))
    with pytest.raises(PlanMismatch, match="made for cuda:7"):
        gm.Session(mlp, gpu)
    for option in ({"engine": "numpy"}, {"batch": 8}, {"threads": 1}, {"variant": {}}):
        with pytest.raises(InvalidInput, match=f"the plan decides about {next(iter(option))}"):
            gm.Session(mlp, plan, **option)
    with pytest.raises(InvalidInput, match="input_dtype must be one of uint8"):
        gm.Session(mlp, plan, input_dtype="float32")
    gm.Session(mlp.with_(name="renamed"), plan, device="cpu").close()  # a name changes no answer


def test_retune_on_request(mlp: gm.MLP, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def optimize(m: gm.MLP, device: str, batch: list[int], input_dtype: str, output: str, *, threads: Any) -> Plan:
        asked.append((device, batch, input_dtype, output, threads))
        return make_plan(m, *(candidate(b, input_dtype=input_dtype, output=output) for b in batch))

    monkeypatch.setattr("gigamlp.tune.optimize", optimize)
    old = make_plan(mlp, candidate(8), candidate(2), candidate(4, input_dtype="float32"), mlp_digest="0" * 64)
    with gm.Session(mlp, old, retune=True) as session:
        assert asked == [("cpu", [2, 8], "uint8", "class", None), ("cpu", [4], "float32", "class", None)]
        close(session.logits(rows(9)), mlp, rows(9))
        close(session.logits(rows(9, "float32")), mlp, rows(9))
    gm.Session(mlp, make_plan(mlp, candidate(8)), retune=True).close()
    assert len(asked) == 2  # a plan that holds is kept


def test_a_planned_engine_that_cannot_give_the_output(mlp: gm.MLP, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(ManualClock(), refuses={Variant.of(odd=True): "classes only"})
    monkeypatch.setattr(registry, "engine", lambda name: engine)
    plan = make_plan(mlp, candidate(8, engine="fake", variant=Variant.of(odd=True)))
    with (
        gm.Session(mlp, plan) as session,
        pytest.raises(Unsupported, match=r"classes only; plan for it with .*output='proba'"),
    ):
        session.predict_proba(rows(3))


def test_runners_are_built_once_and_closed(mlp: gm.MLP, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(ManualClock())
    monkeypatch.setattr(registry, "engine", lambda name: engine)
    with gm.Session(mlp, device="cpu", engine="fake", batch=(1, 8)) as session:
        assert engine.built == 0
        for _ in range(3):
            session.predict(rows(8))
            session.predict(rows(7))  # padded into the same runner
        assert engine.built == 1
        session.predict(rows(8, "float32"))
        session.logits(rows(8))
        assert (engine.built, engine.closed) == (3, 0)
    assert engine.closed == 3


def test_narrow_ids_of_a_runner_become_int64(mlp: gm.MLP, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(ManualClock(), ids="uint8")
    monkeypatch.setattr(registry, "engine", lambda name: engine)
    x = rows(21)
    with gm.Session(mlp, device="cpu", engine="fake", batch=(8,)) as session:
        ids = session.class_ids(x)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, mlp.class_ids(mlp.logits(x)))


def test_without_a_plan(mlp: gm.MLP) -> None:
    with gm.Session(mlp, device="cpu") as session:
        assert "engine 'torch_eager', the default without a plan" in session.explain()
        assert "compute=float32" in session.explain()
        assert "compute=bfloat16" not in session.explain(input_dtype="uint8")


# ---- cutting --------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(1, 300), st.floats(1, 1e4), min_size=1, max_size=6),
    st.integers(0, 2000),
)
@settings(max_examples=200, deadline=None)
def test_cuts_cover_all_rows_once(costs: dict[int, float], count: int) -> None:
    ladder = Ladder([Rung(Spec(batch=b), "numpy", None, cost) for b, cost in costs.items()])
    pieces = ladder.cut(count)
    assert sum(p.rows for p in pieces) == count
    assert all(p.rows == p.runs * p.rung.batch for p in pieces[:-1])  # only the last run is padded
    if pieces:
        assert 0 < p_last_rows(pieces) <= pieces[-1].rung.batch
        total = sum(p.runs * p.rung.cost for p in pieces)
        single = [-(-count // b) * cost for b, cost in costs.items()]  # one rung for all rows
        assert total <= min(single) * (1 + 1e-9)


def p_last_rows(pieces: Any) -> int:
    return int(pieces[-1].rows - (pieces[-1].runs - 1) * pieces[-1].rung.batch)


def test_planned_times_decide_the_cut() -> None:
    def cut(count: int, **times: float) -> list[tuple[int, int, int]]:
        rungs = [Rung(Spec(batch=int(b[1:])), "numpy", None, cost) for b, cost in times.items()]
        return [(p.rung.batch, p.runs, p.rows) for p in Ladder(rungs).cut(count)]

    assert cut(65, b64=10, b1=1) == [(64, 1, 64), (1, 1, 1)]
    assert cut(60, b64=10, b1=1) == [(64, 1, 60)]  # padding four rows beats sixty runs of one
    assert cut(3, b64=10, b1=1) == [(1, 3, 3)]
    assert cut(1000, b512=1000, b100=10) == [(100, 10, 1000)]  # the larger batch is the slower one
    assert default_batches(bytes_per_row=1 << 30, memory=1, largest=100) == (1,)


# ---- threads, processes, no torch -----------------------------------------------------------------------------------


def test_threads_share_a_session(session: gm.Session, mlp: gm.MLP) -> None:
    inputs = [rows(17 + i, seed=i) for i in range(6)]
    wrong: list[Any] = []

    def hammer(i: int) -> None:
        try:
            want = mlp.reference_logits(inputs[i])
            for _ in range(30):
                z = session.logits(inputs[i])
                if not np.allclose(z, want, rtol=1e-5, atol=1e-5):
                    wrong.append((i, "differs"))
        except Exception as error:  # noqa: BLE001  shown by the assertion below
            wrong.append((i, repr(error)))

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_sessions_at_once(mlp: gm.MLP) -> None:
    other = make_mlp((FEATURES, 9, 4), seed=3)
    x = rows(21)
    with gm.Session(mlp, device="cpu", batch=BATCH) as a, gm.Session(other, device="cpu", batch=BATCH) as b:
        za, zb = a.logits(x), b.logits(x)
        a.close()
        close(b.logits(x), other, x)
    close(za, mlp, x)
    close(zb, other, x)


def test_a_cpu_session_survives_a_fork(mlp: gm.MLP) -> None:
    """The child has a lock of its own: the parent's is held by a thread that does not exist in the child."""
    session = gm.Session(mlp, device="cpu", engine="numpy", batch=4)
    session.predict(rows(4))
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with session._runners._lock:
            held.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(session.predict(rows(3)).tolist()), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks beside threads
        child.start()
    over.set()
    holder.join()
    assert queue.get(timeout=30) == mlp.predict(rows(3)).tolist()
    child.join(60)
    session.close()


def test_a_torch_session_works_in_a_forked_child() -> None:
    """With the parent's thread count the child would wait for ever for threads that it does not have."""
    big = gm.MLP([gm.Layer(np.ones((64, 512)), activation="relu"), gm.Layer(np.ones((3, 64)))])
    x = np.ones((600, 512), np.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with gm.Session(big, device="cpu", engine="torch_eager", batch=600) as session:
            expected = session.predict(x).tolist()
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=lambda: queue.put(session.predict(x).tolist()), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            assert queue.get(timeout=60) == expected
            child.join(60)
    finally:
        torch.set_num_threads(before)


def test_torch_defaults_of_the_caller_do_not_matter(mlp: gm.MLP) -> None:
    x = rows(900, "float32")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), gm.Session(mlp, device="cpu", batch=BATCH) as session:
            close(session.logits(x), mlp, x)
            assert session.predict_proba(torch.from_numpy(x)).dtype == torch.float32
    finally:
        torch.set_default_dtype(dtype)


def test_autograd_modes_of_the_caller_do_not_matter(mlp: gm.MLP) -> None:
    """Runners that were built in inference mode run outside of it, and answers are ordinary tensors."""
    x = torch.from_numpy(rows(11, "float32"))
    with gm.Session(mlp, device="cpu", batch=BATCH) as session:
        with torch.inference_mode():
            session.logits(x)
        z = session.logits(x)
        assert not z.is_inference()
        assert not z.requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            close(session.logits(x), mlp, x.numpy())


def test_a_session_is_not_pickled_but_what_it_is_made_of_is(mlp: gm.MLP) -> None:
    plan = make_plan(mlp, candidate(8))
    with gm.Session(mlp, device="cpu") as session:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(InvalidInput, match=r"cannot be pickled or copied.*Send the MLP and the Plan"):
                attempt(session)
    again, its_plan = pickle.loads(pickle.dumps((mlp, plan)))
    assert again.digest() == mlp.digest()
    assert its_plan == plan


def test_without_torch() -> None:
    """NumPy rows need neither torch nor a trace of it."""
    code = """
        import sys
        sys.modules["torch"] = None  # any import of torch fails from here on
        import numpy as np
        import gigamlp as gm
        mlp = gm.MLP([gm.Layer(np.eye(4), np.arange(4), "relu"), gm.Layer(np.ones((3, 4)))], classes=["a", "b", "c"])
        x = np.arange(40, dtype=np.uint8).reshape(10, 4)
        with gm.Session(mlp) as session:
            assert "engine 'numpy', the default without a plan" in session.explain(), session.explain()
            for rows in (x, x.astype(np.float32), x.astype(np.int64), x.tolist(), x[::-1]):
                assert np.allclose(session.logits(rows), mlp.reference_logits(rows), rtol=1e-6)
            assert session.predict(x).tolist() == mlp.predict(x).tolist()
        try:
            gm.Session(mlp, engine="torch_eager")
        except gm.errors.Unsupported as error:
            assert "gigamlp[torch]" in str(error)
        else:
            raise AssertionError("torch_eager was offered without torch")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_numpy_rows_do_not_import_torch() -> None:
    code = """
        import sys
        import numpy as np
        import gigamlp as gm
        with gm.Session(gm.MLP([gm.Layer(np.eye(4))]), device="cpu", engine="numpy") as session:
            session.predict(np.ones((3, 4)))
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


# ---- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_overhead_over_the_bare_runner(engine: str) -> None:
    """At equal residence at most 10 %; asserted loosely, as this machine is shared: benchmarks/session_overhead.py."""
    from gigamlp.measure import clock_for, throughput

    mlp = make_mlp((784, 128, 10))
    x = rows(16_384, features=784)
    with gm.Session(mlp, device="cpu", engine=engine, batch=len(x)) as session:
        session.predict(x)
        (bound,) = session._runners._bound.values()
        source = x if bound.numpy else torch.from_numpy(x)
        for _ in range(3):
            work = {"bare": lambda: bound.runner.run(source), "session": lambda: session.predict(x)}
            times = throughput(work, clock_for("cpu"), repeats=5, min_s=0.02)
            ratio = times["session"].wall_us / times["bare"].wall_us
            if ratio <= 1.3:
                break
        assert ratio <= 1.3


def test_plan_choice_names_its_origin(mlp: gm.MLP) -> None:
    plan = make_plan(mlp, candidate(8))
    choice = PlanChoice(plan, plan.winners, "cpu")
    assert choice.title == "the plan for 'random'"
    with pytest.raises(InvalidInput, match="no winner for float32"):
        choice.ladder("float32", "class")
