"""Where a long training stands, in one safetensors file that is replaced whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gigamlp._atomic import write_bytes
from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.train.rows import Array

__all__ = ["Checkpoint", "load_checkpoint"]

_FORMAT = "gigamlp-checkpoint/1"


@dataclass
class Checkpoint:
    """Named arrays and a few facts, tied to one training by its fingerprint.

    Parameters
    ----------
    path : path-like or None
        None: nothing is ever written.
    fingerprint : str
        Of everything that decides the result.
    arrays : dict of str to ndarray
    facts : dict
        What JSON holds.
    """

    path: str | os.PathLike[str] | None
    fingerprint: str
    arrays: dict[str, Array] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def put(self, prefix: str, arrays: Mapping[str, Array], **facts: Any) -> None:
        """Replace the arrays under `prefix`, update the facts, and write the file."""
        if self.path is None:
            return
        self.arrays = {name: array for name, array in self.arrays.items() if not name.startswith(prefix + ".")}
        self.arrays |= {f"{prefix}.{name}": array for name, array in arrays.items()}
        self.facts |= facts
        header = {"format": _FORMAT, "fingerprint": self.fingerprint, "facts": self.facts}
        write_bytes(self.path, save(self.arrays, metadata={"gigamlp": json.dumps(header, allow_nan=False)}))

    def get(self, prefix: str) -> dict[str, Array]:
        """Return the arrays under `prefix`; empty if there are none."""
        cut = len(prefix) + 1
        return {name[cut:]: array for name, array in self.arrays.items() if name.startswith(prefix + ".")}


def load_checkpoint(path: str | os.PathLike[str], fingerprint: str) -> Checkpoint:
    """Return the checkpoint in `path`, or an empty one if there is no such file.

    Raises
    ------
    FileFormatError
        If the file is no checkpoint.
    InvalidInput
        If it is of a training with other rows or settings.
    """
    if not Path(path).exists():
        return Checkpoint(path, fingerprint)
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("gigamlp", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, ValueError) as error:
        raise FileFormatError(f"{os.fspath(path)}: not a checkpoint: {error}") from error
    if header.get("format") != _FORMAT:
        raise FileFormatError(f"{os.fspath(path)}: not a checkpoint of this version; remove it to start anew")
    if header["fingerprint"] != fingerprint:
        raise InvalidInput(
            f"{os.fspath(path)} is of a training with other rows or settings; remove it, or train without resuming"
        )
    return Checkpoint(path, fingerprint, arrays, header["facts"])
