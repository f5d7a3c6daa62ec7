"""The unit and the Dockerfile: what can be known of them without systemd or Docker running."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gigamlp.serve.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


class Unit(configparser.RawConfigParser):
    """A unit file; of settings that come twice the last counts."""

    def __init__(self) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
        self.optionxform = str  # type: ignore[assignment]
        self.read_string((DEPLOY / "gigamlp.service").read_text())


def help_of_serve() -> str:
    return subprocess.run(
        [sys.executable, "-m", "gigamlp", "serve", "--help"], capture_output=True, text=True, check=False
    ).stdout


def test_the_unit_starts_the_server_with_options_that_it_has() -> None:
    service = Unit()["Service"]
    program, command, models, *options = shlex.split(service["ExecStart"])
    assert (Path(program).name, command, models) == ("gigamlp", "serve", service["ReadOnlyPaths"] + "/models")
    known = help_of_serve()
    assert all(option in known for option in options if option.startswith("--"))
    assert options[options.index("--host") + 1] == "127.0.0.1"
    settings = Settings(models=("m",))
    assert int(service["TimeoutStopSec"]) > settings.grace_s + settings.linger_s + 5


def test_the_unit_gives_up_what_it_does_not_need() -> None:
    service = Unit()["Service"]
    assert service["CapabilityBoundingSet"] == ""
    for name in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "MemoryDenyWriteExecute"):
        assert service[name] == "yes"


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "gigamlp.service").read_text().replace("/opt/gigamlp/bin/gigamlp", shutil.which("env") or "")
    (tmp_path / "gigamlp.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "gigamlp.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "gigamlp.service" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_the_image_copies_what_there_is_and_ends_as_a_user() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    copied = [name for each in words if each[0] == "COPY" and "--from" not in each[1] for name in each[1:-1]]
    assert copied
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name.removeprefix('./')}" in allowed
    assert [each[1] for each in words if each[0] == "USER"][-1].isdigit()
    entry = next(line for line in lines if line.startswith("ENTRYPOINT"))
    known = help_of_serve()
    assert all(option in known for option in re.findall(r'"(--[a-z-]+)"', entry))
