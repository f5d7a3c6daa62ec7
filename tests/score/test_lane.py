"""The overlapped copies' bookkeeping, without a GPU: streams and events that do everything at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.errors import InvalidInput
from gigamlp.score import lane
from gigamlp.score.lane import Lanes
from tests.fakes import make_mlp

torch = pytest.importorskip("torch")

FEATURES, BATCH = 20, 64
WINDOW = ((3, 8), (11, 12))


class Still:
    """A stream or an event; nothing is ever under way."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.waited = 0

    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **more: Any) -> Any:
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Stream", Still)
    monkeypatch.setattr(torch.cuda, "Event", Still)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(lane, "_PIECE_BYTES", BATCH * FEATURES)
    monkeypatch.setattr(lane, "_PART_BYTES", 10 * FEATURES)


def model(window: bool, **more: Any) -> gm.MLP:
    mlp = make_mlp((6 if window else FEATURES, 8, 3), input_scale=1 / 255)
    place = {"columns": WINDOW, "features": FEATURES} if window else {}
    return gm.MLP(mlp.layers, input_scale=1 / 255, **place, **more)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, FEATURES), dtype=np.uint8)


@pytest.mark.parametrize("count", [BATCH, BATCH + 1, 3 * BATCH, 3 * BATCH + 1, 4 * BATCH - 1, 1009])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_answers_are_the_models(count: int, window: bool, order: str) -> None:
    mlp = model(window, classes=["ant", "bee", "wasp"])
    with gm.Session(mlp, device="cpu", engine="torch_eager", batch=(1, BATCH)) as session:
        lanes = Lanes(session)
        for seed in range(2):
            x = rows(count, seed)
            given = np.asarray(x, order=order)
            want = mlp.reference_logits(x)
            np.testing.assert_allclose(lanes.logits(given), want, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(lanes.predict_proba(given), mlp.probabilities(want), atol=1e-5)
            np.testing.assert_array_equal(lanes.predict(given), mlp.answers(want))
        assert len(lanes._made) == 3
        assert all(made is not None and (made._columns is not None) == window for made in lanes._made.values())
        lanes.close()


def test_few_rows_go_to_the_session() -> None:
    mlp = model(False)
    with gm.Session(mlp, device="cpu", engine="torch_eager", batch=(1, BATCH)) as session:
        lanes = Lanes(session)
        x = rows(BATCH - 1)
        np.testing.assert_array_equal(lanes.predict(x), mlp.predict(x))
        assert not lanes._made


def test_a_refused_row_leaves_the_lane_usable() -> None:
    mlp = model(False)
    x = rows(5 * BATCH).astype(np.float32)
    bad = x.copy()
    bad[4 * BATCH, 3] = np.nan
    with gm.Session(mlp, device="cpu", engine="torch_eager", batch=BATCH) as session:
        lanes = Lanes(session)
        with pytest.raises(InvalidInput, match=f"row {4 * BATCH} holds nan"):
            lanes.predict(bad)
        np.testing.assert_array_equal(lanes.predict(x), mlp.predict(x))
        lanes.close()
