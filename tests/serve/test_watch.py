"""Hot reload without a process: on the thread that owns the device, and without a leak."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigamlp.serve.app import create_app
from gigamlp.serve.repository import Repository
from gigamlp.serve.served import Served
from gigamlp.serve.settings import Settings
from gigamlp.serve.watch import Watch
from tests.serve.helpers import OCTETS, ask, running, tiny


@pytest.mark.parametrize("on_cpu", [True, False])
def test_old_models_are_closed_when_their_last_request_ends(
    tmp_path: Path, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Served, "on_cpu", property(lambda self: on_cpu))
    closed: list[str] = []
    close = Served.close
    monkeypatch.setattr(Served, "close", lambda self: (closed.append(self.mlp.name), close(self))[1])
    path = tmp_path / "m.safetensors"
    rows = np.random.default_rng(0).integers(0, 255, (20, 3)).astype(np.uint8)

    async def main() -> None:
        settings = Settings(models=(str(path),), device="cpu", input_dtype="uint8", reload_s=0)
        tiny(0).with_(name="0").save(path)
        models = Repository(settings)
        async with running(create_app(settings, models)) as app:
            watch = Watch(models, app.batcher, app.metrics)
            held = models.get("m")
            held.enter()
            for seed in range(1, 6):
                tiny(seed).with_(name=str(seed)).save(path)
                await watch.look()
                answer = await ask(app, "POST", "/v2/models/m/infer", rows.tobytes(), [OCTETS])
                assert answer is not None
                assert answer.body == tiny(seed).predict(rows).astype(np.uint8).tobytes()
            await app.batcher.errand(lambda: None)
            assert closed == ["1", "2", "3", "4"]
            np.testing.assert_array_equal(held.run("class", rows), tiny(0).predict(rows))
            held.leave()
            await app.batcher.errand(lambda: None)
            assert closed == ["1", "2", "3", "4", "0"]
            assert {model for model, _ in app.batcher._lines} == {models.get("m")}
            await watch.look()
            assert closed == ["1", "2", "3", "4", "0"]
        assert closed[-1] == "5"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_plan_that_does_not_fit_leaves_the_old_model(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    tiny(0).save(folder / "model.safetensors")

    async def main() -> None:
        settings = Settings(models=(str(tmp_path),), device="cpu", reload_s=0)
        models = Repository(settings)
        async with running(create_app(settings, models)) as app:
            watch, old = Watch(models, app.batcher, app.metrics), models.get("m")
            (folder / "plan.json").write_text("{}")
            await watch.look()
            assert models.get("m") is old
            (folder / "plan.json").unlink()
            await watch.look()
            assert models.get("m") is not None

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_plan_decides_what_serves(tmp_path: Path) -> None:
    import gigamlp as gm

    folder, mlp = tmp_path / "m" / "1", tiny(0)
    mlp.save(folder / "model.safetensors")
    options: dict[str, Any] = {"engines": ("numpy",), "batch": (1, 32), "input_dtype": "uint8"}
    gm.optimize(mlp, "cpu", **options).save(folder / "plan.json")
    models = Repository(Settings(models=(str(tmp_path),), device="cpu"))
    models.load()
    served = models.get("m")
    assert (served.engines, served.datatype, served.largest()) == (("numpy",), "UINT8", 32)
    models.close()
