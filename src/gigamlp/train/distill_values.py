"""What a distillation was run with and what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gigamlp.errors import InvalidInput
from gigamlp.mlp import MLP
from gigamlp.train.augment import Augment, TableAugment
from gigamlp.train.choices import Choice
from gigamlp.train.recipe import Recipe
from gigamlp.train.teacher import ConvTeacher, MLPTeacher

__all__ = ["Distillation", "Moment", "Settings", "Trained", "Widths", "checked_widths"]

Widths: TypeAlias = int | Sequence[int | Sequence[int]]


@dataclass(frozen=True)
class Settings:
    """What a distillation was run with, all defaults filled in.

    Parameters
    ----------
    recipe : Recipe
        Epochs, batch, warm-up, average and arithmetic of the students.
    teacher : ConvTeacher, MLPTeacher, str or None
        ``"callable"`` for a function of the user's.
    augment : Augment, TableAugment or None
    choices : dict
        Hidden widths -> `Choice`.
    seeds : tuple of int
    strengths : tuple of float
        Of the pool's copies.
    image_shape : (height, width) or None
    rows, validation_rows : int
    device : str
    quick : bool
    """

    recipe: Recipe
    teacher: ConvTeacher | MLPTeacher | str | None
    augment: Augment | TableAugment | None
    choices: dict[tuple[int, ...], Choice]
    seeds: tuple[int, ...]
    strengths: tuple[float, ...]
    image_shape: tuple[int, int] | None
    rows: int
    validation_rows: int
    device: str
    quick: bool


@dataclass(frozen=True)
class Trained:
    """One student. Its accuracy and loss are on the validation rows, None without such rows."""

    hidden: tuple[int, ...]
    seed: int
    mlp: MLP
    validation_accuracy: float | None
    validation_loss: float | None


@dataclass(frozen=True)
class Moment:
    """Mean over the seeds of one width after `epoch` epochs, on the validation rows."""

    hidden: tuple[int, ...]
    epoch: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Distillation:
    """The trained students and how they came about.

    Parameters
    ----------
    students : tuple of Trained
        Every seed of every width.
    history : tuple of Moment
    teacher_accuracy : float or None
        On the validation rows.
    pool_seconds, teacher_seconds, student_seconds : float
        Wall seconds: augmenting; training the teacher and asking it; training the students, evaluations included.
    settings : Settings
    """

    students: tuple[Trained, ...]
    history: tuple[Moment, ...]
    teacher_accuracy: float | None
    pool_seconds: float
    teacher_seconds: float
    student_seconds: float
    settings: Settings

    def best(self, hidden: int | Sequence[int]) -> Trained:
        """Return the student of these hidden widths that is best on the validation rows; the first without such rows.

        Accuracy decides, then the loss, then the order of the seeds.
        """
        widths = checked_widths((hidden,) if isinstance(hidden, int) else (tuple(hidden),))[0]
        own = [student for student in self.students if student.hidden == widths]
        if not own:
            known = ", ".join(str(each) for each in self.settings.choices)
            raise InvalidInput(f"no student has the hidden widths {widths}; there are {known}")
        return max(own, key=lambda each: (each.validation_accuracy or 0.0, -(each.validation_loss or 0.0), -each.seed))

    @property
    def models(self) -> dict[tuple[int, ...], MLP]:
        """Hidden widths -> the chosen MLP."""
        return {widths: self.best(widths).mlp for widths in self.settings.choices}


def checked_widths(hidden: Widths) -> tuple[tuple[int, ...], ...]:
    """Return the hidden widths of each network, the narrowest first."""
    entries = hidden if isinstance(hidden, Sequence) else (hidden,)
    found = []
    for entry in entries:
        widths = tuple(entry) if isinstance(entry, Sequence) else (entry,)
        for width in widths:
            if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 1:
                raise InvalidInput(f"hidden must hold whole numbers >= 1, got {width!r}")
        found.append(tuple(int(width) for width in widths))
    if not found or not all(found) or len(set(found)) != len(found):
        raise InvalidInput(f"hidden must name at least one network, each once, got {hidden!r}")
    return tuple(sorted(found, key=lambda each: (each[0], each)))
