"""The Plan: choice, validity, file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.errors import FileFormatError, PlanMismatch
from gigamlp.plan import Candidate, Plan, objective
from gigamlp.spec import Spec, Variant

ONE = Spec(batch=1)
MANY = Spec(batch=1024)


def plan(*candidates: Candidate) -> Plan:
    return Plan({"device": "toy", "torch": "2"}, {"gigamlp": "0"}, "d" * 64, "net", candidates)


def make(spec: Spec, engine: str, wall: float | None, **more: object) -> Candidate:
    return Candidate(spec, engine, Variant.of(pad=16, inplace=True), wall_us=wall, **more)


def test_throughput_decides_for_many_rows_and_latency_for_one() -> None:
    assert (objective(ONE), objective(MANY)) == ("latency", "throughput")
    a, b = make(ONE, "a", 5.0, p50_us=9.0), make(ONE, "b", 6.0, p50_us=7.0)
    c, d = make(MANY, "a", 5.0, p50_us=9.0), make(MANY, "b", 6.0, p50_us=7.0)
    p = plan(a, b, c, d)
    assert p.winner(ONE) is b
    assert p.winner(MANY) is c
    assert p.winners == (b, c)


def test_rejected_and_unmeasured_never_win() -> None:
    p = plan(make(MANY, "wrong", 1.0, rejected="wrong answers"), make(MANY, "none", None), make(MANY, "ok", 9.0))
    assert p.winner(MANY).engine == "ok"
    assert plan(make(MANY, "none", None)).winner(MANY) is None
    assert plan().winner(MANY) is None


def test_break_even_counts_launches_until_the_build_has_paid_off() -> None:
    slow_build, quick = make(MANY, "compiled", 4.0, build_s=10.5), make(MANY, "eager", 9.0, build_s=0.5)
    assert plan(slow_build, quick).break_even_launches(slow_build) == pytest.approx(10.0 / 5e-6)
    assert plan(slow_build, quick).break_even_launches(quick) is None
    never = replace(slow_build, wall_us=9.0)
    assert plan(never, quick).break_even_launches(never) is None


def test_another_model_machine_or_version_is_refused_with_the_reason() -> None:
    p = plan(make(MANY, "a", 1.0))
    machine = dict(p.machine)
    assert p.mismatch("d" * 64, machine) is None
    p.check("d" * 64, machine)
    with pytest.raises(PlanMismatch, match="another model"):
        p.check("e" * 64, machine)
    with pytest.raises(PlanMismatch, match="torch is '3' here, but was '2'"):
        p.check("d" * 64, {**machine, "torch": "3"})
    with pytest.raises(PlanMismatch, match="driver is '580' here, but was None"):
        p.check("d" * 64, {**machine, "driver": "580"})


numbers = st.none() | st.floats(0, 1e9)


@given(st.lists(st.builds(
    Candidate,
    spec=st.builds(Spec, batch=st.integers(1, 10**7), threads=st.none() | st.integers(1, 99)),
    engine=st.text(min_size=1, max_size=9),
    variant=st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.booleans()).map(Variant.from_json),
    wall_us=numbers, iqr=numbers, p50_us=numbers, build_s=numbers, accuracy=st.none() | st.floats(0, 1),
    rejected=st.none() | st.text(max_size=20),
), max_size=6))  # fmt: skip
def test_round_trip_through_json(candidates: list[Candidate]) -> None:
    p = plan(*candidates)
    assert Plan.from_json(json.loads(json.dumps(p.to_json()))) == p
    assert p.explain().splitlines()[0].endswith("toy")


def test_file_round_trip_and_refusals(tmp_path) -> None:
    p = plan(make(MANY, "a", 1.0), make(MANY, "b", None, rejected="no"))
    p.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == p
    good = p.to_json()
    for broken in (
        [],
        {},
        {**good, "schema": "gigamlp-plan/2"},
        {**good, "candidates": [{}]},
        {**good, "candidates": [{**good["candidates"][0], "surprise": 1}]},
        {**good, "candidates": [{**good["candidates"][0], "wall_us": "fast"}]},
        {**good, "candidates": [{**good["candidates"][0], "wall_us": float("nan")}]},
        {**good, "candidates": [{**good["candidates"][0], "wall_us": float("inf")}]},
        {**good, "candidates": [{**good["candidates"][0], "accuracy": 7}]},
        {**good, "candidates": [{**good["candidates"][0], "repeats": "x"}]},
        {**good, "candidates": [{**good["candidates"][0], "engine": ["x"]}]},
        {**good, "surprise": 1},
        {**good, "candidates": [{**good["candidates"][0], "spec": {"device": "tpu"}}]},
        {**good, "machine": {"device": 3}},
        {k: v for k, v in good.items() if k != "mlp"},
    ):
        with pytest.raises(FileFormatError):
            Plan.from_json(broken)
    (tmp_path / "broken.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(FileFormatError, match=r"broken\.json"):
        Plan.load(tmp_path / "broken.json")


def test_the_winners_in_the_file_name_their_candidates() -> None:
    p = plan(make(MANY, "slow", 9.0), make(MANY, "fast", 1.0), make(ONE, "one", 3.0, p50_us=3.0))
    data = p.to_json()
    assert [(w["objective"], data["candidates"][w["candidate"]]["engine"]) for w in data["winners"]] == [
        ("throughput", "fast"),
        ("latency", "one"),
    ]


def test_explain_puts_the_winner_first_and_gives_reasons() -> None:
    text = plan(make(MANY, "late", 9.0), make(MANY, "bad", 0.1, rejected="wrong"), make(MANY, "won", 1.0)).explain()
    lines = [line for line in text.splitlines() if "pad=16" in line]
    assert [line.split()[0] for line in lines] == ["*", "late", "bad"]
    assert lines[0].split()[1] == "won"
    assert "rejected: wrong" in lines[2]
