"""The MLP: a plain, immutable NumPy value with a float32 forward pass and a float64 reference."""

from __future__ import annotations

import hashlib
import operator
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.activations import apply_activation, logistic
from gigamlp.errors import InvalidInput, ModelError
from gigamlp.frames import is_table, table_rows
from gigamlp.layers import Layer, Scheme, frozen

__all__ = ["HEADS", "MLP", "Layer", "Scheme", "check_rows", "load"]

HEADS = ("softmax", "sigmoid", "multilabel", "regression")
MAX_FEATURES = 2**31 - 1  # kernels count the features of a row in 32 bits
_ROWS_PER_CHUNK = 4096  # bounds the memory of a forward pass: 4,096 rows x 784 x 4 bytes = 13 MB

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class MLP:
    """A multilayer perceptron as a value: nothing in it changes after construction.

    A row ``x`` of `features` numbers goes through ``x[columns] * input_scale + input_offset``, then the layers.

    Parameters
    ----------
    layers : sequence of Layer
        At least one; each one's input width is the width of the one before.
    input_scale, input_offset : float or array_like of float32, shape [features read]
        Applied to the features that are read, before the first layer.
    head : {"softmax", "sigmoid", "multilabel", "regression"}
        What the last layer's outputs (the logits) mean. ``sigmoid`` needs exactly one logit and two classes.
    classes : sequence of int or str, optional
        Labels in logit order; ``0 .. n-1`` if not given. Not for ``regression``.
    columns : sequence of (start, stop), optional
        Sorted, disjoint runs of features that the MLP reads; all of them if not given.
    features : int, optional
        Width of a row. Needed only with `columns`, where the row may be wider than the last run.
    scheme : Scheme, optional
        How the MLP is to be made integer.
    name : str
        What tables call it.
    feature_names : sequence of str, optional
        What the `features` columns of a row are called: tables must have just these columns, and may have them in any
        order.

    Raises
    ------
    ModelError
        If anything in it does not hold together.

    Examples
    --------
    >>> import numpy as np
    >>> from gigamlp import MLP, Layer
    >>> mlp = MLP([Layer(np.eye(2), activation="relu"), Layer([[1.0, 0.0], [0.0, 2.0]], [0.5, 0.0])], name="toy")
    >>> mlp.predict(np.array([[3, 1], [1, 3]], dtype=np.uint8))
    array([0, 1])
    >>> mlp.hidden, mlp.features, mlp.outputs
    ((2,), 2, 2)
    """

    layers: tuple[Layer, ...]
    input_scale: Array | float = 1.0
    input_offset: Array | float = 0.0
    head: str = "softmax"
    classes: Array | None = None
    columns: tuple[tuple[int, int], ...] | None = None
    features: int = 0
    scheme: Scheme | None = None
    name: str = "mlp"
    feature_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "layers", tuple(self.layers))
        self._check_layers()
        self._freeze_columns()
        for field_name in ("input_scale", "input_offset"):
            value = frozen(getattr(self, field_name), np.float32, field_name)
            if value.shape not in ((), (self.features_read,)):
                raise ModelError(
                    f"{field_name} must be one number or have shape [{self.features_read}], got {list(value.shape)}"
                )
            put(self, field_name, float(value) if value.ndim == 0 else value)
        if self.head not in HEADS:
            raise ModelError(f"unknown head {self.head!r}; known: {', '.join(HEADS)}")
        if self.head == "sigmoid" and self.outputs != 1:
            raise ModelError(f"head 'sigmoid' needs exactly one logit, the last layer has {self.outputs}")
        self._freeze_classes()
        if self.scheme is not None:
            self.scheme.check(self.layers)
        if not isinstance(self.name, str) or not self.name:
            raise ModelError("an MLP's name must be a non-empty string")
        if self.feature_names is not None:
            put(self, "feature_names", _names(self.feature_names, self.features))

    def _check_layers(self) -> None:
        if not self.layers:
            raise ModelError("an MLP needs at least one layer")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise ModelError(f"layer {index} is a {type(layer).__name__}, not a Layer")
            if index and layer.weight.shape[1] != self.layers[index - 1].weight.shape[0]:
                raise ModelError(
                    f"layer {index} takes {layer.weight.shape[1]} inputs, but layer {index - 1} gives "
                    f"{self.layers[index - 1].weight.shape[0]}"
                )

    def _freeze_columns(self) -> None:
        width = self.layers[0].weight.shape[1]
        if self.columns is None:
            if self.features not in (0, width):
                raise ModelError(f"features={self.features}, but the first layer reads {width}; give `columns` too")
            object.__setattr__(self, "features", width)
            return
        try:
            runs = tuple((operator.index(start), operator.index(stop)) for start, stop in self.columns)
            features = operator.index(self.features)
        except (TypeError, ValueError) as error:
            raise ModelError(f"columns must be pairs (start, stop), features one number, all whole: {error}") from error
        end = 0
        for start, stop in runs:
            if not end <= start < stop:
                raise ModelError(f"columns must be sorted, disjoint, non-empty runs; ({start}, {stop}) is not")
            end = stop
        total = sum(stop - start for start, stop in runs)
        if total != width:
            raise ModelError(f"columns hold {total} features, but the first layer reads {width}")
        features = features or end
        if features < end:
            raise ModelError(f"columns end at {end}, past the row width {features}")
        if features > MAX_FEATURES:
            raise ModelError(f"a row of {features:,} features is wider than {MAX_FEATURES:,}, the most an MLP can have")
        object.__setattr__(self, "columns", runs)
        object.__setattr__(self, "features", features)

    def _freeze_classes(self) -> None:
        if self.head == "regression":
            if self.classes is not None:
                raise ModelError("head 'regression' has no classes")
            return
        count = 2 if self.head == "sigmoid" else self.outputs
        try:
            classes = np.arange(count, dtype=np.int64) if self.classes is None else np.array(self.classes)
        except ValueError as error:
            raise ModelError(f"classes must be a flat sequence of integers or of strings: {error}") from error
        given = () if self.classes is None else tuple(self.classes)
        mixed = classes.dtype.kind == "U" and not all(isinstance(label, str) for label in given)
        if classes.dtype.kind not in "iuUb" or classes.ndim != 1 or mixed:
            raise ModelError("classes must be a flat sequence of integers or of strings")
        if len(classes) != count:
            raise ModelError(f"{len(classes)} classes for {count} outputs of head {self.head!r}")
        if len(np.unique(classes)) != count:
            raise ModelError("classes must differ from each other")
        if classes.dtype.kind in "iub":
            if classes.dtype == np.uint64 and (classes > np.iinfo(np.int64).max).any():
                raise ModelError("integer classes must fit in int64")
            classes = classes.astype(np.int64)
        classes.flags.writeable = False
        object.__setattr__(self, "classes", classes)

    # ---- shape ----------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> int:
        """Number of logits."""
        return int(self.layers[-1].weight.shape[0])

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return tuple(int(layer.weight.shape[0]) for layer in self.layers[:-1])

    @property
    def features_read(self) -> int:
        """Number of features that are read from each row."""
        return int(self.layers[0].weight.shape[1])

    @property
    def macs(self) -> int:
        """Multiply-accumulates per row."""
        return sum(layer.weight.size for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(layer.weight.size + (0 if layer.bias is None else layer.bias.size) for layer in self.layers)

    def with_(self, **changes: Any) -> MLP:
        """Return a copy with some fields replaced, for example ``mlp.with_(name="mine")``."""
        return replace(self, **changes)

    def digest(self) -> str:
        """Return the sha256 of everything that decides an answer (the name does not), as 64 hex digits."""
        from gigamlp.modelfile import pack

        return hashlib.sha256(pack(self.with_(name="-"))).hexdigest()

    # ---- answers --------------------------------------------------------------------------------------------------

    def check_rows(self, x: Any) -> Array:
        """Return `x` as a 2-D numeric array of the right width, or raise `InvalidInput` saying what is wrong."""
        return check_rows(x, self.features, self.name, self.feature_names)

    def logits(self, x: ArrayLike) -> Array:
        """Return float32 logits of shape [n, outputs] for rows `x` of shape [n, features]."""
        return self._forward(x, np.float32)

    def reference_logits(self, x: ArrayLike) -> Array:
        """Return the logits computed in float64: what every engine is compared with."""
        return self._forward(x, np.float64)

    def _forward(self, x: ArrayLike, dtype: type[np.floating[Any]]) -> Array:
        rows = self.check_rows(x)
        out = np.empty((len(rows), self.outputs), dtype=dtype)
        weights = [layer.weight.T.astype(dtype, copy=False) for layer in self.layers]
        biases = [None if layer.bias is None else layer.bias.astype(dtype, copy=False) for layer in self.layers]
        for begin in range(0, len(rows), _ROWS_PER_CHUNK):
            h = self.read_columns(rows[begin : begin + _ROWS_PER_CHUNK]).astype(dtype)
            if h.size and not np.isfinite(h).all():
                bad = begin + int(np.flatnonzero(~np.isfinite(h).all(axis=1))[0])
                raise InvalidInput(f"row {bad} holds NaN or infinite values; clean or drop such rows first")
            h = h * np.asarray(self.input_scale, dtype) + np.asarray(self.input_offset, dtype)
            for layer, weight, bias in zip(self.layers, weights, biases, strict=True):
                h = h @ weight
                if bias is not None:
                    h += bias
                h = apply_activation(layer.activation, h)
            out[begin : begin + len(h)] = h
        return out

    def read_columns(self, rows: Array) -> Array:
        """Return the features of `rows` that the first layer reads."""
        if self.columns is None:
            return rows
        return np.concatenate([rows[:, start:stop] for start, stop in self.columns], axis=1)

    def predict(self, x: ArrayLike) -> Array:
        """Return the answer for each row of `x`.

        Class labels [n] for ``softmax`` and ``sigmoid`` (ties go to the lowest index), 0/1 indicators [n, labels] for
        ``multilabel``, the outputs [n] or [n, outputs] for ``regression``.
        """
        return self.answers(self.logits(x))

    def predict_proba(self, x: ArrayLike) -> Array:
        """Return float32 probabilities [n, classes]. Not for ``regression``."""
        return self.probabilities(self.logits(x))

    def answers(self, logits: Array) -> Array:
        """Turn logits [n, outputs] into what `predict` returns."""
        if self.head == "regression":
            return logits[:, 0] if self.outputs == 1 else logits
        if self.head == "multilabel":
            return (logits > 0).astype(np.int64)
        return self.labels(self.class_ids(logits))

    def class_ids(self, logits: Array) -> NDArray[np.int64]:
        """Turn logits [n, outputs] into class indices [n]; ties go to the lowest index."""
        if self.head not in ("softmax", "sigmoid"):
            raise InvalidInput(f"head {self.head!r} has no single class per row; ask for logits")
        if self.head == "sigmoid":
            return (logits[:, 0] > 0).astype(np.int64)
        return np.asarray(np.argmax(logits, axis=1), dtype=np.int64)

    def margins(self, logits: Array) -> Array:
        """Turn logits [n, outputs] into the differences of the two largest ones [n]; NaN where a logit is NaN.

        The two of ``sigmoid`` are 0 and its logit.
        """
        if self.head not in ("softmax", "sigmoid") or (self.head == "softmax" and self.outputs < 2):
            raise InvalidInput(f"head {self.head!r} with {self.outputs} outputs has no margin: that takes two classes")
        if self.head == "sigmoid":
            return np.abs(logits[:, 0])
        top = np.partition(logits, self.outputs - 2, axis=1)
        return np.asarray(top[:, -1] - top[:, -2])

    def labels(self, class_ids: Array) -> Array:
        """Turn class indices into class labels."""
        if self.classes is None:
            raise InvalidInput("head 'regression' has no classes")
        return np.asarray(self.classes[class_ids])

    def probabilities(self, logits: Array) -> Array:
        """Turn logits [n, outputs] into probabilities [n, classes]."""
        if self.head == "regression":
            raise InvalidInput("head 'regression' has no probabilities; use predict or logits")
        if self.head == "multilabel":
            return logistic(logits)
        if self.head == "sigmoid":
            p = logistic(logits[:, 0])
            return np.stack([1 - p, p], axis=1)
        e = np.exp(logits - logits.max(axis=1, keepdims=True)) if logits.size else logits
        return np.asarray(e / e.sum(axis=1, keepdims=True))

    # ---- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], dtype: str = "float32") -> None:
        """Write the MLP to `path` as safetensors, atomically.

        Parameters
        ----------
        path : path-like
        dtype : {"float32", "float16"}
            How weights and biases are stored. float16 halves the file and rounds them.
        """
        from gigamlp.modelfile import save

        save(self, path, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return MLP, tuple(getattr(self, each.name) for each in fields(self))

    def __repr__(self) -> str:
        widths = "-".join(str(w) for w in (self.features_read, *self.hidden, self.outputs))
        scheme = "" if self.scheme is None else f", scheme={self.scheme.name}"
        return f"MLP({self.name!r}, {widths}, {self.layers[0].activation}, head={self.head}{scheme})"

    def __eq__(self, other: object) -> bool:
        """Two MLPs are equal if they give the same answers bit for bit and have the same name."""
        return isinstance(other, MLP) and self.name == other.name and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


def check_rows(x: Any, features: int, name: str, feature_names: tuple[str, ...] | None = None) -> Array:
    """Return `x` as a 2-D numeric array of `features` columns for the model `name`, or raise `InvalidInput`."""
    if not isinstance(x, np.ndarray) and is_table(x):
        x = table_rows(x, features, feature_names)
    try:
        rows = np.asarray(x)
    except ValueError as error:
        raise InvalidInput(f"rows must have shape [n, {features}] and be numbers: {error}") from error
    if rows.dtype.kind not in "buif":
        raise InvalidInput(f"rows must be numbers, got dtype {rows.dtype}")
    if rows.ndim != 2:
        hint = "; one row is x[None, :]" if rows.ndim == 1 else "; images are x.reshape(len(x), -1)"
        raise InvalidInput(f"rows must have shape [n, {features}], got {list(rows.shape)}{hint}")
    if rows.shape[1] != features:
        raise InvalidInput(f"rows have {rows.shape[1]} features, {name!r} takes {features}")
    return rows


def _names(given: Any, features: int) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ModelError("feature_names must be strings that differ from each other")
    if len(names) != features:
        raise ModelError(f"{len(names)} feature_names for rows of {features} features")
    return tuple(str(name) for name in names)  # NumPy's strings become plain ones


def load(path: str | os.PathLike[str]) -> Any:
    """Read an MLP or Cascade that its `save` wrote, or a shipped model by its name.

    Parameters
    ----------
    path : path-like
        A file, or one of `gigamlp.models.names`: ``load("mnist-40")``. A file of that name comes first.

    Returns
    -------
    MLP or Cascade
        By what the file holds.

    Raises
    ------
    FileNotFoundError
        If there is neither; it lists the shipped models.
    FileFormatError, ModelError
        See `gigamlp.modelfile.unpack`.
    """
    from gigamlp import models
    from gigamlp.modelfile import load as load_file

    name = os.fspath(path)
    if Path(path).is_file():
        return load_file(path)
    if name in models.names():
        return models.load(name)
    raise FileNotFoundError(f"no model file at {name}; shipped with gigamlp: {', '.join(models.names())}")
