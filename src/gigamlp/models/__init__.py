"""The models that ship with gigamlp: MNIST networks that ``benchmarks/distill_h200.py`` trained. See docs/accuracy.md.

``gigamlp.load("mnist-40")`` finds them by name. The files hold what training gave, in float32; the codes of scheme
``w8`` are derived from it in float64 on loading, so they are the same bits on every machine.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from gigamlp.errors import FileFormatError, InvalidInput

if TYPE_CHECKING:
    from gigamlp.mlp import MLP

__all__ = ["load", "names", "path"]

# name -> sha256 of the file
_SHA256 = {
    "mnist-16": "ffeaf280dcfacacad4267c1b6c469a854f1beee37549b1cea5bf0f1cbfaf2c8e",
    "mnist-32": "fefcf55daadcc70878c58bbde40fe090f4b01fb8f759189e95aeddc5fb09fc2a",
    "mnist-40": "fd933d2de28bbb3e8f0d43b5c59d20ca23cc4c627a7057beaa0d9ba1411735c1",
    "mnist-64": "8d0d670738198a1a6198c97adac40bcc6b8735e4dff1b7fb8f8670d22394829a",
    "mnist-128": "3d9862cd4a63948f886fdcd679d19609c4daa6de1c30d97f46ba21f310bfa37f",
    "mnist-512": "14a2a3840eed9315b8e4a5c1ebe85149ebe8d0d1252564b0e8c128d47f8781a1",
    "mnist-40-w384": "6118806146f7130d08876d4027831e5bb0284177e5be82930710c0543b05f91f",
    "mnist-40-w352": "ff900581e1bc1cbffc33bde88b0b9acc0c5ba433bce75f25f4b6b4316feb939e",
    "mnist-40-c20": "ced4bac9152ed2afcb8114b2a1008dc64ae63fc24b7376f754570c9857b4f186",
    "mnist-64-s12": "4164fc7d3fadcc0de5cbd9d2be147b8ba3dd1d62fb1650dcb27a23c0b48b7343",
}


def names() -> tuple[str, ...]:
    """Return the names of the shipped models.

    Examples
    --------
    >>> "mnist-40" in names()
    True
    """
    return tuple(_SHA256)


def path(name: str) -> Path:
    """Return the file of the shipped model `name`.

    Raises
    ------
    InvalidInput
        If there is no such model.
    """
    if name not in _SHA256:
        raise InvalidInput(f"no shipped model is called {name!r}; shipped: {', '.join(_SHA256)}")
    return Path(__file__).parent / f"{name}.safetensors"


def load(name: str) -> MLP:
    """Return the shipped model `name`, with the codes and scales of scheme ``w8``.

    ``mlp.with_(scheme=None)`` is the model as it was trained, which float engines run and `gigamlp.train` takes.

    Raises
    ------
    InvalidInput
        If there is no such model.
    FileFormatError
        If its file is not the one that was shipped.

    Examples
    --------
    >>> load("mnist-40")
    MLP('mnist-40', 784-40-10, relu, head=softmax, scheme=w8)
    """
    from gigamlp.mlp import MLP
    from gigamlp.modelfile import unpack
    from gigamlp.quantize import quantise

    file = path(name)
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != _SHA256[name]:
        raise FileFormatError(f"{file}: not the file that was shipped (its sha256 differs); install gigamlp again")
    mlp = unpack(data, str(file))
    assert isinstance(mlp, MLP)
    return quantise(mlp)
