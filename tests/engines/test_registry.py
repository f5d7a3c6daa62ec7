"""The list of engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gigamlp.engines import engine, engine_names
from gigamlp.errors import InvalidInput


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_can_be_asked(name):
    made = engine(name)
    assert made.name == name
    assert isinstance(made.integer, bool)
    assert isinstance(made.compiles, bool)
    reason = made.unavailable("cpu")
    assert reason is None or len(reason) > 10


def test_unknown_engine():
    with pytest.raises(InvalidInput, match=r"unknown engine .tensorrt.; known: .*torch_eager"):
        engine("tensorrt")


def test_asking_for_engines_does_not_import_torch():
    code = (
        "import sys; from gigamlp.engines import engine, engine_names; "
        "[engine(n).unavailable('cpu') for n in engine_names()]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
