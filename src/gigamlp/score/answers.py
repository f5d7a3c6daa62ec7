"""What is asked for each row, and how a Session's answers become named columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Cascade, Model
from gigamlp.errors import InvalidInput
from gigamlp.inputs import as_rows, unusable_rows
from gigamlp.score.blocks import Block, Reject
from gigamlp.session import Session

__all__ = ["OUTPUTS", "Answers", "Field", "Runs", "answer", "fields"]

Array = NDArray[Any]
OUTPUTS = ("class", "margin", "confidence", "proba", "logits")


@dataclass(frozen=True)
class Field:
    """A column of answers.

    Attributes
    ----------
    name : str
    dtype : str
        As NumPy writes it.
    width : int or None
        Numbers a row, for a column of lists.
    """

    name: str
    dtype: str
    width: int | None = None


@dataclass(frozen=True, eq=False)
class Answers:
    """A block's answers, by the names of `fields`; the block's `x` is no longer looked at."""

    block: Block
    columns: dict[str, Array]


def fields(mlp: Model, outputs: Sequence[str]) -> tuple[Field, ...]:
    """Return the columns that `outputs` give for `mlp`.

    ``class`` is what `Session.predict` gives: it is called ``indicators`` for ``multilabel`` and ``value`` for
    ``regression``. The margin is the difference of the two largest logits, for ``sigmoid`` the logit's size; the
    confidence is the largest probability.

    Raises
    ------
    InvalidInput
        If an output is unknown, named twice, or the model has none such.

    Examples
    --------
    >>> from gigamlp import MLP, Layer
    >>> fields(MLP([Layer([[1.0, 0.0], [0.0, 1.0]])]), ["class", "proba"])
    (Field(name='class', dtype='<i8', width=None), Field(name='proba', dtype='<f4', width=2))
    """
    if not outputs:
        raise InvalidInput(f"name at least one output of {', '.join(OUTPUTS)}")
    if len(set(outputs)) < len(outputs):
        raise InvalidInput(f"an output is named twice: {', '.join(outputs)}")
    return tuple(_field(mlp, output) for output in outputs)


def _field(mlp: Model, output: str) -> Field:
    if isinstance(mlp, Cascade) and output in OUTPUTS and output != "class":
        raise InvalidInput(f"a cascade answers with class, not with {output}: score with its last stage for that")
    k, head = mlp.outputs, mlp.head
    if output == "class":
        if head == "regression":
            return Field("value", "<f4", None if k == 1 else k)
        if head == "multilabel":
            return Field("indicators", "<i8", k)
        assert mlp.classes is not None
        return Field("class", mlp.classes.dtype.str)
    if output == "logits":
        return Field("logits", "<f4", k)
    if output == "proba" and head != "regression":
        return Field("proba", "<f4", 2 if head == "sigmoid" else k)
    if output == "confidence" and head in ("softmax", "sigmoid"):
        return Field("confidence", "<f4")
    if output == "margin" and (head == "sigmoid" or (head == "softmax" and k > 1)):
        return Field("margin", "<f4")
    if output not in OUTPUTS:
        raise InvalidInput(f"unknown output {output!r}; known: {', '.join(OUTPUTS)}")
    raise InvalidInput(f"head {head!r} with {k} output{'s' * (k != 1)} has no {output}; ask for class or logits")


class Runs(Protocol):
    """What answers rows: a Session, or `lane.Lanes` around one."""

    mlp: Model

    def predict(self, x: Array) -> Any:
        """See `Session.predict`."""
        ...

    def predict_proba(self, x: Array) -> Any:
        """See `Session.predict_proba`."""
        ...

    def logits(self, x: Array) -> Any:
        """See `Session.logits`."""
        ...


def answer(session: Session, runs: Runs, block: Block, outputs: Sequence[str]) -> Answers:
    """Run the rows of `block` by `runs`. Rows that `session` refuses (NaN, numbers out of range) become rejects.

    Raises
    ------
    InvalidInput
        If all rows are refused for what they are, their dtype, say, and not for their values.
    """
    try:
        return Answers(block, _columns(runs, block.x, outputs))
    except InvalidInput:
        bad, reasons = _unusable(session, block.x)
        if not bad.any():
            raise
    numbers = block.row_numbers()[bad]
    found = zip(numbers.tolist(), reasons, block.x[bad], strict=True)
    rejects = tuple(Reject(row, 1, reason, values.tolist()) for row, reason, values in found)
    rest = block.without(bad, rejects)
    return Answers(rest, _columns(runs, rest.x, outputs))


def _unusable(session: Session, x: Array) -> tuple[NDArray[np.bool_], list[str]]:
    rows = as_rows(x, session.mlp)
    target = session.routes.dtype(rows)
    return unusable_rows(rows, target, session.mlp)


def _columns(runs: Runs, x: Array, outputs: Sequence[str]) -> dict[str, Array]:
    mlp = runs.mlp
    kinds = fields(mlp, outputs)
    if tuple(outputs) == ("class",):
        return {kinds[0].name: runs.predict(x)}
    if tuple(outputs) == ("proba",):
        return {"proba": runs.predict_proba(x)}
    logits = runs.logits(x)  # one run; everything else follows from them
    made = {}
    for output, kind in zip(outputs, kinds, strict=True):
        if output == "class":
            made[kind.name] = mlp.answers(logits)
        elif output == "logits":
            made["logits"] = logits
        elif output == "proba":
            made["proba"] = mlp.probabilities(logits)
        elif output == "confidence":
            made["confidence"] = mlp.probabilities(logits).max(axis=1)
        elif mlp.head == "sigmoid":
            made["margin"] = np.abs(logits[:, 0])
        else:
            top = np.partition(logits, -2, axis=1)[:, -2:]
            made["margin"] = top[:, 1] - top[:, 0]
    return made
