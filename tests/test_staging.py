"""The ring of pinned buffers, with ordinary memory in place of pinned memory and a scripted event."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gigamlp import staging

torch = pytest.importorskip("torch")


class Slot:
    """A slot that notices when its buffer is written before the copy that reads it has been waited for."""

    made: list[Slot] = []

    def __init__(self, size: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self.event = self
        self.busy = False
        Slot.made.append(self)

    def view(self, shape: tuple[int, ...], dtype: Any) -> Any:
        assert not self.busy, "the buffer is still being read"
        count = int(np.prod(shape))
        return self.buffer[: count * dtype.itemsize].view(dtype).view(shape)

    def record(self) -> None:
        self.busy = True

    def synchronize(self) -> None:
        self.busy = False


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> staging.PinnedRing:
    Slot.made = []
    monkeypatch.setattr(staging, "_Slot", Slot)
    # on a machine without CUDA is_pinned() asks for a driver
    monkeypatch.setattr(staging, "_pinned_source", lambda block, target: None)
    return staging.PinnedRing(slot_bytes=64)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 41])
def test_upload_in_pieces(ring: staging.PinnedRing, count: int) -> None:
    x = np.arange(count * 8, dtype=np.uint8).reshape(count, 8)  # 8 rows a slot
    target = torch.zeros(count, 8, dtype=torch.uint8)
    for _ in range(3):
        ring.upload(x, target)
    np.testing.assert_array_equal(target, x)
    assert len(Slot.made) <= 4


@pytest.mark.parametrize("dtype", ["float64", ">f4", "uint16", "int64"])
def test_upload_converts(ring: staging.PinnedRing, dtype: str) -> None:
    x = np.arange(40).reshape(10, 4).astype(dtype)
    target = torch.zeros(10, 4)
    ring.upload(x[::-1], target)
    np.testing.assert_array_equal(target, x[::-1])


def test_upload_of_bfloat16(ring: staging.PinnedRing) -> None:
    x = torch.arange(40).reshape(10, 4).bfloat16()
    target = torch.zeros(10, 4)
    ring.upload(x, target)
    np.testing.assert_array_equal(target, x.float())


@pytest.mark.parametrize("count", [1, 16, 17, 200])
def test_download_in_pieces(ring: staging.PinnedRing, count: int) -> None:
    y = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3).half()
    found = torch.zeros(count, 3)
    ring.download(y, found)
    ring.finish()
    np.testing.assert_array_equal(found, y.float())
    assert all(not slot.busy for slot in Slot.made)
    assert len(Slot.made) <= 4


def test_answers_in_flat_vectors(ring: staging.PinnedRing) -> None:
    y = torch.arange(100)
    found = torch.zeros(100, dtype=torch.int64)
    ring.download(y[:50], found[:50])
    ring.download(y[50:], found[50:])
    ring.finish()
    np.testing.assert_array_equal(found, y)


def test_rows_longer_than_a_slot(ring: staging.PinnedRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "abandon", lambda: None)  # it waits for a CUDA stream
    y, found = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    ring.download(y, found)
    x = np.arange(600, dtype=np.uint8).reshape(3, 200)
    target = torch.zeros(3, 200, dtype=torch.uint8)
    ring.upload(x, target)
    np.testing.assert_array_equal(target, x)
    np.testing.assert_array_equal(found, y)  # answers under way were brought home first
