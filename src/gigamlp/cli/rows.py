"""Which rows a command works on: MNIST, or what ``--data`` and ``--labels`` name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gigamlp.cli.context import UsageError
from gigamlp.errors import DataError

if TYPE_CHECKING:
    from gigamlp.cascade import Model
    from gigamlp.data import Dataset
    from gigamlp.mlp import MLP

__all__ = ["accuracy_rows", "load_dataset", "one_mlp", "with_labels"]


def load_dataset(data: Path | None, labels: Path | None) -> Dataset:
    """Return the data set that the options name; MNIST if they name none."""
    from gigamlp.data import Dataset, load_arrays, load_mnist

    if data is not None:
        return load_arrays(data, labels)
    if labels is not None:
        raise UsageError("--labels needs --data: labels of which rows?")
    x, y, x_test, y_test = load_mnist()
    return Dataset(x, y, x_test, y_test, "mnist", (28, 28))


def one_mlp(path: Path | str) -> MLP:
    """Return the MLP in a file or of a shipped name.

    Raises
    ------
    InvalidInput
        If it is a cascade.
    """
    from gigamlp.errors import InvalidInput
    from gigamlp.mlp import MLP, load

    mlp = load(path)
    if not isinstance(mlp, MLP):
        raise InvalidInput(f"{path} is a cascade, and this takes a single network; gigamlp.load(...).stages are such")
    return mlp


def with_labels(dataset: Dataset) -> Dataset:
    """Return `dataset` if its rows have labels, or raise `DataError`."""
    if dataset.y is None:
        raise DataError(f"{dataset.name}: rows without labels; name them with --labels")
    return dataset


def accuracy_rows(mlp: Model, dataset: Dataset, *, named: bool) -> tuple[Any, Any] | None:
    """Return the rows to measure accuracy on: the test rows, or all rows if there are none apart.

    None if the data set was not `named` (it is MNIST then) and `mlp` is a network for something else.
    """
    from gigamlp.trial import class_indices

    x: Any
    y: Any
    x, y = (dataset.x, dataset.y) if dataset.x_test is None else (dataset.x_test, dataset.y_test)
    if named:
        return x, y
    if mlp.features != x.shape[1] or mlp.classes is None:
        return None
    try:
        class_indices(mlp, y)
    except DataError:
        return None
    return x, y
