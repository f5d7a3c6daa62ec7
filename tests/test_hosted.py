"""Rows in host memory: what competes for them, where the GPU overtakes the CPU, and where a Session sends them.

There is no GPU here: engines are NumPy's forward pass with times on a clock of ours, on a device that is said to exist.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp import choice, hosted, search, tune
from gigamlp.engines import registry
from gigamlp.errors import InvalidInput, PlanMismatch, Unsupported
from gigamlp.hosted import HostEngine, host_specs, is_staged, places
from gigamlp.measure import telemetry
from gigamlp.plan import Candidate, Plan
from gigamlp.spec import Spec, Variant
from gigamlp.tune import Effort, optimize
from tests.fakes import FakeEngine, FakeRunner, ManualClock, make_mlp

HOST, OWN, STAGED = Variant.of(memory="cached"), Variant.of(v="own"), Variant.of(v="own", staged=True)
MLP = make_mlp()
# microseconds of one run of n rows
COSTS = {"cpu": lambda n: 1.0 + n, "own": lambda n: 0.5 + 0.01 * n, "cached": lambda n: 10.0 + 0.05 * n}


class Scripted(FakeRunner):
    """Takes the time of its kind; with `partial`, any number of rows."""

    partial = True

    def __init__(self, owner: Any, mlp: gm.MLP, spec: Spec, variant: Variant) -> None:
        super().__init__(owner, mlp, spec, variant)
        self.singles = 0

    def run(self, x: Any) -> Any:
        owner: Any = self.owner
        kind = "cpu" if self.spec.device == "cpu" else "cached" if self.spec.input_on == "host" else "own"
        owner.clock.advance(COSTS[kind](self.spec.batch) * 1e-6)
        owner.log.append((self.spec.device, self.spec.input_on, len(x)))
        z = self.mlp.logits(x)
        return z if self.spec.output == "logits" else self.mlp.class_ids(z).astype(np.uint32)

    def one_id(self, row: Any) -> int:
        self.singles += 1
        return int(self.mlp.class_ids(self.mlp.logits(row[None]))[0])


class Engine(FakeEngine):
    """One engine for `place`; on CUDA it has a variant of its own for host rows if `reads_host`."""

    place, reads_host = "cpu", True

    def unavailable(self, device: str) -> str | None:
        return None if device.startswith(self.place) else f"runs on {self.place} only"

    def variants(self, mlp: gm.MLP, spec: Spec, *, full: bool = False) -> Any:
        if spec.is_cuda and spec.input_on == "host":
            if not self.reads_host:
                raise Unsupported("takes rows that are on the device")
            return [HOST]
        return [OWN]

    def build(self, mlp: gm.MLP, spec: Spec, variant: Variant | None = None) -> Any:
        self.built += 1
        return Scripted(self, mlp, spec, variant or self.variants(mlp, spec)[0])


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU, a CPU engine `near`, and for the GPU `gpu`, which reads host rows, and `copied`."""
    clock = ManualClock()
    table = {name: Engine(clock, name=name) for name in ("near", "gpu", "copied")}
    table["gpu"].place = table["copied"].place = "cuda"
    table["copied"].reads_host = False
    for module in (telemetry, choice):
        monkeypatch.setattr(module, "resolve_device", lambda name: "cuda:0" if name in ("auto", "cuda") else name)
        monkeypatch.setattr(module, "machine_fingerprint", lambda device: {"device": f"Fake {device}"})
    monkeypatch.setattr(tune, "clock_for", lambda device: clock)
    monkeypatch.setattr(tune, "get_engine", table.__getitem__)
    monkeypatch.setitem(tune.try_candidates.__kwdefaults__, "find", table.__getitem__)
    monkeypatch.setattr(registry, "engine", table.__getitem__)
    monkeypatch.setattr(search, "engine_names", lambda: tuple(table))

    class Copied:
        """In place of `Staged`: 20 us more than the run on the device."""

        def __init__(self, mlp: gm.MLP, spec: Spec, engine: str, variant: Variant) -> None:
            self.inner = table[engine].build(mlp, replace(spec, input_on="device"), variant)
            self.engine, self.spec, self.variant, self.build_s = engine, spec, variant, 0.0
            self.input = np.zeros((spec.batch, mlp.features), spec.input_dtype)

        def run(self, x: Any) -> Any:
            clock.advance(20e-6)
            return self.inner.run(x)

        def close(self) -> None:
            self.inner.close()

    monkeypatch.setattr(hosted, "Staged", Copied)
    return table


