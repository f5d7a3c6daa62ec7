"""Timing on a scripted clock: every expected figure follows from the script."""

from __future__ import annotations

import gc

import pytest

from gigamlp.errors import InvalidInput, MeasurementError
from gigamlp.measure.clock import HostClock
from gigamlp.measure.timing import Latency, Throughput, latency, rotating, split, throughput
from tests.measure.fakes import FakeClock


def one(clock, work, **more):
    found = throughput({"w": work}, clock, **more)["w"]
    assert isinstance(found, Throughput), found
    return found


# ---- throughput -----------------------------------------------------------------------------------------------------


def test_cpu_work_costs_what_the_script_says():
    clock = FakeClock()
    found = one(clock, clock.work("w", host=20e-6), min_s=0.05)
    assert found.wall_us == pytest.approx(20.0)
    assert found.iqr == pytest.approx(0.0, abs=1e-6)
    assert found.device_us is None
    assert found.launches in (2500, 2501)  # 0.05 s / 20 us; the sum of 2,500 floats may round either way
    assert found.repeats == 7


def test_device_work_is_timed_to_the_end_of_the_queue():
    clock = FakeClock("cuda:0")
    found = one(clock, clock.work("w", host=1e-6, device=10e-6), min_s=0.01, warmup_s=0.0)
    # the host issues every 1 us, the device needs 10 us each: only the first launch's host time shows
    n = found.launches
    assert found.wall_us == pytest.approx((1 + 10 * n) / n)
    assert found.device_us == pytest.approx((1 + 10 * n) / n)


def test_launch_bound_work_waits_for_the_host():
    clock = FakeClock("cuda:0")
    found = one(clock, clock.work("w", host=10e-6, device=1e-6), min_s=0.01, warmup_s=0.0)
    n = found.launches
    assert found.wall_us == pytest.approx((10 * n + 1) / n)


def test_a_repeat_lasts_min_s():
    for cost in (1e-7, 3.3e-5, 0.004, 0.7):
        clock = FakeClock()
        found = one(clock, clock.work("w", host=cost), min_s=0.02, repeats=1)
        assert found.launches * cost >= 0.02 * 0.999
        assert (found.launches - 1) * cost < 0.02 * 1.001


def test_median_and_iqr_over_scripted_repeats():
    clock = FakeClock()
    calibration, repeats = [0.1], [0.5, 0.1, 0.4, 0.2, 0.3]
    found = one(clock, clock.work("w", host=calibration + repeats), repeats=5, min_s=0.05, warmup_s=0.0)
    assert (found.launches, found.repeats) == (1, 5)
    assert found.wall_us == pytest.approx(0.3e6)
    assert found.iqr == pytest.approx(0.2e6)
    assert found.noise == pytest.approx(0.2 / 0.3)


def test_the_first_slow_call_does_not_decide_the_launches():
    clock = FakeClock()
    costs = [0.3] + [1e-4] * 10_000
    assert one(clock, clock.work("w", host=costs), min_s=0.01, warmup_s=0.31).launches == pytest.approx(100, abs=1)


def test_warm_up_lasts_warmup_s_before_the_first_repeat():
    clock = FakeClock()
    one(clock, clock.work("w", host=0.01), repeats=1, min_s=0.005, warmup_s=0.095)
    assert clock.log.count("w") == 10 + 1


def test_one_synchronise_at_the_end_of_each_repeat():
    clock = FakeClock("cuda:0")
    found = one(clock, clock.work("w", host=1e-3, device=2e-3), repeats=5, min_s=0.01, warmup_s=0.0)
    text = "".join("|" if entry == "sync" else "w" for entry in clock.log)
    calibration, repeats = "w|", ("w" * found.launches + "|") * 5
    assert text == calibration + repeats
    assert found.launches > 1


