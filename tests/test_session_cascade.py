"""A cascade in a Session: the same answers for any number and kind of rows, and the unsure ones counted."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp import Cascade
from gigamlp.engines import registry
from gigamlp.errors import InvalidInput, PlanMismatch, Unsupported
from gigamlp.unsure import UnsureCount
from tests.engines.test_cascades import cascade_of, rows_of

NAMES = ("cpu_fused", "numpy")


def exact(cascade: Cascade, x: Any) -> Any:
    """Return ids and deciding stages by the native engine in float32, which the tests of engines compare with NumPy."""
    return cascade.decide(x)


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_rows_is_answered_and_counted(name: str) -> None:
    cascade = cascade_of("three")
    variant = {"cascade": 3, "scheme": "float32"} if name == "cpu_fused" else None
    with gm.Session(cascade, device="cpu", engine=name, variant=variant, batch=(1, 64, 1000)) as session:
        assert session.unsure is not None
        assert (session.unsure.share, session.unsure.last) == (None, None)
        rows = total = 0
        for count in (1, 63, 64, 65, 999, 2357, 0):
            x = rows_of(count)
            ids, deciding = exact(cascade, x)
            np.testing.assert_array_equal(session.class_ids(x), ids)
            rows, total = rows + count, total + int((deciding > 0).sum())
            last = session.unsure.last
            if count and name == "cpu_fused":
                assert last == UnsureCount(count, tuple(int((deciding > i).sum()) for i in (0, 1)))
        if name == "cpu_fused":  # the other one counts padding too
            assert session.unsure.total.rows == rows
            assert session.unsure.share == total / rows
            assert session.unsure.total.shares[0] == session.unsure.share


def test_rows_of_every_kind_are_answered_alike() -> None:
    torch = pytest.importorskip("torch")
    cascade = cascade_of("two").with_(name="pair")
    labelled = Cascade(tuple(s.with_(classes=["a", "b", "c", "d"]) for s in cascade.stages), cascade.thresholds)
    x = rows_of(500)
    with gm.Session(cascade, device="cpu") as session, gm.Session(labelled, device="cpu") as words:
        expected = cascade.predict(x)
        wide = np.zeros((500, 80), np.uint8)
        wide[:, ::2][:, :37] = x
        for rows in (
            x,
            x.astype(np.int64),
            x.astype(np.float64),
            np.asfortranarray(x),
            wide[:, ::2][:, :37],
            x.tolist(),
        ):
            np.testing.assert_array_equal(session.predict(rows), expected)
        np.testing.assert_array_equal(session.predict(torch.from_numpy(x)).numpy(), expected)
        out = np.empty(500, np.int64)
        assert session.predict(x, out=out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(words.predict(x), np.array(["a", "b", "c", "d"])[expected])
        assert session.predict_one(x[0]) == expected[0]
        assert words.predict_one(x[0]) == "abcd"[expected[0]]
        assert "pair" in repr(session)
        assert "cascade=2" in session.explain()
        with pytest.raises(InvalidInput, match="NaN"):
            session.predict(np.full((2, 37), np.nan, np.float32))
        with pytest.raises(Unsupported, match="class or margin"):
            session.predict_proba(x)
        with pytest.raises(InvalidInput, match="no calibration"):
            session.unsure.drift()


def test_without_a_plan_unquantised_stages_run_in_float32_and_others_in_their_scheme() -> None:
    cascade = cascade_of("two")
    with gm.Session(cascade, device="cpu") as session:
        assert "scheme=float32" in session.explain(100, input_dtype="uint8")
    integer = cascade.with_(stages=tuple(gm.quantise(stage) for stage in cascade.stages))
    with gm.Session(integer, device="cpu") as session:
        assert "scheme=w8" in session.explain(100, input_dtype="uint8")
        assert "scheme=float32" in session.explain(100, input_dtype="float32")


def test_threads_share_a_session_and_lose_no_count() -> None:
    cascade = cascade_of("two")
    x = rows_of(1001)
    expected, deciding = exact(cascade, x)
    wrong: list[int] = []
    with gm.Session(cascade, device="cpu") as session:

        def work() -> None:
            for _ in range(10):
                if not np.array_equal(session.predict(x), expected):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not wrong
        assert session.unsure is not None
        assert session.unsure.total == UnsureCount(40 * 1001, (40 * int((deciding > 0).sum()),))


def test_an_mlp_counts_nothing() -> None:
    with gm.Session(cascade_of("two").stages[0], device="cpu", engine="numpy") as session:
        assert session.unsure is None


def test_it_is_planned_for_and_the_plan_says_what_it_is() -> None:
    cascade = cascade_of("two")
    if registry.engine("cpu_fused").unavailable("cpu") is not None:
        pytest.skip("no native kernels")
    x = rows_of(2000)
    plan = gm.optimize(cascade, "cpu", (1, 512), validation=(x, cascade.predict(x)), max_disagreement=0.05)
    assert {c.engine for c in plan.candidates if c.rejected is None} >= {"cpu_fused", "numpy"}
    assert all(c.variant.get("cascade") == 2 for c in plan.winners)
    torch = [c for c in plan.candidates if c.engine == "torch_eager"]
    assert torch[0].rejected is not None
    assert "runs no cascades" in torch[0].rejected
    assert "a cascade of n1, n3; " in plan.explain()
    assert "of the validation rows go on" in plan.explain()
    again = gm.Plan.from_json(plan.to_json())
    with gm.Session(cascade, again) as session:
        assert (session.predict(x) == cascade.predict(x)).mean() > 0.95
    with pytest.raises(PlanMismatch, match="another model"):
        gm.Session(cascade.with_(thresholds=(0.25,)), again)


def test_without_validation_rows_only_what_is_exact_competes() -> None:
    cascade = cascade_of("two")
    plan = gm.optimize(cascade, "cpu", 256, engines=["cpu_fused"])
    assert {c.variant.get("scheme") for c in plan.candidates if c.rejected is None} == {"float32"}
    rejected = [c.rejected for c in plan.candidates if c.variant.get("scheme") == "w8"]
    assert rejected
    assert all("carry a scheme" in str(reason) for reason in rejected)
    integer = cascade.with_(stages=tuple(gm.quantise(stage) for stage in cascade.stages))
    plan = gm.optimize(integer, "cpu", 256, engines=["cpu_fused"])
    assert "w8" in {c.variant.get("scheme") for c in plan.candidates if c.rejected is None}
