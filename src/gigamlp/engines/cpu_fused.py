"""Engine ``cpu_fused``: our own native kernels; rows in, answers out, all layers of a block of rows in one pass.

How the kernels work is in ``docs/cpu.md``; the arithmetic of the schemes in ``docs/quantisation.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.byteform import BYTE_SCHEMES, ByteForm, byte_form
from gigamlp.cascade import Cascade
from gigamlp.engines.base import Spec, Unsupported, Variant
from gigamlp.engines.cascades import refuse_output
from gigamlp.engines.cpu_cascade import CpuCascadeRunner, cascade_variants, stage_variants, whole_variant
from gigamlp.errors import InvalidInput, ModelError
from gigamlp.integer import RANGES, Integer
from gigamlp.kernels.cpu.native import InstructionSet, best_set, instruction_set, instruction_sets, load, native_problem
from gigamlp.kernels.cpu.pack import ZEROS, pack
from gigamlp.measure.clock import stopwatch
from gigamlp.measure.cpuinfo import usable_cpus
from gigamlp.mlp import MLP
from gigamlp.quantize import integer_form

__all__ = ["CpuFused"]

Array = NDArray[Any]
_FLOATS = "float32"  # the scheme option of an MLP that is not quantised
_THREADED_MACS = 5_000_000  # a run of fewer takes less time than waking a thread (some 50 us)


class CpuFused:
    """Run an MLP with native code for this machine's instruction set.

    uint8 and int8 rows run in the MLP's scheme (``w8`` if it carries none) or in float32; float32 and float16 rows in
    float32. Class ids are int64.

    Variants: ``scheme`` (float32, w8, w8a8, w7), ``zeros`` (``dense``; ``skip`` leaves out groups of four bytes that
    are all 0; ``auto`` decides for each block of rows; the answers are the same), ``threads``, and ``isa``, the
    instruction set. A variant may name some of them only; the most promising one that has these is then run.
    """

    name = "cpu_fused"
    integer = True
    compiles = False
    cascades = True  # see `gigamlp.engines.cascades`

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        if device != "cpu":
            return "the native kernels run on the CPU only"
        return native_problem()

    @property
    def byte_schemes(self) -> tuple[str, ...]:
        """Schemes worth trying for an MLP that carries none, once its hidden ranges are known; see `optimize`.

        ``w7`` where products of 8-bit codes cost more than those of 7.
        """
        if native_problem() is not None:
            return ()
        return ("w8a8",) if best_set(7) == best_set(8) else ("w7", "w8a8")

    def variants(self, mlp: MLP | Cascade, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring, the most promising first. Raises `Unsupported` as `build` does."""
        if isinstance(mlp, Cascade):
            return list(cascade_variants(mlp, spec, lambda stage, own: list(self.variants(stage, own, full=full))))
        _refuse(mlp, spec)
        found = list(_variants(mlp, spec, full))
        for scheme in {str(each.get("scheme")) for each in found}:
            _form(mlp, scheme, spec.input_dtype)
        return found

    def build(
        self, mlp: MLP | Cascade, spec: Spec, variant: Variant | None = None
    ) -> CpuFusedRunner | CpuCascadeRunner:
        """Return a runner; see `Engine.build`.

        Raises
        ------
        InvalidInput
            If `variant` names an option or instruction set that does not exist.
        """
        if isinstance(mlp, Cascade):
            return self._build_cascade(mlp, spec, variant)
        with stopwatch() as watch:
            chosen, net = _network(mlp, spec, variant)
            x = np.zeros((spec.batch, mlp.features), spec.input_dtype)
            runner = CpuFusedRunner(mlp, spec, chosen, net, x)
        runner.build_s = watch.seconds
        return runner

    def _build_cascade(self, cascade: Cascade, spec: Spec, variant: Variant | None) -> CpuCascadeRunner:
        with stopwatch() as watch:
            refuse_output(spec)
            chosen = next(iter(self.variants(cascade, spec))) if variant is None else variant
            ways, nets = [], []
            for index, (stage, own) in enumerate(zip(cascade.stages, stage_variants(cascade, chosen), strict=True)):
                last = index == len(cascade.stages) - 1
                way, net = _network(stage, spec if last else replace(spec, output="margin"), own)
                ways.append(way)
                nets.append(net)
            x = np.zeros((spec.batch, cascade.features), spec.input_dtype)
            runner = CpuCascadeRunner(cascade, spec, whole_variant(ways), tuple(nets), x)
        runner.build_s = watch.seconds
        return runner


def _network(mlp: MLP, spec: Spec, variant: Variant | None) -> tuple[Variant, Any]:
    """Return the native network for `mlp`, and the variant that it is."""
    _refuse(mlp, spec)
    chosen = _find(mlp, spec, variant)
    scheme, zeros = str(chosen.get("scheme")), str(chosen.get("zeros"))
    isa = instruction_set(str(chosen.get("isa")))
    form = _form(mlp, scheme, spec.input_dtype)
    packed = pack(form, isa, input_dtype=spec.input_dtype, output=spec.output, zeros=zeros)
    net = load().Net(isa.name, packed.header, packed.blob, _labels(mlp))
    net.measure()
    return chosen, net


def _refuse(mlp: MLP, spec: Spec) -> None:
    if spec.device != "cpu":
        raise Unsupported("the native kernels run on the CPU only")
    problem = native_problem()
    if problem is not None:
        raise Unsupported(problem)
    if spec.input_dtype == "bfloat16":
        raise Unsupported("the native kernels read no bfloat16; float32 holds the same values")
    if spec.output in ("class", "margin") and mlp.head not in ("softmax", "sigmoid"):
        raise Unsupported(f"head {mlp.head!r} has no single class per row; ask for logits")
    if spec.output == "margin" and mlp.head == "softmax" and mlp.outputs < 2:
        raise Unsupported("one class has no margin")
    if spec.output == "proba" and mlp.head == "regression":
        raise Unsupported("head 'regression' has no probabilities; ask for logits")


