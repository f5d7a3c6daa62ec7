"""Rows through a runner, and the accuracy gate."""

from __future__ import annotations

import numpy as np
import pytest

from gigamlp.errors import DataError, InvalidInput
from gigamlp.spec import Spec, Variant
from gigamlp.trial import class_indices, cold_count, fill, judge, launch_cold, make_gate, probe_rows, run_rows
from tests.fakes import FakeEngine, ManualClock, make_mlp


def runner(batch: int = 8, output: str = "class", **more: object):
    mlp = make_mlp()
    engine = FakeEngine(ManualClock(), **more)
    return engine, mlp, engine.build(mlp, Spec(batch=batch, output=output))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("output", ["class", "logits", "margin"])
def test_run_rows_gives_one_answer_a_row_whatever_the_batch(rows: int, output: str) -> None:
    _, mlp, r = runner(8, output)
    x = np.random.default_rng(rows).integers(0, 256, (rows, 6)).astype(np.uint8)
    y = run_rows(r, x)
    expected = mlp.logits(x) if output == "logits" else mlp.class_ids(mlp.logits(x))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_fill_repeats_the_rows_over_the_whole_batch() -> None:
    _, _, r = runner(10)
    x = np.arange(18, dtype=np.uint8).reshape(3, 6)
    fill(r, x)
    np.testing.assert_array_equal(r.input, x[np.arange(10) % 3])


def test_cold_runs_take_the_same_rows_from_separate_inputs_beyond_the_cache(monkeypatch) -> None:
    _, mlp, r = runner(10)
    x = np.random.default_rng(0).integers(0, 256, (10, 6)).astype(np.uint8)
    seen = []
    monkeypatch.setattr(r, "run", seen.append)
    work = launch_cold(mlp, r, x, cache_bytes=100)
    for _ in range(10):
        work()
    inputs = {q.ctypes.data: q for q in seen}
    assert len(inputs) == 5  # 5 x 60 bytes is the first count that reaches 3 x 100
    assert [q.ctypes.data for q in seen[:5]] == [q.ctypes.data for q in seen[5:]]
    for q in inputs.values():
        np.testing.assert_array_equal(q, x)
    assert launch_cold(mlp, r, x, cache_bytes=10)() is None  # larger than the cache by itself: no copy needed
    assert seen[-1] is r.input
    with pytest.raises(InvalidInput, match="use a batch of"):
        cold_count(mlp, Spec(batch=1), 48 << 20)
    with pytest.raises(InvalidInput, match="unknown"):
        cold_count(mlp, Spec(batch=1024), 0)


def test_labels_become_indices_in_the_order_of_the_classes() -> None:
    mlp = make_mlp(classes=["pear", "apple", "fig"])
    assert class_indices(mlp, ["fig", "pear", "apple"]).tolist() == [2, 0, 1]
    with pytest.raises(DataError, match="'plum'"):
        class_indices(mlp, ["fig", "plum"])
    with pytest.raises(DataError):
        class_indices(make_mlp(), [0, 3])
    with pytest.raises(DataError):
        class_indices(make_mlp(head="regression"), [0, 1])


def test_drawn_rows_are_of_the_models_scale() -> None:
    mlp = make_mlp((40, 8, 3), input_scale=1e-3, input_offset=5.0)
    x = probe_rows(mlp, "float32").astype(np.float64)
    seen = x * 1e-3 + 5.0
    assert abs(seen.mean()) < 0.1
    assert abs(seen.std() - 1) < 0.1
    assert probe_rows(mlp, "uint8").dtype == np.uint8


