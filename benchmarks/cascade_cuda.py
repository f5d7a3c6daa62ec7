"""Cascades on one GPU beside their stages alone: 2,097,152 uint8 rows in device memory in, class ids out.

    python benchmarks/cascade_cuda.py --out records/cascade-cuda.json [--stage1 FILE …] [--stage2 FILE …]

First stages read a window. They are the files given, or shipped models that read a part of each row, or, where there
are none, students trained on the spot (some 20 s). Last stages are the files given, or shipped models of whole rows.

1. Random cascades of two and three stages, awkward batches, nobody, one or all unsure: equal to the stages run one
   by one and merged.
2. For each pair of stages the quickest chain of kernels, then a grid of thresholds. A threshold is the margin below
   which a given share of 5,000 validation rows lies. Each entry's answers for all rows are compared with its stages'
   merged; its accuracy is that of the answers that were timed, for the 10,000 test images that the rows repeat.
3. The best entries again on rows of random bytes and on blurred shapes, where more rows are unsure.

What fails is recorded with its error, and the rest goes on. Exit status: 0 if all answers were equal and every goal
was met within 3 %.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gigamlp as gm
from gigamlp.data import hold_out, load_mnist
from gigamlp.engines.registry import engine as get_engine
from gigamlp.measure.clock import HostClock, clock_for
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.measure.timing import Throughput, throughput
from gigamlp.record import Record, Row
from gigamlp.spec import Spec, Variant

ROWS = 1 << 21
OURS = "cuda_fused"
GOALS = ((0.995, 4.0e9), (0.993, 5.2e9), (0.985, 7.2e9), (0.97, 9.5e9))
SHARES = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.10, 0.15)
LAST = ("mnist-64", "mnist-128", "mnist-512")
MET = 0.97


@dataclass
class Bench:
    """What has been found so far, and where it is written."""

    out: Path
    rows: list[Row] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=lambda: {"failed": {}, "equal": {}, "entries": []})

    def trying(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what `work` gives; an error is printed and recorded, and gives None."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  a failed entry must not cost the others: that is what this is for
            self.extra["failed"][what] = f"{type(error).__name__}: {error}"[:500]
            print(f"  FAILED {what}: {self.extra['failed'][what]}", flush=True)
            traceback.print_exc(limit=4)
            return None

    def save(self) -> None:
        command = shlex.join(["python", "benchmarks/cascade_cuda.py", *sys.argv[1:]])
        Record(device_info("cuda:0"), versions(), command, self.rows, self.extra).save(self.out)


# ---- models ----------------------------------------------------------------------------------------------------------


def first_stages(
    files: list[Path], x: np.ndarray, y: np.ndarray, validation: Any, widths: tuple[int, ...]
) -> list[gm.MLP]:
    if files:
        return [gm.quantise(gm.load(file).with_(scheme=None)) for file in files]
    shipped = [gm.load(name) for name in gm.models.names() if gm.load(name).features_read < 784]
    if shipped:
        return shipped
    from gigamlp.train import Window, distill

    found = distill(
        x, y, (40,), seeds=4, teacher=None, epochs=40, quick=True, validation=validation, device="cuda",
        image_shape=(28, 28), columns=tuple(Window(width) for width in widths), budget_s=30.0,
    )  # fmt: skip
    kept = {}
    for student in found.students:
        best = found.best(student.hidden, student.reads)
        kept[best.reads] = best.mlp.with_(name=f"trained-40-{best.reads}")
    return [gm.quantise(mlp) for mlp in kept.values()]


def reference_256() -> gm.MLP:
    with np.load(Path(__file__).parent / "data_files" / "reference_int8_256.npz") as data:
        q, s, b1, w2, b2 = (data[f"h256.{key}"] for key in ("q", "s", "b1", "W2", "b2"))
    layers = [gm.Layer(q.T * s[:, None], b1, "relu"), gm.Layer(w2.T, b2)]
    return gm.MLP(layers, scheme=gm.Scheme("w8", {"codes.0": q.T, "scale.0": s}), name="reference-256")


def last_stages(files: list[Path]) -> list[gm.MLP]:
    if files:
        return [gm.quantise(gm.load(file).with_(scheme=None)) for file in files]
    return [*(gm.load(name) for name in LAST), reference_256()]


# ---- rows ------------------------------------------------------------------------------------------------------------


def blurred_shapes(count: int, seed: int = 0) -> np.ndarray:
    """Grey shapes with a soft texture, wider than digits: what clothes look like to a network of digits."""
    rng = np.random.default_rng(seed)
    at = np.arange(28)
    images = np.zeros((count, 28, 28))
    for image in images:
        top, left = rng.integers(1, 9, 2)
        bottom, right = rng.integers(18, 28, 2)
        texture = np.sin(at[:, None] * rng.uniform(0, 1.2) + rng.uniform(0, 6)) * np.sin(at * rng.uniform(0, 1.2))
        image[top:bottom, left:right] = (150 + 70 * texture)[top:bottom, left:right]
        if rng.random() < 0.5:  # a gap, as between trouser legs
            image[bottom - 10 : bottom, 12:16] = 0
    soft = sum(np.roll(images, (i, j), (1, 2)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9
    return np.clip(soft + rng.normal(0, 6, soft.shape) * (soft > 8), 0, 255).astype(np.uint8).reshape(count, 784)


def repeated(x: np.ndarray, rows: int) -> torch.Tensor:
    some = torch.from_numpy(np.ascontiguousarray(x)).cuda()
    return some.repeat(-(-rows // len(x)), 1)[:rows].contiguous()


# ---- building and comparing ------------------------------------------------------------------------------------------


def bound(model: Any, rows: torch.Tensor, output: str = "class", variant: Variant | None = None) -> Any:
    engine: Any = get_engine(OURS)
    runner = engine.build(model, Spec("cuda:0", len(rows), output=output), variant)
    own = runner.bind(rows)
    runner.close()
    return own


def path_of(label: str) -> Variant:
    """What decides the order in which a stage alone adds up floats: the path, and how a first layer is shared out."""
    path, _, sizes = label.partition("-")
    shared = re.search(r"n(\d+)", sizes)
    return Variant.of(path=path, outputs=int(shared.group(1))) if shared else Variant.of(path=path)


class Stages:
    """The answers of single stages for some rows, each computed once."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self._kept = rows, {}  # type: ignore[var-annotated]

    def forget(self) -> None:
        """Free what is kept."""
        self._kept.clear()

    def of(self, mlp: gm.MLP, path: Variant) -> tuple[torch.Tensor, torch.Tensor]:
        key = (mlp.digest(), path)
        if key not in self._kept:
            runner = bound(mlp, self.rows, "margin", path)
            self._kept[key] = tuple(part.clone() for part in runner.run(self.rows))
            runner.close()
        return self._kept[key]

    def merged(self, cascade: gm.Cascade, form: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The class and margin of each row as the stages alone give them, and how many rows go on from each stage."""
        paths = [path_of(label) for label in form.split("+")]
        ids, margins = (part.clone() for part in self.of(cascade.stages[0], paths[0]))
        on = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        counts = []
        for index, threshold in enumerate(cascade.thresholds):
            on &= ~(self.of(cascade.stages[index], paths[index])[1] >= threshold)
            counts.append(int(on.sum()))
            next_ids, next_margins = self.of(cascade.stages[index + 1], paths[index + 1])
            ids, margins = torch.where(on, next_ids, ids), torch.where(on, next_margins, margins)
        return ids, margins, counts


def compare(cascade: gm.Cascade, rows: torch.Tensor, stages: Stages, variant: Variant | None, output: str) -> str:
    """Run twice on the rows and compare with the merged stages; raise if anything differs."""
    runner = bound(cascade, rows, output, variant)
    form = str(runner.variant.get("form"))
    ids, margins, counts = stages.merged(cascade, form)
    for turn in range(2):
        got = runner.run(rows)
        got_ids = got[0] if output == "margin" else got
        wrong = int((got_ids != ids).sum())
        if wrong or (output == "margin" and not torch.equal(got[1], margins)):
            raise AssertionError(f"run {turn}: {wrong} of {len(rows)} answers differ from the merged stages ({form})")
        if list(runner.unsure) != counts:
            raise AssertionError(f"run {turn}: {runner.unsure} rows went on, not {counts} ({form})")
    runner.close()
    return form


def random_cascade(seed: int, stages: int) -> gm.Cascade:
    rng = np.random.default_rng(seed)
    features, classes = int(rng.choice([784, 13, 160, 99, 1])), int(rng.integers(2, 18))
    made = []
    for index in range(stages):
        widths = (features, int(rng.choice([7, 40, 64, 128, 200, 512])), classes)
        columns = [(0, features)]
        if index == 0 and features == 784:
            columns, widths = [(192, 576)], (384, 40, classes)
        layers = [
            gm.Layer(rng.normal(size=(b, a)) / a, rng.normal(size=b), act)
            for a, b, act in zip(widths, widths[1:], ("relu", "identity"), strict=False)
        ]
        made.append(gm.quantise(gm.MLP(layers, columns=columns, features=features, name=f"random-{index}")))
    return gm.Cascade(made, [0.0] * (stages - 1))


def check_random(bench: Bench) -> None:
    sizes = (1, 31, 33, 4095, 70_001)
    for seed in range(10):
        cascade = random_cascade(seed, 2 + seed % 2)
        rng = np.random.default_rng(seed)
        rows = torch.from_numpy(rng.integers(0, 256, (sizes[seed % 5], cascade.features), np.uint8)).cuda()
        stages = Stages(rows)
        for name, share in (("nobody", 0.0), ("one", 1e-9), ("some", 0.2), ("most", 0.9), ("everybody", 1.0)):
            what = f"random {seed}: {cascade!r}, {len(rows)} rows, {name} unsure"

            def one(
                cascade: gm.Cascade = cascade, share: float = share, rows: Any = rows, stages: Stages = stages
            ) -> str:
                ours: Any = get_engine(OURS)
                chain = ours.variants(cascade, Spec("cuda:0", len(rows), output="margin"))[0]
                paths = [path_of(label) for label in str(chain.get("form")).split("+")]
                thresholds = []
                for mlp, path in zip(cascade.stages[:-1], paths, strict=False):
                    margins = np.sort(stages.of(mlp, path)[1].cpu().numpy())
                    at = int(share * len(margins))
                    thresholds.append(
                        np.inf if share == 1 else 0.0 if share == 0 else np.nextafter(margins[at], np.inf)
                    )
                return compare(cascade.with_(thresholds=thresholds), rows, stages, None, "margin")

            bench.extra["equal"][what] = bench.trying(what, one)


# ---- timing ----------------------------------------------------------------------------------------------------------


def timed(work: dict[str, Callable[[], object]], min_s: float, repeats: int) -> dict[str, Throughput]:
    found = throughput(work, clock_for("cuda:0"), repeats=repeats, min_s=min_s)
    return {key: t for key, t in found.items() if isinstance(t, Throughput)}


def runs(runner: Any) -> Callable[[], object]:
    return lambda: runner.run(runner.input)


def quickest(model: Any, rows: torch.Tensor, most: int) -> Variant:
    """The variant with the highest throughput on these rows."""
    engine: Any = get_engine(OURS)
    variants = engine.variants(model, Spec("cuda:0", len(rows)))[:most]
    made = {}
    for variant in variants:
        try:
            made[variant.label] = (variant, bound(model, rows, variant=variant))
        except gm.GigaMLPError as error:
            print(f"    {variant.label}: {error}", flush=True)
    found = timed({label: runs(runner) for label, (_, runner) in made.items()}, 0.01, 3)
    for label, t in sorted(found.items(), key=lambda item: item[1].wall_us):
        print(f"    {label} {t.wall_us:8.2f} us {len(rows) / t.wall_us / 1e3:6.3f} G/s", flush=True)
    best = min(found, key=lambda label: found[label].wall_us)
    for _, runner in made.values():
        runner.close()
    variant: Variant = made[best][0]
    return variant


def row_of(model: Any, runner: Any, t: Throughput, accuracy: float | None, note: str) -> Row:
    return Row(
        name=model.name,
        engine=OURS,
        variant=runner.variant.label,
        scheme="w8",
        hidden=list(model.hidden),
        features_read_bytes=model.features_read,
        batch=runner.spec.batch,
        residence="cold",
        input_dtype="uint8",
        output="class",
        samples_per_s=runner.spec.batch / t.wall_us * 1e6,
        wall_us=t.wall_us,
        device_us=t.device_us,
        iqr=t.iqr,
        accuracy=accuracy,
        clock_mhz=snapshot("cuda:0").get("clock_mhz"),
        note=note,
    )


def right(ids: torch.Tensor, y: np.ndarray) -> float:
    """The accuracy of the answers for the test images, which must be the same in all repetitions."""
    whole = len(ids) // len(y) * len(y)
    some = ids[:whole].view(-1, len(y))
    if not bool((some == some[0]).all()):
        raise AssertionError("the same image got different answers at different places")
    return float((some[0].cpu().numpy() == y).mean())


def margins_of(mlp: gm.MLP, x: np.ndarray) -> np.ndarray:
    runner = bound(mlp, torch.from_numpy(x).cuda(), "margin")
    margins: np.ndarray = runner.run(runner.input)[1].cpu().numpy()
    runner.close()
    return margins


def grid(bench: Bench, pair: tuple[gm.MLP, gm.MLP], data: tuple[Any, ...], stages: Stages) -> None:
    """All thresholds of a pair of stages, timed in interleaved rounds."""
    first, last = pair
    x_val, rows, y_test = data
    margins = np.sort(margins_of(first, x_val))
    cascades = {
        share: gm.Cascade((first, last), (float(margins[int(share * len(margins))]),))
        for share in bench.extra["shares"]
    }
    middle = cascades[sorted(cascades, key=lambda share: abs(share - 0.05))[0]]
    variant = quickest(middle, rows, bench.extra["variants"])
    made = {share: bound(cascade, rows, variant=variant) for share, cascade in cascades.items()}
    found = timed({str(share): runs(runner) for share, runner in made.items()}, 0.03, 5)
    for share, runner in made.items():
        what = f"{first.name}+{last.name} {share:.1%}"
        t, ids = found[str(share)], runner.run(rows)
        accuracy = bench.trying(what, lambda ids=ids: right(ids, y_test))
        unsure = runner.unsure[0] / len(rows)
        want, _, counts = stages.merged(cascades[share], str(variant.get("form")))
        equal = bool(torch.equal(want, ids)) and counts == list(runner.unsure)
        if not equal:
            bench.extra["failed"][what] = (
                f"{int((want != ids).sum())} answers differ, {runner.unsure} unsure, not {counts}"
            )
        note = f"threshold {cascades[share].thresholds[0]:.6g}; {unsure:.3%} of the rows went on; equal: {equal}"
        bench.rows.append(row_of(cascades[share], runner, t, accuracy, note))
        rate = len(rows) / t.wall_us / 1e3
        entry = {"name": what, "threshold": cascades[share].thresholds[0], "validation_share": share, "unsure": unsure,
                 "rate": rate * 1e9, "accuracy": accuracy, "equal": equal, "variant": variant.to_json()}  # fmt: skip
        bench.extra["entries"].append(entry)
        print(
            f"  {what}: unsure {unsure:.3%} {t.wall_us:8.2f} us {rate:6.3f} G/s accuracy {accuracy} equal {equal}",
            flush=True,
        )
        runner.close()


def alone(bench: Bench, mlps: list[gm.MLP], rows: torch.Tensor, y: np.ndarray) -> None:
    made = {}
    for mlp in mlps:
        variant = bench.trying(f"{mlp.name} alone", lambda mlp=mlp: quickest(mlp, rows, 4))
        if variant is not None:
            made[mlp.name] = (mlp, bound(mlp, rows, variant=variant))
    found = timed({name: runs(runner) for name, (_, runner) in made.items()}, 0.03, 5)
    for name, (mlp, runner) in made.items():
        accuracy = bench.trying(f"{name} alone", lambda runner=runner: right(runner.run(rows), y))
        bench.rows.append(row_of(mlp, runner, found[name], accuracy, "a stage alone"))
        print(
            f"  {name}: {len(rows) / found[name].wall_us / 1e3:6.3f} G/s accuracy {accuracy} {runner.variant.label}",
            flush=True,
        )
        runner.close()


def other_rows(bench: Bench, models: dict[str, gm.MLP], kinds: dict[str, Callable[[], torch.Tensor]]) -> None:
    """The best entry of each goal, on other rows than digits."""
    best = {}
    for accuracy, _ in GOALS:
        good = [e for e in bench.extra["entries"] if (e["accuracy"] or 0) >= accuracy]
        if good:
            entry = max(good, key=lambda e: e["rate"])
            best[entry["name"]] = entry
    for kind, make in kinds.items():
        rows = make()
        stages = Stages(rows)
        for name, entry in best.items():

            def one(
                name: str = name, entry: Any = entry, rows: Any = rows, stages: Stages = stages, kind: str = kind
            ) -> None:
                pair = name.split(" ", maxsplit=1)[0].split("+")
                cascade = gm.Cascade([models[part] for part in pair], [entry["threshold"]])
                variant = Variant.from_json(entry["variant"])
                compare(cascade, rows, stages, variant, "class")
                runner = bound(cascade, rows, variant=variant)
                t = timed({"one": runs(runner)}, 0.03, 5)["one"]
                unsure = runner.unsure[0] / len(rows)
                note = (
                    f"rows: {kind}; threshold {entry['threshold']:.6g}; {unsure:.3%} of the rows went on; equal: True"
                )
                bench.rows.append(row_of(cascade, runner, t, None, note))
                print(f"  {name} on {kind}: unsure {unsure:.3%}, {len(rows) / t.wall_us / 1e3:6.3f} G/s", flush=True)
                runner.close()

            bench.trying(f"{name} on {kind}", one)
        bench.save()


def verdict(bench: Bench) -> dict[str, Any]:
    found = {}
    for accuracy, least in GOALS:
        good = [e for e in bench.extra["entries"] if (e["accuracy"] or 0) >= accuracy and e["equal"]]
        best = max(good, key=lambda e: e["rate"], default=None)
        found[f"{accuracy} at {least / 1e9} G rows/s"] = {
            "best": None if best is None else best["name"],
            "rate": None if best is None else best["rate"],
            "accuracy": None if best is None else best["accuracy"],
            "met": best is not None and best["rate"] >= MET * least,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage1", type=Path, nargs="*", default=[])
    parser.add_argument("--stage2", type=Path, nargs="*", default=[])
    parser.add_argument(
        "--windows", default="352,384", help="bytes of the windows of first stages that are trained here"
    )
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="unsure shares of the validation rows")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--variants", type=int, default=9, help="chains of kernels to try for each pair of stages")
    parser.add_argument(
        "--budget", type=float, default=105.0, help="seconds; pairs that would begin later are left out"
    )
    options = parser.parse_args()
    resolve_device("cuda:0")
    begin = HostClock.now()
    bench = Bench(options.out)
    bench.extra["shares"] = [float(word) for word in options.shares.split(",")]
    bench.extra["variants"] = options.variants
    x, y, x_test, y_test = load_mnist()
    x_fit, y_fit, x_val, y_val = hold_out(x, y, 5000, seed=0)

    bench.trying("random cascades", lambda: check_random(bench))
    print(f"random cascades compared, after {HostClock.now() - begin:.0f} s", flush=True)
    bench.save()
    widths = tuple(int(word) for word in options.windows.split(","))
    firsts = (
        bench.trying("first stages", lambda: first_stages(options.stage1, x_fit, y_fit, (x_val, y_val), widths)) or []
    )
    lasts = bench.trying("last stages", lambda: last_stages(options.stage2)) or []
    print(f"{len(firsts)} first stages, {len(lasts)} last ones, after {HostClock.now() - begin:.0f} s", flush=True)
    rows = repeated(x_test, options.rows)
    stages = Stages(rows)
    bench.trying("stages alone", lambda: alone(bench, [*firsts, *lasts], rows, y_test))
    bench.save()
    for last in sorted(lasts, key=lambda mlp: -mlp.hidden[0]):
        for first in firsts:
            what = f"{first.name}+{last.name}"
            if HostClock.now() - begin > options.budget - 15:
                bench.extra["failed"][what] = f"left out: the budget of {options.budget:.0f} s had ended"
                continue
            print(f"{what}, after {HostClock.now() - begin:.0f} s:", flush=True)
            bench.trying(what, lambda pair=(first, last): grid(bench, pair, (x_val, rows, y_test), stages))
            bench.save()
    kinds = {
        "random bytes": lambda: torch.randint(0, 256, (options.rows, 784), dtype=torch.uint8, device="cuda"),
        "blurred shapes": lambda: repeated(blurred_shapes(10_000), options.rows),
    }
    stages.forget()
    bench.trying("other rows", lambda: other_rows(bench, {mlp.name: mlp for mlp in (*firsts, *lasts)}, kinds))
    bench.extra["goals"] = verdict(bench)
    bench.extra["seconds"] = HostClock.now() - begin
    bench.save()
    for goal, found in bench.extra["goals"].items():
        print(f"{goal}: {found}")
    print(f"{len(bench.extra['failed'])} failures; {bench.extra['seconds']:.0f} s in all")
    return 0 if not bench.extra["failed"] and all(found["met"] for found in bench.extra["goals"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
