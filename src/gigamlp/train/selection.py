"""Choose which part of each row a network reads, by how well short trainings answer held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gigamlp.errors import InvalidInput
from gigamlp.train.bank import Bank
from gigamlp.train.bank_layout import Student
from gigamlp.train.choices import choose
from gigamlp.train.encode import ImageShape, encode
from gigamlp.train.pool import Pool, Progress, epoch_plan, make_pool
from gigamlp.train.problem import Pair
from gigamlp.train.recipe import Recipe
from gigamlp.train.window import Crop, Given, Request, Runs, Segments, Window, bytes_moved, merged

__all__ = ["Chosen", "Ground", "choose_window", "held_rows", "restored", "select"]

_MOST_EPOCHS = 60
_SLOWER = 0.4  # of a student's rate, while segments are left out
_SEEDS = 2
_HELD = 5000


@dataclass(frozen=True)
class Chosen:
    """What was chosen for one network, and what it was chosen from.

    Parameters
    ----------
    hidden : tuple of int
    label : str
        Of the request: ``w384`` is a window of 384, ``c20`` a crop, ``s12`` twelve segments.
    columns : sequence of (start, stop)
    features : int
        That are read.
    moved : float
        Bytes per uint8 row that memory with lines of 64 bytes moves, `gigamlp.train.window.bytes_moved`.
    tried : tuple of (runs, loss)
        The candidates with the mean cross-entropy of their short trainings on held-out rows. Of segments: what was
        left after each round.
    """

    hidden: tuple[int, ...]
    label: str
    columns: Runs
    features: int
    moved: float
    tried: tuple[tuple[Runs, float], ...]


@dataclass(frozen=True)
class Ground:
    """What networks are compared on: a pool to train on, held-out rows, and how to train."""

    pool: Pool
    x: Tensor
    y: Tensor
    recipe: Recipe
    seed: int
    graph: bool
    progress: Progress | None = None


def select(request: Request, students: Sequence[Student], strength: float, ground: Ground) -> Chosen:
    """Choose for networks that differ in nothing but the seed.

    Parameters
    ----------
    request : Window, Crop, Segments or Given
    students : sequence of Student
        Of one width; the first two are used.
    strength : float
        Of the pool's copies to train on.
    ground : Ground
    """
    assert request is not None
    source = ground.pool.source
    features = ground.pool.features
    if isinstance(request, Segments):
        columns, tried = _eliminate(request, students[:_SEEDS], strength, ground)
    else:
        columns, tried = _compare(request.candidates(features, source.shape), students[:_SEEDS], strength, ground)
    read = sum(stop - start for start, stop in columns)
    return Chosen(students[0].hidden, request.label, columns, read, bytes_moved(columns, features), tried)


def _compare(
    candidates: list[Runs], students: Sequence[Student], strength: float, ground: Ground
) -> tuple[Runs, tuple[tuple[Runs, float], ...]]:
    """Train every candidate at once for a short while."""
    if len(candidates) == 1:
        return candidates[0], ()
    epochs = min(_MOST_EPOCHS, max(1, ground.recipe.epochs // 20))
    recipe = ground.recipe.with_(epochs=epochs)
    each = [replace(student, columns=runs) for runs in candidates for student in students]
    with Bank(each, ground.pool, recipe, seed=ground.seed, graph=ground.graph) as bank:
        bank.run(_plan(ground, strength, epochs), _told(ground, epochs))
        loss = bank.score(ground.x, ground.y).loss.reshape(len(candidates), -1).mean(1)
    tried = tuple((runs, float(value)) for runs, value in zip(candidates, loss, strict=True))
    return candidates[int(loss.argmin())], tried


def _eliminate(
    request: Segments, students: Sequence[Student], strength: float, ground: Ground
) -> tuple[Runs, tuple[tuple[Runs, float], ...]]:
    """Train on all segments, then leave out those that are missed least, round by round, training on in between."""
    pool = ground.pool
    segments = request.all(pool.features)
    live = list(segments)
    surplus = len(segments) - request.count
    if not surplus:
        return merged(segments), ()
    warm = min(60, max(1, ground.recipe.epochs // 60))
    per_round = min(20, max(1, ground.recipe.epochs // 300))  # what is left learns to do without what has gone
    rounds = min(surplus, max(1, ground.recipe.epochs // 5))
    epochs = warm + rounds * per_round
    recipe = ground.recipe.with_(epochs=epochs, schedule="constant", ema=0.99)
    everything = ((0, pool.features),)
    own = [replace(student, columns=everything, lr=_SLOWER * student.lr) for student in students]
    plan, told = _plan(ground, strength, epochs), _told(ground, epochs)
    tried = []
    with Bank(own, pool, recipe, seed=ground.seed, graph=ground.graph) as bank:
        bank.run(plan, told, until=warm)
        for index in range(rounds):
            missed = [float(bank.score(ground.x, ground.y, hide=segment).loss.mean()) for segment in live]
            fewer = surplus * (index + 1) // rounds - surplus * index // rounds
            gone = {live[place] for place in np.argsort(missed, kind="stable")[:fewer]}
            live = [segment for segment in live if segment not in gone]
            mask = torch.zeros(len(own), pool.features, dtype=torch.bool)
            for start, stop in live:
                mask[:, start:stop] = True
            bank.keep(mask)
            bank.run(plan, told, until=warm + (index + 1) * per_round)
            tried.append((merged(live), float(bank.score(ground.x, ground.y).loss.mean())))
    return merged(live), tuple(tried)


def _plan(ground: Ground, strength: float, epochs: int) -> list[int]:
    return epoch_plan(ground.pool.strengths, ((0.0, strength),), epochs)


def _told(ground: Ground, epochs: int) -> Any:
    if ground.progress is None:
        return None
    progress = ground.progress
    return lambda epoch: progress(epoch, epochs, "choosing what to read")


def restored(facts: dict[str, Any]) -> Chosen:
    """Return the `Chosen` that JSON has kept."""

    def runs(given: Any) -> Runs:
        return tuple((int(start), int(stop)) for start, stop in given)

    tried = tuple((runs(each), float(loss)) for each, loss in facts["tried"])
    return Chosen(
        tuple(facts["hidden"]), facts["label"], runs(facts["columns"]), facts["features"], facts["moved"], tried
    )


def held_rows(x: Tensor | None, y: Tensor | None, pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the rows to choose by: the validation rows, or without any the first training rows."""
    if x is None or y is None:
        return pool.source.x[:_HELD], pool.source.y[:_HELD]
    return x[:_HELD], y[:_HELD]


