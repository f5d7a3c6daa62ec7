"""What importing costs and loads, and that imports go down the floors of DESIGN.md only."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gigamlp

SRC = Path(gigamlp.__file__).parent

# ---- cost --------------------------------------------------------------------------------------------------------

HEAVY = {
    "torch",
    "cuda",
    "pynvml",
    "matplotlib",
    "sklearn",
    "pandas",
    "onnx",
    "onnxruntime",
    "openvino",
    "ray",
    "scipy",
    "triton",
    "starlette",
    "uvicorn",
    "orjson",
    "prometheus_client",
}
IMPORT = "import gigamlp"
HELP = "import runpy; sys.argv = ['gigamlp', '--help']; runpy.run_module('gigamlp', run_name='__main__')"


def probe(code: str) -> tuple[float, set[str]]:
    """Run `code` in a fresh interpreter; return the seconds it took there and the top-level modules that it loaded."""
    # the clock starts inside, and editable installs' start-up hooks are loaded before: python itself is not measured
    program = (
        "import sys, time, contextlib, io\n"
        "before = set(sys.modules); begin = time.perf_counter()\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    {code}\n"
        "seconds = time.perf_counter() - begin\n"
        "print(seconds, *sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, *modules = done.stdout.split()
    return float(seconds), set(modules)


def whole_process(command: list[str]) -> float:
    """Return the seconds of a whole process, start of the interpreter included."""
    program = f"import subprocess, time; b = time.perf_counter(); subprocess.run({command!r}, check=True, "
    program += "stdout=subprocess.DEVNULL); print(time.perf_counter() - b)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_importing_gigamlp_is_quick() -> None:
    assert min(probe(IMPORT)[0] for _ in range(5)) < 0.2


def test_help_is_quick() -> None:
    assert min(whole_process([sys.executable, "-m", "gigamlp", "--help"]) for _ in range(5)) < 0.6


@pytest.mark.parametrize(
    "code", [IMPORT, HELP, f"{IMPORT}, gigamlp.data, gigamlp.train, gigamlp.engines, gigamlp.measure"]
)
def test_nothing_heavy_is_imported(code: str) -> None:
    _, modules = probe(code)
    assert "gigamlp" in modules
    assert modules & HEAVY == set()


def test_the_probe_sees_what_is_imported() -> None:
    assert "torch" in probe("import torch")[1]


def test_running_a_model_needs_numpy_only() -> None:
    code = "import numpy; from gigamlp import MLP, Layer; MLP([Layer(numpy.eye(2))]).predict(numpy.eye(2))"
    _, modules = probe(code)
    assert modules & HEAVY == set()


def test_every_public_name_is_there() -> None:
    assert dir(gigamlp) == sorted(gigamlp.__all__)
    for name in gigamlp.__all__:
        assert getattr(gigamlp, name) is not None
    with pytest.raises(AttributeError, match="module 'gigamlp' has no attribute 'nope'"):
        gigamlp.nope  # noqa: B018


# ---- floors ------------------------------------------------------------------------------------------------------

# module or package -> floor. A package's floor holds for all in it; a new module needs a line here.
FLOORS = {
    "_atomic": 1,
    "activations": 1,
    "errors": 1,
    "measure": 1,
    "byteform": 2,
    "codes": 2,
    "cuda_graph": 2,
    "data": 2,
    "integer": 2,
    "labels": 2,
    "layers": 2,
    "mlp": 2,
    "modelfile": 2,
    "models": 2,
    "plan": 2,
    "quantize": 2,
    "quoted": 2,
    "record": 2,
    "rounded": 2,
    "spec": 2,
    "convert": 3,
    "kernels": 3,
    "train": 3,
    "engines": 4,
    "choice": 5,
    "inputs": 5,
    "jobs": 5,
    "ladder": 5,
    "outputs": 5,
    "runners": 5,
    "search": 5,
    "session": 5,
    "single": 5,
    "staging": 5,
    "trial": 5,
    "guard": 5,
    "hosted": 5,
    "tune": 5,
    "bench": 6,
    "doctor": 6,
    "estimator": 6,
    "frontier": 6,
    "report": 6,
    "reproduce": 6,
    "score": 6,
    "serve": 6,
    "reproduce_settings": 6,
    "reproduce_training": 6,
    "cli": 7,
    "__main__": 7,
}
# may import these at module top: nothing imports them before they are used
AT_TOP = {
    "torch": ("gigamlp.engines.torch_", "gigamlp.train.", "gigamlp.convert.torch_"),
    "onnx": ("gigamlp.convert.onnx_",),
    "sklearn": ("gigamlp.estimator",),
    "starlette": ("gigamlp.serve.",),
    "uvicorn": ("gigamlp.serve.",),
    "orjson": ("gigamlp.serve.",),
}

MODULES = {
    ".".join(("gigamlp", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}


def floor(module: str) -> int:
    return FLOORS[module.split(".")[1]]


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, *, top_only: bool) -> Iterator[ast.AST]:
    """Yield the nodes that run; with `top_only`, only those that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if top_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from statements(child, top_only=top_only)


def imports(module: str, *, top_only: bool) -> set[str]:
    """Return the dotted names that `module` imports, as deep as they are modules of gigamlp."""
    found = set()
    for node in statements(tree(module), top_only=top_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: write absolute imports"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found


def test_every_module_has_a_floor() -> None:
    named = {module.split(".")[1] for module in MODULES if module != "gigamlp"}
    assert named == set(FLOORS)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "gigamlp"])
def test_imports_go_down_only(module: str) -> None:
    upwards = {
        name for name in imports(module, top_only=False) if name.startswith("gigamlp.") and floor(name) > floor(module)
    }
    assert upwards == set()


def test_there_are_no_circles() -> None:
    graph = {m: {n for n in imports(m, top_only=True) if n in MODULES and n != "gigamlp"} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", list(MODULES))
def test_heavy_packages_are_imported_inside_functions(module: str) -> None:
    heavy = {name.partition(".")[0] for name in imports(module, top_only=True)} & HEAVY
    heavy -= {package for package, modules in AT_TOP.items() if module.startswith(modules)}
    assert heavy == set()


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("gigamlp.measure")])
def test_only_measure_reads_a_clock(module: str) -> None:
    assert not {n for n in imports(module, top_only=False) if n.partition(".")[0] in ("time", "timeit")}
    calls = {ast.unparse(n.func) for n in statements(tree(module), top_only=False) if isinstance(n, ast.Call)}
    assert not {call for call in calls if call.endswith((".perf_counter", ".monotonic", "cuda.Event", ".elapsed_time"))}


@pytest.mark.parametrize("module", list(MODULES))
def test_modules_are_of_a_size_to_hold_in_the_head(module: str) -> None:
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= 400


def test_the_checks_see_what_they_look_for() -> None:
    assert "gigamlp.errors" in imports("gigamlp.mlp", top_only=True)
    assert "gigamlp.modelfile" in imports("gigamlp.mlp", top_only=False)  # inside a function
    assert "gigamlp.modelfile" not in imports("gigamlp.mlp", top_only=True)
    assert "torch" in imports("gigamlp.train.elm", top_only=True)
    assert "time" in imports("gigamlp.measure.clock", top_only=False)
