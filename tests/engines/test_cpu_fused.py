"""The engine ``cpu_fused``: what it offers and refuses, its answers, threads, forks and single rows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.engines.base import Unsupported
from gigamlp.engines.cpu_fused import CpuFused
from gigamlp.errors import InvalidInput
from gigamlp.kernels.cpu import native
from gigamlp.quantize import calibrate, form_of
from gigamlp.spec import Spec, Variant
from gigamlp.tune import Effort
from tests.kernels.cpu.cases import network, rows

ENGINE = CpuFused()
pytestmark = pytest.mark.skipif(native.native_problem() is not None, reason=str(native.native_problem()))


def variants(mlp: gm.MLP, batch: int = 64, full: bool = False, **more: object) -> list[Variant]:
    return list(ENGINE.variants(mlp, Spec("cpu", batch, **more), full=full))  # type: ignore[arg-type]


# ---- what is offered and refused ------------------------------------------------------------------------------------


def test_bytes_run_in_the_models_scheme_or_float32() -> None:
    mlp = network((50, 8, 3))
    assert {v.get("scheme") for v in variants(mlp)} == {"w8", "float32"}
    assert variants(mlp)[0].get("scheme") == "w8"
    small = gm.quantise(mlp, "w7", calibration=rows(mlp, 50))
    assert {v.get("scheme") for v in variants(small)} == {"w7", "float32"}
    for dtype in ("float32", "float16"):
        assert {v.get("scheme") for v in variants(mlp, input_dtype=dtype)} == {"float32"}


def test_zeros_are_skipped_in_uint8_rows_only() -> None:
    mlp = network((50, 8, 3))
    assert {v.get("zeros") for v in variants(mlp)} == {"auto", "dense"}
    assert {v.get("zeros") for v in variants(mlp, full=True)} == {"auto", "dense", "skip"}
    assert {v.get("zeros") for v in variants(mlp, input_dtype="int8")} == {"dense"}


def test_threads_are_for_large_batches() -> None:
    mlp = network((784, 40, 10))
    assert {v.get("threads") for v in variants(mlp, 1)} == {1}
    assert {v.get("threads") for v in variants(mlp, 100_000, threads=3)} == {3}
    everything = variants(mlp, 100, full=True)
    assert set(variants(mlp, 100)) <= set(everything)
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize(
    ("change", "spec", "reason"),
    [
        ({}, {"device": "cuda:0"}, "run on the CPU only"),
        ({}, {"input_dtype": "bfloat16"}, "no bfloat16"),
        ({"head": "multilabel"}, {}, "no single class"),
        ({"head": "regression", "classes": None}, {"output": "proba"}, "no probabilities"),
        ({"scheme": gm.Scheme("w8a8")}, {}, "needs? the range of hidden layer 0"),
        ({"scheme": gm.Scheme("w8", {"hidden_scale.0": [1.0]})}, {}, "no use for hidden_scale.0"),
    ],
)
def test_what_it_cannot_do_is_refused(change: dict, spec: dict, reason: str) -> None:
    mlp = network((20, 8, 3)).with_(**change)
    with pytest.raises(Unsupported, match=reason):
        ENGINE.variants(mlp, Spec(**{"device": "cpu", "batch": 4, **spec}))
    with pytest.raises(Unsupported, match=reason):
        ENGINE.build(mlp, Spec(**{"device": "cpu", "batch": 4, **spec}))


def test_a_variant_may_name_some_options_only() -> None:
    mlp = network((20, 8, 3))
    runner = ENGINE.build(mlp, Spec("cpu", 4), Variant.of(zeros="dense", threads=7))
    assert (runner.variant.get("zeros"), runner.variant.get("threads")) == ("dense", 7)
    assert runner.variant.get("scheme") == "w8"
    for options, error, words in (
        ({"zero": "dense"}, InvalidInput, "unknown options zero; known: scheme, zeros, threads, isa"),
        ({"zeros": "never"}, InvalidInput, "zeros must be one of dense, auto, skip"),
        ({"isa": "mmx"}, InvalidInput, "unknown instruction set 'mmx'"),
        ({"threads": 0}, InvalidInput, "threads must be"),
        ({"scheme": "w7"}, Unsupported, "no 'scheme=w7'"),
    ):
        with pytest.raises(error, match=words):
            ENGINE.build(mlp, Spec("cpu", 4), Variant.from_json(options))


def test_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENGINE.unavailable("cpu") is None
    assert "CPU only" in str(ENGINE.unavailable("cuda:0"))

    def absent(name: str) -> None:
        raise ImportError("no module named _native")

    monkeypatch.setattr(native, "import_module", absent)
    assert "without a C++ compiler" in str(ENGINE.unavailable("cpu"))
    with pytest.raises(Unsupported, match="without a C"):
        ENGINE.build(network((20, 8, 3)), Spec("cpu", 4))


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["class", "margin", "logits", "proba"])
@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_every_variant_and_output(output: str, head: str) -> None:
    mlp = network((100, 24, 6 if head == "softmax" else 1), head=head)
    x = rows(mlp, 101)
    small = gm.quantise(mlp, "w7", calibration=x)
    z = form_of(small).reference_logits(x)
    for variant in variants(small, 101, full=True, output=output):
        want = z if variant.get("scheme") == "w7" else mlp.reference_logits(x)
        tolerance = 0 if variant.get("scheme") == "w7" else 1e-4
        y = ENGINE.build(small, Spec("cpu", 101, output=output), variant).run(x)
        if output == "logits":
            np.testing.assert_allclose(y, want, rtol=0, atol=tolerance)
        elif output == "proba":
            np.testing.assert_allclose(y, mlp.probabilities(want), atol=1e-4)
        else:
            ids = y if output == "class" else y[0]
            assert ids.dtype == np.int64
            np.testing.assert_array_equal(ids, mlp.class_ids(want))


@pytest.mark.parametrize("batch", [1, 29, 30, 31, 997])
def test_three_inputs_bind_and_close(batch: int) -> None:
    mlp = network((100, 24, 6))
    runner = ENGINE.build(mlp, Spec("cpu", batch, "float32", "logits"))
    other = runner.bind(rows(mlp, batch, seed=9).astype(np.float32))
    for seed in range(3):
        x = rows(mlp, batch, seed=seed).astype(np.float32)
        np.testing.assert_allclose(runner.run(x), mlp.reference_logits(x), atol=1e-4)
    kept = runner.run(x)
    np.testing.assert_allclose(other.run(other.input), mlp.reference_logits(other.input), atol=1e-4)
    np.testing.assert_allclose(kept, mlp.reference_logits(x), atol=1e-4)  # outputs are not shared
    runner.close()
    runner.close()
    with pytest.raises(InvalidInput, match="closed"):
        runner.run(x)
    np.testing.assert_allclose(other.run(x), mlp.reference_logits(x), atol=1e-4)


def test_wrong_rows() -> None:
    runner = ENGINE.build(network((6, 4, 3)), Spec("cpu", 7))
    for x in (np.zeros((6, 6), np.uint8), np.zeros((7, 6), np.float32), [[0] * 6] * 7):
        with pytest.raises(InvalidInput, match=r"uint8 \[7, 6\]"):
            runner.run(x)


# ---- threads and forks ----------------------------------------------------------------------------------------------


def test_many_callers_share_the_pool() -> None:
    mlp = network((784, 64, 10))
    x = rows(mlp, 3000)
    spec = Spec("cpu", 3000)
    want = ENGINE.build(mlp, spec, Variant.of(threads=1)).run(x).copy()
    wrong: list[int] = []

    def work() -> None:
        runner = ENGINE.build(mlp, spec, Variant.of(threads=3))
        for _ in range(20):
            if not np.array_equal(runner.run(x), want):
                wrong.append(1)

    callers = [threading.Thread(target=work) for _ in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert wrong == []


FORK = """
import os, sys, numpy as np
from gigamlp.engines.cpu_fused import CpuFused
from gigamlp.spec import Spec, Variant
from gigamlp.tune import Effort
from tests.kernels.cpu.cases import network, rows
mlp = network((784, 64, 10))
x = rows(mlp, 5000)
runner = CpuFused().build(mlp, Spec("cpu", 5000), Variant.of(threads=2))
want = runner.run(x).copy()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(np.array_equal(runner.run(x), want) for _ in range(10)) else 3)
    assert np.array_equal(runner.run(x), want)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_makes_its_own_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=60, cwd=Path.cwd()
    )
    assert done.stdout == "done\n", done.stderr


