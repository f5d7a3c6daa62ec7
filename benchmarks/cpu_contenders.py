"""The contenders of `fused_cpu.py`, each in a process of its own: their networks, how they are tuned, run and timed.

A worker holds one contender and one library's thread pool. It waits on a pipe; the parent visits the workers in turn,
so that only one computes at a time.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import gigamlp as gm
from gigamlp.engines.registry import engine as get_engine
from gigamlp.engines.registry import engine_names
from gigamlp.errors import Unsupported
from gigamlp.measure.clock import HostClock
from gigamlp.measure.timing import latency
from gigamlp.spec import Spec, Variant

REFERENCE = Path(__file__).parent.parent / "tests" / "data_files" / "reference_int8.npz"
REFERENCE_512 = Path(__file__).parent / "data_files" / "reference_int8_512.npz"
CHUNKS = (250, 1000, 2500, 10_000)  # for engines that take a batch as it comes
COMPILED_CHUNKS = (2500, 10_000)  # each is compiled, for ten seconds or so
WINDOW = tuple((28 * row + 4, 28 * row + 24) for row in range(4, 24))  # the central 20 x 20 pixels
CLOCK = HostClock()

Pass = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Contender:
    """One way to classify rows. `options` select among the engine's variants; the best of what is left runs."""

    name: str
    kind: str = "engine"
    engine: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    scheme: str | None = None
    window: bool = False
    single_row: bool = False  # takes part in the table of single rows

    @property
    def ours(self) -> bool:
        """Whether it is ours: the ratios are those of ours to the best of the others."""
        return self.engine == "cpu_fused"


def _int8(engine: str, hidden: str) -> dict[str, Any]:
    scheme = "w8a8" if hidden == "scheme" else "w8"
    return {"engine": engine, "options": {"compute": "int8", "hidden": hidden}, "scheme": scheme}


CONTENDERS = (
    Contender("cpu_fused", engine="cpu_fused", options={"scheme": "w8a8"}, scheme="w8a8", single_row=True),
    Contender("cpu_fused w8", engine="cpu_fused", options={"scheme": "w8"}, scheme="w8"),
    Contender("cpu_fused dense", engine="cpu_fused", options={"scheme": "w8a8", "zeros": "dense"}, scheme="w8a8"),
    Contender("cpu_fused avx2", engine="cpu_fused", options={"scheme": "w7", "isa": "avx2"}, scheme="w7"),
    Contender("cpu_fused 20x20", engine="cpu_fused", options={"scheme": "w8a8"}, scheme="w8a8", window=True),
    Contender("openvino int8", **_int8("openvino", "scheme")),
    Contender("openvino int8, float hidden", **_int8("openvino", "float")),
    Contender("openvino bfloat16", engine="openvino", options={"compute": "bfloat16"}),
    Contender("openvino float32", engine="openvino", options={"compute": "float32"}),
    Contender("onnxruntime int8 QDQ", **_int8("onnxruntime", "scheme"), single_row=True),
    Contender("onnxruntime int8 MatMulInteger", **_int8("onnxruntime", "float"), single_row=True),
    Contender("onnxruntime float32", engine="onnxruntime", options={"compute": "float32"}, single_row=True),
    Contender("torch oneDNN int8", kind="qlinear", scheme="w8a8"),
    Contender("torch eager bfloat16", engine="torch_eager", options={"compute": "bfloat16"}),
    Contender("torch eager float32", engine="torch_eager", options={"compute": "float32"}, single_row=True),
    Contender("torch compiled bfloat16", engine="torch_compile", options={"compute": "bfloat16"}),
    Contender("torch compiled float32", engine="torch_compile", options={"compute": "float32"}, single_row=True),
    Contender("numpy float32", engine="numpy", single_row=True),
    Contender("scikit-learn", kind="sklearn", single_row=True),
)


# ---- networks -------------------------------------------------------------------------------------------------------


