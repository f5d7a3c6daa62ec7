"""The commands with a cascade: making one, and giving it to those that take models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.cli.app import run
from gigamlp.data.synthetic import garment_images, random_bytes
from gigamlp.errors import InvalidInput


def emitted(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    assert run([*tokens, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (600, 6)).astype(np.uint8)
    exact = gm.MLP((gm.Layer(rng.normal(size=(3, 6))),), name="exact")
    rough = gm.MLP((gm.Layer(exact.layers[0].weight + rng.normal(size=(3, 6))),), name="rough")
    exact.save(tmp_path / "exact.safetensors")
    rough.save(tmp_path / "rough.safetensors")
    np.savez(tmp_path / "rows.npz", x=x, y=exact.predict(x))
    np.save(tmp_path / "x.npy", x)
    return tmp_path


def made(folder: Path, *own: str) -> list[str]:
    files = [str(folder / name) for name in ("rough.safetensors", "exact.safetensors")]
    return ["cascade", *files, "--out", str(folder / "c.safetensors"), "--data", str(folder / "rows.npz"), *own]


def test_a_cascade_is_made_and_every_command_takes_it(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = emitted(capsys, *made(small, "--max-loss", "0.03", "--name", "pair"))
    cascade = gm.load(small / "c.safetensors")
    assert isinstance(cascade, gm.Cascade)
    assert (cascade.name, found["thresholds"]) == ("pair", list(cascade.thresholds))
    assert 0 < found["validation"]["unsure"][0] < 1
    assert found["validation"]["accuracy"] >= found["validation"]["last_stage_accuracy"] - 0.03
    path, x = str(small / "c.safetensors"), np.load(small / "x.npy")
    answers = emitted(capsys, "predict", path, str(small / "x.npy"))["values"]
    np.testing.assert_array_equal(answers, cascade.predict(x))
    assert run(["score", path, str(small / "x.npy"), "--out", str(small / "o.npy"), "--device", "cpu"]) == 0
    np.testing.assert_array_equal(np.load(small / "o.npy"), cascade.predict(x))
    info = emitted(capsys, "info", path)
    assert (info["format_version"], len(info["stages"]), info["calibration"]["rows"]) == (2, 2, 600)
    assert run(["info", path]) == 0
    assert "threshold" in capsys.readouterr().out
    plan = small / "plan.json"
    tokens = ["optimize", path, "--device", "cpu", "--batch", "64", "--data", str(small / "rows.npz"), "--out"]
    assert run([*tokens, str(plan), "--max-disagreement", "0.05"]) == 0
    capsys.readouterr()
    winner = gm.Plan.load(plan).winners[0]
    assert winner.variant.get("cascade") == 2
    with gm.Session(cascade, gm.Plan.load(plan)) as session:
        assert (session.predict(x) == cascade.predict(x)).mean() > 0.95


def test_what_cannot_be_made_is_refused(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cascade", "mnist-16", "--out", str(small / "c.safetensors")]) == 2
    assert "at least two models" in capsys.readouterr().err
    assert run(made(small, "--max-loss", "0.0001")) == 1
    assert "that takes 29956 rows" in capsys.readouterr().err
    assert run(made(small, "--max-loss", "0.05")) == 0
    path = str(small / "c.safetensors")
    assert run(["export", path, "--out", str(small / "m.onnx")]) == 1
    assert "is a cascade, and this takes a single network" in capsys.readouterr().err
    assert run(["cascade", path, path, "--out", str(small / "d.safetensors")]) == 1
    assert "is a cascade" in capsys.readouterr().err
    assert run(["score", path, str(small / "x.npy"), "--out", str(small / "o.parquet"), "--output", "class,proba"]) == 1
    assert "not with proba" in capsys.readouterr().err
    assert run(["predict", path, str(small / "x.npy"), "--proba", "--device", "cpu"]) == 1
    assert "class or margin, not proba" in capsys.readouterr().err


def test_a_cascade_is_timed_on_three_kinds_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gigamlp.bench.limits_of", lambda place: (None, 32 << 20, "not measured"))
    file = tmp_path / "m.safetensors"
    assert run(["cascade", "mnist-16", "mnist-64", "--max-loss", "0.005", "--out", str(file)]) == 0
    capsys.readouterr()
    tokens = ("bench", str(file), "--engine", "cpu_fused", "--batch", "2000", "--repeats", "1", "--threads", "1")
    rows = emitted(capsys, *tokens, "--device", "cpu")["rows"]
    name = "mnist-16+mnist-64"
    assert [row["name"] for row in rows] == [name, f"{name}, random bytes", f"{name}, garments"]
    assert rows[0]["accuracy"] > 0.98
    assert rows[1]["accuracy"] is None
    assert {row["engine"] for row in rows} == {"cpu_fused"}
    assert all(row["variant"].startswith("cascade=2") and row["roof_share"] is None for row in rows)
    shares = [float(row["note"].split("unsure: ")[1].rstrip("%")) for row in rows]
    assert shares[0] < 20 < shares[1]


def test_drawn_rows_are_the_same_every_time_and_look_as_they_should() -> None:
    images = garment_images(5000)
    assert (images.shape, images.dtype) == ((5000, 784), np.uint8)
    np.testing.assert_array_equal(images, garment_images(5000))
    assert not np.array_equal(images, garment_images(5000, seed=1))
    assert 0.4 < (images == 0).mean() < 0.6
    assert 60 < images.mean() < 85  # 73 in Fashion-MNIST
    assert garment_images(0).shape == (0, 784)
    with pytest.raises(InvalidInput, match=">= 0"):
        garment_images(-1)
    assert np.bincount(random_bytes(1000, 784).ravel(), minlength=256).min() > 2500
