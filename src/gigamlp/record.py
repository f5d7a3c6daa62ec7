"""One schema for every measured row: `reproduce --json`, `bench --json` and the files in ``records/``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gigamlp._atomic import write_text
from gigamlp.errors import FileFormatError
from gigamlp.spec import OUTPUTS

__all__ = ["SCHEMA", "Record", "Row"]

SCHEMA = "gigamlp-record/1"
RESIDENCES = ("hot", "cold", "host-pinned", "host-pageable", "mmap")


@dataclass(frozen=True)
class Row:
    """One measured (or quoted) line. What does not apply is None. Times are microseconds per launch.

    Attributes
    ----------
    name : str
        ``ridge-512``, ``finetuned-512``, ``reader-40``, or the model's name.
    engine, variant, scheme : str or None
    hidden : list of int
    features_read_bytes : int or None
        Bytes of each row that the run reads, in the input dtype.
    batch : int
        Rows per batch.
    batches_per_launch : int
    threads : int or None
    residence : {"hot", "cold", "host-pinned", "host-pageable", "mmap"} or None
    input_dtype, output : str or None
    samples_per_s : float
    wall_us, device_us : float or None
        Per launch, over many back-to-back launches with one synchronise at the end.
    iqr : float or None
        Interquartile range of `wall_us` over the repeats.
    p50_us, p99_us : float or None
        From issue to answer, synchronised each time.
    h2d_us, d2h_us, enqueue_us : float or None
    accuracy : float or None
        A fraction, from the answers of the timed runner over the full test set.
    roof_share : float or None
        Share of the measured roofline of this machine.
    clock_mhz : float or None
        SM clock (CUDA) or core clock (CPU), read just after the run.
    quoted : bool
        True only for figures that were not measured by the program that wrote the record.
    note : str or None
        Where a quoted figure comes from, or what to know about a row.
    """

    name: str
    engine: str | None = None
    variant: str | None = None
    scheme: str | None = None
    hidden: list[int] = field(default_factory=list)
    features_read_bytes: int | None = None
    batch: int | None = None
    batches_per_launch: int = 1
    threads: int | None = None
    residence: str | None = None
    input_dtype: str | None = None
    output: str | None = None
    samples_per_s: float | None = None
    wall_us: float | None = None
    device_us: float | None = None
    iqr: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    h2d_us: float | None = None
    d2h_us: float | None = None
    enqueue_us: float | None = None
    accuracy: float | None = None
    roof_share: float | None = None
    clock_mhz: float | None = None
    quoted: bool = False
    note: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", [int(width) for width in self.hidden])
        for spec in fields(self):
            value = getattr(self, spec.name)
            if hasattr(value, "item"):  # a NumPy scalar, which JSON does not know
                object.__setattr__(self, spec.name, value := value.item())
            if isinstance(value, float) and not math.isfinite(value):
                raise FileFormatError(f"row {self.name!r}: {spec.name} is {value}; what was not measured is None")
        if self.output is not None and self.output not in OUTPUTS:
            raise FileFormatError(f"row {self.name!r}: output {self.output!r} is not one of {OUTPUTS}")
        if self.residence is not None and self.residence not in RESIDENCES:
            raise FileFormatError(f"row {self.name!r}: residence {self.residence!r} is not one of {RESIDENCES}")
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise FileFormatError(f"row {self.name!r}: accuracy is a fraction in 0..1, got {self.accuracy}")


@dataclass(frozen=True)
class Record:
    """The rows of one command on one machine.

    Attributes
    ----------
    device : dict
        ``name`` as the driver or CPU reports it, and whatever else `measure.telemetry` found.
    versions : dict
    command : str
    rows : list of Row
    extra : dict
        What one command adds (roofs, training, ridge statistics); readers may ignore it.
    """

    device: dict[str, Any]
    versions: dict[str, str]
    command: str
    rows: list[Row]
    extra: dict[str, Any] = field(default_factory=dict)
    schema: str = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready dicts and lists."""
        return {
            "schema": self.schema,
            "device": self.device,
            "versions": self.versions,
            "command": self.command,
            "rows": [asdict(row) for row in self.rows],
            **({"extra": self.extra} if self.extra else {}),
        }

    def dumps(self) -> str:
        """Return the record as JSON text. NaN and infinities are refused, as JSON has none."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to `path` atomically."""
        write_text(path, self.dumps())

    @classmethod
    def from_json(cls, data: Any, where: str = "record") -> Record:
        """Make a Record from what `to_json` gave.

        Raises
        ------
        FileFormatError
            If the schema is another one or a field is missing, unknown or of the wrong type.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise FileFormatError(f"{where}: schema is {found!r}, expected {SCHEMA!r}")
        data = {"extra": {}, **data}
        _expect_types(data, {"device": dict, "versions": dict, "command": str, "rows": list, "extra": dict}, where)
        _check_names(data, (f.name for f in fields(cls)), where)
        if not isinstance(data["device"].get("name"), str):
            raise FileFormatError(f"{where}: device.name is missing")
        rows = [_row(row, f"{where}: row {index}") for index, row in enumerate(data["rows"])]
        return cls(data["device"], data["versions"], data["command"], rows, data["extra"])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read a record from a JSON file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise FileFormatError(f"{os.fspath(path)}: not JSON: {error}") from error
        return cls.from_json(data, os.fspath(path))


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _expect_types(data: dict[str, Any], types: dict[str, type], where: str) -> None:
    for key, kind in types.items():
        if not isinstance(data.get(key), kind):
            raise FileFormatError(f"{where}: {key!r} must be a {kind.__name__}, got {type(data.get(key)).__name__}")


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


def _row(data: Any, where: str) -> Row:
    if not isinstance(data, dict):
        raise FileFormatError(f"{where}: must be an object")
    _check_names(data, (f.name for f in fields(Row)), where)
    for spec in fields(Row):
        value, text = data[spec.name], str(spec.type)
        kinds = tuple(kind for word, found in _KINDS.items() if word in text.split(" | ") for kind in found)
        if value is None and "None" in text:
            continue
        if text == "list[int]":
            if not isinstance(value, list) or not all(type(v) is int for v in value):
                raise FileFormatError(f"{where}: {spec.name!r} must be a list of whole numbers")
        elif not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise FileFormatError(f"{where}: {spec.name!r} must be {text}, got {value!r}")
    try:
        return Row(**data)
    except FileFormatError as error:
        raise FileFormatError(f"{where}: {error}") from error


def _check_names(data: dict[str, Any], known: Iterable[str], where: str) -> None:
    names = set(known)
    missing, unknown = sorted(names - set(data)), sorted(set(data) - names)
    if missing:
        raise FileFormatError(f"{where}: fields are missing: {', '.join(missing)}")
    if unknown:
        raise FileFormatError(f"{where}: unknown fields: {', '.join(unknown)}")
