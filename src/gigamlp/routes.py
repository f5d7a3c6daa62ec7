"""Where rows go: which dtype they run in, and which batches of which engine answer them."""

from __future__ import annotations

from collections.abc import Mapping

from gigamlp.choice import Choice
from gigamlp.errors import InvalidInput
from gigamlp.inputs import Rows, target_dtype
from gigamlp.ladder import Ladder

__all__ = ["Routes"]


class Routes:
    """A choice of engines, with the dtype that the caller asked for.

    Parameters
    ----------
    choice : Choice
    asked : str, optional
        The dtype that all rows run in.

    Raises
    ------
    InvalidInput
        If the choice does not run that dtype.

    Examples
    --------
    >>> import gigamlp as gm
    >>> with gm.Session(gm.MLP([gm.Layer([[1.0]])]), device="cpu", engine="numpy") as session:
    ...     session.routes.engines
    ('numpy',)
    """

    def __init__(self, choice: Choice, asked: str | None = None) -> None:
        if asked is not None and asked not in choice.dtypes:
            raise InvalidInput(f"input_dtype must be one of {', '.join(choice.dtypes)}, got {asked!r}")
        self.choice, self.asked = choice, asked
        self._ladders: dict[tuple[str, str], Ladder] = {}
        self._host_ladders: dict[tuple[str, str], Ladder | None] = {}

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that may run."""
        return self.choice.engines

    @property
    def ranges(self) -> Mapping[str, list[float]] | None:
        """The Plan's hidden ranges, for variants in a byte scheme."""
        return self.choice.ranges

    def dtype(self, rows: Rows) -> str:
        """Return the dtype that `rows` run in."""
        return self.asked or target_dtype(rows, self.choice.dtypes)

    def ladder(self, dtype: str, output: str) -> Ladder:
        """Return the batches for rows on the device."""
        if (dtype, output) not in self._ladders:
            self._ladders[dtype, output] = self.choice.ladder(dtype, output)
        return self._ladders[dtype, output]

    def host_ladder(self, dtype: str, output: str) -> Ladder | None:
        """Return the batches for host rows of a session on a GPU, where the plan measured them from there."""
        if self.choice.device == "cpu":
            return None
        if (dtype, output) not in self._host_ladders:
            self._host_ladders[dtype, output] = self.choice.host_ladder(dtype, output)
        return self._host_ladders[dtype, output]
