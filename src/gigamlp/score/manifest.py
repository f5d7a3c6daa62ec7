"""The manifest: what a run was asked, and how far its output is committed. One JSON file, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.score.blocks import START, Position
from gigamlp.score.places import Place, is_uri, place, replace_text

__all__ = ["SCHEMA", "STATES", "Manifest", "beside", "check_same", "described", "read_manifest"]

SCHEMA = "gigamlp-score/1"
STATES = ("running", "finishing", "complete")


@dataclass(frozen=True)
class Manifest:
    """How far a run has come.

    Attributes
    ----------
    settings : dict
        Everything that decides a byte of the output: model, engine, outputs, block size.
    inputs : list of dict
        ``path``, ``bytes`` and ``mtime_ns`` of each; the last two are null for stdin.
    on_error : str
    position : Position
        All rows before it are in the output or rejected.
    rows, bytes : int
        Committed answers, and the bytes of the working file that hold them.
    rejected, rejected_bytes : int
        The same of the rejects: known rows, and bytes of their file.
    state : {"running", "finishing", "complete"}
        ``finishing``: all rows are committed, the output gets its final form.
    """

    settings: Mapping[str, Any]
    inputs: list[dict[str, Any]]
    on_error: str = "fail"
    position: Position = START
    rows: int = 0
    bytes: int = 0
    rejected: int = 0
    rejected_bytes: int = 0
    state: str = "running"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Place) -> None:
        """Write the manifest; a reader sees the old one or this one."""
        replace_text(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    def to(self, **changes: Any) -> Manifest:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


def beside(out: Place, what: str) -> Place:
    """Return the path of a companion of the output file.

    Examples
    --------
    >>> beside(Path("a/answers.npy"), "manifest.json").as_posix()
    'a/answers.npy.manifest.json'
    """
    return out.with_name(f"{out.name}.{what}")


def read_manifest(path: Place) -> Manifest | None:
    """Return the manifest at `path`; None if there is none.

    Raises
    ------
    FileFormatError
        If the file is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FileFormatError(f"{path}: not a manifest ({error}); delete it to start again") from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise FileFormatError(f"{path}: not a manifest of {SCHEMA}; delete it to start again")
    try:
        made = Manifest(**{**data, "position": Position(**data["position"])})
    except (KeyError, TypeError) as error:
        raise FileFormatError(f"{path}: not a manifest of {SCHEMA} ({error}); delete it to start again") from error
    numbers = (made.rows, made.bytes, made.rejected, made.rejected_bytes, *asdict(made.position).values())
    if made.state not in STATES or not all(type(n) is int and n >= 0 for n in numbers):
        raise FileFormatError(f"{path}: a manifest with impossible numbers or state; delete it to start again")
    return made


def check_same(old: Manifest, new: Manifest, path: Place) -> None:
    """Refuse to go on from `old` if the run asked for now would not write the same bytes.

    Raises
    ------
    InvalidInput
        Naming what differs.
    """
    hint = f"run without --resume to start again (the manifest is {path})"
    for key in sorted({*old.settings, *new.settings}):
        was, now = old.settings.get(key), new.settings.get(key)
        if was != now:
            raise InvalidInput(f"cannot resume: {key} was {was!r} and is {now!r} now; {hint}")
    if old.on_error != new.on_error and old.rejected:
        raise InvalidInput(f"cannot resume: rows were rejected with --on-error {old.on_error}; {hint}")
    if [each["path"] for each in old.inputs] != [each["path"] for each in new.inputs]:
        raise InvalidInput(f"cannot resume: the list of inputs is not the same any more; {hint}")
    started = old.position.file + (old.position.row > 0 or old.state != "running")
    for was, now in list(zip(old.inputs, new.inputs, strict=True))[:started]:
        if was != now:
            raise InvalidInput(f"cannot resume: {was['path']} has changed since its rows were answered; {hint}")


def described(path: str) -> dict[str, Any]:
    """Return what the manifest notes of an input."""
    if path == "-":
        return {"path": path, "bytes": None, "mtime_ns": None}
    if is_uri(path):
        info = place(path).info()
        return {"path": path, "bytes": info.size, "mtime_ns": info.mtime_ns}
    found = Path(path).stat()
    return {"path": path, "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