def network(hidden: int, scheme: str | None = None, window: bool = False) -> gm.MLP:
    """Return the int8 reference network of that width, with what the scheme needs.

    The steps of the hidden values are the largest of 5,000 training rows / 255, a unit each. With a window the network
    is cut to the pixels there: its time is right, its accuracy is not, as it was not trained so.
    """
    with np.load(REFERENCE_512 if hidden == 512 else REFERENCE) as data:
        q, s, b1, w2, b2 = (data[f"h{hidden}.{key}"] for key in ("q", "s", "b1", "W2", "b2"))
    codes = q.T
    columns = None
    if window:
        columns = WINDOW
        codes = np.ascontiguousarray(np.concatenate([codes[:, a:b] for a, b in WINDOW], axis=1))
    name = f"784-{hidden}-10" + (" 20x20" if window else "")
    layers = [gm.Layer(codes * s[:, None], b1, "relu"), gm.Layer(w2.T, b2)]
    mlp = gm.MLP(layers, columns=columns, features=784, name=name)
    if scheme is None:
        return mlp
    arrays: dict[str, Any] = {} if scheme == "w7" else {"codes.0": codes, "scale.0": s}
    if scheme != "w8":
        x = mlp.read_columns(gm.data.load_mnist()[0][:5000]).astype(np.float32)
        h = np.maximum(x @ mlp.layers[0].weight.T + mlp.layers[0].bias, 0)
        arrays["hidden_scale.0"] = np.maximum(h.max(axis=0), 1e-6) / 255
    return mlp.with_(scheme=gm.Scheme(scheme, arrays))


# ---- passes: all rows once, class ids out ---------------------------------------------------------------------------


def candidates(who: Contender, mlp: gm.MLP, x: np.ndarray, threads: int) -> dict[str, Callable[[], Pass]]:
    """Return, by name, what builds each candidate pass over all of `x`."""
    if who.kind == "qlinear":
        return {f"chunk={c}": lambda c=c: qlinear_pass(mlp, x, threads, c) for c in CHUNKS if c <= len(x)}
    if who.kind == "sklearn":
        return {f"rows={dtype}": lambda dtype=dtype: sklearn_pass(mlp, x, dtype) for dtype in ("uint8", "float32")}
    found = {}
    for variant, batch in choices(who, mlp, len(x), threads):
        own = "" if variant.get("chunk") or batch == len(x) else f" batch={batch}"
        spec = spec_of(who, batch, threads)
        found[variant.label + own] = lambda v=variant, s=spec: engine_pass(who.engine, mlp, x, s, v)
    return found


def choices(who: Contender, mlp: gm.MLP, rows: int, threads: int) -> list[tuple[Variant, int]]:
    """Return the (variant, batch) worth trying: engines that cut a batch themselves get all rows at once."""
    if who.engine not in engine_names():
        raise Unsupported(f"this version has no engine {who.engine!r}")
    engine = get_engine(who.engine)
    reason = engine.unavailable("cpu")
    if reason is not None:
        raise Unsupported(reason)
    found = []
    for batch in sorted({min(c, rows) for c in (COMPILED_CHUNKS if engine.compiles else CHUNKS)}, reverse=True):
        variants = engine.variants(mlp, spec_of(who, batch, threads), full=not engine.compiles)
        mine = [v for v in variants if who.options.items() <= v.to_json().items()]
        found += [(v, batch) for v in (mine[:1] if engine.compiles else mine)]
        if who.engine in ("cpu_fused", "onnxruntime", "openvino"):
            break
    if not found:
        raise Unsupported(f"engine {who.engine!r} offers nothing with {who.options} on this machine")
    return found


def spec_of(who: Contender, batch: int, threads: int) -> Spec:
    """Return the Spec: NumPy's BLAS takes its threads from the environment, which the parent set."""
    return Spec("cpu", batch, threads=None if who.engine == "numpy" else threads)


