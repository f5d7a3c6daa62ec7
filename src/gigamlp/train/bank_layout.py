"""Where the parameters of many students lie in one flat tensor; their first values, and what they are in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from gigamlp.errors import InvalidInput
from gigamlp.mlp import Layer
from gigamlp.train.network import SILENT, round_up
from gigamlp.train.window import Runs

__all__ = ["BankLayout", "Group", "Student"]


@dataclass(frozen=True)
class Student:
    """One network of a bank.

    Parameters
    ----------
    hidden : tuple of int
        Widths of its hidden layers, relu behind each.
    seed : int
        Draws its first weights. Students of one bank see the same batches.
    lr : float
        Peak learning rate of AdamW (beta 0.9 and 0.999, eps 1e-8).
    weight_decay : float
        Decoupled, on weights only.
    follow : float
        Share of the loss that follows the teacher, 0 to 1; the rest is cross-entropy to the labels.
    temperature : float
        By which teacher's and student's logits are divided; the loss is multiplied by its square (Hinton, Vinyals and
        Dean, *Distilling the knowledge in a neural network*, 2015).
    columns : sequence of (start, stop), optional
        The runs of features that it reads; the weights of the others are 0 and stay so.
    reads : str, optional
        What tables call these columns.
    """

    hidden: tuple[int, ...]
    seed: int = 0
    lr: float = 1e-2
    weight_decay: float = 0.05
    follow: float = 0.0
    temperature: float = 1.0
    columns: Runs | None = None
    reads: str | None = None

    def __post_init__(self) -> None:
        if not self.hidden or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in self.hidden):
            raise InvalidInput(f"hidden must hold whole numbers >= 1, got {self.hidden!r}")
        if not (self.lr > 0 and self.weight_decay >= 0 and 0 <= self.follow <= 1 and self.temperature > 0):
            raise InvalidInput(f"lr and temperature must be > 0, weight_decay >= 0, follow in 0..1: {self}")


@dataclass(frozen=True)
class Group:
    """Students of one shape: where they start among units and students, how many, and their later layers."""

    unit: int
    student: int
    count: int
    widths: tuple[int, ...]
    outputs: int

    def shapes(self) -> list[tuple[int, int]]:
        """Return (out, in) of each layer after the first."""
        return [(out, inputs) for inputs, out in pairwise((*self.widths, self.outputs))]

    def first(self, of_units: Tensor) -> Tensor:
        """Return the view [students, batch, width] of a tensor [batch, units]."""
        width = self.widths[0]
        part = of_units[:, self.unit : self.unit + self.count * width]
        return part.view(len(of_units), self.count, width).transpose(0, 1)


class BankLayout:
    """All first layers as one matrix [units, inputs], then the later layers of each group: weights, then biases.

    Parameters
    ----------
    students : sequence of Student
        Those of equal `hidden` must stand together.
    features, classes : int
    """

    def __init__(self, students: Sequence[Student], features: int, classes: int) -> None:
        self.students, self.features, self.classes = tuple(students), features, classes
        shapes = [key for key, _ in groupby(student.hidden for student in self.students)]
        if not shapes or len(set(shapes)) != len(shapes):
            raise InvalidInput("a bank needs at least one student, and students of equal hidden widths side by side")
        self.outputs = round_up(classes)
        self.groups: list[Group] = []
        unit = student = 0
        for widths in shapes:
            count = sum(each.hidden == widths for each in self.students)
            self.groups.append(Group(unit, student, count, widths, self.outputs))
            unit, student = unit + count * widths[0], student + count
        self.units, self.inputs = round_up(unit), round_up(features + 1)
        self.head = self.units * self.inputs
        self.tail = sum(g.count * out * (inputs + 1) for g in self.groups for out, inputs in g.shapes())

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self.head + self.tail

    def first(self, flat: Tensor) -> Tensor:
        """Return the view [units, inputs] of all first layers; column `features` is the bias."""
        return flat[: self.head].view(self.units, self.inputs)

    def later(self, flat: Tensor) -> Iterator[tuple[Group, list[tuple[Tensor, Tensor]]]]:
        """Yield each group with views (weight [students, out, in], bias [students, out]) of its later layers."""
        begin = self.head
        for group in self.groups:
            found = []
            for out, inputs in group.shapes():
                middle = begin + group.count * out * inputs
                end = middle + group.count * out
                found.append(
                    (flat[begin:middle].view(group.count, out, inputs), flat[middle:end].view(group.count, out))
                )
                begin = end
            yield group, found

    def own(self, group: Group) -> Iterator[tuple[int, Student, slice]]:
        """Yield each student of a group with its place in the group and its units."""
        for index, student in enumerate(self.students[group.student : group.student + group.count]):
            begin = group.unit + index * group.widths[0]
            yield index, student, slice(begin, begin + group.widths[0])

    def rates(self) -> tuple[Tensor, Tensor]:
        """Return learning rate and weight decay, float64 [units + tail]: of each unit, then of each later parameter."""
        rates, decays = torch.ones(self.units + self.tail, dtype=torch.float64), torch.zeros(self.units + self.tail)
        decays = decays.double()
        begin = self.units
        for group in self.groups:
            for _, student, units in self.own(group):
                rates[units], decays[units] = student.lr, student.weight_decay
            for out, inputs in group.shapes():
                for length, decayed in ((out * inputs, True), (out, False)):
                    for _, student, _ in self.own(group):
                        rates[begin : begin + length] = student.lr
                        decays[begin : begin + length] = student.weight_decay if decayed else 0.0
                        begin += length
        return rates, decays

    def mask(self) -> Tensor | None:
        """Return which features each student reads, bool [students, features]; None if all read everything."""
        if all(student.columns is None for student in self.students):
            return None
        found = torch.ones(len(self.students), self.features, dtype=torch.bool)
        for row, student in zip(found, self.students, strict=True):
            if student.columns is not None:
                row.zero_()
                for start, stop in student.columns:
                    row[start:stop] = True
        return found

    def per_unit(self, mask: Tensor) -> Tensor:
        """Spread `mask` [students, features] over the matrix of all first layers: float32 [units, inputs]."""
        found = torch.ones(self.units, self.inputs, device=mask.device)
        for group in self.groups:
            for index, _, units in self.own(group):
                found[units, : self.features] = mask[group.student + index].to(found.dtype)
        return found

    def draw(self) -> Tensor:
        """Return every student's first weights, float64 [size]: normal as in He et al., 2015; biases are 0."""
        flat = torch.zeros(self.size, dtype=torch.float64)
        first, mask = self.first(flat), self.mask()
        for group, layers in self.later(flat):
            layers[-1][1][:, self.classes :] = SILENT
            for index, student, units in self.own(group):
                random = np.random.default_rng([student.seed, *group.widths])
                read = torch.ones(self.features) if mask is None else mask[group.student + index]
                weight = random.standard_normal((group.widths[0], self.features)) * np.sqrt(2 / int(read.sum()))
                first[units, : self.features] = torch.from_numpy(weight) * read
                for depth, (matrix, _) in enumerate(layers):
                    last = depth == len(layers) - 1
                    out, inputs = (self.classes if last else matrix.shape[1]), matrix.shape[2]
                    weight = random.standard_normal((out, inputs)) * np.sqrt((1 if last else 2) / inputs)
                    matrix[index, :out] = torch.from_numpy(weight)
        return flat

    def networks(self, flat: Tensor) -> list[tuple[Layer, ...]]:
        """Return each student's layers from a flat tensor in host memory; they take the columns that it reads."""
        first, mask = self.first(flat).numpy(), self.mask()
        found = []
        for group, layers in self.later(flat):
            for index, _, units in self.own(group):
                own = first[units, : self.features]
                if mask is not None:
                    own = own[:, mask[group.student + index].numpy()]
                made = [Layer(own, first[units, self.features], "relu")]
                for depth, (weight, bias) in enumerate(layers):
                    last = depth == len(layers) - 1
                    out = self.classes if last else weight.shape[1]
                    kind = "identity" if last else "relu"
                    made.append(Layer(weight[index, :out].numpy(), bias[index, :out].numpy(), kind))
                found.append(tuple(made))
        return found