def _schemes(mlp: MLP, spec: Spec) -> list[str]:
    if spec.input_dtype not in RANGES:
        return [_FLOATS]
    return ["w8" if mlp.scheme is None else mlp.scheme.name, _FLOATS]


def _threads(mlp: MLP, spec: Spec) -> list[int]:
    """Return the thread counts worth trying, the most promising first."""
    if spec.threads is not None:
        return [spec.threads]
    usable = usable_cpus()
    if usable == 1 or mlp.macs * spec.batch < _THREADED_MACS:
        return [1]
    return [usable, 1]


def _sets(scheme: str, full: bool) -> list[InstructionSet]:
    bits = 7 if scheme in ("w7", _FLOATS) else 8
    best = best_set(bits)
    here = [each for each in instruction_sets() if each.missing is None and each.bits >= bits]
    if full:
        return here
    # which of the two is quicker depends on the widths
    return [best, *(each for each in here if each.name == "amx" and scheme != _FLOATS)]


def _variants(mlp: MLP, spec: Spec, full: bool) -> Iterator[Variant]:
    for scheme in _schemes(mlp, spec):
        skips = scheme != _FLOATS and spec.input_dtype == "uint8"
        ways = ("auto", "dense", "skip") if full else ("auto", "dense")
        for isa in _sets(scheme, full):
            for zeros in ways if skips and isa.skips else ("dense",):
                for threads in _threads(mlp, spec):
                    yield Variant.of(scheme=scheme, zeros=zeros, threads=threads, isa=isa.name)


def _find(mlp: MLP, spec: Spec, variant: Variant | None) -> Variant:
    """Return the first variant that has all the options that `variant` names."""
    asked = {} if variant is None else variant.to_json()
    known = ("scheme", "zeros", "threads", "isa")
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise InvalidInput(f"unknown options {', '.join(unknown)}; known: {', '.join(known)}")
    if asked.get("zeros", "auto") not in ZEROS:
        raise InvalidInput(f"zeros must be one of {', '.join(ZEROS)}, got {asked['zeros']!r}")
    if "isa" in asked:
        instruction_set(str(asked["isa"]))
    threads = asked.pop("threads", None)
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidInput(f"threads must be a whole number >= 1, got {threads!r}")
    for each in _variants(mlp, spec, full=True):
        options = each.to_json()
        if asked.items() <= options.items():
            return each if threads is None else Variant.from_json({**options, "threads": threads})
    raise Unsupported(f"the native kernels have no {Variant.from_json(asked).label!r} for this network and these rows")


def _form(mlp: MLP, scheme: str, input_dtype: str) -> Integer | ByteForm | MLP:
    """Return what `pack` takes for `mlp` in `scheme`."""
    try:
        if scheme == _FLOATS:
            return mlp
        if scheme in BYTE_SCHEMES:
            return byte_form(mlp, input_dtype)
        return integer_form(mlp, input_dtype)
    except (ModelError, InvalidInput) as error:
        raise Unsupported(str(error)) from error


def _labels(mlp: MLP) -> tuple[Any, ...] | None:
    """Return what a single row is answered with, by class id; None for the ids themselves."""
    if mlp.classes is None or mlp.head not in ("softmax", "sigmoid"):
        return None
    labels = mlp.classes.tolist()
    return None if labels == list(range(len(labels))) else tuple(labels)


class CpuFusedRunner:
    """A network packed for one instruction set, its input and answers."""

    engine = "cpu_fused"
    build_s = 0.0

    def __init__(self, mlp: MLP, spec: Spec, variant: Variant, net: Any, x: Array) -> None:
        self.spec, self.variant, self.input = spec, variant, x
        self._mlp, self._net = mlp, net
        self._threads = int(variant.get("threads"))
        self._margin = np.empty(spec.batch, np.float32) if spec.output == "margin" else None
        self._out: Array
        if spec.output in ("class", "margin"):
            self._out = np.empty(spec.batch, np.int64)
        else:
            width = 2 if spec.output == "proba" and mlp.head == "sigmoid" else mlp.outputs
            self._out = np.empty((spec.batch, width), np.float32)

    def run(self, x: Any) -> Any:
        """Return the answers for `x` [batch, features], rows at any distance from each other; see `Runner.run`."""
        net = self._net
        if net is None:
            raise InvalidInput("this runner is closed")
        rows = x if isinstance(x, np.ndarray) else np.asarray(x)
        if rows.shape != self.input.shape or rows.dtype != self.input.dtype:
            want, got = (f"{a.dtype} {list(a.shape)}" for a in (self.input, rows))
            raise InvalidInput(f"the runner takes an array {want}, got a {type(x).__name__} {got}")
        net.run(rows, self._out, self._margin, self._threads)
        return self._out if self._margin is None else (self._out, self._margin)

    def one(self, other: Callable[[Any], Any] | None = None) -> Any:
        """Return the native call that takes one row [features] and gives its label.

        A row of another type or length goes to `other`; without it that raises ValueError.
        """
        if self._net is None:
            raise InvalidInput("this runner is closed")
        if other is not None:
            self._net.set_other(other)
        return self._net.one

    def bind(self, x: Array) -> CpuFusedRunner:
        """Return a runner with the same weights whose static input is `x`."""
        return CpuFusedRunner(self._mlp, self.spec, self.variant, self._net, x)

    def close(self) -> None:
        """Free the weights and buffers."""
        self._net = None
        self.input = self._out = np.empty((0, 0), np.float32)
