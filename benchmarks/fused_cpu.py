"""The fused CPU engine beside its peers: MNIST rows as raw uint8 in memory, class ids out.

    python benchmarks/fused_cpu.py --out records/cpu-fused-DATE.json [--quick] [--hidden 40,128] [--threads 1,2]

Each contender has a process of its own, waiting on a pipe, with its best variant and chunk size for the network, the
data and the threads (all that were tried are in the record). Rounds visit every contender in turn, in an order drawn
anew, so that a slow phase of the machine hits all alike and no two thread pools fight for the cores; the median over
the rounds counts, with its interquartile range. Accuracies are those of the timed pass's own answers for the 10,000
test images. Networks: the int8 reference networks that the tests use. The single-row table takes a NumPy row to a
Python int, one call at a time, timer included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cpu_contenders import CONTENDERS, Contender, serve

from gigamlp.measure.stats import summarise
from gigamlp.measure.telemetry import device_info, snapshot, versions
from gigamlp.record import Record, Row

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PEERS = ("onnx", "scikit-learn")  # the others are among the record's versions


class Refused(Exception):
    """A worker cannot do what it was asked for."""


class Process:
    """A contender in its own process."""

    def __init__(self, who: Contender, threads: int) -> None:
        self.who = who
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with environment(threads):
            self._process = context.Process(target=serve, args=(theirs, who, threads), daemon=True)
            self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Let the worker do something, and wait for it."""
        try:
            self._pipe.send((method, arguments))
            good, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Refused("its process ended") from error
        if not good:
            raise Refused(result)
        return result

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)


@contextmanager
def environment(threads: int) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- measuring ------------------------------------------------------------------------------------------------------


