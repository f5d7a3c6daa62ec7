"""One row at a time: the engine's own call for it, where the runner of a single row has one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from gigamlp.cascade import Model
from gigamlp.errors import InvalidInput
from gigamlp.hosted import is_staged
from gigamlp.ladder import Rung
from gigamlp.runners import Runners

__all__ = ["direct_call"]


def direct_call(
    mlp: Model, runners: Runners, rung: Rung, predict_one: weakref.WeakMethod[Callable[[Any], Any]]
) -> Callable[[Any], Any] | None:
    """Return what answers a row [features] of the rung's dtype with its label, or None if nothing does so directly.

    Parameters
    ----------
    mlp : MLP or Cascade
    runners : Runners
    rung : Rung
        The runner of a single row.
    predict_one : WeakMethod
        What answers rows of another kind; what this returns does not keep its owner alive.
    """
    if rung.spec.input_dtype not in ("uint8", "int8") or is_staged(rung):
        return None
    with runners.lock:
        runner: Any = runners.get(rung).runner

    def other(row: Any) -> Any:
        method = predict_one()
        if method is None:
            raise InvalidInput("this session is gone; keep it as long as its predict_one")
        return method(row)

    if hasattr(runner, "one"):  # native code all through, with the labels in it
        native: Callable[[Any], Any] = runner.one(other)
        return native
    if not hasattr(runner, "one_id"):
        return None
    class_id, dtype, shape = runner.one_id, np.dtype(rung.spec.input_dtype), (runner.input.shape[1],)
    labels = None if mlp.classes is None else mlp.classes.tolist()

    def call(row: Any) -> Any:
        if type(row) is np.ndarray and row.dtype == dtype and row.shape == shape:
            index = class_id(row)
            return index if labels is None else labels[index]
        return other(row)

    return call
