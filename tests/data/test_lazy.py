"""Importing gigamlp.data costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gigamlp.data


def test_importing_data_loads_nothing() -> None:
    code = (
        "import sys, gigamlp.data\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'platformdirs', 'torch', 'zipfile', 'gzip')])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", SETUP + code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


# -S leaves out site-packages' .pth files, which import what they like
SETUP = f"import sys; sys.path.insert(0, {str(gigamlp.data.__path__[0]).rsplit('/', 2)[0]!r})\n"


def test_public_names() -> None:
    assert dir(gigamlp.data) == sorted(gigamlp.data.__all__)
    for name in gigamlp.data.__all__:
        assert callable(getattr(gigamlp.data, name))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        gigamlp.data.nope  # noqa: B018