class TestJudge:
    def test_exact_answers_pass_with_and_without_rows(self) -> None:
        engine, mlp, r = runner(output="class")
        x = probe_rows(mlp, "uint8", rows=50)
        y = mlp.predict(x)
        verdict = judge(engine, mlp, r, make_gate(mlp, "uint8", (x, y)))
        assert (verdict.accuracy, verdict.disagreement, verdict.rejected) == (1.0, 0.0, None)
        verdict = judge(engine, mlp, r, make_gate(mlp, "uint8"))
        assert verdict.rejected is None
        assert verdict.logit_error < 1e-5
        assert verdict.accuracy is None

    def test_without_rows_logits_decide_even_for_class_output(self) -> None:
        # the classes stay right, as all logits move together; the logits are wrong by far more than 1e-3
        engine, mlp, r = runner(output="class", distort={Variant(): 0.5})
        verdict = judge(engine, mlp, r, make_gate(mlp, "uint8"))
        assert verdict.disagreement == 0.0
        assert "more than 1e-03" in verdict.rejected
        assert engine.closed == 1  # the second runner, built for its logits

    def test_with_rows_disagreement_decides(self) -> None:
        engine, mlp, r = runner(output="class", distort={Variant(): np.array([9.0, 0.0, 0.0])})
        x = probe_rows(mlp, "uint8", rows=200)
        assert "another class" in judge(engine, mlp, r, make_gate(mlp, "uint8", (x, None))).rejected
        assert judge(engine, mlp, r, make_gate(mlp, "uint8", (x, None), max_disagreement=1.0)).rejected is None

    def test_with_labels_accuracy_decides_if_asked(self) -> None:
        engine, mlp, r = runner(output="class")
        x = probe_rows(mlp, "uint8", rows=100)
        y = mlp.predict(x).copy()
        y[:10] = (y[:10] + 1) % 3
        assert judge(engine, mlp, r, make_gate(mlp, "uint8", (x, y), min_accuracy=0.9)).rejected is None
        assert "below 0.9100" in judge(engine, mlp, r, make_gate(mlp, "uint8", (x, y), min_accuracy=0.91)).rejected

    def test_nan_answers_are_rejected(self) -> None:
        engine, mlp, r = runner(output="logits", distort={Variant(): np.nan})
        assert "NaN" in judge(engine, mlp, r, make_gate(mlp, "uint8")).rejected

    @pytest.mark.parametrize("head", ["multilabel", "regression"])
    def test_heads_without_a_class_are_judged_by_their_logits(self, head: str) -> None:
        mlp = make_mlp(head=head)
        x = probe_rows(mlp, "uint8", rows=30)
        good = FakeEngine(ManualClock())
        bad = FakeEngine(ManualClock(), distort={Variant(): 0.3})
        gate = make_gate(mlp, "uint8", (x, None))
        spec = Spec(batch=8, output="logits")
        assert judge(good, mlp, good.build(mlp, spec), gate).rejected is None
        assert "relative" in judge(bad, mlp, bad.build(mlp, spec), gate).rejected


def test_validation_rows_that_the_input_dtype_cannot_hold_are_refused() -> None:
    mlp = make_mlp()
    x = probe_rows(mlp, "uint8", rows=20)
    for bad in (x / 255 + 0.1, x.astype(np.int64) + 256, x.astype(np.int64) - 300):
        with pytest.raises(InvalidInput, match="uint8 cannot"):
            make_gate(mlp, "uint8", (bad, None))
    assert make_gate(mlp, "uint8", (x.astype(np.float64), None)).x.dtype == np.uint8
    assert make_gate(mlp, "float32", (x / 255, None)).given


def test_impossible_gates_are_refused() -> None:
    mlp = make_mlp()
    x = probe_rows(mlp, "uint8", rows=9)
    with pytest.raises(InvalidInput, match="needs validation"):
        make_gate(mlp, "uint8", min_accuracy=0.9)
    with pytest.raises(InvalidInput, match="labels"):
        make_gate(mlp, "uint8", (x, None), min_accuracy=0.9)
    with pytest.raises(InvalidInput, match="fraction"):
        make_gate(mlp, "uint8", (x, None), max_disagreement=3)
    with pytest.raises(DataError, match="9 rows, but 8 labels"):
        make_gate(mlp, "uint8", (x, np.zeros(8, int)))
    with pytest.raises(DataError, match="no rows"):
        make_gate(mlp, "uint8", (x[:0], None))
    with pytest.raises(InvalidInput, match="features"):
        make_gate(mlp, "uint8", (x[:, :5], None))
