"""What travels in the wheel, that the pins fit, and what `make` says on a machine that is not ready."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import gigamlp
from tests.docblocks import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def pins() -> dict[str, Version]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()  # type: ignore[union-attr]
            assert canonicalize_name(name) not in found, line
            found[canonicalize_name(name)] = Version(version)
    return found


# ---- metadata ----------------------------------------------------------------------------------------------------


def test_the_extras_are_those_of_the_design() -> None:
    designed = {"torch", "cuda12", "cuda13", "sklearn", "onnx", "openvino", "score", "report", "serve", "ray", "all"}
    assert set(EXTRAS) == designed | {"test", "lint", "docs"}
    assert EXTRAS["torch"][0] == "torch>=2.9"
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == designed - {"all", "cuda12"}  # one CUDA line


def test_every_requirement_of_set_up_has_a_pin_that_fits() -> None:
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in ("torch", "report", "test", "lint", "docs"):
        wanted += EXTRAS[extra]
    for text in wanted:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in pins(), f"{text} has no pin in constraints.txt"
        assert pins()[name] in requirement.specifier, text
    assert str(pins()["torch"]) == "2.13.0"


def test_what_the_pinned_packages_ask_for_is_pinned_too() -> None:
    from importlib.metadata import PackageNotFoundError, requires, version

    # PyTorch's CUDA build asks for NVIDIA's libraries, at versions that it pins itself
    unpinned = set()
    for name, pin in pins().items():
        try:
            if Version(Version(version(name)).public) != pin:
                continue  # another release may ask for other packages
            wanted = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        for requirement in wanted:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                unpinned.add(canonicalize_name(requirement.name))
    allowed = ("nvidia-", "cuda-", "triton", "setuptools")
    assert {name for name in unpinned - set(pins()) if not name.startswith(allowed)} == set()


def test_the_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for part in ("Version 2.0, January 2004", "9. Accepting Warranty", "END OF TERMS", "APPENDIX: How to apply"):
        assert part in text


# ---- the wheel ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "gigamlp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".cpp", ".h", ".so", ".pyi")
    }
    built = {name for name in names if name.endswith((".so", ".pyd"))}
    assert {name for name in names if ".dist-info/" not in name} - built == expected
    assert all(name.startswith("gigamlp/kernels/cpu/_native.") for name in built)
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    assert len(built) == (compiler is not None), "the native extension is built wherever there is a compiler"
    assert {"gigamlp/py.typed", "gigamlp/data/mnist_idx/train-images-idx3-ubyte.gz"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("mnist_idx/NOTICE") and ".dist-info/" in name for name in names)


def test_without_a_compiler_the_package_still_installs(tmp_path: Path) -> None:
    if find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    env = {**os.environ, "CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(path).extractall(tmp_path / "there")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'there')!r})\n"
        "from gigamlp.engines.registry import engine\n"
        "print(engine('cpu_fused').unavailable('cpu'))"
    )
    site = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "installed without a C++ compiler" in done.stdout, done.stderr


def test_the_wheels_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "gigamlp"
    assert metadata["Version"] == gigamlp.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    (points,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "gigamlp = gigamlp.cli:main" in wheel.read(points).decode().replace("=", " = ").replace("  ", " ")


def test_the_wheel_works_unpacked(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import gigamlp; assert gigamlp.__file__.startswith(sys.path[0]), gigamlp.__file__\n"
        "print(gigamlp.data.load_mnist(cache=False)[0].shape)"
    )
    # -S and the bare site-packages path: without the editable install's hooks
    site = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "(60000, 784)\n", done.stderr


# ---- make --------------------------------------------------------------------------------------------------------


def make(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "ARGS", "PYTHON", "VENV")}
    return subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", *args],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, *, version: str, has_venv: bool) -> Path:
    """Write a stand-in for an interpreter that is too old or has no venv."""
    path = folder / "python-stand-in"
    old = tuple(map(int, version.split("."))) < (3, 11)
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in --version) echo "Python {version}";; *version_info*) exit {int(old)};; '
        f"*ensurepip*) exit {int(not has_venv)};; *) echo ran $*; exit 9;; esac\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("target", ["reproduce", "test", "lint"])
def test_an_old_python_is_refused(tmp_path: Path, target: str) -> None:
    python = fake_python(tmp_path, version="3.10", has_venv=True)
    done = make(target, f"PYTHON={python}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert f"gigamlp needs Python >= 3.11, and '{python}' is Python 3.10" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_without_venv_is_refused(tmp_path: Path) -> None:
    python = fake_python(tmp_path, version="3.12", has_venv=False)
    done = make("test", f"PYTHON={python}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "comes without venv. On Debian and Ubuntu: apt-get install python3-venv" in done.stderr


def test_an_absent_python_is_refused(tmp_path: Path) -> None:
    done = make("reproduce", "PYTHON=no-such-python", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "there is no 'no-such-python' here" in done.stderr


def test_what_make_runs(tmp_path: Path) -> None:
    plan = make("--dry-run", "reproduce", "ARGS=--quick --seed 1", f"VENV={tmp_path}/v").stdout
    assert "-m venv --clear" in plan
    assert "--editable '.[torch,report]'" in plan
    assert plan.rstrip().endswith(f"{tmp_path}/v/bin/gigamlp reproduce --quick --seed 1")
    plan = make("--dry-run", "test", f"VENV={tmp_path}/v").stdout
    assert "--editable '.[torch,report,score,serve,test,cuda13,onnx,openvino]'" in plan
    assert plan.rstrip().endswith('/v/bin/python -m pytest -m "not soak"')


def test_a_second_run_installs_nothing(tmp_path: Path) -> None:
    venv = tmp_path / "v"
    venv.mkdir()
    for stamp in (".made", ".run", ".test", ".lint"):
        (venv / stamp).touch()
    for target in ("reproduce", "test", "lint", "types", "soak", "docs"):
        assert "pip" not in make("--dry-run", target, f"VENV={venv}").stdout, target


def test_changed_pins_install_again(tmp_path: Path) -> None:
    venv = tmp_path / "v"
    venv.mkdir()
    for stamp in (".made", ".run", ".test"):
        (venv / stamp).touch()
        os.utime(venv / stamp, (0, 0))
    assert "pip install" in make("--dry-run", "test", f"VENV={venv}").stdout


def test_ci_runs_the_readmes_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in script
    assert script.rstrip().splitlines()[-1].startswith("exec make test")  # pytest's closing line is the last one
