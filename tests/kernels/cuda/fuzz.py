"""Random networks through the fused kernel's own text on the host, against the integer reference, until time is up.

    python -m tests.kernels.cuda.fuzz --seconds 600 [--seed N]

Each round draws a network (any depth, widths, activations, head, columns; plain, wild, tiny and tied weights), one of
the configurations that `configs` gives for a random GPU, and batches of awkward sizes. Answers must lie within a bound
that follows the roundings layer by layer. A failure prints the seed that brings it back.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass

import numpy as np

import gigamlp as gm
from gigamlp.errors import GigaMLPError
from gigamlp.integer import Integer
from gigamlp.kernels.cuda.pack import pack
from gigamlp.kernels.cuda.paths import Config, configs
from gigamlp.kernels.cuda.shape import Network, network_of
from gigamlp.kernels.cuda.source import generate
from gigamlp.quantize import integer_form
from tests.kernels.cuda.host import HostKernel

__all__ = ["Draw", "bound", "draw", "play"]

FEATURES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 100, 112, 127, 128, 144, 256, 300, 784)
WIDTHS = (1, 2, 7, 8, 9, 10, 15, 16, 17, 24, 33, 40, 64, 127, 128)
ROWS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 101)
ACTIVATIONS = ("relu", "identity", "tanh", "logistic", "gelu", "gelu_tanh", "silu")
OUTPUTS = {
    "softmax": ("logits", "logits", "class", "margin", "proba"),
    "sigmoid": ("logits", "class", "margin", "proba"),
    "multilabel": ("logits", "proba"),
    "regression": ("logits",),
}
GPUS = (((7, 5), 65_536), ((8, 0), 166_912), ((9, 0), 232_448), ((9, 0), 232_448), ((12, 0), 101_376))


@dataclass(frozen=True)
class Draw:
    """What one seed gives."""

    integer: Integer
    network: Network
    config: Config
    arch: int
    batches: tuple[np.ndarray, ...]
    stride: int
    late: bool

    def __str__(self) -> str:
        n = self.network
        return (
            f"{n.features}[{n.columns[0][0]}:{n.columns[-1][1]}]-{n.hidden}-{'-'.join(map(str, n.later))} "
            f"{','.join(n.activations)} {n.head} {n.output} {n.dtype} signed={n.signed} {self.config.label} "
            f"sm_{self.arch // 10} rows {[len(x) for x in self.batches]} stride {self.stride} late={self.late}"
        )


def draw(seed: int, gpu: tuple[tuple[int, int], int] | None = None) -> Draw | None:
    """Return what `seed` gives, or None if gigamlp refuses it; `gpu` = (capability, shared memory), else any."""
    rng = np.random.default_rng(seed)
    mlp = _mlp(rng)
    rows = str(rng.choice(["uint8", "int8"]))
    output = str(rng.choice(OUTPUTS[mlp.head]))
    dtype = {"class": "int32", "margin": "int32", "logits": "float16"}.get(output) if rng.random() < 0.3 else None
    capability, shared = gpu or GPUS[rng.integers(len(GPUS))]
    try:
        integer = integer_form(mlp, rows)
        network = network_of(integer, output, dtype)
        found = configs(network, capability, shared, int(rng.choice([100, 10_000, 1 << 20])), full=True)
    except GigaMLPError:
        return None
    if not found:
        return None
    path = rng.choice(sorted({each.path for each in found}))
    found = tuple(each for each in found if each.path == path)
    config = found[rng.integers(len(found))]
    made = generate(network, config)
    counts = [int(c) for c in rng.choice(ROWS, rng.integers(1, 4))]
    if len(counts) == 1:
        counts[0] = max(1, counts[0])
    batches = tuple(_rows(rng, mlp, count, rows) for count in counts)
    stride = network.features + int(rng.integers(0, 4)) * network.align
    if not made.stride_fits(stride):
        stride = network.features
    arch = capability[0] * 100 + capability[1] * 10
    return Draw(integer, network, config, arch, batches, stride, bool(rng.integers(2)))


def _mlp(rng: np.random.Generator) -> gm.MLP:
    features = int(rng.choice(FEATURES)) if rng.random() < 0.8 else int(rng.integers(1, 1200))
    columns = None
    if features > 2 and rng.random() < 0.4:
        count = 2 * int(rng.integers(1, min(3, features // 2) + 1))
        cuts = sorted(int(c) for c in rng.choice(features + 1, count, replace=False))
        if rng.random() < 0.3:
            cuts[-1] = features  # a window at the very end
        columns = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a < b]
        columns = columns or None
    read = features if columns is None else sum(b - a for a, b in columns)
    head = str(rng.choice(["softmax", "softmax", "softmax", "sigmoid", "multilabel", "regression"]))
    widths = [int(w) for w in rng.choice(WIDTHS, rng.integers(1, 6))]
    if head == "sigmoid":
        widths[-1] = 1
    kind = str(rng.choice(["plain", "wild", "tied", "huge", "tiny"]))
    layers, inputs = [], read
    for index, width in enumerate(widths):
        weight = rng.normal(size=(width, inputs)) / np.sqrt(inputs) / (70 if index == 0 else 1)
        bias = 0.3 * rng.normal(size=width)
        if kind == "wild":
            weight *= np.exp(2 * rng.normal(size=weight.shape))
        elif kind == "tied":
            weight, bias = np.round(weight * 4) / 4, np.round(bias)
            if index == len(widths) - 1:
                weight[:] = weight[0]
                bias[:] = np.round(rng.choice([-3.0, 0.0, 2.0], width))
        elif kind == "huge":
            weight, bias = weight * 50, bias * 1000
        elif kind == "tiny":
            weight *= 0.01
        activation = str(rng.choice(ACTIVATIONS, p=[0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]))
        if index == len(widths) - 1 and rng.random() < 0.8:
            activation = "identity"
        layers.append(gm.Layer(weight, None if rng.random() < 0.2 else bias, activation))
        inputs = width
    offset = float(rng.choice([0.0, -33.4]))
    return gm.MLP(layers, head=head, columns=columns, features=features, input_offset=offset)


def _rows(rng: np.random.Generator, mlp: gm.MLP, count: int, dtype: str) -> np.ndarray:
    x = rng.integers(0, 256, (count, mlp.features), np.uint8)
    if rng.random() < 0.2:
        x[:] = rng.choice(np.array([0, 127, 128, 255], np.uint8))  # sums at their ends
    return x.view(dtype)


def bound(integer: Integer, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the reference's logits [n, outputs] and how far float32 sums in any order may be from each."""
    h = integer.reference_hidden(x).astype(np.float64)
    exact = integer.activation in ("relu", "identity")
    error = np.zeros_like(h) if exact else np.abs(h) * 4e-6 + 1e-6
    for layer in integer.layers:
        weight = layer.weight.astype(np.float16).astype(np.float64)
        rounded = h.astype(np.float32).astype(np.float16).astype(np.float64)
        # where the operand may be another number, it may round to the float16 beside
        moved = np.where(error > 0, error + np.abs(h) * 2.0**-10 + 2.0**-24, 0.0)
        z = rounded @ weight.T + layer.bias
        magnitude = np.abs(rounded) @ np.abs(weight).T + np.abs(layer.bias)
        error = 1.2 * (moved @ np.abs(weight).T + magnitude * weight.shape[1] * 2.0**-23 + 1e-30)
        h = gm.activations.apply_activation(layer.activation, z.astype(np.float32)).astype(np.float64)
        if layer.activation not in ("relu", "identity"):
            error += np.abs(z) * 4e-6 + 1e-6
    return integer.reference_logits(x), error


