"""Long: memory that stays flat however many rows there are. For `make soak`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigamlp.score import score
from tests.fakes import make_mlp
from tests.test_soak import resident_mb

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Endless(io.RawIOBase):
    """`rows` rows of a pattern, made while they are read."""

    def __init__(self, rows: int, features: int) -> None:
        self._block = np.random.default_rng(0).integers(0, 256, (1 << 16, features), dtype=np.uint8).tobytes()
        self._left, self._at = rows * features, 0

    def read(self, size: int = -1) -> bytes:
        part = self._block[self._at : self._at + min(size, self._left)]
        self._at = (self._at + len(part)) % len(self._block)
        self._left -= len(part)
        return part


def peak(inputs: Any, out: Path, features: int, **options: Any) -> tuple[float, int]:
    mlp = make_mlp((features, 16, 4))
    seen = [resident_mb()]
    done = score(
        mlp,
        inputs,
        out,
        device="cpu",
        engine="numpy",
        block_rows=1 << 16,
        progress=lambda *told: seen.append(resident_mb()),
        **options,
    )
    return max(seen), done.rows


@pytest.mark.parametrize("ending", ["npy", "arrow"])
def test_a_hundred_million_rows_of_a_stream(ending: str, tmp_path: Path) -> None:
    few, _ = peak("-", tmp_path / f"few.{ending}", 16, stdin=Endless(1_000_000, 16))
    many, rows = peak("-", tmp_path / f"many.{ending}", 16, stdin=Endless(100_000_000, 16))
    assert rows == 100_000_000
    assert many < few + 100  # the rows are 1.6 GB, their answers 0.8


def test_ten_million_rows_of_a_file(tmp_path: Path) -> None:
    """Pages of a mapped file count as the process's memory until they are given back."""
    path = tmp_path / "rows.npy"
    block = np.random.default_rng(0).integers(0, 256, (100_000, 784), dtype=np.uint8)
    rows = np.lib.format.open_memmap(path, "w+", np.uint8, (10_000_000, 784))
    for begin in range(0, len(rows), len(block)):
        rows[begin : begin + len(block)] = block
        if begin % 1_000_000 == 0:
            rows.flush()
    del rows
    np.save(tmp_path / "few.npy", block)
    few, _ = peak(tmp_path / "few.npy", tmp_path / "a.npy", 784)
    many, count = peak(path, tmp_path / "b.npy", 784)
    assert count == 10_000_000
    answers = np.load(tmp_path / "b.npy", mmap_mode="r")
    want = np.load(tmp_path / "a.npy")
    assert all((answers[begin : begin + len(want)] == want).mean() > 0.999 for begin in range(0, count, len(want)))
    assert many < few + 500  # a few blocks of 51 MB, mapped ahead; the file is 7.8 GB
