"""A cascade as a chain of fused kernels: what a stage is unsure of, the next one picks up, and the host never waits.

Each stage but the last lists the rows that it is unsure of in device memory (a warp collects 32 before it asks for
their places), and the next stage, as many blocks as the GPU has room for, reads how many there are and takes them from
there. See ``docs/kernels.md``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gigamlp.cascade import Cascade
from gigamlp.engines.cascades import joined, refuse_output
from gigamlp.engines.cuda_runner import CudaFusedRunner, ManyBatches, Program, load, open_torch
from gigamlp.errors import InvalidInput, ModelError, Unsupported
from gigamlp.integer import RANGES
from gigamlp.kernels.cuda.cache import cubin_for
from gigamlp.kernels.cuda.compile import Cubin, architecture
from gigamlp.kernels.cuda.driver import Gpu, synchronize
from gigamlp.kernels.cuda.launch import Kernel
from gigamlp.kernels.cuda.memory import Buffer
from gigamlp.kernels.cuda.paths import Config, configs, listed_configs, sift_shared
from gigamlp.kernels.cuda.shape import Form, network_of
from gigamlp.kernels.cuda.source import Generated, generate
from gigamlp.mlp import MLP
from gigamlp.quantize import integer_form
from gigamlp.rounded import COMPUTES, rounded_form
from gigamlp.spec import Spec, Variant

__all__ = ["Chain", "ChainProgram", "CudaCascadeRunner", "build_chain", "chains", "compile_chains"]

_CELLS = 8  # u32 about a list, as in fused.cuh: where they are …
_WERE, _ALL, _RUNS = 2, 4, 6  # … the last two as u64
_MOST = 3  # ways of a stage that are worth measuring
_GRAPH_ROWS = 65_536  # above, launches cost nothing beside the run
_MOST_ROWS = 2**32 - 1  # a list has their numbers in 32 bits
_DTYPES = ("uint8", "int32")


@dataclass(frozen=True)
class Chain:
    """A variant of a cascade, and its stages as the kernel's generator makes them.

    Attributes
    ----------
    variant : Variant
    forms : tuple of Integer or Rounded
    made : tuple of Generated
    """

    variant: Variant
    forms: tuple[Form, ...]
    made: tuple[Generated, ...]


def chains(gpu: Gpu, cascade: Cascade, spec: Spec, *, full: bool = False) -> list[Chain]:
    """Return the chains worth measuring, the most promising first.

    Raises
    ------
    Unsupported
        If a stage does not fit the kernel, or the Spec asks for what chains do not do.
    """
    refuse_output(spec)
    if spec.input_on == "host":
        raise Unsupported("a cascade's kernels read rows from device memory, not from the host's")
    if spec.batch > _MOST_ROWS:
        raise Unsupported(f"a cascade takes up to {_MOST_ROWS:,} rows a batch on CUDA, not {spec.batch:,}")
    forms = tuple(_form(gpu, stage, spec) for stage in cascade.stages)
    last, out = len(forms) - 1, []
    for dtype in _DTYPES if full else _DTYPES[:1]:
        each: list[list[Generated]] = []
        for index, form in enumerate(forms):
            network = network_of(form, output=spec.output, dtype=dtype)
            find: Callable[..., tuple[Config, ...]] = listed_configs if index else configs
            shared = gpu.shared_bytes if index == last else sift_shared(gpu.shared_bytes)
            found = find(network, gpu.capability, shared, spec.batch, full=full)
            found = tuple(c for c in found if index or not c.overlap)
            if not found:
                raise Unsupported(
                    f"no form of the fused kernel fits stage {index}, {form.mlp!r}, into {shared:,} bytes"
                )
            each.append([generate(network, c, sift=index < last, gather=index > 0) for c in found])
        if not full:
            each = [own[:_MOST] for own in each]
        for graph in (True, False) if full or spec.batch <= _GRAPH_ROWS else (False,):
            out += [Chain(_variant(made, graph), forms, made) for made in _combined(each)]
    return out


def _combined(each: Sequence[Sequence[Generated]]) -> Iterator[tuple[Generated, ...]]:
    """Yield the first way of all stages, then one in which each stage differs, then all for the first two stages."""
    seen = set()
    ways = [(first, *(own[min(i, len(own) - 1)] for own in each[1:])) for i in range(len(each[1])) for first in each[0]]
    for made in ways:
        key = tuple(one.config for one in made)
        if key not in seen:
            seen.add(key)
            yield made


def _variant(made: Sequence[Generated], graph: bool) -> Variant:
    form = "+".join(one.config.label for one in made)
    compute = joined([one.network.compute for one in made])
    return Variant.of(cascade=len(made), form=form, graph=graph, dtype=made[0].network.dtype, compute=compute)


def _form(gpu: Gpu, mlp: MLP, spec: Spec) -> Form:
    """Return the stage in integers if its rows are bytes and it can be, else in floats."""
    if spec.input_dtype in RANGES:
        try:
            return integer_form(mlp, spec.input_dtype)
        except (ModelError, Unsupported) as error:
            if mlp.scheme is not None:
                raise Unsupported(str(error)) from error
    later = "tf32" if gpu.capability >= (8, 0) else "float16"
    return rounded_form(mlp, spec.input_dtype, COMPUTES[spec.input_dtype][0], later)


def compile_chains(gpu: Gpu, cascade: Cascade, spec: Spec, *, full: bool = False) -> Iterator[Cubin]:
    """Compile the code of all stages of all chains into the cache, one after the other, and yield it."""
    sources = [one.source for chain in chains(gpu, cascade, spec, full=full) for one in chain.made]
    for source in dict.fromkeys(sources):
        yield cubin_for(source, architecture(gpu.capability))


def build_chain(gpu: Gpu, cascade: Cascade, spec: Spec, variant: Variant | None) -> CudaCascadeRunner:
    """Return a runner of the first chain that has all the options that `variant` names.

    Raises
    ------
    InvalidInput
        If it names options that do not exist.
    Unsupported
        If there is no such chain.
    """
    if spec.input_dtype == "bfloat16" and open_torch() is None:
        raise Unsupported("NumPy has no bfloat16: a runner for such rows needs torch with CUDA")
    found = chains(gpu, cascade, spec)
    asked = {} if variant is None else variant.to_json()
    known = found[0].variant.to_json()
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise InvalidInput(f"unknown options {', '.join(unknown)}; a cascade has: {', '.join(known)}")
    chain = _first(found, asked)
    if chain is None:  # the full list is no longer one of the same combinations: both are looked through
        found = chains(gpu, cascade, spec, full=True)
        chain = _first(found, asked)
    if chain is None:
        forms = dict.fromkeys(str(each.variant.get("form")) for each in found)
        raise Unsupported(
            f"no chain of kernels is {Variant.from_json(asked).label!r} here; there are: {'; '.join(forms)}"
        )
    cubins = [cubin_for(one.source, architecture(gpu.capability)) for one in chain.made]
    stages = [load(gpu, *each) for each in zip(chain.made, cubins, chain.forms, strict=True)]
    return CudaCascadeRunner(ChainProgram(tuple(stages), cascade.thresholds), spec, chain.variant)


def _first(found: Sequence[Chain], asked: dict[str, Any]) -> Chain | None:
    return next((each for each in found if asked.items() <= each.variant.to_json().items()), None)


class _Launches:
    """The launches of all stages, one after the other. They share the arguments that a runner changes."""

    def __init__(self, launches: Sequence[Any]) -> None:
        self._launches = tuple(launches)
        self.kernel: Kernel = launches[0].kernel
        self.arguments = launches[0].arguments

    def __call__(self, stream: int) -> None:
        for launch in self._launches:
            launch(stream)


class ChainProgram:
    """The programs of a cascade's stages, with the lists and counters between them.

    Parameters
    ----------
    stages : tuple of Program
    thresholds : sequence of float
    rows : int
        Room for so many rows in each list; 0 for a program that is not to be launched.
    """

    overlap = False

    def __init__(self, stages: tuple[Program, ...], thresholds: Sequence[float], rows: int = 0) -> None:
        self.stages, self.thresholds = stages, tuple(thresholds)
        first = stages[0]
        self.gpu, self.features, self.row_bytes, self.outputs = (
            first.gpu,
            first.features,
            first.row_bytes,
            first.outputs,
        )
        self.alignment = max(stage.alignment for stage in stages)
        if rows:
            # a stage reads one list and writes another: two are enough for any number of stages
            self._lists = [Buffer(self.gpu, (rows,), np.uint32) for _ in range(min(2, len(thresholds)))]
            self._cells = Buffer.of(self.gpu, np.zeros((len(self.thresholds), _CELLS), np.uint32))

    def with_lists(self, rows: int) -> ChainProgram:
        """Return the same program with lists and counters of its own, for batches of `rows` rows."""
        return ChainProgram(self.stages, self.thresholds, rows)

    def stride_fits(self, row_stride: int) -> bool:
        """Return whether all stages read rows `row_stride` bytes apart."""
        return all(stage.stride_fits(row_stride) for stage in self.stages)

    def launch(self, rows: int, x: tuple[int, int], outs: Sequence[int], table: int = 0, batches: int = 1) -> _Launches:
        """Return the launches for `rows` rows, as `Program.launch`; there is no table."""
        if table or batches != 1:
            raise Unsupported("a cascade runs one batch at a time")
        shared = self.stages[0].arguments(rows, x, outs)
        launches = []
        for index, stage in enumerate(self.stages):
            own = [*shared[:2], ctypes.c_void_p(stage.weights.pointer), *shared[3:]]
            if index:
                own += self._between(index - 1)
            if index < len(self.thresholds):
                own += [*self._between(index), ctypes.c_float(self.thresholds[index])]
            launches.append(stage.launch_with(own, rows))
        return _Launches(launches)

    def _between(self, index: int) -> list[Any]:
        """Return the arguments for the list between stages `index` and `index` + 1, and its counters."""
        cells = self._cells.pointer + 4 * _CELLS * index
        return [ctypes.c_void_p(self._lists[index % 2].pointer), ctypes.c_void_p(cells)]

    def counters(self) -> np.ndarray[Any, Any]:
        """Return the counters, uint32 [stages - 1, 8], after all work of the device has ended."""
        synchronize(self.gpu)
        return self._cells.numpy()


class CudaCascadeRunner(CudaFusedRunner):
    """Runs a cascade's kernels, one for each stage, one after the other on one stream: see `CudaFusedRunner`.

    Attributes
    ----------
    totals : tuple of int
        The rows of all runs so far, and how many of them went on from each stage but the last. Reading it waits for the
        device.
    unsure : tuple of int
        How many rows of the last run went on from each stage but the last. Reading it waits for the device.
    """

    partial = False

    def __init__(self, program: Any, spec: Spec, variant: Variant, x: Any = None) -> None:
        super().__init__(program.with_lists(spec.batch), spec, variant, x)

    @property
    def totals(self) -> tuple[int, ...]:
        """See the class."""
        cells = self._open_program().counters()
        wide = np.ascontiguousarray(cells[:, _ALL:]).view(np.uint64)
        return (int(wide[0, 1]) * self.spec.batch, *(int(count) for count in wide[:, 0]))

    @property
    def unsure(self) -> tuple[int, ...]:
        """See the class."""
        return tuple(int(count) for count in self._open_program().counters()[:, _WERE])

    def bind_many(self, xs: Sequence[Any]) -> ManyBatches:
        """Refuse: a cascade runs one batch at a time."""
        raise Unsupported("a cascade runs one batch at a time; put the batches into one, or bind a runner to each")

    def _open_program(self) -> ChainProgram:
        program: ChainProgram = self._program  # type: ignore[assignment]
        return program
