"""Cascades on this CPU: how fast they are at which accuracy, beside single networks, and whether their promise holds.

    python benchmarks/cascade_cpu.py --out records/cpu-cascade.json [--quick]

Stages are the shipped networks in schemes w8 and w8a8. Thresholds, and which cascades are measured, come from the 5,000
MNIST training rows that the networks left out; accuracies are those of the timed answers for the 10,000 test rows.
Every cascade is timed on the test images, on uniformly random bytes and on drawn images with the looks of
Fashion-MNIST, in one set of interleaved rounds with the single networks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import gigamlp as gm
from gigamlp.calibration import scheme_logits, thresholds_for
from gigamlp.cascade import Calibration, merge
from gigamlp.data import hold_out
from gigamlp.data.synthetic import garment_images, random_bytes
from gigamlp.jobs import Job, measure_jobs
from gigamlp.measure.clock import HostClock
from gigamlp.measure.cpuinfo import last_level_bytes, usable_cpus
from gigamlp.measure.telemetry import device_info, versions
from gigamlp.propose import Proposal, propose
from gigamlp.record import Record, Row
from gigamlp.search import try_candidates
from gigamlp.spec import Spec, Variant
from gigamlp.trial import make_gate
from gigamlp.tune import Effort
from gigamlp.unsure import UnsureCount, drift

BATCH = 10_000
TARGETS = ((0.994, 2.5),)  # (least accuracy, times the speed of the fastest single network of that accuracy)
NEAR = 0.001  # of the cascades whose last stage is that network: validation accuracy at most so much below its own
SPLITS, CONFIDENCE, LOSS = 50, 0.9, 0.005


def single_networks(x_fit: np.ndarray) -> list[gm.MLP]:
    """Return the shipped networks in both schemes; hidden ranges of w8a8 come from training rows."""
    out = []
    for name in gm.models.names():
        mlp = gm.load(name)
        plain = mlp.with_(scheme=None, name=f"{name}-w8a8")
        out += [mlp.with_(name=f"{name}-w8"), gm.quantise(plain, "w8a8", calibration=x_fit[:5000])]
    return out


def best_variant(model: Any, spec: Spec, x_val: np.ndarray, effort: Effort) -> Variant:
    """Return the quickest of the engine's variants for rows of the validation set."""
    gate = make_gate(model, spec.input_dtype, (x_val, None), max_disagreement=0.02)
    found = try_candidates(model, spec, gate, HostClock(), effort=effort, engines=["cpu_fused"])
    good = [each for each in found if each.rejected is None]
    if not good:
        raise SystemExit(f"{model.name}: {found[0].rejected}")
    return min(good, key=lambda each: each.cost_us).variant


def timed(models: list[tuple[Any, Variant]], x: np.ndarray, targets: Any, spec: Spec, repeats: int) -> list[Row]:
    jobs = [Job(model, spec, "cpu_fused", variant) for model, variant in models]
    cache = last_level_bytes() or 0
    return measure_jobs(jobs, x, targets, HostClock(), None, repeats=repeats, latency_calls=200, cache_bytes=cache).rows


