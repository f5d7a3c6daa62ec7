"""Rows in files or host memory to answers in files or host memory, beside the wire, the Session and a DataLoader loop.

    python benchmarks/score_rates.py --device cuda --out records/h200-score-rates.json      (about a minute)
    python benchmarks/score_rates.py --device cpu --out records/cpu-score-rates.json        (some minutes)

On CUDA, class ids for 784-128-10 (and for one that reads 512 of 784 bytes) from pinned memory, ordinary NumPy memory
and a memory-mapped ``.npy`` in page cache, by overlapped copies (`gigamlp.score.lane`) and by a Session;
``roof_share`` is the share of the measured host-to-device link, counting the bytes of whole rows. A split of one piece:
copy-in, compute, copy-out, and what the host takes to issue it. On the CPU, `gigamlp.score.score` from ``.npy`` and
Parquet to ``.npy`` beside the Session on rows in memory; for Parquet also the share of its compute stage, decoding
excluded; a Ray Data pipeline with a torch predictor, and `score` on Ray with 1 and 2 workers; and the peak of resident
memory from 10^5 to 10^8 rows.

In both a plain torch DataLoader loop over the same file and model, which is what a user would write. All answers must
be those of the Session, and of the loop's float32 model in all but 1 % of rows (near ties of random weights); the exit
code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gigamlp as gm
from gigamlp.engines.registry import engine as get_engine
from gigamlp.engines.registry import engine_names
from gigamlp.errors import GigaMLPError
from gigamlp.measure.clock import HostClock
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.record import Record, Row
from gigamlp.score import score
from gigamlp.score.lane import Lanes

FEATURES, CLASSES, REPEATS = 784, 10, 5
PEER_ROWS = 100_000
RAY_COPIES = 8


def random_mlp(hidden: int, read: int | None = None) -> gm.MLP:
    rng = np.random.default_rng(0)
    width = read or FEATURES
    layers = [
        gm.Layer(rng.normal(size=(hidden, width)) / 28, rng.normal(size=hidden), "relu"),
        gm.Layer(rng.normal(size=(CLASSES, hidden)), rng.normal(size=CLASSES)),
    ]
    columns = None if read is None else ((128, 128 + read),)
    name = f"random-{hidden}" if read is None else f"random-{hidden}, {read} of {FEATURES} bytes"
    return gm.MLP(layers, input_scale=1 / 255, features=FEATURES, columns=columns, name=name)


def seconds(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Warm up once; return the seconds of each repeat."""
    work()
    taken = []
    for _ in range(repeats):
        begin = HostClock.now()
        work()
        taken.append(HostClock.now() - begin)
    return taken


class Report:
    """Rows of the record, and what was wrong."""

    def __init__(self, device: str, engine: str) -> None:
        self.device, self.engine = device, engine
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.extra: dict[str, Any] = {}

    def add(self, mlp: gm.MLP, count: int, took: list[float], residence: str, note: str, **more: Any) -> float:
        middle = statistics.median(took)
        spread = statistics.quantiles(took, n=4) if len(took) > 1 else [middle] * 3
        values = {
            "engine": self.engine,
            "hidden": list(mlp.hidden),
            "features_read_bytes": mlp.features_read,
            "batch": count,
            "residence": residence,
            "input_dtype": "uint8",
            "output": "class",
            "samples_per_s": count / middle,
            "wall_us": middle * 1e6,
            "iqr": (spread[2] - spread[0]) * 1e6,
            "clock_mhz": snapshot(self.device).get("clock_mhz"),
            "note": note,
            **more,
        }
        self.rows.append(Row(name=mlp.name, **values))
        share = "" if values.get("roof_share") is None else f"  {values['roof_share']:.3f} of the link"
        print(f"{mlp.name:<32} {residence:<14} {note:<52} {count / middle / 1e6:9.3f} M rows/s{share}", flush=True)
        return count / middle

    def same(self, what: str, found: Any, want: Any, allowed: float = 0.0) -> None:
        share = float((np.asarray(found) != np.asarray(want)).mean())
        if share > allowed:
            self.wrong.append(f"{what}: {share:.4%} of the answers differ")


