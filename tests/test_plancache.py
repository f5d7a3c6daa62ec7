"""Kept Plans: found again, lost when anything changes, never in the way, and run only where that is safe."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gigamlp as gm
from gigamlp import plancache
from gigamlp.measure.telemetry import machine_fingerprint, versions
from gigamlp.plan import Candidate, Plan
from gigamlp.spec import Spec, Variant
from gigamlp.tune import Effort
from tests.fakes import make_mlp

QUICK = Effort(repeats=2, min_s=0.001, warmup_s=0.0, latency_calls=3, compile=False)
OPEN = {"batch": [8], "input_dtype": "uint8", "output": "class", "engines": None, "threads": None}
FLOAT = Variant.of(op="matmul", compute="float32")


def candidate(dtype: str = "uint8", output: str = "class", batch: int = 8, **fields: object) -> Candidate:
    own = {"engine": "numpy", "variant": FLOAT, "wall_us": 1.0, "p50_us": 1.0, "repeats": 5, **fields}
    return Candidate(spec=Spec("cpu", batch, dtype, output), **own)  # type: ignore[arg-type]


def made(mlp: gm.MLP, *candidates: Candidate, question: dict[str, object] | None = None, **settings: object) -> Plan:
    known = {"question": {**OPEN, **(question or {})}, "validation_rows": 0, "max_disagreement": 0.001, **settings}
    return Plan(machine_fingerprint("cpu"), versions(), mlp.digest(), mlp.name, candidates or (candidate(),), known)


def engines(mlp: gm.MLP, dtype: str, output: str = "class", **options: object) -> list[str]:
    """Return the lines that say what runs; the numpy engine at batch 8 is what the kept plan says."""
    with gm.Session(mlp, device="cpu", **options) as session:  # type: ignore[arg-type]
        return session.explain(64, input_dtype=dtype, output=output).splitlines()[2:]


def is_kept(lines: list[str]) -> bool:
    return len(lines) == 1 and lines[0].split()[:5] == ["8", "x", "batch", "8", "numpy"]


def test_optimize_keeps_its_plan_and_a_session_runs_it(own_plans: Path) -> None:
    mlp = make_mlp()
    x = np.random.default_rng(0).integers(0, 255, (37, mlp.features), np.uint8)
    before = gm.Session(mlp, device="cpu").predict(x)
    plan = gm.optimize(mlp, "cpu", batch=(1, 16), effort=QUICK)
    assert plancache.find(mlp.digest(), "cpu") == [plan]
    assert plancache.entry(plan).is_relative_to(own_plans)
    with gm.Session(mlp, device="cpu") as session:
        assert "a kept plan, and for what they did not measure engine" in session.explain()
        np.testing.assert_array_equal(session.predict(x), before)
        planned = [c.spec.batch for c in plan.winners]
        assert {rung.batch for rung in session.routes.ladder("uint8", "class").rungs} <= set(planned)
        np.testing.assert_allclose(
            session.logits(x.astype(np.float32) + 0.5), mlp.logits(x + np.float32(0.5)), 1e-4, 1e-4
        )
    with gm.Session(mlp, device="cpu", cache=False) as session:
        assert "kept" not in session.explain()


def test_optimize_without_cache_keeps_nothing(own_plans: Path) -> None:
    gm.optimize(make_mlp(), "cpu", batch=8, engines=["numpy"], effort=QUICK, cache=False)
    assert not own_plans.exists()


def test_a_kept_plan_is_lost_when_anything_that_decides_changes() -> None:
    mlp = make_mlp()
    plan = made(mlp)
    plancache.keep(plan)
    assert is_kept(engines(mlp, "uint8"))
    other = mlp.with_(layers=(*mlp.layers[:-1], gm.Layer(mlp.layers[-1].weight * 2)))
    assert not is_kept(engines(other, "uint8"))
    for key in ("machine", "versions"):
        for name in getattr(plan, key):
            changed = replace(plan, **{key: {**getattr(plan, key), name: "another"}})
            assert plancache.entry(changed) != plancache.entry(plan), (key, name)
    asked = replace(plan, settings={**plan.settings, "question": {**OPEN, "batch": [9]}})
    assert plancache.entry(asked) != plancache.entry(plan)


@pytest.mark.parametrize("key", ["machine", "versions"])
def test_a_file_under_the_right_name_for_another_machine_is_not_used(key: str) -> None:
    mlp = make_mlp()
    plan = made(mlp)
    path = plancache.keep(replace(plan, **{key: {**getattr(plan, key), "gigamlp": "0.0"}}))
    assert path is not None
    path.rename(plancache.entry(plan))
    assert plancache.find(mlp.digest(), "cpu") == []


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a number changed": lambda text: text.replace('"wall_us": 1.0', '"wall_us": 2.0', 1),
    "not an object": lambda text: "[1, 2]",
    "no plan": lambda text: json.dumps({"sha256": "0", "plan": None}),
    "deep": lambda text: "[" * 100_000,
    "not UTF-8": lambda text: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_told_left_out_and_written_anew(damage: str) -> None:
    mlp = make_mlp()
    plan = made(mlp)
    path = plancache.keep(plan)
    assert path is not None
    bad = DAMAGE[damage](path.read_text())
    path.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    with pytest.warns(RuntimeWarning, match=r"is not used: .*gigamlp\.optimize writes it anew"):
        lines = engines(mlp, "uint8")
    assert not is_kept(lines)
    assert plancache.keep(plan) == path
    assert is_kept(engines(mlp, "uint8"))


def test_a_folder_that_cannot_be_written_is_told_and_no_error(own_plans: Path) -> None:
    own_plans.write_text("a file in the way")
    with pytest.warns(RuntimeWarning, match="the plan is not kept in"):
        assert plancache.keep(made(make_mlp())) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines(make_mlp(), "uint8")


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("engines were named", {"question": {"engines": ["numpy"]}}),
        ("threads were named", {"question": {"threads": 1}}),
        ("the gate was wide", {"validation_rows": 100, "max_disagreement": 0.01}),
        ("only accuracy was gated", {"validation_rows": 100, "max_disagreement": None}),
    ],
)
def test_plans_for_a_narrower_or_looser_question_do_not_run_by_themselves(why: str, options: dict) -> None:
    mlp = make_mlp()
    plan = made(mlp, **options)
    plancache.keep(plan)
    assert len(plancache.find(mlp.digest(), "cpu")) == 1
    assert not is_kept(engines(mlp, "uint8")), why
    with gm.Session(mlp, plan) as session:  # handed over it does run
        assert "batch 8" in session.explain(64, input_dtype="uint8")


def test_float_rows_are_answered_by_float_engines() -> None:
    mlp = make_mlp()
    integer = candidate("float32", variant=Variant.of(compute="int8", hidden="float"), engine="onnxruntime")
    plancache.keep(made(mlp, integer, replace(candidate("float32"), wall_us=9.0)))
    assert is_kept(engines(mlp, "float32"))
    native = candidate("float32", variant=Variant.of(scheme="float32", threads=1), engine="cpu_fused")
    plancache.keep(made(mlp, integer, native))
    assert any("scheme=float32" in line for line in engines(mlp, "float32"))  # its word for floats
    plancache.keep(made(mlp, integer))
    assert not any("int8" in line for line in engines(mlp, "float32"))


def test_rows_that_no_kept_plan_measured_run_on_the_default_engine() -> None:
    mlp = make_mlp()
    default = engines(mlp, "float32", cache=False)
    plancache.keep(made(mlp, candidate("uint8")))
    assert is_kept(engines(mlp, "uint8"))
    assert engines(mlp, "float32") == default
    assert engines(mlp, "uint8", batch=64) != engines(mlp, "uint8")  # a named batch: no kept plan


def test_logits_come_from_what_was_measured_for_classes_only_if_they_were_exact() -> None:
    mlp = make_mlp()
    plancache.keep(made(mlp, candidate(logit_error=None)))
    assert not is_kept(engines(mlp, "uint8", "logits"))
    plancache.keep(made(mlp, candidate(logit_error=1e-2)))
    assert not is_kept(engines(mlp, "uint8", "logits"))
    plancache.keep(made(mlp, candidate(logit_error=1e-7)))
    assert is_kept(engines(mlp, "uint8", "logits"))


def test_the_newest_of_several_kept_plans_runs() -> None:
    mlp = make_mlp()
    plancache.keep(made(mlp, candidate(batch=8)))
    plancache.keep(made(mlp, candidate(batch=16), question={"batch": [16]}))
    plancache.keep(made(mlp, candidate("float32", batch=32), question={"batch": [32], "input_dtype": "float32"}))
    assert "batch 16" in engines(mlp, "uint8")[0]
    assert "batch 32" in engines(mlp, "float32")[0]


def test_plans_of_two_calibrations_are_not_mixed() -> None:
    mlp = make_mlp()
    old, new = {"hidden_scale.0": [1.0]}, {"hidden_scale.0": [2.0]}
    plancache.keep(made(mlp, candidate("int8"), question={"input_dtype": "int8"}, hidden_ranges=old))
    plancache.keep(made(mlp, candidate("uint8"), hidden_ranges=new))
    with gm.Session(mlp, device="cpu") as session:
        assert session.routes.ranges == new
    assert is_kept(engines(mlp, "uint8"))
    assert not is_kept(engines(mlp, "int8"))


def test_several_processes_may_keep_the_same_plan_at_once(tmp_path: Path) -> None:
    mlp = make_mlp()
    made(mlp).save(tmp_path / "plan.json")
    program = (
        "import sys; from pathlib import Path; from gigamlp import plancache; from gigamlp.plan import Plan\n"
        "plan = Plan.load(sys.argv[1])\n"
        "for _ in range(30):\n"
        "    assert plancache.keep(plan, Path(sys.argv[2])), 'not kept'\n"
        "    assert plancache.find(plan.mlp_digest, 'cpu', Path(sys.argv[2])) == [plan]\n"
    )
    argv = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "plan.json"), str(tmp_path / "kept")]
    running = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(p.communicate()[1], p.returncode) for p in running] == [("", 0)] * 3
    assert [p.suffix for p in (tmp_path / "kept" / mlp.digest()).iterdir()] == [".json"]
