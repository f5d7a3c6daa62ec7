"""Cut any number of rows into the batches that there are: pure arithmetic, no arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gigamlp.spec import Spec, Variant

__all__ = ["Ladder", "Piece", "Rung", "default_batches"]

_REMEMBERED = 1024  # cuts of that many row counts are kept


@dataclass(frozen=True)
class Rung:
    """One batch size and what runs it.

    Parameters
    ----------
    spec : Spec
        ``spec.batch`` rows a run.
    engine : str
    variant : Variant or None
        None leaves it to the engine.
    cost : float
        What one run costs, in any unit that all rungs of a ladder share.
    planned_us : float or None
        What the Plan measured for one run; None without a Plan.
    """

    spec: Spec
    engine: str
    variant: Variant | None
    cost: float
    planned_us: float | None = None

    @property
    def batch(self) -> int:
        """Rows a run."""
        return self.spec.batch


@dataclass(frozen=True)
class Piece:
    """`runs` runs of one rung that take `rows` rows; the last run is padded if ``rows < runs * rung.batch``."""

    rung: Rung
    runs: int
    rows: int


class Ladder:
    """The rungs for one input dtype and output kind, and the cheapest way to cut rows into them.

    Parameters
    ----------
    rungs : sequence of Rung
        At least one; of two with the same batch the cheaper one stays.

    Examples
    --------
    >>> ladder = Ladder([Rung(Spec(batch=b), "numpy", None, cost=10 + b) for b in (1, 64)])
    >>> [(p.rung.batch, p.runs, p.rows) for p in ladder.cut(130)]
    [(64, 2, 128), (1, 2, 2)]
    >>> [(p.rung.batch, p.runs, p.rows) for p in ladder.cut(60)]
    [(64, 1, 60)]
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        best: dict[int, Rung] = {}
        for rung in rungs:
            if rung.batch not in best or rung.cost < best[rung.batch].cost:
                best[rung.batch] = rung
        if not best:
            raise ValueError("a ladder needs at least one rung")
        self.rungs: tuple[Rung, ...] = tuple(best[b] for b in sorted(best, reverse=True))
        self._cuts: dict[int, tuple[Piece, ...]] = {}

    def cut(self, rows: int) -> tuple[Piece, ...]:
        """Return the pieces that cover `rows` rows, larger batches first, at the lowest total cost.

        Full runs come before the padded one, which is the last. ``rows=0`` gives no pieces.
        """
        found = self._cuts.get(rows)
        if found is None:
            found = self._search(rows, {})[1]
            if len(self._cuts) >= _REMEMBERED:
                self._cuts.clear()
            self._cuts[rows] = found
        return found

    def explain(self, rows: int | None = None) -> list[str]:
        """Say in a line each what runs: for `rows` rows their pieces, else all rungs."""
        if rows is None:
            return [f"  batch {_words(rung)}" for rung in self.rungs]
        lines = []
        for piece in self.cut(rows):
            unused = piece.runs * piece.rung.batch - piece.rows
            tail = f", the last with {unused:,} rows of padding" if unused else ""
            lines.append(f"  {piece.runs:,} x batch {_words(piece.rung)}{tail}")
        return lines

    def _search(self, rows: int, known: dict[int, tuple[float, tuple[Piece, ...]]]) -> tuple[float, tuple[Piece, ...]]:
        """Take as many full runs of one rung as fit and go on with the rest, or pad; try every rung."""
        if rows == 0:
            return 0.0, ()
        if rows in known:
            return known[rows]
        best: tuple[float, tuple[Piece, ...]] | None = None
        for rung in self.rungs:
            full, rest = divmod(rows, rung.batch)
            pieces: tuple[Piece, ...] = (Piece(rung, 1, rows),)
            if full == 0:
                cost = rung.cost
            else:
                more, tail = self._search(rest, known)
                cost, pieces = full * rung.cost + more, (Piece(rung, full, rows - rest), *tail)
            if best is None or cost < best[0]:
                best = (cost, pieces)
        assert best is not None  # there is at least one rung
        known[rows] = best
        return best


def _words(rung: Rung) -> str:
    variant = "" if rung.variant is None else f" {rung.variant.label}"
    cost = "" if rung.planned_us is None else f", {rung.planned_us:,.1f} us by the plan"
    place = f" on {rung.spec.device}" if rung.spec.input_on == "host" else ""
    return f"{rung.batch:<5} {rung.engine}{place}{variant}{cost}"


def default_batches(*, bytes_per_row: int, memory: int, largest: int, step: int = 4) -> tuple[int, ...]:
    """Return batch sizes for a Session without a Plan: 1 and powers of `step`, as far as `memory` bytes allow.

    Examples
    --------
    >>> default_batches(bytes_per_row=6000, memory=8 << 20, largest=65536)
    (1, 4, 16, 64, 256, 1024)
    """
    sizes = [1]
    while sizes[-1] * step <= largest and sizes[-1] * step * bytes_per_row <= memory:
        sizes.append(sizes[-1] * step)
    return tuple(sizes)
