"""A cascade behind the server: classes only, in every form, and the same ones as the cascade's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.cascade import merge
from gigamlp.quantize import integer_form
from gigamlp.serve.repository import Repository
from gigamlp.serve.served import choose, natural_input
from gigamlp.serve.settings import Settings
from tests.serve.helpers import OCTETS, app_of, ask, running, served, tiny
from tests.serve.test_app import json_request

CASCADE = gm.Cascade((tiny(0), tiny(1)), (40.0,))
X = gm.data.load_mnist()[2][:500]
ROWS = np.random.default_rng(2).integers(0, 255, (60, 3)).astype(np.uint8)


def test_classes_are_the_cascades_and_nothing_else_is_offered() -> None:
    assert 0 < CASCADE.decide(ROWS)[1].mean() < 1  # some rows go on, some do not

    async def test() -> None:
        async with running(app_of(served(CASCADE))) as app:
            metadata = await ask(app, "GET", "/v2/models/m")
            assert metadata is not None
            assert [each["name"] for each in metadata.json["outputs"]] == ["class"]
            raw = await ask(app, "POST", "/v2/models/m/infer", ROWS.tobytes(), [OCTETS])
            assert raw is not None
            np.testing.assert_array_equal(np.frombuffer(raw.body, np.uint8), CASCADE.predict(ROWS))
            worded = await ask(app, "POST", "/v2/models/m/infer", json_request(ROWS.tolist()))
            assert worded is not None
            assert worded.json["outputs"][0]["data"] == CASCADE.predict(ROWS).tolist()
            refused = await ask(
                app, "POST", "/v2/models/m/infer", json_request(ROWS.tolist(), outputs=[{"name": "proba"}])
            )
            assert refused is not None
            assert refused.status == 400
            assert "class" in refused.json["error"]
            shown = await ask(app, "POST", "/page/models/m/versions/1/answer", ROWS[:1].tobytes(), [OCTETS])
            assert shown is not None
            assert (shown.status, shown.json["class"], shown.json["top"]) == (
                200,
                str(CASCADE.predict(ROWS[:1])[0]),
                [],
            )
            listed = await ask(app, "GET", "/page/models")
            assert listed is not None
            assert listed.json["models"][0]["widths"] == [3, 5, 5, 4]

    asyncio.run(asyncio.wait_for(test(), 30))


def expected(cascade: Any, rows: Any) -> Any:
    """The classes of the arithmetic that runs: the stages' schemes where they have one."""
    forms = [integer_form(stage) if stage.scheme is not None else stage for stage in cascade.stages]
    logits = [form.reference_logits(rows).astype(np.float32) for form in forms]
    pairs = list(zip(cascade.stages, logits, strict=True))
    return merge(cascade.thresholds, [m.class_ids(z) for m, z in pairs], [m.margins(z) for m, z in pairs])[0]


@pytest.mark.parametrize(
    ("stages", "dtype"),
    [
        ((gm.load("mnist-40-w384"), gm.load("mnist-64")), "uint8"),
        ((tiny(0), tiny(1)), "float32"),
    ],
    ids=["integer", "float"],
)
def test_from_a_file(tmp_path: Path, stages: Any, dtype: str) -> None:
    cascade = gm.Cascade(stages, (3.0,))
    cascade.save(tmp_path / "c.safetensors")
    settings = Settings(models=(str(tmp_path / "c.safetensors"),), device="cpu")
    assert natural_input(cascade) == dtype
    models = Repository(settings)
    models.load()
    try:
        model = models.get("c")
        rows = (X if cascade.features == 784 else ROWS).astype(dtype)
        np.testing.assert_array_equal(model.run("class", rows), expected(cascade, rows))
        np.testing.assert_array_equal(model.run("class", rows[:1]), expected(cascade, rows[:1]))
    finally:
        models.close()
    with choose(cascade, settings, None) as session:
        np.testing.assert_array_equal(session.class_ids(rows), expected(cascade, rows))
