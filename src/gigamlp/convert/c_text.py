"""Pieces of C99: literals that lose no bit, names, comments, and the functions that MLPs need."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["ACTIVATIONS", "HALF", "comment", "double_literal", "float_literal", "identifier", "string_literal", "table"]

_KEYWORDS = {
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum", "extern",
    "float", "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return", "short", "signed",
    "sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile", "while",
}  # fmt: skip

ACTIVATIONS = {
    "identity": "",
    "relu": "static float act_relu(float x) { return x > 0.0f ? x : 0.0f; }",
    "tanh": "static float act_tanh(float x) { return tanhf(x); }",
    "logistic": "static float act_logistic(float x) {\n"
    "    float e = expf(-fabsf(x));\n"
    "    return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);\n"
    "}",
    "gelu": "static float act_gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }",
    "gelu_tanh": "static float act_gelu_tanh(float x) {\n"
    "    float inner = 0.79788456f * (x + 0.044715f * x * x * x);\n"
    "    return 0.5f * x * (1.0f + tanhf(inner));\n"
    "}",
    "silu": "static float act_silu(float x) {\n"
    "    float e = expf(-fabsf(x));\n"
    "    return x * (x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e));\n"
    "}",
}

# rounds to the nearest number that float16 holds, ties to even, as NumPy and GPUs do
HALF = """\
static float to_half(float x) {
    float size = fabsf(x), unit;
    int exponent;
    if (!(size > 0.0f) || size >= 65520.0f) {
        return size >= 65520.0f ? copysignf(INFINITY, x) : x;
    }
    frexpf(size, &exponent);
    unit = ldexpf(1.0f, exponent < -13 ? -24 : exponent - 11);
    return copysignf(rintf(size / unit) * unit, x);
}"""


def float_literal(value: Any) -> str:
    """Return a float32 as a C99 literal of exactly that value.

    Examples
    --------
    >>> float_literal(0.1), float_literal(-2)
    ('0x1.99999ap-4f', '-0x1p+1f')
    """
    return f"{_hex(float(np.float32(value)))}f"


def double_literal(value: Any) -> str:
    """Return a float64 as a C99 literal of exactly that value."""
    return _hex(float(value))


def _hex(value: float) -> str:
    return re.sub(r"\.?0*p", "p", value.hex())


def identifier(word: str) -> str:
    """Return a C identifier that is near to `word`.

    Examples
    --------
    >>> identifier("my net-2"), identifier("2"), identifier("float")
    ('my_net_2', 'mlp_2', 'mlp_float')
    """
    name = re.sub(r"[^0-9A-Za-z]+", "_", word).strip("_")
    return name if name and not name[0].isdigit() and name not in _KEYWORDS else f"mlp_{name}".rstrip("_")


def comment(text: str) -> str:
    r"""Return `text` so that it cannot end a comment, nor continue the line.

    Examples
    --------
    >>> comment("a */ int x; \\ ??/")
    'a * / int x; / ? ?/'
    """
    plain = "".join(c if " " <= c <= "~" else "?" for c in text).replace("\\", "/")
    return plain.replace("*/", "* /").replace("/*", "/ *").replace("??", "? ?")


def string_literal(text: str) -> str:
    r"""Return `text` as a C string of UTF-8, printable ASCII apart from escapes.

    Examples
    --------
    >>> string_literal('a"?é')
    '"a\\042\\077\\303\\251"'
    """
    plain = set(range(32, 127)) - set(b'"\\?')
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode("utf-8")) + '"'


def table(kind: str, name: str, shape: str, values: Iterable[str]) -> str:
    """Return a constant array, in lines of up to 116 characters."""
    lines, line = [], "   "
    for value in values:
        if len(line) + len(value) > 115:
            lines.append(line)
            line = "   "
        line += f" {value},"
    body = "\n".join([*lines, line])
    return f"static const {kind} {name}{shape} = {{\n{body}\n}};"
