"""`gigamlp doctor`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given

__all__ = ["doctor"]


def doctor(
    *,
    roofs: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Show versions, devices, and what each engine says about this machine.

    Parameters
    ----------
    roofs
        Also measure the limits of this machine's memory and arithmetic (some seconds).
    """
    from gigamlp.doctor import diagnose, render

    with context.progress("looking at this machine"):
        found = diagnose(roofs=roofs)
    context.emit(found)
    if not context.as_json:
        context.show(render(found))