def test_threads_sleep_when_there_is_nothing_to_do() -> None:
    mlp = network((784, 64, 10))
    runner = ENGINE.build(mlp, Spec("cpu", 20_000), Variant.of(threads=2))
    runner.run(runner.input)
    before = os.times()
    threading.Event().wait(0.3)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1


# ---- one row --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [None, ["zero", "one", "two"], [5, 3, 9]])
def test_one_row(labels: list | None) -> None:
    mlp = network((50, 8, 3), classes=labels)
    x = rows(mlp, 40)
    for zeros in ("dense", "auto", "skip"):
        runner = ENGINE.build(mlp, Spec("cpu", 8), Variant.of(zeros=zeros))
        got = [runner.one()(row) for row in x]
        ids = np.concatenate([runner.run(x[i : i + 8]).copy() for i in range(0, 40, 8)])
        assert got == [mlp.classes[i] for i in ids]
        assert all(type(label) is (str if labels and isinstance(labels[0], str) else int) for label in got)
        for bad in (x[0, :5], x[0].astype(np.float32), x[:1]):
            with pytest.raises(ValueError, match="another type or length"):
                runner.one()(bad)


# ---- with the tuner and a Session -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[gm.MLP, np.ndarray, gm.Plan]:
    mlp = network((100, 24, 6), classes=list("abcdef"))
    x = rows(mlp, 600)
    effort = Effort(repeats=2, min_s=0.001, warmup_s=0.001, latency_calls=10)
    plan = gm.optimize(
        mlp,
        device="cpu",
        batch=(1, 64),
        validation=(x, None),
        max_disagreement=1.0,
        engines=["cpu_fused"],
        effort=effort,
    )
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return mlp, x, gm.Plan.load(path)


