"""The Plan: what the tuner measured, what it chose and why, as a JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from gigamlp._atomic import write_text
from gigamlp.errors import FileFormatError, InvalidInput, PlanMismatch
from gigamlp.spec import Spec, Variant

__all__ = ["SCHEMA", "Candidate", "Plan", "objective"]

SCHEMA = "gigamlp-plan/1"


def objective(spec: Spec) -> str:
    """Return what decides a winner: ``"latency"`` (p50) for one row, ``"throughput"`` (wall time) for more."""
    return "latency" if spec.batch == 1 else "throughput"


@dataclass(frozen=True)
class Candidate:
    """One way to run one Spec, with what was measured of it, or why it was not chosen.

    Attributes
    ----------
    spec, engine, variant
        What ran.
    wall_us, iqr, device_us : float or None
        Microseconds per launch: median and interquartile range of the repeats, and the device's own time.
    repeats : int
        Timed repeats behind `wall_us`.
    p50_us, p99_us : float or None
        From issue to answer, synchronised each time.
    build_s : float or None
        Seconds to build the runner, compilation included.
    accuracy, disagreement : float or None
        On the validation rows: share of right answers, share that differ from the MLP's float32 answers.
    logit_error : float or None
        ``|logits - float64| / |float64|`` on the rows of the accuracy gate.
    rejected : str or None
        Why it cannot win; None if it can.
    """

    spec: Spec
    engine: str
    variant: Variant
    wall_us: float | None = None
    iqr: float | None = None
    device_us: float | None = None
    repeats: int = 0
    p50_us: float | None = None
    p99_us: float | None = None
    build_s: float | None = None
    accuracy: float | None = None
    disagreement: float | None = None
    logit_error: float | None = None
    rejected: str | None = None

    @property
    def samples_per_s(self) -> float | None:
        """Rows per second by wall time."""
        return None if not self.wall_us else self.spec.batch / self.wall_us * 1e6

    @property
    def cost_us(self) -> float:
        """What the objective of its Spec minimises; infinite if it was not measured."""
        value = self.p50_us if objective(self.spec) == "latency" and self.p50_us is not None else self.wall_us
        return math.inf if value is None else value

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as a JSON-ready dict."""
        return {**asdict(self), "spec": self.spec.to_json(), "variant": self.variant.to_json()}