def engine_pass(engine: str, mlp: gm.MLP, x: np.ndarray, spec: Spec, variant: Variant) -> Pass:
    if len(x) % spec.batch:
        raise Unsupported(f"{len(x)} rows are no multiple of {spec.batch}")
    first = get_engine(engine).build(mlp, spec, variant)
    parts: list[Any] = [x[b : b + spec.batch] for b in range(0, len(x), spec.batch)]
    if not isinstance(first.input, np.ndarray):
        import torch

        parts = [torch.from_numpy(part) for part in parts]
    bound = [first.bind(part) for part in parts]

    def run() -> np.ndarray:
        answers = [runner.run(runner.input) for runner in bound]
        return np.asarray(answers[0]) if len(answers) == 1 else answers  # type: ignore[return-value]

    return run


def qlinear_pass(mlp: gm.MLP, x: np.ndarray, threads: int, chunk: int) -> Pass:
    """OneDNN's int8 linear through torch's private operations: as quick as it gets from Python, undocumented."""
    import torch

    from gigamlp.engines.static_int8 import static_int8

    torch.set_num_threads(threads)
    ops: Any = torch.ops.onednn
    form = static_int8(mlp, "uint8", "scheme")
    layers = []
    for layer in form.layers:
        packed = ops.qlinear_prepack(torch.from_numpy(np.ascontiguousarray(layer.codes.T)), None)
        zeros = torch.zeros(layer.codes.shape[1], dtype=torch.int32)
        bias = torch.from_numpy(layer.bias.astype(np.float32))
        layers.append((packed, torch.from_numpy(layer.scale), zeros, bias, layer.out_scale is not None))
    parts = torch.from_numpy(x).split(chunk)
    out = torch.empty(len(x), dtype=torch.int64)
    outs = out.split(chunk)

    def run() -> np.ndarray:
        with torch.no_grad():
            for part, ids in zip(parts, outs, strict=True):
                h = part
                for packed, scale, zeros, bias, again in layers:
                    kind, post = (torch.uint8, "relu") if again else (torch.float32, "none")
                    h = ops.qlinear_pointwise(h, 1.0, 0, packed, scale, zeros, bias, 1.0, 0, kind, post, [], "")
                torch.argmax(h, dim=1, out=ids)
        return out.numpy()

    return run


def sklearn_pass(mlp: gm.MLP, x: np.ndarray, dtype: str) -> Pass:
    classifier = sklearn_classifier(mlp)
    return lambda: classifier.predict(x if dtype == "uint8" else x.astype(np.float32))