def test_every_round_visits_every_key_in_a_fresh_order():
    def order(seed):
        clock = FakeClock()
        work = {name: clock.work(name, host=1.0) for name in "abcd"}
        throughput(work, clock, repeats=12, warmup_s=0.0, seed=seed)
        calls = [entry for entry in clock.log if entry != "sync"]
        assert calls[:4] == list("abcd")  # calibration
        return ["".join(calls[at : at + 4]) for at in range(4, len(calls), 4)]

    rounds = order(0)
    assert len(rounds) == 12
    assert all(sorted(visited) == list("abcd") for visited in rounds)
    assert len(set(rounds)) > 3
    assert order(0) == rounds
    assert order(1) != rounds


def test_results_come_in_the_order_of_the_work():
    clock = FakeClock()
    assert list(throughput({name: clock.work(name, host=1.0) for name in "cab"}, clock, repeats=2)) == list("cab")


def test_a_deadline_stops_repeats_but_each_key_gets_one():
    clock = FakeClock()
    work = {name: clock.work(name, host=1.0) for name in "abc"}
    found = throughput(work, clock, repeats=7, warmup_s=0.0, deadline=0.5)
    assert [result.repeats for result in found.values()] == [1, 1, 1]
    assert clock.log.count("a") == 2


def test_a_deadline_in_the_middle_shows_in_repeats():
    clock = FakeClock()
    found = throughput({"a": clock.work("a", host=1.0)}, clock, repeats=7, warmup_s=0.0, deadline=4.0)
    assert found["a"].repeats == 3  # one second went to the calibration


def test_a_deadline_cuts_the_warm_up():
    clock = FakeClock()
    found = throughput({"a": clock.work("a", host=1e-3)}, clock, warmup_s=1e6, deadline=0.01)
    assert found["a"].repeats == 1
    assert clock.time < 1.0


@pytest.mark.parametrize("good_calls", [0, 5])
def test_what_a_callable_raises_is_its_value_and_the_others_go_on(good_calls):
    clock = FakeClock()
    bad, left = clock.work("bad", host=1.0), [good_calls]

    def breaks():
        if not left[0]:
            raise RuntimeError("out of order")
        left[0] -= 1
        bad()

    found = throughput({"bad": breaks, "good": clock.work("good", host=1.0)}, clock, repeats=6, warmup_s=0.0)
    assert isinstance(found["bad"], RuntimeError)
    assert str(found["bad"]) == "out of order"
    assert found["good"].repeats == 6
    assert clock.log.count("bad") == good_calls


def test_an_error_that_only_the_synchronise_shows_belongs_to_its_key():
    clock = FakeClock("cuda:0")
    current = []

    class Late(FakeClock):
        def synchronize(self):
            super().synchronize()
            if current and current[-1] == "bad":
                raise RuntimeError("illegal address")

    clock = Late("cuda:0")
    good, bad = clock.work("good", device=1.0), clock.work("bad", device=1.0)
    found = throughput(
        {"good": lambda: (current.append("good"), good()), "bad": lambda: (current.append("bad"), bad())},
        clock,
        repeats=2,
        warmup_s=0.0,
    )
    assert isinstance(found["bad"], RuntimeError)
    assert isinstance(found["good"], Throughput)


def test_ctrl_c_is_not_a_result():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        throughput({"w": stop}, FakeClock())


def test_a_clock_that_stands_still_is_an_error():
    clock = FakeClock()
    found = throughput({"w": lambda: None}, clock)
    assert isinstance(found["w"], MeasurementError)
    assert "did not advance" in str(found["w"])


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"min_s": 0.0}, {"min_s": float("nan")}, {"warmup_s": -1.0}])
def test_throughput_refuses_bad_arguments(bad):
    with pytest.raises(InvalidInput):
        throughput({"w": lambda: None}, FakeClock(), **bad)