def plan_for(**options: Any) -> Plan:
    effort = Effort(repeats=5, min_s=1e-5, warmup_s=1e-5, latency_calls=10)
    return optimize(MLP, **{"device": "auto", "batch": (1, 100), "effort": effort, **options})


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_which_specs():
    specs = [Spec("cuda:0", n) for n in (1, 5000)]
    assert places(specs, False, None, None) == specs
    both = places(specs, True, None, None)
    assert both[:2] == specs
    assert {(s.device, s.input_on) for s in both[2:]} == {("cuda:0", "host"), ("cpu", "host")}
    assert sorted({s.batch for s in both[2:]}) == [1, 8, 64, 512, 4096, 5000]
    assert places(specs, False, "host", None) == [replace(s, input_on="host") for s in specs]
    assert places(specs, True, ["host"], False) == [replace(s, input_on="host") for s in specs]
    near = [Spec("cpu", 1)]
    assert places(near, True, "host", True) == near
    with pytest.raises(InvalidInput, match="'device', 'host' or both, got 'disk'"):
        places(specs, True, "disk", None)
    assert [s.batch for s in host_specs(specs[0], (3,), cpu=True)] == [1, 1, 3, 3]


def test_an_engine_for_host_rows_has_its_own_variants_and_staged_ones(machine):
    spec = Spec("cuda:0", 8, input_on="host")
    assert list(HostEngine(machine["gpu"]).variants(MLP, spec)) == [HOST, STAGED]
    assert list(HostEngine(machine["copied"]).variants(MLP, spec)) == [STAGED]
    found = [Candidate(Spec("cuda:0", 8), "gpu", OWN, wall_us=1.0), Candidate(Spec("cuda:0", 8), "copied", OWN, 2.0)]
    assert list(HostEngine(machine["gpu"], found).variants(MLP, spec)) == [HOST, STAGED]
    with pytest.raises(Unsupported, match="another engine is quicker once the rows are on the device"):
        HostEngine(machine["copied"], found).variants(MLP, spec)
    with pytest.raises(Unsupported, match="takes rows that are on the device"):
        HostEngine(machine["copied"]).variants(MLP, replace(spec, output="margin"))
    assert isinstance(HostEngine(machine["gpu"]).build(MLP, spec, STAGED), hosted.Staged)
    assert isinstance(HostEngine(machine["gpu"]).build(MLP, spec), Scripted)


def test_the_plan_knows_where_the_gpu_overtakes_the_cpu(machine):
    plan = plan_for()
    winners = {(c.spec.device, c.spec.input_on, c.spec.batch): (c.engine, c.variant) for c in plan.winners}
    assert winners["cuda:0", "device", 100] == ("gpu", OWN)
    assert winners["cuda:0", "host", 64] == ("gpu", HOST)
    assert winners["cpu", "host", 8] == ("near", OWN)
    # by runs of 8 the CPU takes 9 us, by one and eights 11 us for nine rows; the GPU takes 10.4 for up to eight rows,
    # 13.2 for up to 64, of which the CPU answers one with 2 us, two with 4, eight with 9 and nine with 18
    assert plan.crossing() == 9
    text = plan.explain()
    assert "rows in host memory, uint8 -> class: from 9 rows on cuda:0 answers sooner, below that the CPU" in text
    assert "(by runs of 1, 8, 64, 100 rows)" in text
    assert Plan.from_json(plan.to_json()) == plan


def test_rows_of_a_caller_are_copied_within_the_time(machine, monkeypatch):
    seen = []
    run = Scripted.run
    monkeypatch.setattr(Scripted, "run", lambda self, x: seen.append((self.spec, x is self.input)) or run(self, x))
    plan_for(batch=8)
    assert (Spec("cuda:0", 8), True) in seen  # the static input of a runner on the device
    assert dict(seen)[Spec("cuda:0", 8, input_on="host")] is False  # the last run of a Spec was timed


@pytest.mark.parametrize(
    ("gpu", "cpu", "want"),
    [
        ({1: 10.0, 64: 12.0}, {1: 2.0, 64: 50.0}, 6),  # five single rows on the CPU are 10 us, six are 12
        ({1: 1.0, 64: 12.0}, {1: 2.0, 64: 50.0}, 1),
        ({1: 10.0, 64: 90.0}, {1: 2.0, 64: 50.0}, None),
        ({1: 10.0}, {}, None),
        ({}, {1: 10.0}, None),
    ],
)
def test_the_crossing_by_measured_runs(gpu, cpu, want):
    def candidates(device, costs):
        return [Candidate(Spec(device, n, input_on="host"), "e", OWN, wall_us=c, p50_us=c) for n, c in costs.items()]

    plan = Plan({}, {}, "", "", (*candidates("cuda:0", gpu), *candidates("cpu", cpu)))
    assert plan.crossing() == want
    assert ("answers sooner" in plan.explain()) == bool(gpu and cpu)


