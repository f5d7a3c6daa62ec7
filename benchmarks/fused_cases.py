"""The lines of `fused_cuda.py`: their bars and order, the roof of each row, and what a row is counted to take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gigamlp.measure.roofline import Roofs
from gigamlp.measure.stats import summarise
from gigamlp.record import Row

__all__ = ["CASES", "OURS", "ROWS", "Case", "Work", "explained", "line", "schedule", "typical", "verdict"]

ROWS = 1 << 21
OURS = "cuda_fused"
ANSWER_BYTES = {OURS: 1, "jax": 1}  # class ids are uint8 there, int64 in torch's engines
ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
MET = 0.97  # figures within 3 % of a bar count as met


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    hidden: int
    batch: int
    least: float | None  # samples/s that the issue asks for; None: an extra
    residence: str = "cold"
    window: tuple[int, int] | None = None
    batches: int = 1  # per launch
    visits: int = 1
    input_dtype: str = "uint8"

    @property
    def in_cache(self) -> bool:
        return self.residence == "hot"


CASES = (
    Case("784-40-10 b1", 40, 1, 1 / 3.2e-6, "hot", visits=3),
    Case("784-40-10", 40, ROWS, 5.4e9),
    Case("784-40-10 window 384", 40, ROWS, 9.1e9, window=(192, 576)),
    Case("784-64-10", 64, ROWS, 5.4e9),
    Case("784-40-10 b10000", 40, 10_000, 1.8e9, "hot"),
    Case("784-40-10 b1024", 40, 1024, 300e6, "hot"),
    Case("784-128-10 b1024", 128, 1024, 210e6, "hot"),
    Case("784-40-10 64 x b1024", 40, 1024, 3.0e9, batches=64),
    Case("784-128-10", 128, ROWS, 4.8e9),
    Case("784-256-10", 256, ROWS, 2.6e9),
    Case("784-512-10", 512, ROWS, 1.6e9),
    Case("784-512-10 b1024", 512, 1024, 180e6, "hot"),
    Case("784-512-10 b10000", 512, 10_000, 800e6, "hot"),
    Case("784-40-10 float16", 40, ROWS, 2.7e9, input_dtype="float16"),
    Case("784-40-10 b10000 cold (extra)", 40, 10_000, None),
    Case("784-40-10 b1024 cold (extra)", 40, 1024, None),
)


def schedule(cases: Sequence[Case]) -> list[Case]:
    """The cases in the order of measurement: those of several visits at the start, in the middle and at the end."""
    often = [case for case in cases if case.visits > 1]
    once = [case for case in cases if case.visits == 1]
    half = len(once) // 2
    return [*often, *once[:half], *often, *once[half:], *often] if often else once


def verdict(rows: Sequence[Row], cases: Sequence[Case]) -> dict[str, str]:
    """What keeps each bar from being met: nothing, for those that are."""
    out = {}
    for case in CASES:
        if case.least is None:
            continue
        row = next((r for r in rows if r.name == case.name and r.engine == OURS), None)
        if case not in cases or row is None or row.samples_per_s is None:
            out[case.name] = "not measured"
        elif row.samples_per_s < MET * case.least:
            out[case.name] = f"{row.samples_per_s / case.least:.1%} of the bar"
    return out


@dataclass(frozen=True)
class Work:
    """What one row of a case takes in one engine: bytes of device memory, and multiply-accumulates."""

    bytes_in: int
    bytes_out: int
    macs: dict[str, int]  # by what they are computed in

    @classmethod
    def of(cls, case: Case, row: Row) -> Work:
        read = 784 if case.window is None else case.window[1] - case.window[0]
        first, rest = read * case.hidden, case.hidden * 10
        item = ITEM_BYTES[row.input_dtype or "uint8"]
        if row.engine == OURS:
            macs = {"int8": first, "float16": rest} if item == 1 else {"float16": first, "tf32": rest}
        else:
            compute = re.search(r"compute=(\w+)", row.variant or "")
            macs = {compute[1] if compute else "float32": first + rest}
        return cls(read * item, ANSWER_BYTES.get(row.engine or "", 8), macs)

    def roof(self, case: Case, roofs: Roofs, launch_s: float) -> tuple[str, float]:
        """Which limit is the longest for a launch, and its seconds."""
        rows = case.batch * case.batches
        limits = {"one empty launch": launch_s}
        if not case.in_cache:
            limits["memory"] = rows * (self.bytes_in + self.bytes_out) / roofs.read_bytes_s
        for dtype, macs in self.macs.items():
            seconds = roofs.floor_seconds(0, rows * macs, dtype, in_cache=True)
            if seconds is not None:
                limits[f"{dtype} products"] = seconds
        which = max(limits, key=lambda name: limits[name])
        return which, limits[which]


def explained(row: Row, case: Case, roofs: Roofs, launch_s: float) -> Row:
    """The row with its share of its roof, and in the note what that roof is and what the launch moves and computes."""
    work, rows = Work.of(case, row), case.batch * case.batches
    which, seconds = work.roof(case, roofs, launch_s)
    macs = " and ".join(f"{rows * count:,} {dtype}" for dtype, count in work.macs.items())
    parts = [
        row.note,
        f"roof: {which}, {seconds * 1e6:.3f} us",
        f"a launch reads {rows * work.bytes_in:,} bytes of rows, writes {rows * work.bytes_out:,} of answers",
        f"{macs} multiply-accumulates",
        None if case.least is not None else "extra: no bar",
    ]
    note = "; ".join(part for part in parts if part)
    assert row.wall_us is not None
    return replace(row, roof_share=seconds / (row.wall_us * 1e-6), note=note)


def typical(visits: Sequence[Row]) -> Row:
    """The median visit of one engine to a case; its range is the wider of its own and that between the visits."""
    walls = [row.wall_us for row in visits if row.wall_us is not None]
    spread = summarise(walls)
    middle = min(visits, key=lambda row: abs((row.wall_us or 0.0) - spread.median))
    if len(visits) == 1:
        return middle
    note = f"the median of {len(visits)} visits: {', '.join(f'{us:.2f}' for us in walls)} us"
    return replace(middle, iqr=max(middle.iqr or 0.0, spread.iqr), note=note)


def line(row: Row, case: Case) -> str:
    work, rate, share = Work.of(case, row), (row.samples_per_s or 0) / 1e6, row.roof_share or 0
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
    bar = "no bar" if case.least is None else f"bar {case.least / 1e6:9.3f}"
    macs = "+".join(f"{count:,} {dtype}" for dtype, count in work.macs.items())
    roof = re.search(r"roof: ([^,]+)", row.note or "")
    return (
        f"  {row.engine:14} {rate:10.3f} M/s ({bar}) wall {row.wall_us:9.2f} us iqr {row.iqr:.2f} "
        f"p50 {row.p50_us or 0:8.2f} us, {share:5.1%} of {roof[1] if roof else '?'}; a row: "
        f"{work.bytes_in}+{work.bytes_out} bytes, {macs} MACs; accuracy {accuracy} {row.variant}"
    )
