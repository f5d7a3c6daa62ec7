"""The frontier: what is dominated, what is picked, and that its figures are those of what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.cli import main
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.frontier import Frontier, Point, _marked, computed_in, frontier, pick
from gigamlp.measure.roofline import Roofs
from gigamlp.record import Record, Row
from tests.fakes import make_mlp

SMALL = make_mlp((24, 6, 4))
LARGE = make_mlp((24, 12, 4), seed=1)


@pytest.fixture(autouse=True)
def no_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: tuple[Roofs | None, int, str | None] = (None, 1 << 20, "not measured in this test")
    monkeypatch.setattr("gigamlp.frontier.limits_of", lambda place: limits)


def point(speed: float, accuracy: float, name: str = "p") -> Point:
    return Point(name, (4,), 24, 64.0, None, "numpy", None, 8, "uint8", "hot", speed, accuracy, None)


def of(*points: Point) -> Frontier:
    return Frontier(_marked(points), Record({"name": "x"}, {}, "c", []))


def test_what_is_dominated_is_what_another_point_beats() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        points = [point(float(s), float(a)) for s, a in random.integers(0, 4, (12, 2)) + 1]
        for each in _marked(points):
            beaten = any(
                o.samples_per_s >= each.samples_per_s
                and o.validation_accuracy >= each.validation_accuracy
                and (o.samples_per_s, o.validation_accuracy) != (each.samples_per_s, each.validation_accuracy)
                for o in points
            )
            assert each.dominated == beaten
    assert [each.samples_per_s for each in _marked([point(1, 0.9), point(3, 0.5)])] == [3, 1]


def test_pick_takes_the_fastest_or_the_most_accurate() -> None:
    found = of(point(100, 0.9, "a"), point(60, 0.95, "b"), point(20, 0.99, "c"), point(59, 0.95, "d"))
    assert pick(found, min_accuracy=0.9).name == "a"
    assert pick(found, min_accuracy=0.94).name == "b"
    assert pick(found, min_share_of_fastest=0.5).name == "b"
    assert pick(found, min_share_of_fastest=0.1).name == "c"
    assert pick(found, min_share_of_fastest=1.0).name == "a"
    assert [each.name for each in found.best] == ["a", "b", "c"]
    with pytest.raises(InvalidInput, match=r"the best has 0\.9900"):
        pick(found, min_accuracy=0.995)
    for wrong in ({}, {"min_accuracy": 0.5, "min_share_of_fastest": 0.5}, {"min_accuracy": 97.0}):
        with pytest.raises(InvalidInput):
            pick(found, **wrong)


@pytest.mark.parametrize(
    ("engine", "variant", "scheme", "expected"),
    [
        ("numpy", None, "w8", None),
        ("torch_eager", "op=mm compute=float16", "w8", None),
        ("cpu_fused", "scheme=w8 isa=avx2", "w8", "w8"),
        ("cpu_fused", "scheme=float32 isa=avx2", "w8", None),
        ("cuda_fused", "path=ring dtype=uint8", "w8", "w8"),
        ("cuda_fused", "path=ring compute=float16", None, None),
        ("onnxruntime", "compute=int8 hidden=bound", None, "int8"),
        ("onnxruntime", "compute=int8 hidden=float", None, "w8"),
    ],
)
def test_a_point_says_what_it_was_computed_in(engine: str, variant: str, scheme: str, expected: str) -> None:
    row = Row("m", engine, variant, scheme, input_dtype="uint8")
    assert computed_in(row, gm.quantise(SMALL) if scheme else SMALL) == expected


def test_models_are_measured_in_every_precision() -> None:
    x = np.random.default_rng(0).integers(0, 256, (600, 24), dtype=np.uint8)
    models = [SMALL.with_(name="small"), LARGE.with_(name="large")]
    y = models[1].predict(x)
    rows: dict[str, Any] = {"test": (x[300:], y[300:]), "batch": (64,), "device": "cpu", "max_disagreement": 1.0}
    found = frontier(models, (x[:300], y[:300]), engines=["numpy", "cpu_fused"], **rows)
    assert {each.name for each in found.points} == {"small", "large"}
    assert {each.engine for each in found.points} == {"numpy", "cpu_fused"}
    for each in found.points:
        assert each.samples_per_s > 0
        assert each.bytes_read == 24
        assert each.bytes_moved == 24
        if each.name == "large" and each.scheme is None:
            assert each.validation_accuracy == each.test_accuracy == 1.0
    assert Frontier.of(Record.from_json(json.loads(json.dumps(found.record.to_json())))) == found
    with pytest.raises(InvalidInput, match="holds no frontier"):
        Frontier.of(Record({"name": "x"}, {}, "c", []))


def test_what_cannot_be_measured_is_refused() -> None:
    x, y = np.zeros((20, 24), np.uint8), np.zeros(20, int)
    with pytest.raises(InvalidInput, match="different names"):
        frontier([SMALL, SMALL], (x, y))
    with pytest.raises(InvalidInput, match="at least one model"):
        frontier([], (x, y))
    with pytest.raises(Unsupported, match=r"torch_graph.*CUDA"):
        frontier([SMALL], (x, y), engines=["torch_graph"], device="cpu")


def test_the_command_writes_record_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    x = np.random.default_rng(0).integers(0, 256, (600, 24), dtype=np.uint8)
    np.savez(tmp_path / "rows.npz", x=x, y=(x[:, 0] > 127).astype(int))
    SMALL.with_(name="a$b<c>").save(tmp_path / "small.safetensors")
    command = ["frontier", "--models", str(tmp_path / "small.safetensors"), "--hidden", "3", "--device", "cpu"]
    command += ["--data", str(tmp_path / "rows.npz"), "--batch", "32", "--engine", "numpy", "--repeats", "5"]
    command += ["--out", str(tmp_path / "f.json"), "--plot", str(tmp_path / "f.svg"), "--min-accuracy", "0.5", "--json"]
    assert main(command) == 0
    out = capsys.readouterr()
    assert "chosen: " in out.err
    found = Frontier.of(Record.load(tmp_path / "f.json"))
    assert {each.name for each in found.points} == {"a$b<c>", "distilled-3"}
    assert json.loads(out.out)["extra"]["frontier"] == [
        json.loads(json.dumps(e)) for e in found.record.extra["frontier"]
    ]
    picture = (tmp_path / "f.svg").read_text()
    assert picture.startswith("<?xml")
    assert "distilled-3" in picture or "a$b" in picture
    assert main([*command, "--min-share-of-fastest", "0.5"]) == 2


def test_cascades_are_measured_beside_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigamlp.bench.limits_of", lambda place: (None, 1 << 20, "not measured in this test"))
    x, y, x_test, y_test = gm.data.load_mnist()
    x_val, y_val = gm.data.hold_out(x, y)[2:]
    models = [gm.load("mnist-16"), gm.load("mnist-64")]
    test = (x_test[:2000], y_test[:2000])
    options: dict[str, Any] = {"engines": ["cpu_fused"], "batch": (500,), "repeats": 1, "threads": 1, "device": "cpu"}
    found = frontier(models, (x_val, y_val), test=test, precision=("w8",), cascades=2, **options)
    cascades = [each for each in found.points if each.name.startswith("mnist-16+mnist-64")]
    assert len(cascades) == 2
    for each in cascades:
        row = next(row for row in found.record.rows if row.name == each.name)
        assert row.note is not None
        assert "predicted" in row.note
        assert "unsure" in row.note
        assert (each.hidden, each.scheme, each.engine) == ((16, 64), "w8", "cpu_fused")
        assert 0.96 < each.validation_accuracy <= 0.994
        assert each.test_accuracy == row.accuracy
    plain = frontier(models[:1], (x_val, y_val), test=test, precision=("w8",), cascades=2, **options)
    assert len(plain.points) == 1
    one = frontier(
        models[:1],
        (x_val, y_val),
        precision=("float",),
        cascades=1,
        **{**options, "engines": ["numpy"], "threads": None},
    )
    assert any("no network was timed by an engine" in each["reason"] for each in one.record.extra["skipped"])
