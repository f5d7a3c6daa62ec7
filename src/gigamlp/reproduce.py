"""`gigamlp reproduce`: the article's whole story on this machine, from raw MNIST to its table.

Ridge-ELM at every width, every execution variant timed, a speed guard-rail, fine-tuning of the survivors, the best of
them selected on held-out rows, the final benchmark; then the rows that the article leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gigamlp.errors import InvalidInput
from gigamlp.guard import guard_rail
from gigamlp.jobs import Job, measure_jobs
from gigamlp.measure.roofline import Roofs
from gigamlp.mlp import MLP
from gigamlp.plan import Candidate, Plan
from gigamlp.quoted import quoted_rows
from gigamlp.record import Record, Row
from gigamlp.reproduce_settings import Settings, settings_for
from gigamlp.reproduce_training import Data, Progress, Training
from gigamlp.spec import Spec
from gigamlp.trial import cold_count, make_gate
from gigamlp.tune import Effort, try_candidates

__all__ = ["Reproduction", "reproduce"]


@dataclass(frozen=True)
class Reproduction:
    """What `reproduce` returns: the record, the Plan and MLP of each network, and a summary for people."""

    record: Record
    plans: dict[str, Plan]
    models: dict[str, MLP]
    summary: dict[str, Any] = field(default_factory=dict)


def reproduce(
    *,
    device: str = "auto",
    quick: bool = False,
    seed: int = 0,
    grid: str = "default",
    budget_s: float | None = None,
    command: str = "gigamlp.reproduce.reproduce",
    progress: Progress | None = None,
    settings: Settings | None = None,
    data: Data | None = None,
) -> Reproduction:
    """Run the article's story on this machine.

    Parameters
    ----------
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    quick, grid, budget_s
        See `settings_for`.
    seed : int
        Of the random features, the held-out rows and the training.
    command : str
        What the record says was run.
    progress : callable, optional
        Called with (done, total, text).
    settings : Settings, optional
        Instead of those of `settings_for`.
    data : (x_train, y_train, x_test, y_test), optional
        Instead of MNIST.

    Returns
    -------
    Reproduction
        Its record always has rows named ``ridge-512`` (for the first width), ``finetuned-512`` and ``reader-40``.

    Raises
    ------
    DeviceError, InvalidInput
        If an argument cannot be used.
    """
    from gigamlp.measure.telemetry import resolve_device

    place = resolve_device(device)
    settings = settings or settings_for(place, quick=quick, grid=grid, budget_s=budget_s)
    return _Story(place, settings, seed, progress, data).run(command)


class _Story(Training):
    """The steps of one reproduction, in order; each leaves what the next one needs."""

    def __init__(
        self, device: str, settings: Settings, seed: int, progress: Progress | None, data: Data | None
    ) -> None:
        super().__init__(device, settings, seed, progress, data)
        self.candidates: dict[str, list[Candidate]] = {}
        self.screened: dict[str, list[Candidate]] = {}
        self.missing: list[Row] = []
        self.cache_bytes = 0

    def run(self, command: str) -> Reproduction:
        from gigamlp.engines.probes import measure_roofs
        from gigamlp.measure.telemetry import device_info, versions

        self.fit_ridge()
        survivors = self.screen()
        selected = self.finetune(survivors)
        self.train_reader()
        self.say(60, "measuring this machine's roofs")
        roofs = measure_roofs(self.device)
        self.tune(selected)
        rows, samples = self.benchmark(selected, roofs)
        self.say(100, "done")
        extra = {
            "seconds": self.clock.now() - self.began,
            "seed": self.seed,
            "selected": selected,
            "roofs": roofs.to_json(),
            "latency_samples": samples,
            **self.notes,
        }
        record = Record(device_info(self.device), versions(), command, rows + self.missing + quoted_rows(), extra)
        plans = {name: self.plan(name, found) for name, found in self.candidates.items()}
        return Reproduction(record, plans, self.models, self.summary(selected))

    # ---- choosing -------------------------------------------------------------------------------------------------

    def try_network(self, mlp: MLP, spec: Spec, effort: Effort, *, bounded: bool = True) -> list[Candidate]:
        """Try every candidate for one network and Spec, within the budget if `bounded`; keep them for its Plan."""
        floor = self.accuracy(mlp, self.x_val, self.y_val) - self.settings.accuracy_loss_max
        gate = make_gate(mlp, spec.input_dtype, (self.x_val, self.y_val), min_accuracy=max(floor, 0.0))
        deadline = self.deadline if bounded else None
        found = try_candidates(mlp, spec, gate, self.clock, effort=effort, deadline=deadline)
        self.candidates.setdefault(mlp.name, []).extend(found)
        return found

    def spec(self, batch: int, input_dtype: str | None = None, output: str = "logits", **more: Any) -> Spec:
        return Spec(self.device, batch, input_dtype or self.settings.input_dtype, output, **more)

    def screen(self) -> list[int]:
        """Time every width, apply the guard-rail, return the surviving widths.

        The budget does not cut this short: widths that were tried with unlike effort could not be compared.
        """
        s = self.settings
        speeds: dict[str, float | None] = {}
        for index, width in enumerate(s.widths):
            self.say(15 + 10 * index // len(s.widths), f"timing every variant of 784-{width}-10")
            found = self.try_network(self.models[f"ridge-{width}"], self.spec(s.batch), s.screen, bounded=False)
            best = min((c for c in found if c.rejected is None), key=lambda c: c.cost_us, default=None)
            speeds[str(width)] = None if best is None else best.samples_per_s
        verdicts = guard_rail(
            speeds, str(s.widths[0]), speed_ratio_min=s.speed_ratio_min, survivors_max=s.survivors_max
        )
        self.notes["guard_rail"] = {
            "speed_ratio_min": s.speed_ratio_min,
            "networks": [
                {"hidden": int(name), "samples_per_s": speeds[name], "rejected": reason}
                for name, reason in verdicts.items()
            ],
        }
        for name, reason in verdicts.items():
            if reason is not None:
                key = f"ridge-{name}"
                self.candidates[key] = [
                    c if c.rejected else replace(c, rejected=f"guard-rail: the network {reason}")
                    for c in self.candidates[key]
                ]
        return [int(name) for name, reason in verdicts.items() if reason is None]

    def tune(self, selected: str) -> None:
        """Find the winners of the networks that get rows: by throughput at the batch, by latency at one row.

        One row takes a few microseconds on any path that is captured; compiling for it is left to ``--grid full``.
        """
        s = self.settings
        base = str(s.widths[0])
        names = list(dict.fromkeys([*self.finetuned(), "reader-40", f"ridge-{base}"]))
        for index, name in enumerate(names):
            mlp = self.models[name]
            self.say(62 + 18 * index // len(names), f"tuning {name}")
            batch = s.reader_batch if name == "reader-40" else s.batch
            if name in self.candidates:
                self.screened[name] = self.candidates.pop(name)
            self.try_network(mlp, self.spec(batch), s.final)
            self.try_network(mlp, self.spec(1), replace(s.final, compile=s.final.full))
            if s.large_batch is not None and not name.startswith("ridge"):
                self.try_network(mlp, self.spec(s.large_batch), replace(s.final, compile=False, repeats=5))
        for name in dict.fromkeys([selected, "reader-40"]):
            batch = s.reader_batch if name == "reader-40" else s.batch
            self.say(80, f"tuning {name} from raw bytes to classes")
            self.try_network(self.models[name], self.spec(batch, "uint8", "class"), replace(s.final, compile_top=2))

    def plan(self, name: str, found: Sequence[Candidate]) -> Plan:
        from gigamlp.measure.telemetry import machine_fingerprint, versions

        return Plan(
            machine=machine_fingerprint(self.device),
            versions=versions(),
            mlp_digest=self.models[name].digest(),
            mlp_name=name,
            candidates=tuple(found),
            settings={
                "validation_rows": len(self.x_val),
                "accuracy_loss_max": self.settings.accuracy_loss_max,
                "speed_ratio_min": self.settings.speed_ratio_min,
                "budget_s": self.settings.budget_s,
                "full": self.settings.final.full,
                "guard_rail_screening": [
                    {"engine": c.engine, "variant": c.variant.label, "wall_us": c.wall_us, "rejected": c.rejected}
                    for c in self.screened.get(name, ())
                ],
            },
        )

    # ---- the final benchmark --------------------------------------------------------------------------------------

    def benchmark(self, selected: str, roofs: Roofs) -> tuple[list[Row], dict[str, list[float]]]:
        """Measure the winners side by side: first the article's rows, then the ones that it leaves out."""
        rows: list[Row] = []
        samples: dict[str, list[float]] = {}
        self.cache_bytes = roofs.cache_bytes
        groups = [("the article's rows", self.article_jobs()), ("the other rows", self.other_jobs(selected))]
        for index, (text, jobs) in enumerate(groups):
            self.say(85 + 8 * index, f"final benchmark: {text}")
            done = measure_jobs(
                jobs,
                self.x_test,
                np.asarray(self.y_test, np.int64),
                self.clock,
                roofs,
                repeats=self.settings.repeats,
                min_s=self.settings.min_s,
                cache_bytes=roofs.cache_bytes,
            )
            rows += done.rows
            samples.update(done.latency_samples)
        return rows, samples

    def winner(self, name: str, spec: Spec) -> Candidate | None:
        return self.plan(name, self.candidates[name]).winner(spec)

    def jobs(self, name: str, spec: Spec, residences: Sequence[str] = ("hot",)) -> list[Job]:
        best = self.winner(name, spec)
        if best is None:
            reasons = dict.fromkeys(c.rejected for c in self.candidates[name] if c.spec == spec and c.rejected)
            self.miss(name, spec, "; ".join(reasons))
            return []
        out: list[Job] = []
        for where in residences:
            try:
                if where == "cold":
                    cold_count(self.models[name], spec, self.cache_bytes)
                out.append(Job(self.models[name], spec, best.engine, best.variant, where))
            except InvalidInput as error:
                self.miss(name, spec, str(error), where)
        return out

    def miss(self, name: str, spec: Spec, reason: str, residence: str | None = None) -> None:
        """Keep a row for what was not measured, with the reason."""
        row = Row(
            name=name,
            hidden=list(self.models[name].hidden),
            batch=spec.batch,
            residence=residence,
            input_dtype=spec.input_dtype,
            output=spec.output,
            note=f"not measured: {reason}",
        )
        self.missing.append(row)

    def article_jobs(self) -> list[Job]:
        s, base = self.settings, str(self.settings.widths[0])
        out: list[Job] = []
        for name in dict.fromkeys([f"ridge-{base}", *self.finetuned()]):
            out += self.jobs(name, self.spec(s.batch)) + self.jobs(name, self.spec(1))
        return out + self.jobs("reader-40", self.spec(s.reader_batch)) + self.jobs("reader-40", self.spec(1))

    def other_jobs(self, selected: str) -> list[Job]:
        s = self.settings
        host = ("host-pinned", "host-pageable") if self.device.startswith("cuda") else ("host-pageable",)
        out: list[Job] = []
        for name, batch in dict.fromkeys([(selected, s.batch), ("reader-40", s.reader_batch)]):
            out += self.jobs(name, self.spec(batch), ("cold",))
            out += self.jobs(name, self.spec(batch, "uint8", "class"), ("hot", "cold", *host))
        if s.large_batch is not None:
            for name in [*self.finetuned(), "reader-40"]:
                out += self.jobs(name, self.spec(s.large_batch), ("cold",))
        return out

    def summary(self, selected: str) -> dict[str, Any]:
        trained = {t["name"]: t for t in self.notes["finetune"] if "name" in t}
        ridge = {r["hidden"]: r for r in self.notes["ridge"]}
        return {
            "device": self.device,
            "selected": selected,
            "seconds": self.clock.now() - self.began,
            "accuracy": {f"ridge-{w}": ridge[w]["test_accuracy"] for w in self.settings.widths}
            | {name: t["test_accuracy"] for name, t in trained.items()},
            "survivors": [n["hidden"] for n in self.notes["guard_rail"]["networks"] if n["rejected"] is None],
        }
