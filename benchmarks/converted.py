"""Models of other frameworks, in their own framework and by gigamlp.

    python benchmarks/converted.py --device cpu --out records/HOST-converted.json
    python benchmarks/converted.py --device cpu --scaler standard --out records/HOST-converted-standard.json
    python benchmarks/converted.py --device cuda --out records/GPU-converted.json

On a CPU: a scikit-learn pipeline, MinMaxScaler and MLPClassifier 784-128-10, trained here on MNIST, against a Session
of ``from_sklearn(pipeline)`` on 100,000 rows, float32 and uint8. The Session runs by a Plan, made here, whose accuracy
gate saw 5,000 rows held out of training. Both answer the very same array.

On CUDA: a torch module of the same network, its own fp16 forward in a CUDA graph (fp16 rows to logits, and bytes to
classes), against the Session's runner and the Session itself on the same resident rows.

All contenders of a comparison are timed interleaved. The accuracy beside a speed, and how many classes differ from the
framework's, are computed from answers that the timed callables gave; of the rows that differ, the margin (difference of
the two largest float64 logits) is reported beside the median margin. The exit code is 1 if a bar is missed: float32
1.5x, uint8 5x on a CPU; 2x on CUDA.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gigamlp as gm
from gigamlp.measure.clock import clock_for
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.measure.timing import Throughput, throughput
from gigamlp.record import Record, Row

BARS = {"float32": 1.5, "uint8": 5.0, "cuda": 2.0}
HELD = 5000
Work = Callable[[], Any]


def trained_pipeline(args: argparse.Namespace, x: np.ndarray, y: np.ndarray) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    scaler = {"minmax": MinMaxScaler, "standard": StandardScaler}[args.scaler]()
    model = MLPClassifier((args.hidden,), max_iter=args.epochs, batch_size=256, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return make_pipeline(scaler, model).fit(x.astype(np.float32), y)


def differences(mlp: gm.MLP, x: np.ndarray, theirs: np.ndarray, ours: np.ndarray) -> dict[str, Any]:
    """Count the classes that differ, and say how near to a tie those rows are."""
    other = np.flatnonzero(theirs != ours)
    logits = mlp.reference_logits(x[: min(len(x), 10_000)])
    margin = np.diff(np.sort(logits, axis=1)[:, -2:])[:, 0]
    own = np.diff(np.sort(mlp.reference_logits(x[other]), axis=1)[:, -2:])[:, 0] if other.size else np.zeros(0)
    return {
        "rows": len(x),
        "differing": int(other.size),
        "largest_margin_of_those": float(own.max()) if own.size else None,
        "median_margin_of_all": float(np.median(margin)),
    }


class Table:
    """The rows of the record, and the comparisons."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.device, self.clock = args, device, clock_for(device)
        self.rows: list[Row] = []
        self.comparisons: list[dict[str, Any]] = []
        self.missed: list[str] = []

    def time(self, works: dict[str, Work]) -> dict[str, Throughput]:
        times = throughput(works, self.clock, repeats=self.args.repeats, min_s=self.args.min_s)
        for each in times.values():
            if not isinstance(each, Throughput):
                raise each
        return times  # type: ignore[return-value]

    def add(self, t: Throughput, **fields: Any) -> None:
        batch = fields["batch"]
        clock = snapshot(self.device).get("clock_mhz")
        row = Row(
            hidden=[self.args.hidden],
            samples_per_s=batch / t.wall_us * 1e6,
            wall_us=t.wall_us,
            device_us=t.device_us,
            iqr=t.iqr,
            clock_mhz=clock,
            **fields,
        )
        self.rows.append(row)
        print(
            f"{row.note:<52} {row.input_dtype:<8} {row.samples_per_s / 1e6:10.3f} M/s  IQR {t.iqr:.1f} us", flush=True
        )

    def compare(self, what: str, theirs: Throughput, ours: Throughput, bar: float, found: dict[str, Any]) -> None:
        ratio = theirs.wall_us / ours.wall_us
        self.comparisons.append({"what": what, "ratio": ratio, "bar": bar, **found})
        print(f"{what}: {ratio:.2f}x (bar {bar}x), {found}", flush=True)
        if ratio < bar:
            self.missed.append(f"{what}: {ratio:.2f}x, bar {bar}x")