def loop(mlp: gm.MLP, path: Path, device: str, workers: int) -> np.ndarray:
    """What a user would write: a Dataset over the file, a DataLoader, a float32 module."""
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.x = np.load(path, mmap_mode="r")

        def __len__(self) -> int:
            return min(PEER_ROWS, len(self.x))

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.from_numpy(self.x[index].astype(np.float32) / 255)

    hidden, last = (nn.Linear(*layer.weight.shape[::-1]) for layer in mlp.layers)
    for module, layer in zip((hidden, last), mlp.layers, strict=True):
        module.weight.data = torch.from_numpy(layer.weight.copy())
        assert layer.bias is not None
        module.bias.data = torch.from_numpy(layer.bias.copy())
    model = nn.Sequential(hidden, nn.ReLU(), last).to(device).eval()
    found = []
    with torch.inference_mode():
        for batch in DataLoader(Rows(), batch_size=1024, num_workers=workers, pin_memory=device != "cpu"):
            found.append(model(batch.to(device, non_blocking=True)).argmax(dim=1).cpu())
    return torch.cat(found).numpy()


def peer(report: Report, mlp: gm.MLP, path: Path, want: np.ndarray, ours: float) -> None:
    workers = 0 if report.device == "cpu" else 8
    taken, found = [], None
    for _ in range(2):
        begin = HostClock.now()
        found = loop(mlp, path, report.device, workers)
        taken.append(HostClock.now() - begin)
    report.same("DataLoader loop", found, want[: len(found)], 0.01)
    note = f"torch DataLoader loop, {workers} workers"
    rate = report.add(mlp, len(found), taken, "mmap", note, engine=None)
    report.extra["times_the_dataloader_loop"] = ours / rate
    print(f"    score is {ours / rate:.1f} x the DataLoader loop", flush=True)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


def link_rate(device: str) -> float:
    """Bytes a second of one large copy from pinned memory."""
    size = 512 << 20
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return size / statistics.median(seconds(copy, 9))


def split(report: Report, lanes: Lanes, mlp: gm.MLP, pinned: np.ndarray) -> None:
    """The parts of one piece, each alone."""
    (lane,) = lanes._made.values()
    slot = lane._slots[0]
    rows = torch.from_numpy(pinned[: lane._batch])
    target, answers, landing = slot.bound.runner.input, slot.answers, slot.landing
    parts: dict[str, Callable[[], object]] = {
        "compute": lambda: slot.bound.runner.run(target),
        "d2h": lambda: landing.copy_(answers, non_blocking=True),
    }
    if tuple(target.shape) == tuple(rows.shape):
        parts["h2d"] = lambda: target.copy_(rows, non_blocking=True)
    found: dict[str, float] = {}
    make: Any = torch.cuda.Event
    with torch.inference_mode():
        for name, part in parts.items():
            part()
            taken = []
            for _ in range(9):
                begin, end = make(enable_timing=True), make(enable_timing=True)
                torch.cuda.synchronize()
                begin.record()
                part()
                end.record()
                torch.cuda.synchronize()
                taken.append(begin.elapsed_time(end) * 1e3)
            found[name] = statistics.median(taken)
        issue = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin_s = HostClock.now()
            for part in parts.values():
                part()
            issue.append((HostClock.now() - begin_s) * 1e6)
        torch.cuda.synchronize()
    report.rows.append(
        Row(
            name=mlp.name,
            engine=report.engine,
            hidden=list(mlp.hidden),
            features_read_bytes=mlp.features_read,
            batch=lane._batch,
            residence="host-pinned",
            input_dtype="uint8",
            output="class",
            device_us=found["compute"],
            h2d_us=found.get("h2d"),
            d2h_us=found["d2h"],
            enqueue_us=statistics.median(issue),
            note="one piece, each part alone",
        )
    )
    print(f"    one piece of {lane._batch:,} rows, us: {found}, enqueue {statistics.median(issue):.1f}", flush=True)