def test_nothing_to_time_is_an_empty_result():
    assert throughput({}, FakeClock()) == {}


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_off_while_timing_and_then_as_before(was_on):
    clock, seen = FakeClock(), []
    work = clock.work("w", host=1.0)

    def look():
        seen.append(gc.isenabled())
        work()

    def fails():
        raise KeyboardInterrupt

    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        throughput({"w": look}, clock, repeats=2)
        latency(look, clock, calls=2)
        split(None, look, None, clock, repeats=2)
        assert gc.isenabled() is was_on
        with pytest.raises(KeyboardInterrupt):
            throughput({"w": fails}, clock)
        assert gc.isenabled() is was_on
    finally:
        gc.enable() if before else gc.disable()
    assert not any(seen)


# ---- rotating inputs ------------------------------------------------------------------------------------------------


def test_rotating_calls_in_turn_and_returns_what_they_return():
    work = rotating([lambda: "a", lambda: "b", lambda: "c"])
    assert [work() for _ in range(7)] == list("abcabca")


def test_rotating_nothing_is_refused():
    with pytest.raises(InvalidInput):
        rotating([])


def test_rotating_work_is_timed_per_call():
    clock = FakeClock()
    work = rotating([clock.work("a", host=1e-3), clock.work("b", host=3e-3)])
    found = one(clock, work, min_s=0.2, warmup_s=0.0)
    assert found.wall_us == pytest.approx(2000, rel=0.02)


# ---- latency --------------------------------------------------------------------------------------------------------


def test_latency_is_issue_to_answer_with_nothing_subtracted():
    clock = FakeClock("cuda:0")
    found = latency(clock.work("w", host=2e-6, device=7e-6), clock, calls=100)
    assert found.p50_us == pytest.approx(9.0)
    assert found.p99_us == pytest.approx(9.0)
    assert found.calls == 100
    assert clock.log[:100] == ["w", "sync"] * 50


def test_latency_percentiles_of_scripted_calls():
    clock = FakeClock()
    costs = [5.0] * 50 + [(1 + k) * 1e-6 for k in range(101)]
    found = latency(clock.work("w", host=costs), clock, calls=101, warmup=50, budget_s=1e9)
    assert found.p50_us == pytest.approx(51.0)
    assert found.p99_us == pytest.approx(100.0)
    assert found.samples == pytest.approx([1.0 + k for k in range(101)])


def test_latency_stops_at_its_budget_and_says_how_many_calls():
    clock = FakeClock()
    found = latency(clock.work("w", host=0.1), clock, calls=1000, warmup=50, budget_s=2.0)
    assert clock.time == pytest.approx(2.0, abs=0.11)
    assert found.calls == pytest.approx(15, abs=1)  # a quarter of the budget went to the warm-up


def test_latency_times_one_call_however_slow():
    clock = FakeClock()
    found = latency(clock.work("w", host=100.0), clock, budget_s=0.1)
    assert (found.calls, found.p50_us) == (1, pytest.approx(100e6))


def test_latency_keeps_at_most_two_thousand_samples_of_all_calls():
    clock = FakeClock()
    found = latency(clock.work("w", host=1e-6), clock, calls=5001, warmup=0)
    assert found.calls == 5001
    assert 1000 < len(found.samples) <= 2000


def test_latency_raises_what_the_work_raises():
    with pytest.raises(ZeroDivisionError):
        latency(lambda: 1 / 0, FakeClock())


@pytest.mark.parametrize("bad", [{"calls": 0}, {"warmup": -1}, {"budget_s": 0.0}])
def test_latency_refuses_bad_arguments(bad):
    with pytest.raises(InvalidInput):
        latency(lambda: None, FakeClock(), **bad)


# ---- split ----------------------------------------------------------------------------------------------------------


def test_split_of_asynchronous_copies():
    clock = FakeClock("cuda:0")
    found = split(
        clock.work("in", host=3e-6, device=100e-6),
        clock.work("run", host=2e-6, device=50e-6),
        clock.work("out", host=1e-6, device=20e-6),
        clock,
    )
    assert found.enqueue_us == pytest.approx(3 + 2 + 1)
    assert found.wall_us == pytest.approx(3 + 100 + 50 + 20)
    # ten calls in a loop: the host time of the first shows, a tenth of it per call
    assert found.h2d_us == pytest.approx(100.3)
    assert found.device_us == pytest.approx(50.2)
    assert found.d2h_us == pytest.approx(20.1)
    assert found.repeats == 20


