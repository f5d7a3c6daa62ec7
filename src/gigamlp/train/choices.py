"""What `distill` uses where nothing is said: losses and rates by width, phases, copies, epochs. NumPy only.

Those for images were found on held-out training rows of MNIST.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Choice", "choose", "copies", "default_batch", "default_epochs"]

Phases = tuple[tuple[float, float], ...]

_HEAVY, _MIDDLE, _LIGHT = 0.7, 0.5, 0.35  # strengths of augmentation
_MAIN_COPIES, _END_COPIES = 80, 40


@dataclass(frozen=True)
class Choice:
    """How one width is trained.

    Parameters
    ----------
    lr, weight_decay : float
    follow, temperature : float
        See `gigamlp.train.bank.Student`; for a run with a teacher.
    phases : tuple of (share, strength)
        From that share of the epochs on, copies of that strength.
    """

    lr: float
    weight_decay: float
    follow: float
    temperature: float
    phases: Phases


def choose(hidden: tuple[int, ...], *, image: bool, augmented: bool) -> Choice:
    """Return how a network of these hidden widths is trained by default.

    Narrow networks have little to remember: they profit from an end on lightly augmented rows, and copy the teacher's
    probabilities as they are. Wide ones gain from a softened teacher.

    Examples
    --------
    >>> choose((40,), image=True, augmented=True).phases
    ((0.0, 0.7), (0.85, 0.5))
    """
    width = max(hidden)
    if not image:
        return Choice(1e-2, 0.1, 0.5, 1.0, ((0.0, 1.0 if augmented else 0.0),))
    if not augmented:
        return Choice(1e-2, 0.3 if width <= 96 else 0.1, 0.5, 2.0, ((0.0, 0.0),))
    if width <= 24:
        return Choice(2e-2 if width <= 12 else 1e-2, 0.05, 1.0, 1.0, ((0.0, _HEAVY), (0.85, _LIGHT)))
    if width <= 96:
        follow, temperature = (1.0, 1.0) if width <= 44 else (0.5, 2.0)
        return Choice(1e-2, 0.05, follow, temperature, ((0.0, _HEAVY), (0.85, _MIDDLE)))
    if width <= 320:
        return Choice(1e-2, 0.05, 1.0, 2.0, ((0.0, _HEAVY),))
    return Choice(3e-3, 0.1, 1.0, 2.0, ((0.0, _HEAVY),))


def default_batch(rows: int, *, quick: bool) -> int:
    """Return rows per step: 1,024, or 256 for a short training; fewer for small data sets."""
    return min(256 if quick else 1024, max(min(32, rows), 1 << int(math.log2(max(rows / 8, 1)))))


def default_epochs(rows: int, batch: int, *, quick: bool) -> int:
    """Return epochs: 400 (60 for a short training), fewer where an epoch is long.

    Examples
    --------
    >>> default_epochs(55_000, 1024, quick=False), default_epochs(1_000_000, 1024, quick=False)
    (400, 25)
    """
    most, steps = (60, 13_000) if quick else (400, 25_000)
    return max(min(20, most), min(most, steps // max(rows // batch, 1)))


def copies(phases: Sequence[Phases], epochs: int, most: int) -> tuple[float, ...]:
    """Return the strengths of a pool's copies: no more than the epochs can read, no more than `most` if that goes.

    Examples
    --------
    >>> copies([((0, 0.7), (0.5, 0.35))], 8, 100)
    (0.7, 0.7, 0.7, 0.7, 0.35, 0.35, 0.35, 0.35)
    >>> copies([((0, 0.0),)], 8, 100)
    (0.0,)
    """
    wanted: dict[float, int] = {}
    for plan in phases:
        ends = [share for share, _ in plan[1:]] + [1.0]
        for index, ((share, strength), end) in enumerate(zip(plan, ends, strict=True)):
            limit = 1 if strength == 0 else _MAIN_COPIES if index == 0 else _END_COPIES
            needed = min(limit, math.ceil(round((end - share) * epochs, 6)))
            wanted[strength] = max(wanted.get(strength, 1), needed)
    total = sum(wanted.values())
    if total > most:
        wanted = {strength: max(1, count * most // total) for strength, count in wanted.items()}
    return tuple(strength for strength, count in wanted.items() for _ in range(count))
