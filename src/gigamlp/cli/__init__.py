"""The command ``gigamlp``: parses, calls the library, prints tables, writes files. It holds no logic of its own.

Nothing heavy is imported until a command runs: ``gigamlp --help`` loads neither NumPy nor torch nor matplotlib.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv[1:]``) and return the exit code.

    Returns
    -------
    int
        0: done. 1: an expected failure, said in one line on stderr. 2: the command line is wrong. 130: interrupted.
        141: what read the output stopped reading.
    """
    try:
        from gigamlp.cli.app import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