def on_cuda(report: Report, count: int, folder: Path) -> None:
    rng = np.random.default_rng(1)
    block = rng.integers(0, 256, (min(count, 1 << 18), FEATURES), dtype=np.uint8)
    pinned = torch.empty((count, FEATURES), dtype=torch.uint8, pin_memory=True).numpy()
    for begin in range(0, count, len(block)):
        pinned[begin : begin + len(block)] = block[: min(len(block), count - begin)]
    plain = pinned.copy()
    path = folder / "rows.npy"
    np.save(path, plain)
    mapped = np.load(path, mmap_mode="r")
    link = link_rate(report.device)
    report.extra["link_bytes_per_s"] = link
    print(f"link, pinned to device: {link / 1e9:.1f} GB/s = {link / FEATURES / 1e6:.1f} M rows/s", flush=True)
    for mlp in (random_mlp(128), random_mlp(128, 512)):
        with gm.Session(mlp, device=report.device, engine=report.engine) as session:
            lanes = Lanes(session)
            want = session.predict(plain)
            for residence, x in (("host-pinned", pinned), ("host-pageable", plain), ("mmap", mapped)):
                report.same(f"{mlp.name}, {residence}", lanes.predict(x), want)
                took = seconds(lambda: lanes.predict(x))  # noqa: B023
                share = count * FEATURES / statistics.median(took) / link
                report.add(mlp, count, took, residence, "overlapped copies", roof_share=share)
                took = seconds(lambda: session.predict(x), 3)  # noqa: B023
                share = count * FEATURES / statistics.median(took) / link
                report.add(mlp, count, took, residence, "Session.predict", roof_share=share)
            split(report, lanes, mlp, pinned)
            lanes.close()
        ours = files(report, mlp, path, want, [])
        if mlp.columns is None:
            peer(report, mlp, path, want, ours)


# ---- files ----------------------------------------------------------------------------------------------------------


def files(report: Report, mlp: gm.MLP, path: Path, want: np.ndarray, memory: list[float]) -> float:
    """`score` from a file in page cache; return rows a second. With the Session's rate in `memory`, note the share."""
    out = path.with_name("out.npy")
    results: list[Any] = []

    def work() -> None:
        results.append(
            score(mlp, path, out, device=report.device, engine=report.engine, streams=report.device != "cpu")
        )

    seconds(work, 3)
    report.same(f"score, {path.suffix}", np.load(out), want)
    flowing = [r.seconds for r in results[1:]]
    rate = report.add(mlp, len(want), flowing, "mmap", f"score {path.suffix} -> .npy, session start included")
    busy = {stage: statistics.median(r.busy[stage] for r in results[1:]) for stage in ("read", "compute", "write")}
    note = {"busy_s": busy, "seconds": statistics.median(flowing)}
    if memory:
        note["share_of_session"] = rate / memory[0]
        note["compute_share_of_session"] = len(want) / busy["compute"] / memory[0]
    report.extra[f"{mlp.name}, {path.suffix}"] = note
    print(f"    {note}", flush=True)
    return rate


def ray_peer(report: Report, mlp: gm.MLP, path: Path, want: np.ndarray, ours: float) -> None:
    """What a user of Ray Data would write, Parquet rows to a torch predictor in two actors; ours on Ray beside."""
    import ray

    workers, width = 2, mlp.hidden[0]
    parameters = [(layer.weight, layer.bias) for layer in mlp.layers]

    class Predictor:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            hidden, last = torch.nn.Linear(FEATURES, width), torch.nn.Linear(width, CLASSES)
            for module, (weight, bias) in zip((hidden, last), parameters, strict=True):
                module.weight.data, module.bias.data = torch.tensor(weight), torch.tensor(bias)
            self.model = torch.nn.Sequential(hidden, torch.nn.ReLU(), last).eval()

        def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            x = np.stack([np.frombuffer(row, np.uint8) for row in batch["x"]]).astype(np.float32) / 255
            with torch.inference_mode():
                return {"class": self.model(torch.from_numpy(x)).argmax(dim=1).numpy()}

    def theirs() -> np.ndarray:
        data = ray.data.read_parquet(str(path), override_num_blocks=4 * workers)
        data.context.execution_options.preserve_order = True
        made = data.map_batches(Predictor, batch_size=4096, compute=ray.data.ActorPoolStrategy(size=workers))
        return np.concatenate([b["class"] for b in made.iter_batches(batch_size=None, batch_format="numpy")])

    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        theirs()  # starts the workers' processes
        begin = HostClock.now()
        found = theirs()
        took = HostClock.now() - begin
        report.same("Ray Data loop", found, want[: len(found)], 0.01)
        rate = report.add(mlp, len(found), [took], "mmap", f"Ray Data, torch predictor, {workers} actors", engine=None)
        several = path.with_name("several")  # of one file the start of the actors would be all that shows
        several.mkdir()
        for index in range(RAY_COPIES):
            (several / f"{index}.parquet").hardlink_to(path)
        for each in range(1, workers + 1):
            ray.shutdown()
            ray.init(num_cpus=each, include_dashboard=False, log_to_driver=False, logging_level="error")
            out = path.with_name("ray.npy")
            score(mlp, path, out, device="cpu", engine=report.engine, ray="auto")  # starts the workers' processes
            begin = HostClock.now()
            score(mlp, several, out, device="cpu", engine=report.engine, ray="auto")
            took = HostClock.now() - begin
            report.same(f"score on Ray, {each} workers", np.load(out), np.tile(want, RAY_COPIES))
            mine = report.add(
                mlp, RAY_COPIES * len(want), [took], "mmap", f"score --ray, {each} CPU workers, start included"
            )
            report.extra[f"ray_workers_{each}_rows_per_s"] = mine
        ones = report.extra["ray_workers_1_rows_per_s"]
        report.extra["ray_scaling_efficiency"] = mine / ones / workers
        report.extra["times_ray_data"] = {"score": ours / rate, "score --ray": mine / rate}
        print(f"    {report.extra['times_ray_data']}, efficiency {mine / ones / workers:.2f}", flush=True)
    finally:
        ray.shutdown()


