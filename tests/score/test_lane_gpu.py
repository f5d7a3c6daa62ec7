"""Overlapped copies on CUDA: the same answers as the Session's, from every kind of memory. All of it needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.errors import InvalidInput
from gigamlp.score import lane, score
from gigamlp.score.lane import Lanes
from tests.fakes import make_mlp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FEATURES, BATCH = 784, 1024
# graph replay keeps its input and output buffers between calls, so it shows what eager hides
ENGINES = ("torch_eager", "torch_graph")
WINDOW = ((100, 356), (400, 401))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lane, "_PIECE_BYTES", BATCH * FEATURES)
    monkeypatch.setattr(lane, "_PART_BYTES", 100 * FEATURES)
    return str(request.param)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, FEATURES), dtype=np.uint8)


def kinds(x: np.ndarray, folder: Path) -> Iterator[np.ndarray]:
    yield x
    yield torch.from_numpy(x).pin_memory().numpy()
    np.save(folder / "x.npy", x)
    yield np.load(folder / "x.npy", mmap_mode="r")
    yield np.asfortranarray(x)


# one piece, a piece and a row, as many as there are slots, a prime number
@pytest.mark.parametrize("count", [BATCH, BATCH + 1, 3 * BATCH, 4 * BATCH - 1, 17911])
@pytest.mark.parametrize("window", [False, True])
def test_the_answers_are_the_models(engine: str, count: int, window: bool, tmp_path: Path) -> None:
    mlp = make_mlp((257 if window else FEATURES, 64, 10), input_scale=1 / 255)
    if window:
        mlp = gm.MLP(mlp.layers, input_scale=1 / 255, columns=WINDOW, features=FEATURES)
    with gm.Session(mlp, device="cuda", engine=engine, batch=(32, BATCH)) as session:
        lanes = Lanes(session)
        for seed in range(2):
            x = rows(count, seed)
            want = mlp.reference_logits(x)
            for given in kinds(x, tmp_path):
                np.testing.assert_allclose(lanes.logits(given), want, rtol=1e-4, atol=1e-4)
                np.testing.assert_array_equal(lanes.predict(given), want.argmax(axis=1))
        assert all(made is not None for made in lanes._made.values())
        assert len(lanes._made) == 2
        lanes.close()
        assert session.predict(x[:3]).tolist() == want[:3].argmax(axis=1).tolist()


def test_a_refused_row_leaves_the_lane_usable(engine: str) -> None:
    mlp = make_mlp((FEATURES, 64, 10), input_scale=1 / 255)
    x = rows(5 * BATCH).astype(np.float32)
    bad = x.copy()
    bad[4 * BATCH, 3] = np.nan
    with gm.Session(mlp, device="cuda", engine=engine, batch=BATCH) as session:
        lanes = Lanes(session)
        with pytest.raises(InvalidInput, match=f"row {4 * BATCH} holds nan"):
            lanes.predict(bad)
        np.testing.assert_array_equal(lanes.predict(x), mlp.reference_logits(x).argmax(axis=1))
        lanes.close()


def test_score_on_cuda(engine: str, tmp_path: Path) -> None:
    mlp = make_mlp((FEATURES, 64, 10), input_scale=1 / 255, classes=[f"c{i}" for i in range(10)])
    x = rows(20_011)
    np.save(tmp_path / "rows.npy", x)
    done = score(mlp, tmp_path / "rows.npy", tmp_path / "out.npy", device="cuda", engine=engine, block_rows=5000)
    assert done.rows == len(x)
    want = mlp.classes[mlp.reference_logits(x).argmax(axis=1)]
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), want)