def test_the_tuner_tries_bytes_in_every_layer(planned: tuple[gm.MLP, np.ndarray, gm.Plan]) -> None:
    mlp, x, plan = planned
    assert {c.variant.get("scheme") for c in plan.candidates} >= {"w8", "w8a8", "float32"}
    assert [c.rejected for c in plan.candidates] == [None] * len(plan.candidates)
    assert plan.hidden_ranges is not None
    assert plan.hidden_ranges["hidden_scale.0"] == calibrate(mlp, x)["hidden_scale.0"].tolist()


def test_a_session_rebuilds_the_very_model(planned: tuple[gm.MLP, np.ndarray, gm.Plan]) -> None:
    mlp, x, plan = planned
    kept = tuple(c for c in plan.candidates if c.variant.get("scheme") == "w8a8")
    only = replace(plan, candidates=kept)
    want = form_of(gm.quantise(mlp, "w8a8", calibration=x)).reference_logits(x)
    with gm.Session(mlp, only) as session:
        np.testing.assert_array_equal(session.logits(x), want)
        assert session.predict(x).tolist() == [session.predict_one(row) for row in x]


def test_one_row_through_a_session() -> None:
    mlp = network((50, 8, 3), classes=["zero", "one", "two"])
    x = rows(mlp, 30)
    with gm.Session(mlp, device="cpu", engine="cpu_fused") as session:
        want = session.predict(x).tolist()
        early = session.predict_one
        for _ in range(2):  # the first call finds the native one
            assert [session.predict_one(row) for row in x] == want
        assert type(session.predict_one).__name__ == "builtin_function_or_method"
        assert [early(row) for row in x] == want
        assert session.predict_one(x[0].tolist()) == want[0]
        assert session.predict_one(x[0].astype(np.float32)) == mlp.predict(x[:1])[0]
        assert session.predict_one(np.repeat(x, 2, axis=1)[3, ::2]) == want[3]
        for bad in (x[0, :5], x[:2], "row", None):
            with pytest.raises(InvalidInput):
                session.predict_one(bad)
    with pytest.raises(InvalidInput, match="closed"):
        session.predict_one(x[0])
    for other in (network((5, 3), head="regression", classes=None), network((5, 3), head="multilabel")):
        row = rows(other, 1)[0]
        with gm.Session(other, device="cpu", engine="cpu_fused") as session:
            np.testing.assert_array_equal(session.predict_one(row), session.predict(row[None])[0])
