"""Which cascades are worth measuring: from the measured speeds of their stages and the rows that would go on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.calibration import losses_allowed, scheme_logits, thresholds_for
from gigamlp.cascade import Calibration, Cascade, merge
from gigamlp.errors import InvalidInput
from gigamlp.labels import encode_labels
from gigamlp.mlp import MLP

__all__ = ["LOSSES", "Proposal", "predicted_speed", "propose"]

LOSSES = (0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01)

Array = NDArray[Any]


@dataclass(frozen=True)
class Proposal:
    """A calibrated cascade, and what it should do.

    Attributes
    ----------
    cascade : Cascade
    predicted_samples_per_s : float
        From the stages' measured speeds and the share of validation rows that reaches each.
    validation_accuracy : float
    unsure : tuple of float
        Share of the validation rows that goes on from each stage but the last.
    """

    cascade: Cascade
    predicted_samples_per_s: float
    validation_accuracy: float
    unsure: tuple[float, ...]


def predicted_speed(speeds: Sequence[float], unsure: Sequence[float]) -> float:
    """Return the rows per second of a cascade: every row pays for the stages that it reaches.

    Examples
    --------
    >>> round(predicted_speed([10.0, 1.0], [0.1]), 3)
    5.0
    """
    reach = (1.0, *unsure)
    return 1 / sum(share / speed for share, speed in zip(reach, speeds, strict=True))


def propose(
    models: Sequence[MLP],
    speeds: Mapping[str, float],
    x_val: ArrayLike,
    y_val: ArrayLike,
    *,
    max_loss: Sequence[float] = LOSSES,
    confidence: float = 0.95,
    stages: int = 3,
    top: int = 5,
) -> list[Proposal]:
    """Return up to `top` cascades of `models` that no other one, and no single model, should beat in both.

    Parameters
    ----------
    models : sequence of MLP
        Of different names, in the scheme that they run in.
    speeds : mapping of str to float
        Rows per second of each model alone, by its name, all measured alike.
    x_val, y_val : array_like
        Rows that no model was trained on; see `gigamlp.calibrate`.
    max_loss : sequence of float
        What is tried; see `gigamlp.calibrate`. What the rows are too few to promise is left out.
    confidence : float
    stages : int
        The most stages that are tried.
    top : int
        Of all that are worth it, those spread most evenly over the speeds.

    Returns
    -------
    list of Proposal
        The fastest first. Accuracy is that on the rows which chose the thresholds: a little too good.
    """
    names = [mlp.name for mlp in models]
    if len(set(names)) != len(names) or any(name not in speeds for name in names):
        raise InvalidInput(f"models need different names and a speed each; got {', '.join(names)}")
    if not models:
        return []
    rows = models[0].check_rows(x_val)
    logits = {mlp.name: scheme_logits(mlp, rows) for mlp in models}
    ids = {mlp.name: mlp.class_ids(logits[mlp.name]) for mlp in models}
    margins = {mlp.name: mlp.margins(logits[mlp.name]).astype(np.float32) for mlp in models}
    classes = models[0].classes
    assert classes is not None  # `margins` refuses heads without
    targets = encode_labels(np.asarray(y_val), classes)
    accuracy = {name: float(np.mean(ids[name] == targets)) for name in names}
    found = []
    ordered = sorted(models, key=lambda mlp: -speeds[mlp.name])
    for count in range(2, stages + 1):
        for chosen in itertools.combinations(ordered, count):
            rising = [accuracy[mlp.name] for mlp in chosen]
            if any(b <= a for a, b in itertools.pairwise(rising)):
                continue
            of = [mlp.name for mlp in chosen]
            for loss in max_loss:
                if losses_allowed(len(rows), loss / (count - 1), (1 - confidence) / (count - 1)) < 0:
                    continue
                answers = [ids[name] for name in of], [margins[name] for name in of[:-1]]
                thresholds = thresholds_for(*answers, targets, max_loss=loss, confidence=confidence)
                merged, deciding = merge(thresholds, *answers)
                went_on = tuple(int((deciding > index).sum()) for index in range(count - 1))
                unsure = tuple(each / len(rows) for each in went_on)
                promise = Calibration(len(rows), went_on, loss, confidence, labelled=True)
                name = f"{'+'.join(of)} {loss:.2%}"
                found.append(
                    Proposal(
                        Cascade(chosen, thresholds, promise, name),
                        predicted_speed([speeds[each] for each in of], unsure),
                        float(np.mean(merged == targets)),
                        unsure,
                    )
                )
    return _spread(_worth_it(found, [(speeds[name], accuracy[name]) for name in names]), top)


def _worth_it(found: Sequence[Proposal], singles: Sequence[tuple[float, float]]) -> list[Proposal]:
    """Return the proposals that nothing beats in both speed and accuracy, the fastest first."""
    kept: list[Proposal] = []
    for each in sorted(found, key=lambda p: (-p.predicted_samples_per_s, -p.validation_accuracy)):
        faster = [accuracy for speed, accuracy in singles if speed >= each.predicted_samples_per_s]
        best = max([*faster, *(p.validation_accuracy for p in kept)], default=-1.0)
        if each.validation_accuracy > best:
            kept.append(each)
    return kept


def _spread(found: list[Proposal], top: int) -> list[Proposal]:
    if len(found) <= top:
        return found
    return [found[index] for index in sorted({round(i) for i in np.linspace(0, len(found) - 1, top)})]
