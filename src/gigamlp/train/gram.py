"""Ridge regression from Gram statistics: sums over rows, gathered a chunk at a time, and the solve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gigamlp.errors import InvalidInput, TrainingError

__all__ = ["ALPHA_RATIO", "GramStats", "RidgeSolution", "default_alpha", "empty_stats", "solve_ridge"]

ALPHA_RATIO = 1e-4  # default penalty as a share of the mean variance of a feature times the rows; docs/training.md
_BLOCK = 1024  # columns of the Gram matrix computed at once: only the blocks at or below the diagonal are
_JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)  # relative to the mean diagonal
_RESIDUAL = 1e-6  # largest relative residual that counts as a solution


@dataclass(frozen=True)
class GramStats:
    """Sums over the rows of ``H`` [n, hidden] and one-hot ``Y`` [n, classes]. float64, on one device.

    Parameters
    ----------
    gram : Tensor [hidden, hidden]
        ``H.T @ H``; only the lower triangle is meaningful.
    cross : Tensor [hidden, classes]
        ``H.T @ Y``
    sum_h : Tensor [hidden]
    sum_y : Tensor [classes]
    rows : int
    """

    gram: Tensor
    cross: Tensor
    sum_h: Tensor
    sum_y: Tensor
    rows: int = 0

    def add(self, h: Tensor, y: Tensor) -> GramStats:
        """Return the statistics with a chunk more; the tensors are updated in place.

        Parameters
        ----------
        h : Tensor float32 or float64 [rows, hidden]
        y : Tensor of the same dtype [rows, classes]

        Notes
        -----
        A chunk's products are formed in `h`'s dtype and added in float64.
        """
        hidden = h.shape[1]
        for begin in range(0, hidden, _BLOCK):
            end = min(begin + _BLOCK, hidden)
            self.gram[begin:, begin:end] += h[:, begin:].t() @ h[:, begin:end]
        self.cross.add_(h.t() @ y)
        self.sum_h.add_(h.sum(0, dtype=torch.float64))
        self.sum_y.add_(y.sum(0, dtype=torch.float64))
        return GramStats(self.gram, self.cross, self.sum_h, self.sum_y, self.rows + h.shape[0])

    def narrow(self, hidden: int) -> GramStats:
        """Return the statistics of the first `hidden` features: a slice."""
        if not 1 <= hidden <= len(self.sum_h):
            raise InvalidInput(f"these statistics hold {len(self.sum_h)} features, not {hidden}")
        return GramStats(self.gram[:hidden, :hidden], self.cross[:hidden], self.sum_h[:hidden], self.sum_y, self.rows)


@dataclass(frozen=True)
class RidgeSolution:
    """The output layer, and how it was found.

    Parameters
    ----------
    weight : Tensor float64 [classes, hidden]
    bias : Tensor float64 [classes]
    solver : {"cholesky", "eigh"}
    jitter : float
        What was added to the diagonal beside alpha.
    """

    weight: Tensor
    bias: Tensor
    solver: str
    jitter: float


def empty_stats(hidden: int, classes: int, device: torch.device | str = "cpu") -> GramStats:
    """Return statistics of no rows."""

    def new(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=device)

    return GramStats(new(hidden, hidden), new(hidden, classes), new(hidden), new(classes))


def _centred(stats: GramStats) -> tuple[Tensor, Tensor]:
    """Return both sides of the normal equations with the bias eliminated (the block matrix's Schur complement)."""
    mean = stats.sum_h / stats.rows
    lower = stats.gram.tril()
    left = lower + lower.tril(-1).t()
    left.addr_(mean, stats.sum_h, alpha=-1)
    return left, stats.cross - torch.outer(mean, stats.sum_y)


def default_alpha(stats: GramStats) -> float:
    """Return the default penalty: `ALPHA_RATIO` times the mean diagonal of the centred Gram matrix."""
    diagonal = stats.gram.diagonal() - stats.sum_h**2 / stats.rows
    return max(ALPHA_RATIO * float(diagonal.mean()), 0.0)


def solve_ridge(stats: GramStats, alpha: float) -> RidgeSolution:
    """Minimise ``sum |Y - H W.T - b|^2 + alpha |W|^2``; the bias ``b`` is not penalised.

    The bias is eliminated from the block matrix ``[[H'H + alpha I, sum_h], [sum_h', n]]``. The rest is solved by
    Cholesky, with a rising jitter on the diagonal where the matrix is not positive definite to working precision (dead
    or duplicate features), and if that fails too through the eigenvalues, small ones left out.

    Parameters
    ----------
    stats : GramStats
        At least one row.
    alpha : float
        Penalty >= 0, as scikit-learn's ``Ridge(alpha)``.

    Returns
    -------
    RidgeSolution

    Raises
    ------
    TrainingError
        If the sums are not finite, or no solver copes.

    Examples
    --------
    >>> import torch
    >>> h = torch.tensor([[0.0], [1.0], [2.0]]); y = 3 * h + 1
    >>> found = solve_ridge(empty_stats(1, 1).add(h, y), alpha=0.0)
    >>> round(found.weight.item(), 6), round(found.bias.item(), 6), found.solver
    (3.0, 1.0, 'cholesky')
    """
    if stats.rows < 1:
        raise InvalidInput("there are no rows to solve for")
    left, right = _centred(stats)
    if not (torch.isfinite(left).all() and torch.isfinite(right).all()):
        raise TrainingError(
            "the Gram statistics are not finite; lower weight_scale, or scale the features to a size near 1"
        )
    left.diagonal().add_(alpha)
    size = float(left.diagonal().abs().mean())
    for relative in _JITTERS:
        jitter = relative * size
        attempt = left.clone()
        attempt.diagonal().add_(jitter)
        factor, failed = torch.linalg.cholesky_ex(attempt)
        if int(failed) == 0:
            solved = torch.cholesky_solve(right, factor)
            if _fits(attempt, solved, right):
                return _with_bias(stats, solved, "cholesky", jitter)
    values, vectors = torch.linalg.eigh(left)
    floor = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    inverse = torch.where(values > floor, 1 / values, torch.zeros_like(values))
    solved = vectors @ (inverse[:, None] * (vectors.t() @ right))
    if not torch.isfinite(solved).all():
        raise TrainingError(f"neither Cholesky nor eigenvalues solved the ridge equations; raise alpha (now {alpha:g})")
    return _with_bias(stats, solved, "eigh", 0.0)


def _fits(left: Tensor, solved: Tensor, right: Tensor) -> bool:
    """Whether `solved` is finite and solves the equations: Cholesky can succeed on a matrix it cannot invert."""
    if not torch.isfinite(solved).all():
        return False
    residual = torch.linalg.norm(left @ solved - right)
    return bool(residual <= _RESIDUAL * torch.linalg.norm(right))


def _with_bias(stats: GramStats, solved: Tensor, solver: str, jitter: float) -> RidgeSolution:
    bias = (stats.sum_y - stats.sum_h @ solved) / stats.rows
    return RidgeSolution(solved.t().contiguous(), bias, solver, jitter)
