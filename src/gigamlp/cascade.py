"""The cascade: MLPs of rising cost over the same rows; a row goes on to the next one only where this one is unsure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.errors import InvalidInput, ModelError
from gigamlp.mlp import MLP, check_rows

__all__ = ["Calibration", "Cascade", "Model", "goes_on", "merge", "one_mlp"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Calibration:
    """What `gigamlp.calibrate` promised, and what it saw of the rows that it was given.

    Attributes
    ----------
    rows : int
        Validation rows.
    unsure : tuple of int
        Of these, the rows that went on from each stage but the last.
    max_loss, confidence : float
        With probability `confidence` over the draw of the rows, at most `max_loss` of all rows of their kind lose.
    labelled : bool
        Whether a loss is a row that the last stage answers right and the cascade wrong. Without labels it is a row that
        the two answer differently.
    """

    rows: int
    unsure: tuple[int, ...]
    max_loss: float
    confidence: float
    labelled: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "unsure", tuple(int(count) for count in self.unsure))
        if self.rows < 1 or any(not 0 <= count <= self.rows for count in self.unsure):
            raise ModelError(f"a calibration over {self.rows} rows cannot have {self.unsure} unsure ones")
        if not (0 < self.max_loss < 1 and 0 < self.confidence < 1):
            raise ModelError(f"max_loss {self.max_loss} and confidence {self.confidence} must lie within 0..1")

    @property
    def unsure_share(self) -> float:
        """Share of the validation rows that the first stage was unsure of."""
        return self.unsure[0] / self.rows


@dataclass(frozen=True, eq=False)
class Cascade:
    """MLPs over the same rows, each asked only about the rows that those before it were unsure of.

    A row whose margin in stage ``i`` (the difference of its two largest logits, in float32) is at least
    ``thresholds[i]`` keeps that stage's class; otherwise, and where the margin is NaN, it goes on. The last stage
    decides about what reaches it.

    Parameters
    ----------
    stages : sequence of MLP
        At least two, the cheapest first, with the same row width, head (``softmax`` of two classes or more, or
        ``sigmoid``) and class labels. They may read different columns.
    thresholds : sequence of float
        One per stage but the last, rounded to float32, at least 0. Infinity sends every row on.
    calibration : Calibration, optional
        What `gigamlp.calibrate` found. It decides no answer.
    name : str
        What tables call it; the stages' names joined with ``+`` if not given.

    Raises
    ------
    ModelError
        If the stages do not fit each other, or the thresholds do not fit the stages.

    Examples
    --------
    >>> import numpy as np
    >>> from gigamlp import MLP, Layer
    >>> quick = MLP([Layer([[1.0, 0.0], [0.0, 1.0]])], name="quick")
    >>> exact = MLP([Layer([[1.0, 0.5], [0.0, 2.0]])], name="exact")
    >>> cascade = Cascade((quick, exact), (2.0,))
    >>> rows = np.array([[9, 1], [3, 2], [1, 3]], np.uint8)
    >>> cascade.predict(rows), cascade.decide(rows)[1]
    (array([0, 0, 1]), array([0, 1, 0]))
    >>> cascade
    Cascade('quick+exact', 2-2 >= 2.0 | 2-2, head=softmax)
    """

    stages: tuple[MLP, ...]
    thresholds: tuple[float, ...]
    calibration: Calibration | None = None
    name: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stages", tuple(self.stages))
        if len(self.stages) < 2:
            raise ModelError(f"a cascade needs at least two stages, got {len(self.stages)}; one MLP is just that MLP")
        for index, stage in enumerate(self.stages):
            if not isinstance(stage, MLP):
                raise ModelError(f"stage {index} is a {type(stage).__name__}, not an MLP")
        self._check_agreement()
        put(self, "thresholds", self._checked_thresholds())
        if self.calibration is not None and len(self.calibration.unsure) != len(self.thresholds):
            raise ModelError(f"the calibration is one of {len(self.calibration.unsure) + 1} stages")
        if self.name == "":
            put(self, "name", "+".join(stage.name for stage in self.stages))
        if not isinstance(self.name, str):
            raise ModelError("a cascade's name must be a string")

    def _check_agreement(self) -> None:
        first = self.stages[0]
        if first.head not in ("softmax", "sigmoid"):
            raise ModelError(f"a cascade needs one class per row; head {first.head!r} has none")
        if first.head == "softmax" and first.outputs < 2:
            raise ModelError("a cascade needs two classes or more: one class has no margin")
        for index, stage in enumerate(self.stages[1:], start=1):
            if stage.features != first.features:
                raise ModelError(
                    f"stages take the same rows, but stage 0 takes {first.features} features and stage {index} "
                    f"{stage.features}; a stage that reads fewer has columns=... and features={first.features}"
                )
            if stage.head != first.head:
                raise ModelError(f"stages have the same head, but {first.head!r} and {stage.head!r} were given")
            assert first.classes is not None  # both heads have classes
            if not np.array_equal(first.classes, np.asarray(stage.classes)):
                raise ModelError(f"stage {index} has other class labels than stage 0, or another order of them")

    def _checked_thresholds(self) -> tuple[float, ...]:
        try:
            given = tuple(float(value) for value in self.thresholds)
        except (TypeError, ValueError) as error:
            raise ModelError(f"thresholds must be numbers: {error}") from error
        if len(given) != len(self.stages) - 1:
            raise ModelError(f"{len(self.stages)} stages need {len(self.stages) - 1} thresholds, got {len(given)}")
        for value in given:
            if not value >= 0:
                raise ModelError(f"a threshold is a margin of logits, at least 0; got {value}")
        with np.errstate(over="ignore"):
            return tuple(float(np.float32(value)) for value in given)

    # ---- shape ----------------------------------------------------------------------------------------------------

    @property
    def features(self) -> int:
        """Width of a row."""
        return self.stages[0].features

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Names of a row's columns, if the first stage has them."""
        return self.stages[0].feature_names

    @property
    def outputs(self) -> int:
        """Number of logits."""
        return self.stages[0].outputs

    @property
    def head(self) -> str:
        """What the logits mean: ``softmax`` or ``sigmoid``."""
        return self.stages[0].head

    @property
    def classes(self) -> Array:
        """Labels in logit order."""
        classes = self.stages[0].classes
        assert classes is not None
        return classes

    @property
    def columns(self) -> tuple[tuple[int, int], ...] | None:
        """Sorted, disjoint runs of the features that at least one stage reads; None for all."""
        runs = [run for stage in self.stages for run in stage.columns or ((0, self.features),)]
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return None if joined == [(0, self.features)] else tuple(joined)

    @property
    def features_read(self) -> int:
        """Number of features that at least one stage reads: what a row that goes on costs at most."""
        return sum(stop - start for start, stop in self.columns or ((0, self.features),))

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers, stage after stage."""
        return tuple(width for stage in self.stages for width in stage.hidden)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a row that goes through all stages."""
        return sum(stage.macs for stage in self.stages)

    @property
    def parameters(self) -> int:
        """Number of weights and biases of all stages."""
        return sum(stage.parameters for stage in self.stages)

    def with_(self, **changes: Any) -> Cascade:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def digest(self) -> str:
        """Return the sha256 of everything that decides an answer, as 64 hex digits."""
        whole = hashlib.sha256(b"gigamlp-cascade")
        for stage in self.stages:
            whole.update(bytes.fromhex(stage.digest()))
        whole.update(np.asarray(self.thresholds, "<f4").tobytes())
        return whole.hexdigest()

    # ---- answers --------------------------------------------------------------------------------------------------

    def check_rows(self, x: Any) -> Array:
        """Return `x` as a 2-D numeric array of the right width, or raise `InvalidInput` saying what is wrong."""
        return check_rows(x, self.features, self.name, self.feature_names)

    def logits(self, x: ArrayLike) -> Array:
        """Return float32 logits [n, outputs], each row's from the stage that decided it."""
        return self._run(x, MLP.logits)[0]

    def reference_logits(self, x: ArrayLike) -> Array:
        """Return the same, computed in float64; the margins that decide are rounded to float32."""
        return self._run(x, MLP.reference_logits)[0]

    def decide(
        self, x: ArrayLike, logits_of: Callable[[MLP, Array], Array] = MLP.logits
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the class index [n] of each row, and the index [n] of the stage that decided it.

        Parameters
        ----------
        x : array_like, shape [n, features]
        logits_of : callable
            Gives a stage's logits for some of the rows: float32 arithmetic if not given.
        """
        logits, stage = self._run(x, logits_of)
        return self.class_ids(logits), stage

    def _run(self, x: ArrayLike, logits_of: Callable[[MLP, Array], Array]) -> tuple[Array, NDArray[np.int64]]:
        rows = self.check_rows(x)
        logits = np.array(logits_of(self.stages[0], rows))
        deciding = np.zeros(len(rows), np.int64)
        at = np.arange(len(rows))
        for index, threshold in enumerate(self.thresholds):
            at = at[goes_on(self.stages[index].margins(logits[at]), threshold)]
            if len(at) == 0:
                break
            logits[at] = logits_of(self.stages[index + 1], rows[at])
            deciding[at] = index + 1
        return logits, deciding

    def predict(self, x: ArrayLike) -> Array:
        """Return the class label [n] of each row of `x`; ties go to the lowest index."""
        return self.answers(self.logits(x))

    def predict_proba(self, x: ArrayLike) -> Array:
        """Return float32 probabilities [n, classes], each row's from the stage that decided it."""
        return self.probabilities(self.logits(x))

    def answers(self, logits: Array) -> Array:
        """Turn logits [n, outputs] into what `predict` returns."""
        return self.stages[0].answers(logits)

    def class_ids(self, logits: Array) -> NDArray[np.int64]:
        """Turn logits [n, outputs] into class indices [n]; ties go to the lowest index."""
        return self.stages[0].class_ids(logits)

    def margins(self, logits: Array) -> Array:
        """Turn logits [n, outputs] into the differences of the two largest ones [n]."""
        return self.stages[0].margins(logits)

    def labels(self, class_ids: Array) -> Array:
        """Turn class indices into class labels."""
        return self.stages[0].labels(class_ids)

    def probabilities(self, logits: Array) -> Array:
        """Turn logits [n, outputs] into probabilities [n, classes]."""
        return self.stages[0].probabilities(logits)

    # ---- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], dtype: str = "float32") -> None:
        """Write the cascade to `path` as one safetensors file, atomically; see `MLP.save`."""
        from gigamlp.modelfile import save

        save(self, path, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return Cascade, (self.stages, self.thresholds, self.calibration, self.name)

    def __repr__(self) -> str:
        shapes = ["-".join(str(w) for w in (s.features_read, *s.hidden, s.outputs)) for s in self.stages]
        steps = [f"{shape} >= {t:.4}" for shape, t in zip(shapes, self.thresholds, strict=False)]
        return f"Cascade({self.name!r}, {' | '.join([*steps, shapes[-1]])}, head={self.head})"

    def __eq__(self, other: object) -> bool:
        """Two cascades are equal if they answer alike bit for bit and have the same name and calibration."""
        same = isinstance(other, Cascade) and (self.name, self.calibration) == (other.name, other.calibration)
        return same and self.digest() == other.digest()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.digest())


Model = MLP | Cascade


def goes_on(margins: Array, threshold: float) -> NDArray[np.bool_]:
    """Return for each margin [n] whether its row goes on to the next stage: it is below the threshold, or NaN."""
    return np.asarray(~(margins.astype(np.float32, copy=False) >= np.float32(threshold)))


def merge(
    thresholds: Sequence[float], class_ids: Sequence[Array], margins: Sequence[Array]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the class index and the deciding stage of each row, from answers of all stages for all rows.

    What an engine does with a cascade equals this, applied to what it does with each stage.

    Parameters
    ----------
    thresholds : sequence of float
    class_ids : sequence of ndarray [n], one per stage
    margins : sequence of ndarray of float32 [n], one per stage but the last (more are ignored)

    Examples
    --------
    >>> merge([2.0], [np.array([0, 0, 1]), np.array([5, 6, 7])], [np.array([3.0, 2.0, np.nan], np.float32)])
    (array([0, 0, 7]), array([0, 0, 1]))
    """
    if len(class_ids) != len(thresholds) + 1 or len(margins) < len(thresholds):
        raise InvalidInput(f"{len(thresholds)} thresholds need the answers of {len(thresholds) + 1} stages")
    ids = np.array(class_ids[0], np.int64)
    deciding = np.zeros(len(ids), np.int64)
    on = np.ones(len(ids), np.bool_)
    for index, threshold in enumerate(thresholds):
        on &= goes_on(np.asarray(margins[index]), threshold)
        ids[on] = class_ids[index + 1][on]
        deciding[on] = index + 1
    return ids, deciding


def one_mlp(model: object, what: str) -> MLP:
    """Return `model` if it is one MLP, which `what` needs; else raise `InvalidInput`, which says what to do instead."""
    if isinstance(model, MLP):
        return model
    if isinstance(model, Cascade):
        raise InvalidInput(f"{what} takes one MLP, and {model.name!r} is several: take each of its `stages`")
    raise InvalidInput(f"{what} takes an MLP, not a {type(model).__name__}; gigamlp.load reads one from a file")
