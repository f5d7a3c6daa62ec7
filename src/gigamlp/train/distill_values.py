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
from gigamlp.train.selection import Chosen
from gigamlp.train.teacher import ConvTeacher, MLPTeacher
from gigamlp.train.window import Reads

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
    reads : dict
        Hidden widths -> what networks of these widths read: None is whole rows.
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
    reads: Reads
    seeds: tuple[int, ...]
    strengths: tuple[float, ...]
    image_shape: tuple[int, int] | None
    rows: int
    validation_rows: int
    device: str
    quick: bool


@dataclass(frozen=True)
class Trained:
    """One student. Its accuracy and loss are on the validation rows, None without such rows.

    `reads` is the label of the part of each row that it reads, None for whole rows.
    """

    hidden: tuple[int, ...]
    seed: int
    mlp: MLP
    validation_accuracy: float | None
    validation_loss: float | None
    reads: str | None = None


@dataclass(frozen=True)
class Moment:
    """Mean over the seeds of one width and `reads` after `epoch` epochs, on the validation rows."""

    hidden: tuple[int, ...]
    epoch: int
    accuracy: float
    loss: float
    reads: str | None = None


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
    chosen : tuple of Chosen
        What was chosen for networks that read a part of each row.
    selection_seconds : float
        For choosing it.
    """

    students: tuple[Trained, ...]
    history: tuple[Moment, ...]
    teacher_accuracy: float | None
    pool_seconds: float
    teacher_seconds: float
    student_seconds: float
    settings: Settings
    chosen: tuple[Chosen, ...] = ()
    selection_seconds: float = 0.0

    def best(self, hidden: int | Sequence[int], reads: str | None = "any") -> Trained:
        """Return the student of these hidden widths that is best on the validation rows; the first without such rows.

        Accuracy decides, then the loss, then the order of the seeds. `reads` narrows it to those that read that part of
        each row (``"w384"``), or whole rows (None).
        """
        widths = checked_widths((hidden,) if isinstance(hidden, int) else (tuple(hidden),))[0]
        own = [each for each in self.students if each.hidden == widths and reads in ("any", each.reads)]
        if not own:
            known = ", ".join(str(each) for each in self.settings.choices)
            part = "" if reads == "any" else f" and reads {reads or 'whole rows'}"
            raise InvalidInput(f"no student has the hidden widths {widths}{part}; there are {known}")
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