class Endless:
    """`rows` rows of a pattern, made while they are read."""

    def __init__(self, rows: int, features: int) -> None:
        self._block = np.random.default_rng(0).integers(0, 256, (1 << 16, features), dtype=np.uint8).tobytes()
        self._left, self._at = rows * features, 0

    def read(self, size: int = -1) -> bytes:
        part = self._block[self._at : self._at + min(size, self._left)]
        self._at = (self._at + len(part)) % len(self._block)
        self._left -= len(part)
        return part


def memory(report: Report, folder: Path, most: int) -> None:
    """The peak of resident memory over runs of 10^5 rows and more, generated while they are read."""
    import resource

    features, found = 16, {}
    mlp = gm.MLP([gm.Layer(np.random.default_rng(0).normal(size=(4, features)))])
    count = 100_000
    while count <= most:
        seen: list[int] = []

        def look(*told: object, seen: list[int] = seen) -> None:
            seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())

        options: dict[str, Any] = {"device": "cpu", "engine": "numpy", "block_rows": 1 << 16, "progress": look}
        score(mlp, "-", folder / "memory.npy", stdin=Endless(count, features), **options)
        look()
        found[f"{count:.0e}"] = max(seen) / 2**20
        count *= 10
    report.extra["peak_resident_mb"] = found
    print(f"    peak resident MB by rows: {found}", flush=True)
    if max(found.values()) > min(found.values()) + 150:
        report.wrong.append(f"memory is not flat: {found}")


def on_cpu(report: Report, count: int, folder: Path, most: int) -> None:
    x = np.random.default_rng(1).integers(0, 256, (count, FEATURES), dtype=np.uint8)
    mlp = random_mlp(128)
    path = folder / "rows.npy"
    np.save(path, x)
    with gm.Session(mlp, device="cpu", engine=report.engine) as session:
        want = session.predict(x)
        rate = report.add(mlp, count, seconds(lambda: session.predict(x)), "cold", "Session.predict, rows in memory")
    ours = files(report, mlp, path, want, [rate])
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        print("no pyarrow: Parquet is left out", flush=True)
    else:
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(FEATURES), count, [None, pa.py_buffer(x)])
        pq.write_table(pa.table({"x": column}), folder / "rows.parquet", use_dictionary=False, row_group_size=1 << 17)
        files(report, mlp, folder / "rows.parquet", want, [rate])
        if find_spec("ray") is not None:
            ray_peer(report, mlp, folder / "rows.parquet", want, ours)
    peer(report, mlp, path, want, ours)
    memory(report, folder, most)


def pick(device: str, named: str | None) -> str:
    """The engine asked for, else the fused one, else torch's."""
    fused = "cpu_fused" if device == "cpu" else "cuda_fused"
    if named is not None:
        return named
    if fused in engine_names() and get_engine(fused).unavailable(device) is None:
        return fused
    return "torch_eager" if device == "cpu" else "torch_graph"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine")
    parser.add_argument("--rows", type=int, help="default: 2^21 on CUDA, 2,000,000 on a CPU")
    parser.add_argument("--most", type=int, default=100_000_000, help="rows of the longest run for memory")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = resolve_device(args.device)
    report = Report(device, pick(device, args.engine))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        try:
            if device == "cpu":
                on_cpu(report, args.rows or 2_000_000, Path(folder), args.most)
            else:
                on_cuda(report, args.rows or 1 << 21, Path(folder))
        except GigaMLPError as error:
            report.wrong.append(f"{type(error).__name__}: {error}")
    if args.out is not None:
        command = " ".join(["python", *sys.argv])
        Record(device_info(device), versions(), command, report.rows, report.extra).save(args.out)
    for line in report.wrong:
        print(f"wrong: {line}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