def splits(models: dict[str, gm.MLP], x: np.ndarray, y: np.ndarray) -> list[dict[str, Any]]:
    """Calibrate on 50 random halves of the held-out rows; count how often the bound is broken over all of them."""
    out = []
    for names in (("mnist-16", "mnist-128"), ("mnist-40", "mnist-512"), ("mnist-16", "mnist-64", "mnist-512")):
        stages = [models[f"{name}-w8"] for name in names]
        logits = [scheme_logits(stage, x) for stage in stages]
        ids = [np.argmax(z, axis=1) for z in logits]
        margins = [stage.margins(z) for stage, z in zip(stages, logits, strict=False)][:-1]
        rng = np.random.default_rng(0)
        broken = broken_later = flagged = 0
        lost_shares, unsure_shares = [], []
        for _ in range(SPLITS):
            order = rng.permutation(len(y))
            some, later = order[: len(y) // 2], order[len(y) // 2 :]
            own = [i[some] for i in ids], [m[some] for m in margins]
            t = thresholds_for(*own, y[some], max_loss=LOSS, confidence=CONFIDENCE)
            merged, deciding = merge(t, ids, margins)
            lost = (merged != ids[-1]) & (ids[-1] == y)
            broken += bool(lost.mean() > LOSS)
            broken_later += bool(lost[later].mean() > LOSS)
            counts = [tuple(int((deciding[part] > i).sum()) for i in range(len(margins))) for part in (some, later)]
            known = Calibration(len(some), counts[0], LOSS, CONFIDENCE, True)
            flagged += drift(known, UnsureCount(len(later), counts[1])) < 0.001
            lost_shares.append(float(lost[later].mean()))
            unsure_shares.append(float((deciding > 0).mean()))
        out.append(
            {
                "stages": list(names),
                "splits": SPLITS,
                "max_loss": LOSS,
                "confidence": CONFIDENCE,
                "broken_over_all_rows": broken,
                "broken_over_the_other_half": broken_later,
                "median_lost_share_of_the_other_half": float(np.median(lost_shares)),
                "median_unsure_share": float(np.median(unsure_shares)),
                "flagged_as_drift": flagged,
            }
        )
    return out


def shifts(cascade: gm.Cascade, x_test: np.ndarray) -> dict[str, Any]:
    """Return the unsure share and the drift test's p-value for the test rows, and for changed ones."""
    rng = np.random.default_rng(0)
    images = x_test.reshape(-1, 28, 28)
    kinds = {
        "test": x_test,
        "test moved by 1 pixel": np.roll(images, 1, axis=2).reshape(-1, 784),
        "test moved by 2 pixels": np.roll(images, 2, axis=2).reshape(-1, 784),
        "test with noise of 25": np.clip(x_test + rng.normal(0, 25, x_test.shape), 0, 255).astype(np.uint8),
        "test at 70 % light": (x_test * 0.7).astype(np.uint8),
        "random bytes": random_bytes(len(x_test), 784),
        "garments": garment_images(len(x_test)),
    }
    out = {}
    with gm.Session(cascade, device="cpu", engine="cpu_fused") as session:
        for kind, rows in kinds.items():
            session.predict(rows)
            assert session.unsure is not None
            assert session.unsure.last is not None
            out[kind] = {"unsure": list(session.unsure.last.shares), "p_value": session.unsure.drift(last=True)}
    return out


def main(arguments: list[str] | None = None) -> Record:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--top", type=int, default=8, help="cascades that are measured")
    parser.add_argument("--quick", action="store_true", help="few networks and repeats, to see that it works")
    given = parser.parse_args(arguments)
    x, y, x_test, y_test = gm.data.load_mnist()
    x_fit, _, x_val, y_val = hold_out(x, y)
    spec = Spec("cpu", BATCH, "uint8", "class", threads=given.threads)
    effort = Effort(repeats=3, min_s=0.01) if given.quick else Effort()
    repeats = 3 if given.quick else 9
    singles = single_networks(x_fit)
    if given.quick:
        singles = [mlp for mlp in singles if mlp.name in ("mnist-16-w8", "mnist-40-w8", "mnist-512-w8")]
    chosen = [(mlp, best_variant(mlp, spec, x_val, effort)) for mlp in singles]
    alone = timed(chosen, x_test, y_test, spec, repeats)
    speeds = {row.name: float(row.samples_per_s or 0) for row in alone}
    quickest = {}  # of the two schemes of a network the quicker one may be a stage
    for mlp in singles:
        base = mlp.name.rsplit("-", 1)[0]
        if base not in quickest or speeds[mlp.name] > speeds[quickest[base].name]:
            quickest[base] = mlp
    proposals = propose(list(quickest.values()), speeds, x_val, y_val, top=given.top)
    models = chosen + [(p.cascade, best_variant(p.cascade, spec, x_val, effort)) for p in proposals]
    rows = timed(models, x_test, y_test, spec, repeats)
    for kind, other in (("random bytes", random_bytes(BATCH, 784)), ("garments", garment_images(BATCH))):
        for each in timed(models, other, None, spec, repeats):
            rows.append(replace(each, name=f"{each.name}, {kind}"))
    by_name = {row.name: row for row in rows}
    validation = {m.name: float(np.mean(m.answers(scheme_logits(m, x_val)) == y_val)) for m in singles}
    extra: dict[str, Any] = {
        "validation_accuracy": validation,
        "proposals": [
            {
                "name": p.cascade.name,
                "thresholds": [each if np.isfinite(each) else None for each in p.cascade.thresholds],
                "calibration": asdict(p.cascade.calibration) if p.cascade.calibration else None,
                "validation_accuracy": p.validation_accuracy,
                "predicted_samples_per_s": p.predicted_samples_per_s,
                "measured_samples_per_s": by_name[p.cascade.name].samples_per_s,
            }
            for p in proposals
        ],
        "targets": [_target(least, times, by_name, validation, proposals) for least, times in TARGETS],
        "splits": [] if given.quick else splits({mlp.name: mlp for mlp in singles}, x_val, y_val),
        "shifts": {p.cascade.name: shifts(p.cascade, x_test) for p in proposals[:: max(1, len(proposals) // 2)]},
    }
    record = Record(device_info("cpu"), versions(), " ".join(["python", *sys.argv]), rows, extra)
    record.save(given.out)
    _tell(record)
    return record


def _target(
    least: float, times: float, by_name: dict[str, Row], chosen: dict[str, float], proposals: list[Proposal]
) -> dict[str, Any]:
    """Compare the fastest single network of that test accuracy with a cascade that is chosen on validation rows."""
    singles = [by_name[name] for name in chosen if (by_name[name].accuracy or 0) >= least]
    if not singles:
        return {"least_accuracy": least, "wanted_ratio": times, "single": None}
    single = max(singles, key=lambda row: row.samples_per_s or 0)
    near = [p for p in proposals if p.validation_accuracy >= chosen[single.name] - NEAR]
    cascade = max((by_name[p.cascade.name] for p in near), key=lambda row: row.samples_per_s or 0, default=None)
    found = {"least_accuracy": least, "wanted_ratio": times, "single": single.name, "validation_within": NEAR}
    if cascade is None:
        return {**found, "cascade": None}
    ratio = (cascade.samples_per_s or 0) / (single.samples_per_s or 1)
    reached = bool(ratio >= times and (cascade.accuracy or 0) >= least)
    return {**found, "cascade": cascade.name, "accuracy": cascade.accuracy, "ratio": ratio, "reached": reached}


def _tell(record: Record) -> None:
    for row in sorted(record.rows, key=lambda row: -(row.samples_per_s or 0)):
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2%}"
        print(
            f"{row.name:<50} {(row.samples_per_s or 0) / 1e6:8.3f} M/s {accuracy:>8}  {row.note or ''}  {row.variant}"
        )
    for key in ("targets", "splits", "proposals"):
        for each in record.extra[key]:
            print(key, each)
    for name, kinds in record.extra["shifts"].items():
        for kind, found in kinds.items():
            print(f"{name}: {kind}: unsure {found['unsure']}, p {found['p_value']:.2g}")


if __name__ == "__main__":
    main()