def on_cpu(table: Table) -> None:
    args = table.args
    x_train, y_train, x_test, y_test = gm.data.load_mnist()
    pipeline = trained_pipeline(args, x_train[HELD:], y_train[HELD:])
    mlp = gm.from_sklearn(pipeline, name=f"sklearn-{args.hidden}")
    print(f"{mlp}: accuracy {np.mean(mlp.predict(x_test) == y_test):.4f}", flush=True)
    bytes_ = np.concatenate([x_test] * (-(-args.rows // len(x_test))))[: args.rows]
    labels = np.concatenate([y_test] * (-(-args.rows // len(y_test))))[: args.rows]
    held = (x_train[:HELD], y_train[:HELD])
    for dtype in ("float32", "uint8"):
        x = bytes_.astype(dtype)
        plan = gm.optimize(
            mlp,
            "cpu",
            batch=args.batch,
            input_dtype=dtype,
            validation=(held[0].astype(dtype), held[1]),
            calibration=x_train[HELD:],  # what the pipeline was trained with chooses the scales of integer codes
            max_disagreement=args.max_disagreement,
            cache=False,
        )
        print(plan.explain(), flush=True)
        (winner,) = plan.winners
        answers: dict[str, Any] = {}
        with gm.Session(mlp, plan) as session:
            works: dict[str, Work] = {
                "theirs": lambda x=x, a=answers: a.update(theirs=pipeline.predict(x)),  # type: ignore[misc]
                "ours": lambda x=x, a=answers, s=session: a.update(ours=s.predict(x)),  # type: ignore[misc]
            }
            times = table.time(works)
        about = {"batch": len(x), "residence": "host-pageable", "input_dtype": dtype, "output": "class"}
        for who, engine, variant, note in (
            ("theirs", "sklearn", "", f"pipeline.predict ({args.scaler} scaler)"),
            ("ours", winner.engine, winner.variant.label, f"Session.predict in batches of {winner.spec.batch:,}"),
        ):
            accuracy = float(np.mean(answers[who] == labels))
            fields = about | {"name": mlp.name, "engine": engine, "variant": variant, "note": note}
            table.add(times[who], **fields, accuracy=accuracy, features_read_bytes=784 * x.itemsize)
        found = differences(mlp, x, answers["theirs"], answers["ours"]) | {"engine": winner.engine}
        table.compare(f"{dtype} rows, Session over pipeline", times["theirs"], times["ours"], BARS[dtype], found)


def graphed(module: Any, x: Any) -> tuple[Work, Any]:
    """Return a replay of the module's forward on `x`, captured, and its output."""
    import torch

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                module(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x)
    return graph.replay, out


def on_cuda(table: Table) -> None:
    import torch
    from torch import nn

    args, batch = table.args, table.args.batch
    x_train, y_train, x_test, y_test = gm.data.load_mnist()
    mlp = gm.train.finetune(None, x_train[HELD:], y_train[HELD:], hidden=args.hidden, seed=0, device=table.device)
    module = gm.to_torch(mlp).half().to(table.device)
    again = gm.from_torch(gm.to_torch(mlp), name=f"torch-{args.hidden}")  # what a user has, brought in
    bytes_ = np.concatenate([x_test] * (-(-batch // len(x_test))))[:batch]
    labels = np.concatenate([y_test] * (-(-batch // len(y_test))))[:batch]
    x8 = torch.from_numpy(bytes_).to(table.device)
    x16 = x8.half()

    class Whole(nn.Module):
        def forward(self, x: Any) -> Any:
            return module(x.half()).argmax(1)

    replay, logits = graphed(module, x16)
    replay_whole, classes = graphed(Whole(), x8)
    plan = gm.optimize(
        again,
        table.device,
        batch=batch,
        input_dtype="uint8",
        validation=(x_train[:HELD], y_train[:HELD]),
        max_disagreement=args.max_disagreement,
        cache=False,
    )
    print(plan.explain(), flush=True)
    (winner,) = plan.winners
    answers: dict[str, Any] = {}
    with gm.Session(again, plan) as session:
        session.predict(x8)
        (bound,) = session._runners._bound.values()
        times = table.time(
            {
                "module, fp16 rows to logits": replay,
                "module, bytes to classes": replay_whole,
                "runner": lambda: answers.update(runner=bound.runner.run(x8)),
                "session": lambda: answers.update(session=session.predict(x8)),
            }
        )
        ours = session.predict(x8).cpu().numpy()
    theirs = logits.argmax(1).cpu().numpy()
    given = {
        "module, fp16 rows to logits": (theirs, "torch", "float16", "logits", 2),
        "module, bytes to classes": (classes.cpu().numpy(), "torch", "uint8", "class", 1),
        "runner": (ours, winner.engine, "uint8", "class", 1),
        "session": (ours, winner.engine, "uint8", "class", 1),
    }
    for who, (found, engine, dtype, output, size) in given.items():
        table.add(
            times[who],
            name=again.name,
            engine=engine,
            variant=winner.variant.label if engine == winner.engine else "fp16, CUDA graph",
            batch=batch,
            residence="hot",
            input_dtype=dtype,
            output=output,
            features_read_bytes=784 * size,
            accuracy=float(np.mean(found == labels)),
            note=who,
        )
    for who in ("module, fp16 rows to logits", "module, bytes to classes"):
        about = differences(again, bytes_, given[who][0], ours) | {"engine": winner.engine}
        table.compare(f"runner over {who}", times[who], times["runner"], BARS["cuda"], about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the comparison on a CPU")
    parser.add_argument("--batch", type=int, help="rows a run; default 4,096 on a CPU, 10,000 on CUDA")
    parser.add_argument("--scaler", choices=("minmax", "standard"), default="minmax")
    parser.add_argument("--epochs", type=int, default=20, help="of the pipeline's training")
    parser.add_argument("--max-disagreement", type=float, default=0.005, help="what the plan's gate lets through")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--min-s", type=float, default=0.2, help="seconds a repeat lasts at least")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = resolve_device(args.device)
    args.batch = args.batch or (4096 if device == "cpu" else 10_000)
    table = Table(args, device)
    (on_cpu if device == "cpu" else on_cuda)(table)
    if args.out is not None:
        command = " ".join(["python", *sys.argv])
        extra = {"comparisons": table.comparisons, "missed": table.missed, "max_disagreement": args.max_disagreement}
        own = {**versions()}
        if device == "cpu":
            import sklearn

            own["scikit-learn"] = sklearn.__version__
        Record(device_info(device), own, command, table.rows, extra).save(args.out)
    for line in table.missed:
        print(f"missed: {line}")
    return 1 if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
