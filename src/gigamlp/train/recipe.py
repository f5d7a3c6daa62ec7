"""How long and how fast to train: the `Recipe`, its defaults, and the schedules it stands for. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput

__all__ = ["FAST", "PRECISIONS", "SCHEDULES", "Recipe", "default_recipe"]

PRECISIONS = ("auto", "float32", "tf32", "bf16", "fp16")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Recipe:
    """Everything about a training run but the data and the network.

    Parameters
    ----------
    epochs : int
        Passes over the training rows.
    batch : int
        Rows per step. The last, incomplete batch of an epoch is left out; which rows that are changes every epoch.
    lr : float
        Peak learning rate of AdamW (beta 0.9 and 0.999, eps 1e-8).
    weight_decay : float
        Decoupled (Loshchilov and Hutter, *Decoupled weight decay regularization*, 2019), on weights, not on biases.
    ema : float
        Decay per step of the running average of the weights, which is what is kept. 0 keeps the last weights. Early
        steps use ``min(ema, (1 + t) / (10 + t))``.
    warmup : float
        Share of the steps in which the rate climbs to its peak.
    schedule : {"cosine", "linear", "constant"}
        How the rate falls to 0 after that.
    precision : {"auto", "float32", "tf32", "bf16", "fp16"}
        Arithmetic of the matrix products. The weights, the gradients' sums and the optimiser are float32 in every
        case. ``auto``: float32 on CPU; on CUDA tf32 where the card has it, fp16 with loss scaling otherwise.
    """

    epochs: int = 40
    batch: int = 256
    lr: float = 1e-2
    weight_decay: float = 0.1
    ema: float = 0.999
    warmup: float = 0.02
    schedule: str = "cosine"
    precision: str = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InvalidInput(f"{name} must be a whole number >= 1, got {value!r}")
        limits = (("lr", 0, None), ("weight_decay", 0, None), ("ema", 0, 1), ("warmup", 0, 1))
        for name, least, most in limits:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
                raise InvalidInput(f"{name} must be a finite number, got {value!r}")
            if value < least or (most is not None and value >= most) or (name == "lr" and value == 0):
                bounds = "> 0" if name == "lr" else ">= 0" if most is None else f"in [{least}, {most})"
                raise InvalidInput(f"{name} must be {bounds}, got {value!r}")
        if self.schedule not in SCHEDULES:
            raise InvalidInput(f"unknown schedule {self.schedule!r}; known: {', '.join(SCHEDULES)}")
        if self.precision not in PRECISIONS:
            raise InvalidInput(f"unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}")

    def with_(self, **changes: Any) -> Recipe:
        """Return a copy with the fields replaced that are given and are not None."""
        known = {field.name for field in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise InvalidInput(f"a Recipe has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def tables(self, steps: int) -> NDArray[np.float32]:
        """Return float32 [3, steps]: the learning rate, the step number from 1, and the weight of the new average.

        Examples
        --------
        >>> Recipe(lr=1.0, warmup=0.5, schedule="linear", ema=0).tables(4)[0].tolist()
        [0.5, 1.0, 1.0, 0.5]
        """
        t = np.arange(steps, dtype=np.float64)
        warm = self.warmup * steps
        climb = np.minimum(1.0, (t + 1) / max(warm, 1.0))
        past = np.clip((t - warm) / max(steps - warm, 1.0), 0, 1)
        fall = {"cosine": 0.5 * (1 + np.cos(np.pi * past)), "linear": 1 - past, "constant": np.ones(steps)}[
            self.schedule
        ]
        average = 1 - np.minimum(self.ema, (1 + t) / (10 + t)) if self.ema else np.ones(steps)
        return np.stack([self.lr * climb * fall, t + 1, average]).astype(np.float32)


# 784-40-10 to 96.91 % (the reader's network) in tens of milliseconds on a data-centre GPU; see docs/training.md
FAST = Recipe(epochs=10, batch=512, lr=2.4e-2, weight_decay=0.1, ema=0.99, warmup=0.1, schedule="linear")


def default_recipe(hidden: tuple[int, ...], rows: int) -> Recipe:
    """Return the recipe for a network with these hidden widths and that many training rows.

    Chosen on 5,000 held-out rows of MNIST (docs/training.md). Small data sets get smaller batches and more epochs, so
    that there are always about 2,000 steps.

    Examples
    --------
    >>> default_recipe((40,), 55_000).epochs
    40
    >>> default_recipe((40,), 500)
    Recipe(epochs=134, batch=32, lr=0.01, weight_decay=0.3, ...)
    """
    batch = min(256, max(min(32, rows), 2 ** int(math.log2(max(rows / 8, 1)))))
    wide = max(hidden, default=0) > 96
    enough = math.ceil(2000 / max(rows // batch, 1))
    return Recipe(epochs=max(20 if wide else 40, enough), batch=batch, weight_decay=0.1 if wide else 0.3)
