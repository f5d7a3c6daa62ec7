"""Pools: augmented copies of the training rows on the device, with a teacher's logits, made once for many students."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.train.augment import Augment, Shape, TableAugment, distort, mix, prefetch
from gigamlp.train.network import SILENT, round_up
from gigamlp.train.rows import Array

__all__ = ["Encoded", "Pool", "Progress", "TeacherLogits", "epoch_plan", "make_pool"]

Progress: TypeAlias = Callable[[int, int, str], object]
TeacherLogits: TypeAlias = Callable[[Tensor], Tensor]  # raw rows [n, features] -> logits float32 [n, classes]

_TEACHER_ROWS = {"cpu": 1024, "cuda": 16384}
_LOGIT_LIMIT = 60.0  # e^-60 is nothing; float16 then keeps two digits behind the point


@dataclass(frozen=True)
class Encoded:
    """Training rows on the device, as the network's inputs are made from them.

    Parameters
    ----------
    x : Tensor [n, features]
        uint8; or float32: raw for images, scaled already for tables (then `scale` is 1 and `offset` 0).
    y : Tensor int64 [n]
    classes : int
    scale : float or Tensor float32 [features]
    offset : Tensor float32 [features]
        The network sees ``x * scale + offset``.
    spread : Tensor float32 [features]
        Standard deviation of each column of `x`.
    shape : (height, width) or None
        Of the rows, if they are images.
    """

    x: Tensor
    y: Tensor
    classes: int
    scale: float | Tensor
    offset: Tensor
    spread: Tensor
    shape: Shape | None = None

    def write(self, rows: Tensor, out: Tensor) -> None:
        """Write the scaled `rows` into `out` float [n, features]."""
        if isinstance(self.scale, float) and out.dtype == torch.float32:
            torch.add(self.offset, rows, alpha=self.scale, out=out)
        elif isinstance(self.scale, float):
            out.copy_(torch.add(self.offset.to(out.dtype), rows.to(out.dtype), alpha=self.scale))
        else:
            out.copy_(torch.addcmul(self.offset, rows.float(), self.scale))

    def inputs(self, rows: Tensor) -> Tensor:
        """Return the scaled `rows`: float32 [n, features]."""
        out = torch.empty(rows.shape, device=rows.device)
        self.write(rows, out)
        return out


@dataclass(frozen=True)
class Pool:
    """Copies of the training rows, one below the other.

    Parameters
    ----------
    source : Encoded
    x : Tensor [copies * rows, features]
        Of the dtype of ``source.x``.
    target : Tensor float32 [rows or copies * rows, padded classes]
        Labels as probabilities. Only copies with mixed labels have their own.
    strengths : tuple of float
        How strongly each copy is augmented.
    logits : Tensor float16 [copies * rows, padded classes] or None
        The teacher's; padded ones are very small.
    """

    source: Encoded
    x: Tensor
    target: Tensor
    strengths: tuple[float, ...]
    logits: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of one copy."""
        return len(self.source.x)

    @property
    def features(self) -> int:
        """Columns of a row."""
        return int(self.x.shape[1])

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.source.classes

    @property
    def padded(self) -> int:
        """Columns of logits and targets: a multiple of 8, which tensor cores want."""
        return round_up(self.source.classes)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.x, self.target, *(() if self.logits is None else (self.logits,)))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def write(self, rows: Tensor, out: Tensor) -> None:
        """Write the scaled `rows` into `out`; see `Encoded.write`."""
        self.source.write(rows, out)

    def targets(self, index: Tensor) -> Tensor:
        """Return the targets of the rows named by `index` int64 [n]."""
        if len(self.target) != len(self.x):
            index = index % self.rows
        return self.target.index_select(0, index)

    def taught(self, teacher: TeacherLogits, progress: Progress | None = None) -> Pool:
        """Return this pool with the logits of `teacher`.

        Raises
        ------
        TrainingError
            If they are not finite.
        InvalidInput
            If they are not one row of one logit a class for each row.
        """
        logits = torch.full((len(self.x), self.padded), SILENT, device=self.x.device, dtype=torch.float16)
        step = _TEACHER_ROWS[self.x.device.type]
        with torch.no_grad():
            for begin in range(0, len(self.x), step):
                rows = self.x[begin : begin + step]
                found = teacher(rows).float()
                if found.shape != (len(rows), self.classes):
                    raise InvalidInput(
                        f"the teacher gave logits of shape {list(found.shape)}, expected {[len(rows), self.classes]}"
                    )
                found = found - found.mean(1, keepdim=True)
                logits[begin : begin + step, : self.classes] = found.clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)
                if progress is not None:
                    progress(min(begin + step, len(self.x)), len(self.x), "teacher's answers")
        if not bool(torch.isfinite(logits).all()):
            raise TrainingError("the teacher's logits are not finite")
        return replace(self, logits=logits)