def test_split_runs_the_parts_in_the_order_of_the_data():
    clock = FakeClock("cuda:0")
    split(*(clock.work(name, device=1e-3) for name in ("in", "run", "out")), clock, repeats=1)
    assert clock.log[:8] == ["in", "run", "out", "sync"] * 2


def test_a_copy_that_waits_counts_as_enqueue():
    clock = FakeClock("cuda:0")
    found = split(clock.work("in", device=100e-6, waits=True), clock.work("run", host=1e-6, device=5e-6), None, clock)
    assert found.enqueue_us == pytest.approx(101.0)
    assert found.wall_us == pytest.approx(106.0)
    assert found.d2h_us is None


def test_split_on_a_cpu_has_a_wall_time_only():
    clock = FakeClock()
    found = split(clock.work("in", host=1e-3), clock.work("run", host=2e-3), clock.work("out", host=3e-3), clock)
    assert (found.h2d_us, found.device_us, found.d2h_us, found.enqueue_us) == (None, None, None, None)
    assert found.wall_us == pytest.approx(6000)


def test_split_keeps_to_its_budget():
    clock = FakeClock("cuda:0")
    parts = [clock.work(name, device=0.4) for name in ("in", "run", "out")]
    found = split(*parts, clock, budget_s=2.0)
    assert found.repeats == 1
    assert clock.time < 8.0
    assert found.h2d_us == pytest.approx(0.4e6)


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"budget_s": -1.0}])
def test_split_refuses_bad_arguments(bad):
    with pytest.raises(InvalidInput):
        split(None, lambda: None, None, FakeClock(), **bad)


# ---- the real clocks ------------------------------------------------------------------------------------------------


def test_real_time_agrees_with_a_known_delay():
    clock = HostClock()

    def busy():
        end = clock.now() + 200e-6
        while clock.now() < end:
            pass

    found = one(clock, busy, repeats=5, min_s=0.01, warmup_s=0.0)
    single = latency(busy, clock, calls=50, warmup=5)
    assert isinstance(single, Latency)
    # a busy machine can only make them longer
    assert found.wall_us >= 200
    assert single.p50_us >= 200


@pytest.mark.gpu
def test_gpu_times_cover_work_of_known_length():
    import torch

    from gigamlp.measure.clock import CudaClock

    clock = CudaClock("cuda:0")
    cycles = 2_000_000  # about 1 ms at 2 GHz
    sleep = lambda: torch.cuda._sleep(cycles)  # noqa: E731
    found = one(clock, sleep, repeats=5, min_s=0.05)
    shortest_us = cycles / 3000  # no GPU clocks above 3 GHz
    assert found.device_us is not None
    assert shortest_us < found.device_us <= found.wall_us * 1.01
    assert found.wall_us < found.device_us * 1.2  # back to back, the host adds next to nothing
    assert latency(sleep, clock, calls=20, warmup=2).p50_us > shortest_us
    parts = split(sleep, sleep, sleep, clock, repeats=5)
    assert parts.enqueue_us < 0.5 * parts.wall_us
    assert parts.wall_us > 2.5 * shortest_us
    assert min(parts.h2d_us, parts.device_us, parts.d2h_us) > shortest_us


@pytest.mark.gpu
def test_gpu_error_becomes_the_value():
    import torch

    from gigamlp.measure.clock import CudaClock

    a = torch.ones(4, 4, device="cuda:0")
    b = torch.ones(5, 5, device="cuda:0")
    found = throughput({"bad": lambda: a @ b, "good": lambda: a @ a}, CudaClock("cuda:0"), repeats=2, min_s=0.001)
    assert isinstance(found["bad"], RuntimeError)
    assert isinstance(found["good"], Throughput)
