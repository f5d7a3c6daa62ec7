"""`gigamlp completion`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given

__all__ = ["completion"]


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], Parameter(show_choices=True)],
    /,
    *,
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Print a script that completes gigamlp's commands and options in a shell. Nothing is installed.

    Parameters
    ----------
    shell
        Which shell the script is for.
    """
    from gigamlp.cli.app import make_app

    script = make_app().generate_completion(prog_name="gigamlp", shell=shell)
    context.emit({"schema": "gigamlp-completion/1", "shell": shell, "script": script})
    if not context.as_json:
        sys.stdout.write(script)
