"""Engine ``cuda_fused``: rows into tensor cores, every layer and the argmax in one kernel, made for the MLP.

How the kernel works, and what it computes with float rows, is in ``docs/kernels.md``; the integer arithmetic (scheme
``w8``) in ``docs/quantisation.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gigamlp.cascade import Cascade
from gigamlp.engines.base import Runner
from gigamlp.errors import DeviceError, InvalidInput, ModelError, Unsupported
from gigamlp.integer import RANGES
from gigamlp.kernels.cuda.compile import architecture, toolchain_problem
from gigamlp.kernels.cuda.driver import Gpu, driver_cuda, open_gpu
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP
from gigamlp.quantize import integer_form
from gigamlp.rounded import COMPUTES, rounded_form
from gigamlp.spec import Spec, Variant

if TYPE_CHECKING:
    from gigamlp.engines.cuda_mapped import MappedRunner
    from gigamlp.engines.cuda_runner import CudaFusedRunner, Program
    from gigamlp.kernels.cuda.compile import Cubin
    from gigamlp.kernels.cuda.paths import Config
    from gigamlp.kernels.cuda.shape import Form, Network
    from gigamlp.kernels.cuda.source import Generated

__all__ = ["CudaFused"]

# Above this many rows a launch costs nothing beside the run (2 us of some 20), with a graph or without.
_GRAPH_ROWS = 65_536
_SECOND = 3  # configurations to try of another way to multiply the same rows
# The kernel reads rows from host memory by itself in batches up to this; more are quicker copied (a guess, with room:
# what a Session uses is measured).
_MAPPED_ROWS = 4096
_CARRIED_BYTES = 4000  # of a kernel's arguments: 4,096 bytes, less the other ones
_DTYPES = {"class": ("uint8", "int32"), "margin": ("uint8", "int32"), "logits": ("float32", "float16")}


class CudaFused:
    """Run the MLP as one CUDA kernel, specialised to it and compiled by NVRTC when a runner is built.

    For uint8 and int8 rows the first layer is int8 (scheme ``w8``), later ones float16 with float32 sums. For float
    rows, and for bytes where weights must not be quantised, operands are rounded to a float format (`gigamlp.rounded`).
    Class ids are uint8, or int32 with ``dtype=int32``; logits float32, or float16 with ``dtype=float16``. Machine code
    is kept on disk, so that a network is compiled once (about a second a variant). Needs neither a CUDA compiler nor
    torch, but for bfloat16 rows, which NumPy does not have.

    Variants: ``path`` (how rows reach the tensor cores: direct, ring, window, split), ``tiles``, ``warps``, ``stages``,
    ``weights`` (see ``docs/kernels.md``), ``graph`` (whether runs on the static input replay a CUDA Graph), ``dtype``
    of the answers, ``compute`` (what the first layer is multiplied in: int8, float16, bfloat16, tf32; with ``x2`` each
    weight is a sum of two such numbers), ``overlap`` (whether a launch begins before the one before it has ended). A
    variant may name some of them only; the most promising one that has these is then run.

    With ``input_on="host"`` the kernel reads the rows from host memory itself and answers there, for up to 4,096 rows.
    Such variants have ``memory`` instead of ``graph``, ``dtype`` and ``compute``: ``cached`` or ``combined`` is how the
    CPU writes the rows, with ``launch`` they travel as an argument of the kernel (up to 4,000 bytes).
    """

    name = "cuda_fused"
    integer = True
    compiles = False
    cascades = True  # see `gigamlp.engines.cascades`

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        try:
            _open(device)
        except Unsupported as error:
            return error.reason
        return None

    def variants(self, mlp: MLP | Cascade, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring, the most promising first. Raises `Unsupported` as `build` does."""
        if isinstance(mlp, Cascade):
            from gigamlp.engines.cuda_cascade import chains

            return [each.variant for each in chains(_open(spec.device), mlp, spec, full=full)]
        return [each.variant for each in _choices(_open(spec.device), mlp, spec, full)]

    def build(self, mlp: MLP | Cascade, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner; see `Engine.build`.

        Raises
        ------
        InvalidInput
            If `variant` names an option that does not exist.
        """
        from gigamlp.engines.cuda_runner import plain

        runner: Runner
        with stopwatch() as watch:
            gpu = _open(spec.device)
            if isinstance(mlp, Cascade):
                from gigamlp.engines.cuda_cascade import build_chain

                with plain(spec.device):
                    runner = build_chain(gpu, mlp, spec, variant)
            else:
                choice = _find(_choices(gpu, mlp, spec, full=variant is not None), variant)
                with plain(spec.device):
                    runner = _build(gpu, choice, spec)
        runner.build_s = watch.seconds
        return runner

    def compile_all(self, mlp: MLP | Cascade, spec: Spec, *, full: bool = False) -> Iterator[Cubin]:
        """Compile the code of every variant into the cache, one after the other, and yield it."""
        gpu, seen = _open(spec.device), set()
        if isinstance(mlp, Cascade):
            from gigamlp.engines.cuda_cascade import compile_chains

            yield from compile_chains(gpu, mlp, spec, full=full)
            return
        for choice in _choices(gpu, mlp, spec, full):
            if (key := (choice.network, choice.config, choice.host, choice.carried)) not in seen:
                seen.add(key)
                yield _compiled(gpu, choice)[1]


@dataclass(frozen=True)
class _Choice:
    """A variant, and what the kernel's generator makes of it."""

    variant: Variant
    form: Form
    network: Network
    config: Config
    host: bool = False
    carried: int = 0  # bytes of rows among the kernel's arguments


def _open(device: str) -> Gpu:
    """Return the GPU, or raise `Unsupported` with why the fused kernel cannot run on it."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise Unsupported("the fused kernel is CUDA code; it needs a CUDA device")
    problem = toolchain_problem()
    if problem is not None:
        raise Unsupported(problem)
    try:
        problem = toolchain_problem(driver_cuda())
        gpu = None if problem else open_gpu(int(index or 0))
    except DeviceError as error:
        raise Unsupported(str(error)) from error
    if gpu is None:
        raise Unsupported(str(problem))
    architecture(gpu.capability)
    return gpu


def _choices(gpu: Gpu, mlp: MLP, spec: Spec, full: bool) -> list[_Choice]:
    _refuse(mlp, spec)
    if spec.input_on == "host":
        return _host_choices(gpu, mlp, spec, full)
    if spec.input_dtype not in RANGES:
        return _float_choices(gpu, mlp, spec, full)
    try:
        out = _form_choices(gpu, integer_form(mlp, spec.input_dtype), spec, full)
    except ModelError as error:
        raise Unsupported(str(error)) from error
    except Unsupported as error:
        if mlp.scheme is not None:
            raise
        try:
            return _float_choices(gpu, mlp, spec, full)
        except Unsupported as other:
            reasons = dict.fromkeys((error.reason, other.reason))
            raise Unsupported("; ".join(reasons)) from other
    if mlp.scheme is None or full:  # an MLP with a scheme is meant to be integer
        try:
            out += _float_choices(gpu, mlp, spec, full, most=_SECOND)
        except Unsupported:  # the integer form does without, for example without float32's range of weights
            return out
    return out


def _float_choices(gpu: Gpu, mlp: MLP, spec: Spec, full: bool, most: int | None = None) -> list[_Choice]:
    computes = COMPUTES[spec.input_dtype]
    if not full and spec.input_dtype != "bfloat16":  # rounding weights to bfloat16 may or may not be good enough
        computes = computes[:1]
    later = "tf32" if gpu.capability >= (8, 0) else "float16"
    out: list[_Choice] = []
    for compute in computes:
        form = rounded_form(mlp, spec.input_dtype, compute, later)
        out += _form_choices(gpu, form, spec, full, most if not out else _SECOND)
    return out


def _form_choices(gpu: Gpu, form: Form, spec: Spec, full: bool, most: int | None = None) -> list[_Choice]:
    from gigamlp.kernels.cuda.paths import configs
    from gigamlp.kernels.cuda.shape import network_of

    dtypes = _DTYPES.get(spec.output, ("float32",))
    graphs = (True, False) if full or spec.batch <= _GRAPH_ROWS else (False,)
    out = []
    for dtype in dtypes if full else dtypes[:1]:
        network = network_of(form, output=spec.output, dtype=dtype)
        found = configs(network, gpu.capability, gpu.shared_bytes, spec.batch, full=full)
        if most is not None and not full:
            found = found[:most]
        if not found:
            raise Unsupported(
                f"no form of the fused kernel fits {form.mlp!r} into {gpu.shared_bytes:,} bytes of shared memory"
            )
        for graph in graphs:
            for c in found:
                if graph and c.overlap:  # launches within one graph could overlap, its replays do not
                    continue
                options = {**asdict(c), "graph": graph, "dtype": dtype, "compute": network.compute}
                variant = Variant.from_json(options)
                out.append(_Choice(variant, form, network, c))
    return out


def _host_choices(gpu: Gpu, mlp: MLP, spec: Spec, full: bool) -> list[_Choice]:
    from gigamlp.kernels.cuda.paths import configs
    from gigamlp.kernels.cuda.shape import network_of

    if spec.input_dtype not in RANGES:
        raise Unsupported(
            f"the fused kernel reads bytes from host memory: rows must be uint8 or int8, not {spec.input_dtype}"
        )
    if spec.batch > _MAPPED_ROWS:
        raise Unsupported(
            f"the fused kernel reads rows from host memory in batches of up to {_MAPPED_ROWS:,}, not {spec.batch:,}; "
            "larger ones are copied to the device (input_on='device')"
        )
    try:
        integer = integer_form(mlp, spec.input_dtype)
    except ModelError as error:
        raise Unsupported(str(error)) from error
    network = network_of(integer, output=spec.output)
    found = configs(network, gpu.capability, gpu.shared_bytes, spec.batch, full=full)
    split = [c for c in found if c.path == "split" and not c.overlap]
    if not split:
        raise Unsupported(f"no form of the fused kernel reads rows of {integer.mlp!r} from host memory")
    out = []
    row_bytes = spec.batch * network.features
    memories = (
        {"cached": 0, "combined": 0}
        if row_bytes > _CARRIED_BYTES
        else {"launch": row_bytes, "cached": 0, "combined": 0}
    )
    for c in split if full else split[:2]:
        for memory, carried in memories.items():
            out.append(_Choice(Variant.from_json({**asdict(c), "memory": memory}), integer, network, c, True, carried))
    return out


def _refuse(mlp: MLP, spec: Spec) -> None:
    if spec.output in ("class", "margin") and mlp.head not in ("softmax", "sigmoid"):
        raise Unsupported(f"head {mlp.head!r} has no single class per row; ask for logits")
    if spec.output == "proba" and mlp.head == "regression":
        raise Unsupported("head 'regression' has no probabilities; ask for logits")


def _find(choices: Sequence[_Choice], variant: Variant | None) -> _Choice:
    """Return the first choice that has all the options that `variant` names."""
    asked = {} if variant is None else variant.to_json()
    known = choices[0].variant.to_json()
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise InvalidInput(f"unknown options {', '.join(unknown)}; known: {', '.join(known)}")
    # a Plan's variant is for one output; asked for another (logits of a plan for classes), its dtype means nothing
    dtypes = _DTYPES.get(choices[0].network.output, ("float32",))
    if asked.get("dtype") in {"float32"}.union(*_DTYPES.values()) - set(dtypes):
        del asked["dtype"]
    for choice in choices:
        if asked.items() <= choice.variant.to_json().items():
            return choice
    forms = dict.fromkeys(choice.config.label for choice in choices)
    raise Unsupported(
        f"no form of the fused kernel is {Variant.from_json(asked).label!r} for this network and batch; there are: "
        f"{'; '.join(forms)}, each with graph=yes and graph=no"
    )


def _compiled(gpu: Gpu, choice: _Choice) -> tuple[Generated, Cubin]:
    from gigamlp.kernels.cuda.cache import cubin_for
    from gigamlp.kernels.cuda.source import generate

    made = generate(choice.network, choice.config, packets=choice.host, carried=choice.carried)
    return made, cubin_for(made.source, architecture(gpu.capability))


def _build(gpu: Gpu, choice: _Choice, spec: Spec) -> CudaFusedRunner | MappedRunner:
    from gigamlp.engines.cuda_mapped import MappedRunner
    from gigamlp.engines.cuda_runner import CudaFusedRunner, open_torch

    if choice.host:
        return MappedRunner(_program(gpu, choice), spec, choice.variant)
    if spec.input_dtype == "bfloat16" and open_torch() is None:
        raise Unsupported("NumPy has no bfloat16: a runner for such rows needs torch with CUDA")
    return CudaFusedRunner(_program(gpu, choice), spec, choice.variant)


def _program(gpu: Gpu, choice: _Choice) -> Program:
    from gigamlp.engines.cuda_runner import load

    return load(gpu, *_compiled(gpu, choice), choice.form)
