"""The native extension: whether it is there, and the instruction sets that it was compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gigamlp.errors import InvalidInput, Unsupported

__all__ = ["InstructionSet", "best_set", "instruction_set", "instruction_sets", "load", "native_problem"]


@dataclass(frozen=True)
class InstructionSet:
    """One way to compute for which there is native code.

    Attributes
    ----------
    name : str
    missing : str or None
        What this machine lacks; None if it can run.
    lanes : int
        int32 lanes of a vector.
    dense_span : int
        4-byte groups of a row to a vector in the dense form.
    step : int
        Inputs that weights are padded to a multiple of, in the dense form: 64 for the tiles of AMX.
    skips : bool
        Whether there is a form that skips zeros.
    bits : int
        8, or 7 where codes must lie within -64..64.
    """

    name: str
    missing: str | None
    lanes: int
    dense_span: int
    step: int
    skips: bool
    bits: int


def load() -> Any:
    """Return the extension module.

    Raises
    ------
    Unsupported
        If it was not built when gigamlp was installed.
    """
    try:
        return import_module("gigamlp.kernels.cpu._native")
    except ImportError as error:
        raise Unsupported(
            "the native kernels are not there: gigamlp was installed without a C++ compiler, or for another Python; "
            f"install g++ or clang and then gigamlp again ({error})"
        ) from error


def native_problem() -> str | None:
    """Return why there are no native kernels here, or None."""
    try:
        load()
    except Unsupported as error:
        return error.reason
    return None


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return all sets that were compiled, the fastest first, whether this machine has them or not."""
    return tuple(
        InstructionSet(name, missing, lanes, span, step, bool(skips), bits)
        for name, missing, lanes, span, step, skips, bits in load().instruction_sets()
    )


def instruction_set(name: str) -> InstructionSet:
    """Return the set called `name`.

    Raises
    ------
    InvalidInput
        If there is none of that name.
    Unsupported
        If this machine lacks it.
    """
    known = instruction_sets()
    for each in known:
        if each.name == name:
            if each.missing is not None:
                raise Unsupported(f"instruction set {name!r}: {each.missing}")
            return each
    raise InvalidInput(f"unknown instruction set {name!r}; known: {', '.join(each.name for each in known)}")


def best_set(bits: int = 8) -> InstructionSet:
    """Return the fastest set that this machine has and that takes codes of `bits` bits (7 or 8)."""
    return next(each for each in instruction_sets() if each.missing is None and each.bits >= bits)
