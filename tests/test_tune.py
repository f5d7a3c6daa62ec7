"""The tuner on a fake clock: what is measured, chosen and rejected, and why."""

from __future__ import annotations

import numpy as np
import pytest

from gigamlp import search as candidates
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.plan import Candidate, Plan
from gigamlp.spec import Spec, Variant
from gigamlp.trial import make_gate
from gigamlp.tune import Effort, optimize, try_candidates
from tests.fakes import FakeEngine, ManualClock, make_mlp

A, B, C = Variant.of(v="a"), Variant.of(v="b"), Variant.of(v="c")
SPEC = Spec(batch=16, output="class")
EFFORT = Effort(repeats=5, min_s=0.1, latency_calls=20)


def search(*engines: FakeEngine, spec: Spec = SPEC, effort: Effort = EFFORT, **more: object) -> list[Candidate]:
    mlp = make_mlp()
    table = {e.name: e for e in engines}
    return try_candidates(
        mlp, spec, make_gate(mlp, spec.input_dtype), engines[0].clock, effort=effort,
        engines=more.pop("engines", None) or list(table), find=table.__getitem__, **more,
    )  # fmt: skip


def winner(found: list[Candidate], spec: Spec = SPEC) -> Candidate | None:
    return Plan({}, {}, "", "", tuple(found)).winner(spec)


def test_the_quickest_accepted_variant_wins() -> None:
    clock = ManualClock()
    found = search(FakeEngine(clock, offered=[A, B, C], seconds={A: 3e-3, B: 1e-3, C: 2e-3}))
    assert winner(found).variant == B
    assert winner(found).wall_us == pytest.approx(16e3)
    assert winner(found).repeats == 5
    assert winner(found).iqr == pytest.approx(0, abs=1e-6)


def test_a_fast_variant_with_wrong_answers_is_rejected_and_not_timed() -> None:
    clock = ManualClock()
    engine = FakeEngine(clock, offered=[A, B], seconds={A: 1e-6, B: 1e-3}, distort={A: 1.0})
    found = {c.variant: c for c in search(engine)}
    assert winner(list(found.values())).variant == B
    assert "relative" in found[A].rejected
    assert found[A].wall_us is None


def test_every_failure_is_a_row_with_its_reason() -> None:
    clock = ManualClock()
    engine = FakeEngine(
        clock,
        offered=[A, B, C],
        refuses={A: "needs a unicorn"},
        breaks={B: ValueError("boom\nmore")},
        fails_after={C: 60},
    )
    found = {c.variant: c.rejected for c in search(engine)}
    assert found[A] == "needs a unicorn"
    assert found[B] == "ValueError: boom"
    assert found[C] == "failed while timed: RuntimeError: the device fell off the bus"
    assert engine.built == engine.closed


def test_variants_are_interleaved() -> None:
    clock = ManualClock()
    engine = FakeEngine(clock, offered=[A, B], seconds={A: 0.01, B: 0.01})
    search(engine)
    order = [v for i, v in enumerate(engine.log) if i == 0 or engine.log[i - 1] != v]
    assert len(order) > 8  # not first all of A, then all of B


def test_one_row_is_decided_by_latency() -> None:
    clock = ManualClock()
    spec = Spec(batch=1)
    found = search(FakeEngine(clock, offered=[A, B], seconds={A: 2e-3, B: 1e-3}), spec=spec)
    assert all(c.p50_us is not None for c in found)
    assert winner(found, spec).p50_us == pytest.approx(1e3)


def test_an_unavailable_engine_is_a_row_unless_it_was_named() -> None:
    clock = ManualClock()
    mlp, gone, here = make_mlp(), FakeEngine(clock, name="gone", reason="no card"), FakeEngine(clock, name="here")
    with pytest.raises(Unsupported, match="'gone' cannot run on cpu: no card"):
        search(here, gone)

    names, candidates.engine_names = candidates.engine_names, lambda: ("here", "gone")
    try:
        found = try_candidates(
            mlp, SPEC, make_gate(mlp, "uint8"), clock, effort=EFFORT, find={"gone": gone, "here": here}.__getitem__
        )
    finally:
        candidates.engine_names = names
    assert {c.engine: c.rejected for c in found} == {"here": None, "gone": "no card"}