def check(d: Draw, x: np.ndarray, got: object) -> None:
    """Assert that `got` may be the kernel's answer for rows `x`."""
    network, mlp = d.network, d.integer.mlp
    want, error = bound(d.integer, x)
    if network.output == "logits":
        assert got.dtype == network.dtype
        seen = got.astype(np.float64)
        if network.dtype == "float16":
            error = error + np.abs(want) * 2.0**-10 + 2.0**-24
            beyond = np.abs(want) + error >= 65_504
            seen = np.where(beyond, want, seen)
        assert (np.abs(seen - want) <= error).all(), np.abs(seen - want).max()
        return
    near = error.max(axis=1, initial=0)
    if network.output == "proba":
        assert got.dtype == np.float32
        assert np.isfinite(got).all()
        assert (np.abs(got - mlp.probabilities(want)).max(axis=1, initial=0) <= 2 * near + 2e-6).all()
        return
    ids, margin = got if network.output == "margin" else (got, None)
    assert ids.dtype == network.dtype
    right = mlp.class_ids(want)
    if mlp.head == "sigmoid":
        gap = np.abs(want[:, 0])
    else:
        top = np.sort(want, axis=1)
        gap = top[:, -1] - top[:, -2] if mlp.outputs > 1 else np.full(len(x), np.inf)
    clear = gap > 2 * near
    assert (ids[clear] == right[clear]).all()
    assert (ids < max(2, mlp.outputs)).all()
    same = (want == want[:, :1]).all(axis=1) & (mlp.head == "softmax") & (mlp.outputs > 1)
    tied = same & np.array(_same_sums(d.integer))
    assert (ids[tied] == 0).all()
    if margin is not None:
        both = np.isinf(gap) & np.isinf(margin)
        assert (both | (np.abs(margin - np.where(both, 0, gap)) <= 2 * near + 1e-6)).all()


def _same_sums(integer: Integer) -> bool:
    """Whether all outputs are computed from the very same numbers, so that they tie bit for bit."""
    if not integer.layers:
        return bool((integer.codes == integer.codes[:1]).all() and (integer.scale == integer.scale[0]).all())
    last = integer.layers[-1]
    return bool((last.weight == last.weight[:1]).all() and (last.bias == last.bias[0]).all())


def play(seed: int, folder: str) -> str | None:
    """Run one seed; return what it was, or None if there is nothing to run. Raises AssertionError if it fails."""
    d = draw(seed)
    if d is None:
        return None
    try:
        kernel = HostKernel(generate(d.network, d.config), folder, arch=d.arch)
        packed = pack(d.integer, d.network, d.config.wide)
        for x, got in zip(d.batches, kernel(packed, list(d.batches), stride=d.stride, late=d.late), strict=True):
            check(d, x, got)
    except Exception as error:
        error.add_note(f"seed {seed}: {d}")
        raise
    return str(d)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, seed, played, failed = time.monotonic() + options.seconds, options.seed, 0, 0
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            try:
                played += play(seed, folder) is not None
            except Exception as error:  # noqa: BLE001  a fuzzer reports and goes on
                failed += 1
                print(f"FAILED {error} {getattr(error, '__notes__', '')}", flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {played} networks ran, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