class Bench:
    """The rounds, and what came of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self.tried: dict[str, dict[str, float]] = {}
        self.ratios: dict[str, dict[str, Any]] = {}
        self.single: dict[str, dict[str, Any]] = {}
        self.roofs: dict[str, Any] = {}
        self._rng = np.random.default_rng(0)

    def threads(self, threads: int, processes: Sequence[Process]) -> None:
        """Measure everything with one number of threads."""
        self.roofs[str(threads)] = processes[-1].ask("roofs")
        for hidden in self.options.hidden:
            for data in ("mnist", "dense") if threads == 1 else ("mnist",):
                self._table(hidden, data, threads, processes)
            if threads == 1:
                self._single(hidden, processes)
            self.save()

    def _ready(self, processes: Sequence[Process], method: str, *arguments: Any) -> dict[Process, Any]:
        ready = {}
        for process in processes:
            try:
                ready[process] = process.ask(method, *arguments)
            except Refused as reason:
                what = " ".join([method, *map(str, arguments)])
                self.skipped.append({"contender": process.who.name, "what": what, "reason": str(reason)})
                print(f"    {process.who.name}: {reason}", flush=True)
        return ready

    def _visits(self, processes: Sequence[Process], rounds: int, threads: int) -> Iterator[Process]:
        for _ in range(rounds):
            for index in self._rng.permutation(len(processes)):
                # a pool of several threads may spin for a fifth of a second after its last work
                time.sleep(0.02 if threads == 1 else 0.25)
                yield processes[index]

    def _table(self, hidden: int, data: str, threads: int, processes: Sequence[Process]) -> None:
        key = f"784-{hidden}-10 {data} threads={threads}"
        print(f"{key}:", flush=True)
        ready = self._ready(processes, "prepare", hidden, data)
        times: dict[Process, list[float]] = {process: [] for process in ready}
        for process in self._visits(list(ready), self.options.rounds, threads):
            times[process].append(process.ask("visit", self.options.min_s))
        speeds = {}
        for process, told in ready.items():
            row = self._row(process.who, (hidden, data, threads), told, times[process])
            self.rows.append(row)
            self.tried[f"{key} {process.who.name}"] = told["tried_us"]
            speeds[process.who.name] = row.samples_per_s or 0.0
            print(_line(row, process.who), flush=True)
        self._ratio(key, speeds)

    def _row(self, who: Contender, what: tuple[int, str, int], told: dict[str, Any], taken: Sequence[float]) -> Row:
        hidden, data, threads = what
        stat = summarise(seconds * 1e6 for seconds in taken)
        rate = told["rows"] / stat.median * 1e6
        roofs = self.roofs[str(threads)]
        peak = roofs["native_int8_macs_s"] or roofs["macs_s"].get("int8")
        kind = "MNIST test rows" if data == "mnist" else "uniform random bytes"
        note = f"{who.name}; {kind}; {told['disagreement']:.2%} of the answers differ from float32"
        if who.window:
            note += "; cut to the window, not trained so: no accuracy"
        return Row(
            name=f"784-{hidden}-10" + (" 20x20" if who.window else ""),
            engine=who.engine or {"qlinear": "onednn_qlinear", "sklearn": "scikit-learn"}[who.kind],
            variant=told["variant"],
            scheme=who.scheme,
            hidden=[hidden],
            features_read_bytes=told["read"],
            batch=told["rows"],
            threads=threads,
            residence="hot",
            input_dtype="uint8",
            output="class",
            samples_per_s=rate,
            wall_us=stat.median,
            iqr=stat.iqr,
            accuracy=told["accuracy"],
            # of the first layer's products only, if all were done: skipping zeros can take it past 1
            roof_share=rate * told["first"] / peak if peak and who.scheme is not None else None,
            clock_mhz=snapshot("cpu").get("clock_mhz"),
            note=note,
        )

    def _ratio(self, key: str, speeds: dict[str, float]) -> None:
        ours = {c.name for c in CONTENDERS if c.ours}
        peers = {name: speed for name, speed in speeds.items() if name not in ours}
        if not peers:
            return
        best = max(peers, key=lambda name: peers[name])
        relative = {name: speed / peers[best] for name, speed in speeds.items()}
        self.ratios[key] = {"best_peer": best, "to_best_peer": relative}
        mine = ", ".join(f"{name} {relative[name]:.2f}x" for name in speeds if name in ours)
        print(f"  best peer: {best}; {mine or 'cpu_fused is not in this version'}", flush=True)

    def _single(self, hidden: int, processes: Sequence[Process]) -> None:
        key = f"784-{hidden}-10 single row"
        print(f"{key}:", flush=True)
        ready = self._ready([p for p in processes if p.who.single_row], "prepare_row", hidden)
        taken: dict[Process, list[dict[str, float]]] = {process: [] for process in ready}
        for process in self._visits(list(ready), self.options.rounds, 1):
            taken[process].append(process.ask("visit_row", self.options.calls))
        for process, label in ready.items():
            found = {name: summarise(t[name] for t in taken[process]).median for name in taken[process][0]}
            self.single[f"{key} {process.who.name}"] = {"variant": label, **found}
            numbers = " ".join(f"{name} {value:8.2f}" for name, value in found.items())
            print(f"  {process.who.name:32} {numbers} {label}", flush=True)

    def save(self) -> None:
        """Write what there is so far."""
        found = {}
        for name in PEERS:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        extra = {
            "peers": found,
            "roofs": self.roofs,
            "rounds": self.options.rounds,
            "min_s": self.options.min_s,
            "ratios": self.ratios,
            "single_row": self.single,
            "tried_us": self.tried,
            "skipped": self.skipped,
        }
        command = " ".join(["python", "benchmarks/fused_cpu.py", *sys.argv[1:]])
        Record(device_info("cpu"), versions(), command, self.rows, extra).save(self.options.out)


def _line(row: Row, who: Contender) -> str:
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
    share = "" if row.roof_share is None else f"{row.roof_share:4.0%}"
    speed = (row.samples_per_s or 0) / 1e6
    noise = (row.iqr or 0) / (row.wall_us or 1)
    return f"  {who.name:32} {speed:8.3f} M/s iqr {noise:4.0%} {share:>5} {accuracy:6} {row.variant}"


# ---- the command ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=_numbers, default=[40, 128, 512])
    parser.add_argument("--threads", type=_numbers, default=[1, 2])
    parser.add_argument("--only", default="", help="names of contenders, separated by semicolons; all if not given")
    parser.add_argument("--quick", action="store_true", help="three short rounds: to see that it works")
    options = parser.parse_args()
    options.rounds, options.min_s, options.calls = (3, 0.03, 300) if options.quick else (9, 0.15, 3000)
    chosen = [c for c in CONTENDERS if not options.only or c.name in options.only.split(";")]
    bench = Bench(options)
    for threads in options.threads:
        with ExitStack() as stack:
            processes = [Process(who, threads) for who in chosen]
            for process in processes:
                stack.callback(process.close)
            bench.threads(threads, processes)
    bench.save()
    return 0


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
