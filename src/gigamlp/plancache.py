"""Plans kept on disk, so that a Session without a Plan runs what was measured for its model on this machine.

A file is named by all that decides whether its Plan holds: the model's digest, the machine and versions, and what was
asked of the tuner. If one of these changes, the name changes, and the old file is not found. Files appear whole or not
at all; of two processes that write the same one, the last wins. A cache never causes an error.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gigamlp._atomic import write_text
from gigamlp.errors import FileFormatError
from gigamlp.measure.telemetry import machine_fingerprint, versions
from gigamlp.plan import Plan

__all__ = ["default_folder", "entry", "find", "keep"]

_HEX = 32  # digits of a sha256 that a name has


def default_folder() -> Path:
    """Return the folder for Plans, in the user's cache folder. It need not exist."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("gigamlp", appauthor=False)) / "plans"


def entry(plan: Plan, folder: Path | None = None) -> Path:
    """Return the file for `plan`: ``MODEL/MACHINE-QUESTION.json``, each a sha256 of what it stands for."""
    question = _digest(plan.settings.get("question", {}))
    return (folder or default_folder()) / plan.mlp_digest / f"{_place(plan.machine, plan.versions)}-{question}.json"


def keep(plan: Plan, folder: Path | None = None) -> Path | None:
    """Write `plan` to its file, also over a corrupt one, and return the file.

    Returns
    -------
    Path or None
        None, with a warning, if it cannot be written (a read-only home, a full disk).

    Examples
    --------
    >>> import tempfile
    >>> plan = Plan({"device": "a CPU"}, {"gigamlp": "0"}, "0" * 64, "toy", ())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keep(plan, Path(folder)) == entry(plan, Path(folder))
    True
    """
    path = entry(plan, folder)
    text = json.dumps(plan.to_json(), indent=1, allow_nan=False)
    try:
        write_text(
            path, json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()})[:-1] + f', "plan": {text}}}\n'
        )
    except OSError as error:
        warnings.warn(f"the plan is not kept in {path.parent}: {error}", RuntimeWarning, stacklevel=3)
        return None
    return path


def find(mlp_digest: str, device: str, folder: Path | None = None) -> list[Plan]:
    """Return the kept Plans that hold for a model on a resolved device of this machine, the newest first.

    A file that is damaged is left out with a warning; the next `keep` of the same Plan writes it anew.
    """
    where = (folder or default_folder()) / mlp_digest
    try:
        if not where.is_dir():  # nearly always, and quickly: no device is asked
            return []
        machine, known = machine_fingerprint(device), versions()
        files = sorted(where.glob(f"{_place(machine, known)}-*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name))
    except OSError:  # not readable, or removed meanwhile
        return []
    plans = []
    for path in reversed(files):
        try:
            plan = _read(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:  # FileFormatError is a ValueError
            warnings.warn(
                f"the kept plan {path} is not used: {error}; gigamlp.optimize writes it anew",
                RuntimeWarning,
                stacklevel=5,
            )
            continue
        if plan.mismatch(mlp_digest, machine) is None and plan.versions == known:
            plans.append(plan)
    return plans


def _read(path: Path) -> Plan:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.keys() != {"sha256", "plan"}:
        raise FileFormatError("it is not a kept plan")
    text = json.dumps(data["plan"], indent=1)
    if hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
        raise FileFormatError("it is damaged: its checksum is another")
    return Plan.from_json(data["plan"], "it")


def _place(machine: Mapping[str, str], known: Mapping[str, str]) -> str:
    return _digest([dict(machine), dict(known)])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[:_HEX]