def make_pool(
    source: Encoded,
    augment: Augment | TableAugment | None,
    strengths: Sequence[float],
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Progress | None = None,
) -> Pool:
    """Return a pool of one copy for each of `strengths`, augmented that strongly; 0 leaves the rows as they are.

    Parameters
    ----------
    source : Encoded
    augment : Augment, TableAugment or None
        None goes with strengths that are all 0.
    strengths : sequence of float
    seed : int
    workers : int
        Threads that draw random numbers ahead.
    progress : callable, optional
    """
    if augment is None and any(strengths):
        raise InvalidInput("a pool of augmented copies needs to know how: augment=None goes with strength 0 only")
    if isinstance(augment, Augment) and source.shape is None:
        raise InvalidInput("Augment distorts images, and these rows are not known to be; give image_shape")
    count, (rows, features) = len(strengths), source.x.shape
    x = torch.empty(count * rows, features, device=source.x.device, dtype=source.x.dtype)
    plain = torch.zeros(rows, round_up(source.classes), device=source.x.device)
    plain.scatter_(1, source.y[:, None], 1.0)
    soft = isinstance(augment, TableAugment) and bool(augment.mixup) and any(strengths)
    target = torch.empty(count * rows, plain.shape[1], device=plain.device) if soft else plain

    def draw(copy: int) -> Any:
        if augment is None or not strengths[copy]:
            return None
        random = np.random.default_rng([seed, copy])
        if isinstance(augment, Augment):
            assert source.shape is not None
            return augment.draw(rows, source.shape, strengths[copy], random)
        return augment.draw(rows, features, strengths[copy], random)

    for copy, draws in enumerate(prefetch(draw, count, workers)):
        part = slice(copy * rows, (copy + 1) * rows)
        if draws is None:
            x[part] = source.x
        elif isinstance(augment, Augment):
            assert source.shape is not None
            x[part] = distort(source.x, source.shape, draws)
        else:
            x[part], mixed = mix(source.x, plain, source.spread, draws)
            if soft:
                target[part] = mixed
        if soft and draws is None:
            target[part] = plain
        if progress is not None:
            progress(copy + 1, count, "augmenting")
    return Pool(source, x, target, tuple(strengths))


def epoch_plan(strengths: Sequence[float], phases: Sequence[tuple[float, float]], epochs: int) -> list[int]:
    """Return which copy each epoch reads.

    Parameters
    ----------
    strengths : sequence of float
        Of the pool's copies.
    phases : sequence of (share, strength)
        From that share of the epochs on, copies of that strength, in turn. The first starts at 0.
    epochs : int

    Examples
    --------
    >>> epoch_plan((0.7, 0.7, 0.35), ((0, 0.7), (0.5, 0.35)), 6)
    [0, 1, 0, 2, 2, 2]
    """
    found = np.asarray(strengths)
    plan = []
    for epoch in range(epochs):
        strength = [strength for share, strength in phases if share * epochs <= epoch][-1]
        copies = np.flatnonzero(found == strength)
        if not len(copies):
            raise InvalidInput(f"the pool has no copy of strength {strength}; it has {sorted(set(strengths))}")
        plan.append(int(copies[epoch % len(copies)]))
    return plan


def ids(y: Array, device: torch.device) -> Tensor:
    """Return class ids int64 [n] on `device`."""
    return torch.from_numpy(np.ascontiguousarray(y, np.int64)).to(device)