def choose_window(
    x: Any,
    y: Any,
    request: Window | Crop | Segments,
    *,
    hidden: int | Sequence[int] = 40,
    epochs: int = 100,
    batch: int = 256,
    validation: Pair | int | None = None,
    seed: int = 0,
    device: str = "auto",
    image_shape: ImageShape = "auto",
    progress: Progress | None = None,
) -> Chosen:
    """Choose which part of each row a network of these hidden widths should read.

    A window: one short training for each place where it could begin. Segments: greedy backward selection, the segment
    that is missed least goes first. A crop is where it is asked for. Cross-entropy on held-out rows decides.
    `gigamlp.train.distill` does the same on its augmented rows (``columns=Window(384)``).

    Parameters
    ----------
    x : array_like [n, features], or images [n, height, width]
    y : array_like [n]
    request : Window, Crop or Segments
    hidden : int or sequence of int
    epochs : int
        Of a whole training; choosing takes shares of it.
    batch : int
    validation : (x, y) or int, optional
        See `gigamlp.train.distill`. With 0 the training rows decide.
    seed : int
    device : {"auto", "cpu", "cuda", "cuda:N"}
    image_shape : {"auto", "square"}, (height, width) or None
    progress : callable, optional

    Returns
    -------
    Chosen
        ``chosen.columns`` is what `MLP.columns` takes.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.integers(0, 256, (400, 64), dtype=np.uint8)
    >>> y = x[:, 40] > x[:, 45]
    >>> choose_window(x, y, Window(16, align=16), hidden=4, device="cpu").columns
    ((32, 48),)
    """
    from gigamlp.measure.telemetry import resolve_device
    from gigamlp.train.distill_values import checked_widths

    if not isinstance(request, Window | Crop | Segments | Given):
        raise InvalidInput(f"ask for a Window, a Crop or Segments, got {request!r}")
    (widths,) = checked_widths((hidden,) if isinstance(hidden, int) else (tuple(hidden),))
    place = torch.device(resolve_device(device))
    labels = np.asarray(y)
    labels = labels.astype(np.int64) if labels.dtype.kind == "b" else labels
    problem = encode(x, labels, validation=validation, image_shape=image_shape, seed=seed, device=place)
    pool = make_pool(problem.rows, None, (0.0,))
    choice = choose(widths, image=problem.rows.shape is not None, augmented=False)
    students = [Student(widths, seed + index, choice.lr, choice.weight_decay) for index in range(_SEEDS)]
    held = held_rows(problem.x_val, problem.y_val, pool)
    recipe = Recipe(epochs=epochs, batch=min(batch, pool.rows))
    return select(request, students, 0.0, Ground(pool, *held, recipe, seed, place.type == "cuda", progress))
