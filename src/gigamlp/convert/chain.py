"""What every importer reads a foreign model into, a chain of steps, and the folding of the chain into an MLP.

Folding is done in float64 and rounded to float32 once. An elementwise ``x * scale + shift`` becomes the MLP's input
scale and offset before the first dense step, a part of the dense step before it where no activation lies between, and
else a part of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import ConversionError, InvalidInput, ModelError
from gigamlp.mlp import HEADS, MLP, Layer

__all__ = ["Activation", "Affine", "Dense", "Softmax", "Step", "fold", "numbers"]

Float64 = NDArray[np.float64]

# float32 keeps 24 bits: an offset that large costs the scaled feature 2**13 / 2**24 = 0.0005 of absolute precision
_MAX_OFFSET = 2.0**13


@dataclass(frozen=True, eq=False)
class Dense:
    """``x @ weight.T + bias``, weight float64 [out, in]."""

    weight: Float64
    bias: Float64 | None
    where: str


@dataclass(frozen=True, eq=False)
class Affine:
    """``x * scale + shift``, each float64 [] or [width]."""

    scale: Float64
    shift: Float64
    where: str


@dataclass(frozen=True)
class Activation:
    """One of `gigamlp.activations.ACTIVATIONS`."""

    name: str
    where: str


@dataclass(frozen=True)
class Softmax:
    """Softmax or log-softmax over the outputs: it must be the last step."""

    where: str


Step = Dense | Affine | Activation | Softmax


def numbers(values: Any, where: str) -> Float64:
    """Return `values` as an owned float64 array.

    Raises
    ------
    ModelError
        If they are not real numbers, or not finite.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "buif":
        raise ModelError(f"{where} holds {array.dtype}, not real numbers")
    array = np.array(array, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ModelError(f"{where} holds NaN or infinite values; an MLP needs finite numbers")
    return array


@dataclass
class _Under:
    """A layer under construction."""

    weight: Float64
    bias: Float64 | None
    where: str
    activation: str = "identity"


class _Folder:
    def __init__(self) -> None:
        self.scale: Float64 = np.ones(())
        self.shift: Float64 = np.zeros(())
        self.layers: list[_Under] = []
        self.pending: Affine | None = None  # follows an activation: waits for the next dense step
        self.softmax: Softmax | None = None

    @property
    def width(self) -> int | None:
        return len(self.layers[-1].weight) if self.layers else None

    def add(self, step: Step) -> None:
        if self.softmax is not None:
            raise ConversionError(f"{self.softmax.where}: softmax is supported as the last step only")
        if isinstance(step, Dense):
            self._dense(step)
        elif isinstance(step, Affine):
            self._affine(step)
        elif isinstance(step, Activation):
            self._activation(step)
        else:
            self._no_pending()
            self.softmax = step

    def _dense(self, step: Dense) -> None:
        weight, bias = step.weight, step.bias
        if weight.ndim != 2 or 0 in weight.shape:
            raise ConversionError(f"{step.where}: its weight has shape {list(weight.shape)}, not two sizes > 0")
        if self.width is not None and weight.shape[1] != self.width:
            raise ConversionError(f"{step.where} takes {weight.shape[1]} values, but gets {self.width}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ConversionError(f"{step.where}: {list(bias.shape)} is no shape for the bias of {len(weight)} outputs")
        if self.pending is not None:
            scale, shift = self.pending.scale, self.pending.shift
            more = (weight * shift).sum(axis=1)
            bias = more if bias is None else bias + more
            weight, self.pending = weight * scale, None
        self.layers.append(_Under(weight, bias, step.where))

    def _affine(self, step: Affine) -> None:
        scale, shift = (each.reshape(()) if each.size == 1 else each for each in (step.scale, step.shift))
        step = Affine(scale, shift, step.where)
        if self.width is not None and not {step.scale.shape, step.shift.shape} <= {(), (self.width,)}:
            shapes = f"{list(step.scale.shape)} and {list(step.shift.shape)}"
            raise ConversionError(f"{step.where}: factors and terms of shapes {shapes} for {self.width} values")
        if not self.layers:
            sizes = {each.shape for each in (step.scale, step.shift, self.scale, self.shift)} - {()}
            if len(sizes) > 1 or any(len(size) > 1 for size in sizes):
                found = " and ".join(str(list(size)) for size in sorted(sizes))
                raise ConversionError(f"{step.where}: factors and terms of shapes {found} do not go with one row")
            self.shift = self.shift * step.scale + step.shift
            self.scale = self.scale * step.scale
        elif self.layers[-1].activation == "identity":
            last = self.layers[-1]
            last.weight = last.weight * (step.scale[:, None] if step.scale.ndim else step.scale)
            last.bias = (0.0 if last.bias is None else last.bias) * step.scale + step.shift + np.zeros(len(last.weight))
        elif self.pending is None:
            self.pending = step
        else:
            before = self.pending
            self.pending = Affine(before.scale * step.scale, before.shift * step.scale + step.shift, step.where)

    def _no_pending(self) -> None:
        """Make a dense step of an affine one that can be folded into none: exact, if not free."""
        if self.pending is not None:
            width = self.width or 0
            diagonal = np.diag(np.broadcast_to(self.pending.scale, (width,)))
            shift, where = np.broadcast_to(self.pending.shift, (width,)).copy(), self.pending.where
            self.pending = None
            self.layers.append(_Under(diagonal, shift, where))

    def _activation(self, step: Activation) -> None:
        if step.name == "identity":
            return
        if not self.layers:
            raise ConversionError(f"{step.where}: {step.name} before the first dense layer is not supported")
        self._no_pending()
        last = self.layers[-1]
        if last.activation == step.name == "relu":
            return
        if last.activation != "identity":
            raise ConversionError(
                f"{step.where}: {step.name} right after {last.activation} is not supported; a dense layer "
                "must lie between"
            )
        last.activation = step.name

    def resolve_head(self, head: str | None, logits: bool) -> str:
        """Return the head, taking off the last step what belongs to it."""
        self._no_pending()
        last = self.layers[-1]
        if head is not None and head not in HEADS:
            raise InvalidInput(f"unknown head {head!r}; known: {', '.join(HEADS)}")
        if self.softmax is not None:
            if head not in (None, "softmax"):
                raise ConversionError(
                    f"{self.softmax.where}: the model ends in softmax, which head {head!r} has no place for"
                )
            return "softmax"
        if head is None and last.activation == "logistic":
            head = "sigmoid" if self.width == 1 else "multilabel"
        if head in ("sigmoid", "multilabel") and last.activation == "logistic" and not logits:
            last.activation = "identity"
        if head is None:
            head = "regression" if self.width == 1 else "softmax"
        return head


def fold(
    steps: Iterable[Step],
    *,
    head: str | None = None,
    classes: Any = None,
    name: str = "mlp",
    features: int | None = None,
    logits: bool = False,
) -> MLP:
    """Return the MLP that computes what `steps` compute.

    Parameters
    ----------
    steps : iterable of Step
    head : str, optional
        What the outputs mean. Without it: ``softmax`` after a softmax; after a final logistic ``sigmoid`` for one
        output and ``multilabel`` for more; else ``regression`` for one output and ``softmax`` for more.
    classes, name
        Of the MLP.
    features : int, optional
        How many features the source says it takes, to be checked.
    logits : bool
        The steps end in the logits: a final logistic is the last layer's activation, not a part of the head.

    Raises
    ------
    ConversionError
        If the steps do not make an MLP: the message names the step.
    ModelError
        If a number is not finite or leaves float32.
    """
    folder = _Folder()
    for step in steps:
        folder.add(step)
    if not folder.layers:
        raise ConversionError("the model has no dense layer")
    head = folder.resolve_head(head, logits)
    width = folder.layers[0].weight.shape[1]
    if features is not None and features != width:
        raise ConversionError(f"{folder.layers[0].where} takes {width} features, but the model's rows have {features}")
    for what, value in (("factors", folder.scale), ("terms", folder.shift)):
        if value.shape not in ((), (width,)):
            raise ConversionError(f"{value.size} {what} scale the input, but rows have {width} features")
    _check_offset(folder.shift)
    layers = []
    for under in folder.layers:
        try:
            layers.append(Layer(under.weight, under.bias, under.activation))
        except ModelError as error:
            raise ModelError(f"{under.where}: {error}") from error
    return MLP(
        tuple(layers), input_scale=folder.scale, input_offset=folder.shift, head=head, classes=classes, name=name
    )


def _check_offset(shift: Float64) -> None:
    largest = int(np.argmax(np.abs(shift)))
    value = float(np.ravel(shift)[largest])
    if abs(value) > _MAX_OFFSET:
        raise ConversionError(
            f"feature {largest} is scaled by a shift of {value:.6g}: its mean is so far from 0 beside its spread that "
            "float32 rows lose the digits that matter; subtract the mean in float64 first, and train on that"
        )
