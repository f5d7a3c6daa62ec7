"""Random networks, rows, layouts and schemes through the native kernels of every instruction set of this machine.

The rule, exactly:

- ``w8a8`` and ``w7`` with relu or identity: logits equal the scheme's reference bit for bit, so class ids do too.
- ``w8``: the first layer is exact and its hidden float16 values have the reference's bits; the float32 layers after it
  add in another order. Their logits lie within the rounding of such sums, and class ids are the reference's unless its
  two largest logits are nearer to each other than that.
- float32: the same, against float64.

A scheme is compared with its own reference, never with the float network: a row whose two best logits are nearer than
what rounding weights to 8 bits moves them may get another class there, and rightly so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.kernels.cpu import native
from tests.kernels.cpu.cases import SETS, form, network, run, sets_for

pytestmark = pytest.mark.skipif(not SETS, reason=str(native.native_problem()))
each_set = pytest.mark.parametrize("isa", SETS, ids=lambda isa: isa.name)


@dataclass(frozen=True)
class Case:
    """A network, rows of it that lie somewhere in a larger array, and what they are computed in."""

    mlp: gm.MLP
    x: np.ndarray
    scheme: str
    zeros: str
    threads: int


def draw(rng: np.random.Generator, *, soak: bool = False) -> Case:
    """Draw a case: widths from 1 up, up to 5 layers, any of the layouts that the kernels take."""
    most = 3000 if soak else 700
    # small widths as often as large ones: the ends of vectors and chunks are there
    depth = int(rng.choice([1, 2, 2, 2, 3, 5]))
    hidden = [int(2 ** rng.uniform(0, np.log2(300))) for _ in range(depth - 1)]
    read = int(2 ** rng.uniform(0, np.log2(most)))
    outputs = int(rng.choice([1, 2, 3, 10, 17, int(rng.integers(1, 200))]))
    columns, features = windows(rng, read)
    head = "sigmoid" if outputs == 1 and rng.random() < 0.5 else "softmax"
    activation = str(rng.choice(["relu", "identity"]))
    more = {"columns": columns, "features": features, "head": head, "input_offset": float(rng.choice([0, -0.5]))}
    mlp = network((read, *hidden, outputs), activation, seed=int(rng.integers(1 << 30)), **more)
    dtype = str(rng.choice(["uint8", "uint8", "int8", "float32", "float16"]))
    whole = dtype in ("uint8", "int8")
    scheme = str(rng.choice(["w8", "w8a8", "w7", "float32"])) if whole else "float32"
    zeros = str(rng.choice(["dense", "auto", "skip"])) if dtype == "uint8" and scheme != "float32" else "dense"
    return Case(mlp, layout(rng, features, dtype), scheme, zeros, int(rng.choice([1, 1, 2, 3])))


def windows(rng: np.random.Generator, read: int) -> tuple[tuple[tuple[int, int], ...] | None, int]:
    """Return runs of columns that hold `read` values, or None, and the values of a row."""
    kind = rng.integers(4)
    if kind < 2:
        return None, read
    runs = 1 if kind == 2 else min(read, int(rng.integers(2, 9)))
    cuts = np.sort(rng.choice(np.arange(1, read), runs - 1, replace=False)) if runs > 1 else []
    at, found = int(rng.integers(0, 40)), []
    for length in np.diff([0, *cuts, read]):
        found.append((at, at + int(length)))
        at += int(length) + int(rng.integers(1, 20))
    return tuple(found), at + int(rng.integers(0, 40))


def layout(rng: np.random.Generator, features: int, dtype: str) -> np.ndarray:
    """Return rows that are contiguous, a part of wider ones, every second one, or in reverse order."""
    count = int(rng.choice([1, 2, 7, 33, int(rng.integers(1, 200))]))
    share = rng.choice([0.0, 0.05, 0.3, 0.6, 1.0], size=2 * count)  # rows of many kinds in one batch
    low, high = (-128, 128) if dtype == "int8" else (0, 256)
    values = rng.integers(low, high, (2 * count, features + 13))
    values[rng.random(values.shape) >= share[:, None]] = 0
    whole = values.astype(dtype)
    start = int(rng.integers(0, 13))
    part = whole[:, start : start + features]
    return [np.ascontiguousarray(part[:count]), part[:count], part[::2], part[count - 1 :: -1]][rng.integers(4)]


def check(case: Case, isa: native.InstructionSet) -> None:
    made = form(case.mlp, case.scheme, case.x)
    told = {"zeros": case.zeros, "threads": case.threads}
    logits = run(made, isa, case.x, **told)
    ids = run(made, isa, case.x, output="class", **told)
    what = f"{[layer.weight.shape for layer in case.mlp.layers]} {case.x.shape} {case.x.dtype} {case.scheme} {told}"
    np.testing.assert_array_equal(ids, case.mlp.class_ids(logits), what)  # of the very same logits
    want = made.reference_logits(case.x)
    if case.scheme in ("w8a8", "w7"):
        np.testing.assert_array_equal(logits, want, what)
        np.testing.assert_array_equal(ids, case.mlp.class_ids(want), what)
        return
    rounding = bound(case, want)
    np.testing.assert_array_less(np.abs(logits - want), rounding, what)
    top = np.sort(want, axis=1) if want.shape[1] > 1 else np.hstack([np.zeros_like(want), want])
    clear = np.abs(top[:, -1] - top[:, -2]) > 2 * rounding
    np.testing.assert_array_equal(ids[clear], case.mlp.class_ids(want)[clear], what)


def bound(case: Case, want: np.ndarray) -> float:
    """How far sums of float32, in any order, may lie from the reference: relative to the largest logit or 1."""
    size = max(1.0, float(np.abs(want).max(initial=0.0)))
    if case.scheme == "w8" and len(case.mlp.layers) > 2:
        return 4e-3 * size  # a sum on the edge between two float16 values: the next layer's input is one step off
    return (1e-4 if len(case.mlp.layers) > 2 else 3e-5) * size


@each_set
@pytest.mark.parametrize("seed", range(3))
def test_random_cases(isa: native.InstructionSet, seed: int) -> None:
    rng = np.random.default_rng([seed, SETS.index(isa)])
    done = 0
    while done < 40:
        case = draw(rng)
        if isa in sets_for(case.scheme):
            check(case, isa)
            done += 1


@pytest.mark.soak
@each_set
def test_many_random_cases(isa: native.InstructionSet) -> None:
    rng = np.random.default_rng(SETS.index(isa) + 1000)
    for _ in range(3000):
        case = draw(rng, soak=True)
        if isa in sets_for(case.scheme):
            check(case, isa)


@each_set
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_classes_are_those_of_the_scheme_not_of_the_floats(isa: native.InstructionSet, dtype: str) -> None:
    """200-129-3, 33 rows: now and then a row's class in ``w8`` is not the float network's, and that is the scheme's."""
    differ = 0
    for seed in range(20):
        mlp = network((200, 129, 3), seed=seed)
        rng = np.random.default_rng(seed)
        x = rng.integers(-128 if dtype == "int8" else 0, 128 if dtype == "int8" else 256, (33, 200)).astype(dtype)
        exact = mlp.reference_logits(x)
        np.testing.assert_array_equal(run(mlp, isa, x, output="class"), exact.argmax(axis=1))
        if isa not in sets_for("w8"):
            continue
        made = form(mlp, "w8", x)
        want = made.reference_logits(x)
        ids = run(made, isa, x, output="class")
        np.testing.assert_array_equal(ids, want.argmax(axis=1))
        other = ids != exact.argmax(axis=1)
        differ += int(other.sum())
        top = np.sort(exact, axis=1)
        moved = np.abs(want - exact).max(axis=1)  # what rounding the weights does to a row's logits
        assert (top[other, -1] - top[other, -2] <= 2 * moved[other]).all()
    assert differ > 0 or isa not in sets_for("w8")  # else this test says nothing
