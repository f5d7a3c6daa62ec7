"""CUDA C++ to machine code through NVRTC: no compiler, no torch and no GPU are needed, only the extra's packages."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gigamlp.errors import Unsupported
from gigamlp.kernels.cuda.nvidia import core, nvidia

__all__ = [
    "MINIMUM_CAPABILITY",
    "OPTIONS",
    "Cubin",
    "Resources",
    "architecture",
    "compile_cubin",
    "nvrtc_version",
    "parse_resources",
    "toolchain_problem",
]

MINIMUM_CAPABILITY = (7, 5)  # the first with integer tensor cores
OPTIONS = ("std=c++17", "ptxas=-v")  # part of the cache key, in the words of `_program_options`
# what 9.0 alone has (bulk copies are plain sm_90; wgmma is not): binary code named so runs on exactly that capability
_EXACT = {(9, 0): "sm_90a"}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, as ptxas reports it.

    Attributes
    ----------
    registers : int
        Per thread.
    stack_bytes, spill_bytes : int
        Local memory per thread, and how much of it the spilled registers' stores and loads move. Both are 0 for a
        kernel that keeps everything in registers.
    shared_bytes : int
        Static shared memory per block.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture.

    Attributes
    ----------
    image : bytes
        The ELF file that the driver loads.
    arch : str
        For example ``"sm_90a"``.
    log : str
        What NVRTC and ptxas said.
    """

    image: bytes
    arch: str
    log: str

    def resources(self, kernel: str) -> Resources:
        """Return what `kernel` takes, read from the log."""
        return parse_resources(self.log, kernel)


def toolchain_problem(driver_cuda: tuple[int, int] | None = None) -> str | None:
    """Return why kernels cannot be compiled here, with the way to change that, or None.

    Parameters
    ----------
    driver_cuda : (major, minor), optional
        The CUDA version of the driver that is to load the code. Its major version must be at least NVRTC's.
    """
    extra = "cuda13" if driver_cuda is None or driver_cuda[0] >= 13 else "cuda12"
    install = f"pip install 'gigamlp[{extra}]'"
    missing = [name for name, module in (("cuda-core", "cuda.core"), ("cuda-bindings", "cuda.bindings")) if _no(module)]
    if missing:
        return f"{' and '.join(missing)} not installed; get what the fused engine needs with: {install}"
    try:
        found = nvrtc_version()
    except Unsupported as error:
        return f"{error.reason}; get it with: {install}"
    if driver_cuda is not None and found[0] > driver_cuda[0]:
        return (
            f"NVRTC {found[0]}.{found[1]} makes code that the driver (CUDA {driver_cuda[0]}.{driver_cuda[1]}) cannot "
            f"load; update the driver, or install what fits it: {install}"
        )
    return None


def _no(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:  # the parent package is missing
        return True


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC library that is found here.

    Raises
    ------
    Unsupported
        If there is none, or it does not load.
    """
    try:
        nvrtc = nvidia("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:  # cuda-pathfinder's "not found" is a RuntimeError
        raise Unsupported(f"the CUDA run-time compiler NVRTC cannot be loaded ({_first_line(error)})") from error
    if int(status):
        raise Unsupported(f"the CUDA run-time compiler NVRTC does not answer ({status!r})")
    return int(major), int(minor)


def _supported() -> tuple[int, ...]:
    nvrtc = nvidia("cuda.bindings.nvrtc")
    status, found = nvrtc.nvrtcGetSupportedArchs()
    if int(status):
        raise Unsupported(f"NVRTC does not say which architectures it knows ({status!r})")
    return tuple(int(one) for one in found)


def architecture(capability: tuple[int, int], supported: tuple[int, ...] | None = None) -> str:
    """Return the architecture to compile for, so that the code runs on a GPU of `capability`.

    Binary code runs on its own major version with the same or a higher minor one. So a GPU that this NVRTC does not
    know yet gets code for the highest one below it.

    Parameters
    ----------
    capability : (major, minor)
    supported : tuple of int, optional
        Architectures as NVRTC numbers them (``90`` is 9.0); those of the NVRTC here if not given.

    Raises
    ------
    Unsupported
        If the GPU is too old for integer tensor cores, or NVRTC knows nothing that runs on it.

    Examples
    --------
    >>> architecture((9, 0), (75, 80, 90, 120)), architecture((8, 9), (75, 80, 86)), architecture((12, 0), (90, 120))
    ('sm_90a', 'sm_86', 'sm_120')
    """
    major, minor = capability
    if capability < MINIMUM_CAPABILITY:
        raise Unsupported(
            f"the GPU has compute capability {major}.{minor}; the fused kernel needs integer tensor cores, which come "
            "with 7.5 (Turing)"
        )
    known = _supported() if supported is None else supported
    fitting = [one for one in known if one // 10 == major and one % 10 <= minor]
    if not fitting:
        raise Unsupported(
            f"this NVRTC compiles for {', '.join(f'sm_{one}' for one in known)}, none of which runs on a GPU of "
            f"compute capability {major}.{minor}; update gigamlp's CUDA packages"
        )
    best = max(fitting)
    return _EXACT.get((best // 10, best % 10), f"sm_{best}") if best == major * 10 + minor else f"sm_{best}"


def compile_cubin(source: str, arch: str, name: str = "gigamlp.cu") -> Cubin:
    """Compile CUDA C++ `source` for `arch`.

    Parameters
    ----------
    source : str
    arch : str
        ``"sm_75"``, ``"sm_90a"``, …
    name : str
        What messages call the source.

    Raises
    ------
    Unsupported
        If NVRTC is missing, or refuses the source or the architecture; the message holds the first lines of its log.
    """
    problem = toolchain_problem()
    if problem is not None:
        raise Unsupported(problem)
    cuda = core()
    log = io.StringIO()
    try:
        program = cuda.Program(source, "c++", _program_options(cuda, arch, name))
        code = program.compile("cubin", logs=log).code
    except Exception as error:  # cuda-core raises a class per release; all mean that there is no code
        detail = " / ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise Unsupported(f"NVRTC cannot compile the fused kernel for {arch}: {detail[:600]}") from error
    return Cubin(bytes(code), arch, log.getvalue().replace("\0", "").strip())


def _program_options(cuda: Any, arch: str, name: str) -> Any:
    return cuda.ProgramOptions(name=name, arch=arch, std="c++17", ptxas_options=["-v"])


def parse_resources(log: str, kernel: str) -> Resources:
    """Read what `kernel` takes from the words of ``ptxas -v``.

    Raises
    ------
    Unsupported
        If the log does not speak of that kernel.

    Examples
    --------
    >>> log = '''ptxas info    : Compiling entry function 'k' for 'sm_90a'
    ... ptxas info    : Function properties for k
    ... ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
    ... ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem'''
    >>> parse_resources(log, "k")
    Resources(registers=40, stack_bytes=8, spill_bytes=28, shared_bytes=1024)
    """
    parts = re.split(r"Compiling entry function '([^']+)'", log)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    text = texts.get(kernel)
    used = None if text is None else re.search(r"Used (\d+) registers", text)
    if text is None or used is None:
        raise Unsupported(f"the compiler's log does not say what kernel {kernel!r} takes; it names {list(texts)}")

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Resources(
        registers=int(used[1]),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
