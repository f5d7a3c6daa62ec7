"""What every command gets besides its own options: where to print, how to show progress, how it was called."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from cyclopts import Parameter
from rich.console import Console, RenderableType

__all__ = ["DEFAULTS", "Common", "Context", "Given", "Progress", "UsageError"]

Progress = Callable[[int, int, str], None]
_PIPE_WIDTH = 240  # columns where no terminal says how wide it is: tables are then neither wrapped nor cut


class UsageError(Exception):
    """The command line does not make sense: exit code 2."""


def check_out(path: Path | None, *, folder: bool = False) -> None:
    """Refuse an output path that cannot work, before any work is done for it."""
    if path is None:
        return
    if not folder and path.is_dir():
        raise UsageError(f"--out names the file to write, and {path} is a directory")
    for place in (path, *path.parents) if folder else path.parents:
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"--out {path}: {place} is a file, not a directory")
            if not os.access(place, os.W_OK):
                raise UsageError(f"--out {path}: {place} may not be written to")
            return


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options that every command has."""

    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    "Print the result as JSON on stdout, everything else on stderr."
    debug: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    "Show the traceback of a failure."


DEFAULTS = Common()


@dataclass(frozen=True)
class Context:
    """Where a command prints to.

    Attributes
    ----------
    argv : tuple of str
        The command line after ``gigamlp``.
    as_json, debug : bool
    out, err : Console
        For people: `out` is stdout, or stderr with ``--json``; `err` is stderr. Neither reads markup in text.
    """

    argv: tuple[str, ...]
    as_json: bool
    debug: bool
    out: Console
    err: Console

    @classmethod
    def make(cls, argv: Sequence[str], common: Common) -> Context:
        """Open the consoles for one command."""
        err = console(sys.stderr)
        return cls(tuple(argv), common.json, common.debug, err if common.json else console(sys.stdout), err)

    @property
    def command(self) -> str:
        """The command line as a shell would take it, for records."""
        return shlex.join(["gigamlp", *self.argv])

    def show(self, *what: RenderableType) -> None:
        """Print for people."""
        for item in what:
            self.out.print(item, soft_wrap=isinstance(item, str))

    def note(self, text: str, style: str = "") -> None:
        """Say something on stderr."""
        self.err.print(text, style=style, soft_wrap=True)

    def emit(self, data: Any) -> None:
        """Print `data` on stdout if JSON was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")

    @contextmanager
    def progress(self, text: str) -> Iterator[Progress | None]:
        """Yield a callable(done, total, text) that moves a bar on stderr; None where no terminal shows one."""
        if not self.err.is_terminal:
            yield None
            return
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Bars(*columns, console=self.err, transient=True) as bars:
            task = bars.add_task(text, total=None)
            yield lambda done, total, info: bars.update(task, completed=done, total=total, description=info or text)


# how a command declares that `run` hands it its Context; it is not an option of the command line
Given = Annotated[Context, Parameter(parse=False)]


def console(file: IO[str]) -> Console:
    """Return a console for `file` that prints text as it is and is wide if nothing says how wide it should be."""
    made = Console(file=file, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        made.width = _PIPE_WIDTH
    return made