@dataclass(frozen=True)
class Plan:
    """The tuner's result for one MLP on one machine.

    Attributes
    ----------
    machine : dict of str to str
        The fingerprint that must match where the Plan is used.
    versions : dict of str to str
    mlp_digest, mlp_name : str
    candidates : tuple of Candidate
        All of them, the rejected ones too.
    settings : dict
        The gates and grid that the tuner used, and the hidden ranges that it found.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    mlp_digest: str
    mlp_name: str
    candidates: tuple[Candidate, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden_ranges(self) -> dict[str, list[float]] | None:
        """Hidden scales and zero points that byte schemes were tried with; see `gigamlp.quantize.in_scheme`."""
        found: dict[str, list[float]] | None = self.settings.get("hidden_ranges")
        return found

    # ---- choice ---------------------------------------------------------------------------------------------------

    @property
    def winners(self) -> tuple[Candidate, ...]:
        """The best accepted candidate of each Spec, in the order of the Specs."""
        found = (self.winner(spec) for spec in dict.fromkeys(c.spec for c in self.candidates))
        return tuple(c for c in found if c is not None)

    def winner(self, spec: Spec) -> Candidate | None:
        """Return the accepted candidate with the lowest cost for `spec`, or None; the earlier one wins a tie."""
        accepted = [c for c in self.candidates if c.spec == spec and c.rejected is None and c.cost_us < math.inf]
        return min(accepted, key=lambda c: c.cost_us, default=None)

    def break_even_launches(self, candidate: Candidate) -> float | None:
        """Return after how many launches `candidate`'s longer build has paid off against the best quicker-built one.

        None if nothing accepted builds quicker, or if it never pays off.
        """
        if candidate.wall_us is None or candidate.build_s is None:
            return None
        rivals = [
            c
            for c in self.candidates
            if c.spec == candidate.spec
            and c.rejected is None
            and c.wall_us is not None
            and c.build_s is not None
            and c.build_s < candidate.build_s
        ]
        best = min(rivals, key=lambda c: c.wall_us or math.inf, default=None)
        if best is None or best.wall_us is None or best.build_s is None or best.wall_us <= candidate.wall_us:
            return None
        return (candidate.build_s - best.build_s) / (best.wall_us - candidate.wall_us) * 1e6

    def crossing(self, input_dtype: str = "uint8", output: str = "class") -> int | None:
        """Return from how many rows in host memory on the GPU answers sooner than the CPU, by the measured runs.

        Any number of rows is taken to be answered by runs of one measured batch, the last one padded. None if the CPU
        answers the largest measured batch sooner still, or one of the two was not measured.
        """
        gpu, cpu = (self._from_host(input_dtype, output, cpu=kind) for kind in (False, True))
        if not gpu or not cpu:
            return None
        rows = np.arange(1, max(c.spec.batch for c in (*gpu, *cpu)) + 1)
        costs = [np.min([-(-rows // c.spec.batch) * c.cost_us for c in side], axis=0) for side in (gpu, cpu)]
        slower = np.flatnonzero(costs[0] > costs[1])
        if not slower.size:
            return 1
        last = int(slower[-1]) + 1
        return None if last == len(rows) else last + 1

    # ---- validity -------------------------------------------------------------------------------------------------

    def mismatch(self, mlp_digest: str, machine: Mapping[str, str]) -> str | None:
        """Return why the Plan does not hold for this MLP and machine, or None if it does."""
        if mlp_digest != self.mlp_digest:
            return f"the plan was made for another model ({self.mlp_name!r}, digest {self.mlp_digest[:12]}…)"
        for key in sorted(self.machine.keys() | machine.keys()):
            here, then = machine.get(key), self.machine.get(key)
            if here != then:
                return f"{key} is {here!r} here, but was {then!r} when the plan was made"
        return None

    def check(self, mlp_digest: str, machine: Mapping[str, str]) -> None:
        """Raise `PlanMismatch` if the Plan does not hold for this MLP and machine."""
        reason = self.mismatch(mlp_digest, machine)
        if reason is not None:
            raise PlanMismatch(f"{reason}; tune again with gigamlp.optimize or `gigamlp optimize`")

    # ---- words ----------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return a table of all candidates per Spec: the winner first, then by cost, the rejected last."""
        lines = [f"Plan for {self.mlp_name!r} on {self.machine.get('device', 'this machine')}"]
        found: dict[str, Any] | None = self.settings.get("cascade")
        if found is not None:
            went_on = ", ".join(f"{share:.2%}" for share in found["unsure"])
            rows = "the validation rows" if self.settings.get("validation_rows") else "drawn rows"
            lines.append(
                f"a cascade of {', '.join(found['stages'])}; {went_on} of {rows} go on: times are those of such"
            )
        for spec in dict.fromkeys(c.spec for c in self.candidates):
            winner = self.winner(spec)
            lines += ["", f"{spec.label}, by {objective(spec)}"]
            group = [c for c in self.candidates if c.spec == spec]
            for c in sorted(group, key=lambda c: (c is not winner, c.rejected is not None, c.cost_us)):
                lines.append(self._explain_one(c, c is winner))
        crossings = self._explain_crossings()
        return "\n".join([*lines, "", *crossings] if crossings else lines)

    def _explain_crossings(self) -> list[str]:
        lines = []
        for dtype, output in dict.fromkeys((c.spec.input_dtype, c.spec.output) for c in self._from_host()):
            gpu, cpu = self._from_host(dtype, output, cpu=False), self._from_host(dtype, output, cpu=True)
            if not gpu or not cpu:
                continue
            rows = self.crossing(dtype, output)
            sizes = ", ".join(f"{n:,}" for n in sorted({c.spec.batch for c in (*gpu, *cpu)}))
            place = gpu[0].spec.device
            if rows is None:
                said = f"the CPU answers sooner than {place}, whatever their number"
            elif rows == 1:
                said = f"{place} answers sooner than the CPU, whatever their number"
            else:
                said = f"from {rows:,} rows on {place} answers sooner, below that the CPU"
            lines.append(f"rows in host memory, {dtype} -> {output}: {said} (by runs of {sizes} rows)")
        return lines

    def _from_host(self, input_dtype: str = "", output: str = "", cpu: bool | None = None) -> list[Candidate]:
        """Return the winners for rows in host memory, of one dtype, output and kind of device if these are given."""
        return [
            c
            for c in self.winners
            if c.spec.input_on == "host"
            and input_dtype in ("", c.spec.input_dtype)
            and output in ("", c.spec.output)
            and cpu in (None, not c.spec.is_cuda)
        ]

    def _explain_one(self, c: Candidate, won: bool) -> str:
        parts = [f"{'*' if won else ' '} {c.engine:<14} {c.variant.label:<58}"]
        if c.samples_per_s is not None:
            parts.append(f"{c.samples_per_s / 1e6:10.3f} M/s {c.wall_us:10.2f} us")
        if c.p50_us is not None:
            parts.append(f"p50 {c.p50_us:.1f} us")
        if 0 < c.repeats < 5:
            parts.append(f"only {c.repeats} repeats")
        if c.accuracy is not None:
            parts.append(f"accuracy {c.accuracy:.4f}")
        launches = self.break_even_launches(c)
        if launches is not None and c.build_s is not None and c.build_s > 1:
            parts.append(f"built in {c.build_s:.1f} s, pays off after {launches:,.0f} launches")
        if c.rejected is not None:
            parts.append(f"rejected: {c.rejected}")
        return "  ".join(parts).rstrip()

    # ---- files ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the Plan as JSON-ready dicts and lists."""
        index = {id(c): i for i, c in enumerate(self.candidates)}
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "versions": self.versions,
            "mlp": {"name": self.mlp_name, "digest": self.mlp_digest},
            "settings": self.settings,
            "winners": [
                {"spec": c.spec.to_json(), "objective": objective(c.spec), "candidate": index[id(c)]}
                for c in self.winners
            ],
            "candidates": [
                {**c.to_json(), "break_even_launches": self.break_even_launches(c)} for c in self.candidates
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Plan to `path` as JSON, atomically."""
        write_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a Plan from a JSON file.

        Raises
        ------
        FileFormatError
            If the file is not a Plan of a schema that this program knows.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise FileFormatError(f"{os.fspath(path)}: not JSON: {error}") from error
        return cls.from_json(data, os.fspath(path))

    @classmethod
    def from_json(cls, data: Any, where: str = "plan") -> Plan:
        """Make a Plan from what `to_json` gave."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise FileFormatError(f"{where}: schema is {found!r}, expected {SCHEMA!r}")
        try:
            _refuse_unknown(data, _FIELDS)
            return cls(
                machine=_strings(data["machine"]),
                versions=_strings(data["versions"]),
                mlp_digest=str(data["mlp"]["digest"]),
                mlp_name=str(data["mlp"]["name"]),
                candidates=tuple(_candidate(c) for c in data["candidates"]),
                settings=dict(data["settings"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, InvalidInput) as error:
            raise FileFormatError(f"{where}: the plan is incomplete or malformed: {error!r}") from error


def _strings(data: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in data.items()):
        raise TypeError("expected an object of strings")
    return dict(data)


_FIELDS = ("schema", "machine", "versions", "mlp", "settings", "winners", "candidates")
_NUMBERS = ("wall_us", "iqr", "device_us", "p50_us", "p99_us", "build_s", "accuracy", "disagreement", "logit_error")


def _candidate(data: Mapping[str, Any]) -> Candidate:
    known = {f.name for f in fields(Candidate)} | {"break_even_launches"}
    _refuse_unknown(data, known)
    for key in _NUMBERS:
        value = data[key]
        most = 1 if key in ("accuracy", "disagreement") else math.inf
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value == math.inf:
            raise TypeError(f"{key} must be a finite number in 0..{most} or null, got {value!r}")
    if not isinstance(data["engine"], str) or not isinstance(data["rejected"], str | None):
        raise TypeError("engine must be a string, rejected a string or null")
    if type(data["repeats"]) is not int or data["repeats"] < 0:
        raise TypeError(f"repeats must be a whole number >= 0, got {data['repeats']!r}")
    options = data["variant"]
    if not all(isinstance(v, str | int | bool) for v in options.values()):
        raise TypeError("variant options must be strings, whole numbers or booleans")
    values = {k: v for k, v in data.items() if k not in ("spec", "variant", "break_even_launches")}
    return Candidate(spec=Spec(**data["spec"]), variant=Variant.from_json(options), **values)


def _refuse_unknown(data: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise TypeError(f"unknown fields: {', '.join(unknown)}")