class TestCompiling:
    def test_compiled_variants_are_timed_beside_the_best_of_the_others(self) -> None:
        clock = ManualClock()
        quick = FakeEngine(clock, offered=[A, B], seconds={A: 2e-3, B: 3e-3})
        slow = FakeEngine(
            clock, name="slow", compiles=True, offered=[A, B, C], seconds={A: 1e-3}, build_seconds={A: 9.0}
        )
        found = search(quick, slow, effort=Effort(min_s=0.1, latency_calls=9, compile_top=1))
        plan = Plan({}, {}, "", "", tuple(found))
        assert plan.winner(SPEC).engine == "slow"
        assert plan.winner(SPEC).build_s == 9.0
        assert plan.break_even_launches(plan.winner(SPEC)) == pytest.approx(9.0 / 16e-3)
        left_out = [c for c in found if c.engine == "slow" and c.rejected]
        assert {c.variant for c in left_out} == {B, C}
        assert len(found) == 5
        assert (quick.built, slow.built) == (quick.closed, slow.closed)

    def test_after_the_deadline_nothing_is_compiled_if_something_ran(self) -> None:
        clock = ManualClock()
        quick = FakeEngine(clock, build_seconds={Variant(): 5.0})
        slow = FakeEngine(clock, name="slow", compiles=True)
        found = search(quick, slow, deadline=3.0)
        assert slow.built == 0
        assert [c.rejected for c in found if c.engine == "slow"] == ["not tried: the budget had ended"]
        assert winner(found).engine == "fake"

    def test_without_compilation_they_are_rows_with_the_reason(self) -> None:
        clock = ManualClock()
        slow = FakeEngine(clock, name="slow", compiles=True)
        found = search(FakeEngine(clock), slow, effort=Effort(compile=False, min_s=0.1))
        assert [c.rejected for c in found if c.engine == "slow"] == ["not compiled: outside the grid"]
        assert slow.built == 0


def test_the_deadline_stops_new_candidates_but_keeps_what_was_measured() -> None:
    clock = ManualClock()
    engine = FakeEngine(clock, offered=[A, B, C], build_seconds={A: 5.0, B: 5.0, C: 5.0})
    found = {c.variant: c for c in search(engine, deadline=8.0)}
    assert found[C].rejected == "not tried: the budget had ended"
    assert found[A].rejected is None
    assert found[A].wall_us is not None


def test_all_variants_are_tried_when_no_promising_one_is_exact_enough() -> None:
    class Shy(FakeEngine):
        def variants(self, mlp, spec, *, full=False):
            return [A, B] if full else [A]

    engine = Shy(ManualClock(), distort={A: 1.0})
    found = search(engine)
    assert [(c.variant, c.rejected is None) for c in found] == [(A, False), (B, True)]


class TestOptimize:
    def test_bfloat16_rows_have_a_winner_without_validation_rows(self) -> None:
        plan = optimize(
            make_mlp((20, 16, 5)), "cpu", 64, "bfloat16", engines=["torch_eager"], effort=Effort(min_s=0.002)
        )
        assert plan.winners[0].variant.get("compute") == "float32"
        assert any("relative" in (c.rejected or "") for c in plan.candidates)

    def test_on_this_cpu(self) -> None:
        mlp = make_mlp((20, 16, 5))
        plan = optimize(
            mlp, device="cpu", batch=(1, 64), engines=["torch_eager"], effort=Effort(repeats=5, min_s=0.002)
        )
        assert [c.spec.batch for c in plan.winners] == [1, 64]
        assert plan.mlp_digest == mlp.digest()
        assert all(c.logit_error is not None and c.logit_error < 1e-3 for c in plan.winners)

    def test_numbers_of_numpy_are_numbers(self) -> None:
        mlp = make_mlp()
        plan = optimize(mlp, "cpu", np.int64(4), engines=["numpy"], effort=Effort(min_s=0.002))
        assert plan.winners[0].spec == Spec(batch=4)

    def test_a_budget_is_shared_by_the_specs(self) -> None:
        plan = optimize(make_mlp(), "cpu", (1, 8, 64), engines=["numpy"], budget_s=0.05)
        assert len(plan.winners) == 3

    def test_refusals(self) -> None:
        mlp = make_mlp()
        with pytest.raises(InvalidInput, match="budget_s"):
            optimize(mlp, device="cpu", budget_s=0)
        with pytest.raises(InvalidInput, match="threads"):
            optimize(mlp, device="cpu", threads=100_000)
        with pytest.raises(InvalidInput, match="batch is empty"):
            optimize(mlp, device="cpu", batch=())
        with pytest.raises(InvalidInput, match="unknown engine 'warp_drive'"):
            optimize(mlp, device="cpu", batch=1, engines=["warp_drive"])
        with pytest.raises(Unsupported, match="torch_graph"):
            optimize(mlp, device="cpu", batch=1, engines=["torch_graph"])