def test_what_is_asked_for_is_measured(machine):
    assert {(c.spec.device, c.spec.input_on) for c in plan_for(device="cuda").winners} == {("cuda:0", "device")}
    only = plan_for(input_on="host", beside_cpu=False)
    assert {(c.spec.device, c.spec.input_on) for c in only.winners} == {("cuda:0", "host")}
    named = plan_for(engines=["gpu"])  # it does not run on the CPU, which is no error
    assert {c.engine for c in named.candidates} == {"gpu"}
    assert named.crossing() is None


# ---- where a Session sends rows -------------------------------------------------------------------------------------


def draw(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, MLP.features), np.uint8)


def test_a_session_follows_the_plan(machine):
    plan = plan_for()
    with gm.Session(MLP, plan) as session:
        assert session.device == "cuda:0"
        for count in (1, 3, 8, 64, 100, 164):
            np.testing.assert_array_equal(session.class_ids(draw(count)), MLP.class_ids(MLP.logits(draw(count))))
        for engine in machine.values():
            engine.log.clear()
        session.class_ids(draw(3))
        assert {place for place, _, _ in machine["near"].log} == {"cpu"}
        assert machine["gpu"].log == []
        machine["near"].log.clear()
        session.class_ids(draw(50))  # no padding: the runner takes as many rows as there are
        assert machine["gpu"].log == [("cuda:0", "host", 50)]
        assert machine["near"].log == []
        np.testing.assert_allclose(session.logits(draw(50)), MLP.logits(draw(50)), rtol=1e-6)
        assert "gpu on cuda:0 memory=cached" in session.explain(50, input_on="host")
        assert "near on cpu" in session.explain(3, input_on="host")
        assert "gpu v=own" in session.explain(50)


def test_one_row_takes_the_short_way(machine):
    mlp = MLP.with_(classes=["a", "b", "c"])
    effort = Effort(repeats=5, min_s=1e-5, warmup_s=1e-5, latency_calls=10)
    plan = optimize(mlp, "auto", (1, 8), effort=effort, input_on="host", beside_cpu=False)
    with gm.Session(mlp, plan) as session:
        x = draw(20)
        want = session.predict(x)
        assert [session.predict_one(row) for row in x] == want.tolist()
        (runner,) = [b.runner for b in session._near._bound.values() if b.runner.singles]
        assert (runner.spec.input_on, runner.singles) == ("host", 19)  # the first went the long way
        assert session.predict_one(x[0].astype(np.float64)) == want[0]
        assert session.predict_one(x[0].tolist()) == want[0]
        with pytest.raises(InvalidInput):
            session.predict_one(x)
        assert type(session.predict_one(x[0])) is str
    with pytest.raises(InvalidInput, match="closed"):
        session.predict_one(x[0])


def test_pieces_that_are_staged_go_through_pinned_memory(machine, monkeypatch):
    monkeypatch.setitem(COSTS, "cached", lambda n: 10.0 + 5 * n)  # for 100 rows it is quicker to copy them
    plan = plan_for()
    staged = [c for c in plan.winners if c.variant.get("staged")]
    assert [c.spec.batch for c in staged] == [8, 64, 100]
    with gm.Session(MLP, plan) as session:
        seen = []

        def through(x, pieces, answers):
            seen.append([(p.rung.spec.input_on, p.rung.variant, p.rows) for p in pieces])
            answers[:] = MLP.class_ids(MLP.logits(x))

        monkeypatch.setattr(session._runners, "through_pinned", through)
        x = draw(203)
        np.testing.assert_array_equal(session.class_ids(x), MLP.class_ids(MLP.logits(x)))
        assert seen == [[("device", OWN, 200)]]
        assert not any(is_staged(rung) for rung in session._near._bound)


def test_a_plan_for_host_rows_has_none_for_the_device(machine):
    plan = plan_for(input_on="host")
    with gm.Session(MLP, plan) as session, pytest.raises(InvalidInput, match="rows in host memory only"):
        session.routes.ladder("uint8", "class")


def test_winners_for_two_gpus_are_still_refused(machine):
    plan = plan_for()
    other = [replace(c, spec=replace(c.spec, device="cuda:1")) for c in plan.candidates if c.spec.is_cuda]
    with pytest.raises(PlanMismatch, match="several devices"):
        gm.Session(MLP, replace(plan, candidates=(*plan.candidates, *other)))


def test_a_plan_is_tuned_again_for_the_same_places(machine, monkeypatch):
    plan = replace(plan_for(), machine={"device": "another"})
    asked = []

    def again(mlp, *args, **options):
        asked.append((args, options))
        return plan_for()

    monkeypatch.setattr(tune, "optimize", again)
    with gm.Session(MLP, plan, retune=True):
        pass
    ((args, options),) = asked
    assert args == ("cuda:0", [1, 100], "uint8", "class")
    assert options == {"input_on": ["device", "host"], "beside_cpu": True, "threads": None}