def sklearn_classifier(mlp: gm.MLP) -> Any:
    """A fitted MLPClassifier whose weights are replaced by those of `mlp`."""
    from sklearn.neural_network import MLPClassifier

    rng = np.random.default_rng(0)
    made = MLPClassifier(mlp.hidden, max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(rng.random((mlp.outputs * 2, mlp.features), np.float32), np.arange(mlp.outputs * 2) % mlp.outputs)
    made.coefs_ = [np.ascontiguousarray(layer.weight.T) for layer in mlp.layers]
    made.intercepts_ = [np.asarray(layer.bias) for layer in mlp.layers]
    return made


def single_row(who: Contender, mlp: gm.MLP, x: np.ndarray, threads: int) -> tuple[str, Callable[[], int]]:
    """Return what takes the next row as uint8 [784] in NumPy and gives its class as a Python int."""
    rows = itertools.cycle([np.ascontiguousarray(row) for row in x[:1000]])
    if who.kind == "sklearn":
        classifier = sklearn_classifier(mlp)
        return "predict", lambda: int(classifier.predict(next(rows)[None])[0])
    (variant, _), *_ = choices(who, mlp, 1, threads)
    if who.ours and hasattr(gm.Session, "predict_one"):
        session: Any = gm.Session(mlp, device="cpu", engine=who.engine, variant=variant, batch=1, threads=threads)
        return f"Session.predict_one {variant.label}", lambda: int(session.predict_one(next(rows)))
    runner = get_engine(who.engine).build(mlp, spec_of(who, 1, threads), variant)
    if isinstance(runner.input, np.ndarray):
        return variant.label, lambda: int(runner.run(next(rows)[None])[0])
    import torch

    return variant.label, lambda: int(runner.run(torch.from_numpy(next(rows))[None])[0])


# ---- the worker -----------------------------------------------------------------------------------------------------


class Worker:
    """What one process holds: the data, and the pass that won."""

    def __init__(self, who: Contender, threads: int) -> None:
        self.who, self.threads = who, threads
        _, _, x, self.y = gm.data.load_mnist()
        dense = np.random.default_rng(5).integers(0, 256, x.shape, dtype=np.uint8)
        self.data = {"mnist": np.ascontiguousarray(x), "dense": dense}
        self.run: Pass | None = None

    def prepare(self, hidden: int, data: str) -> dict[str, Any]:
        """Try every candidate, keep the quickest; say which, and how right its answers are."""
        self.run = None
        mlp, x = network(hidden, self.who.scheme, self.who.window), self.data[data]
        tried = {}
        best = math.inf
        for label, build in candidates(self.who, mlp, x, self.threads).items():
            run = build()
            run()
            tried[label] = seconds = min(self._time(run, 0.03) for _ in range(3))
            if seconds < best:
                best, self.run, chosen = seconds, run, label
        assert self.run is not None
        answers = self.run()
        ids = np.concatenate([np.asarray(a) for a in answers]) if isinstance(answers, list) else np.asarray(answers)
        told = {"variant": chosen, "macs": mlp.macs, "first": mlp.layers[0].weight.size, "read": mlp.features_read}
        float32 = network(hidden, None, self.who.window).predict(x)
        told["disagreement"] = float(np.mean(ids != float32))
        told["accuracy"] = float(np.mean(ids == self.y)) if data == "mnist" and not self.who.window else None
        told["rows"] = len(x)
        told["tried_us"] = {label: seconds * 1e6 for label, seconds in tried.items()}
        return told

    def visit(self, min_s: float) -> float:
        """Return seconds of one pass, over at least `min_s`; what is cold after the wait is warmed first."""
        assert self.run is not None
        self.run()
        return self._time(self.run, min_s)

    @staticmethod
    def _time(run: Pass, min_s: float) -> float:
        count, begin = 0, CLOCK.now()
        while CLOCK.now() - begin < min_s:
            run()
            count += 1
        return (CLOCK.now() - begin) / count

    def prepare_row(self, hidden: int) -> str:
        """Build what answers a single row."""
        mlp = network(hidden, self.who.scheme, self.who.window)
        label, self.row = single_row(self.who, mlp, self.data["mnist"], self.threads)
        return label

    def visit_row(self, calls: int) -> dict[str, Any]:
        """Return the times of single calls, timer included, and of one in a loop of a thousand."""
        found = latency(self.row, CLOCK, calls=calls, budget_s=1.0)
        begin = CLOCK.now()
        for _ in range(1000):
            self.row()
        loop = (CLOCK.now() - begin) / 1000 * 1e6
        return {"p50_us": found.p50_us, "p99_us": found.p99_us, "loop_us": loop}

    def roofs(self) -> dict[str, Any]:
        """Return this machine's limits with that many threads; the native extension's own probe where there is one."""
        import torch

        from gigamlp.engines.probes import measure_roofs

        torch.set_num_threads(self.threads)
        found = measure_roofs("cpu").to_json()
        return {**found, "native_int8_macs_s": native_peak(self.threads)}


def native_peak(threads: int) -> float | None:
    """Return multiply-accumulates/s of int8 in registers, from ``gigamlp.kernels.cpu.peak_macs_s``, if it is there."""
    try:
        from gigamlp.kernels import cpu
    except ImportError:
        return None
    probe: Any = getattr(cpu, "peak_macs_s", None)
    return None if probe is None else float(probe(threads))


def serve(pipe: Connection, who: Contender, threads: int) -> None:
    """Answer (method, arguments) with (True, result) or (False, reason) until the pipe closes."""
    worker = Worker(who, threads)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, method)(*arguments)))
        except Exception as error:  # noqa: BLE001  a library may raise anything; the record's `skipped` shows it
            pipe.send((False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))
