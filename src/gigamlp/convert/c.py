"""An MLP as one dependency-free C99 file and its header, for firmware and for other languages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gigamlp._atomic import write_text
from gigamlp.cascade import one_mlp
from gigamlp.convert.c_text import (
    ACTIVATIONS,
    HALF,
    comment,
    float_literal,
    identifier,
    string_literal,
    table,
)
from gigamlp.errors import InvalidInput, ModelError
from gigamlp.layers import Layer
from gigamlp.mlp import MLP
from gigamlp.quantize import integer_form

__all__ = ["to_c"]

DTYPES = ("float32", "int8")
_MOST = 2**31 - 1  # C's int counts them, where an int has 32 bits


@dataclass(frozen=True)
class _Plan:
    """What the two files have in common."""

    mlp: MLP
    name: str
    row: str  # C type of a feature
    dtype: str

    @property
    def upper(self) -> str:
        return self.name.upper()


def to_c(
    mlp: MLP,
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    name: str | None = None,
) -> tuple[Path, Path]:
    """Write the MLP as C99: `path` with the code and the weights, and a header of the same name beside it.

    Parameters
    ----------
    mlp : MLP
    path : path-like
        Of the C file; its name ends in ``.c``.
    dtype : {"float32", "int8"}
        ``float32``: rows and weights are float, sums are taken in the order of the features. ``int8``: scheme ``w8``;
        rows are uint8, the first layer's weights int8 and its sums int32; later layers are computed in double from
        operands rounded to float16. `gigamlp.quantise` describes it.
    name : str, optional
        What the functions begin with. Default: the MLP's name, as a C identifier.

    Returns
    -------
    tuple of Path
        The C file and the header. ``NAME_logits(row, logits)`` gives the logits of one row. ``NAME_predict(row)`` gives
        the index of its class (``multilabel``: ``NAME_predict(row, labels)``; none for ``regression``). No memory is
        allocated and nothing is written but the arguments: any number of threads may call them.

    Raises
    ------
    InvalidInput
        If an argument cannot be used.
    Unsupported
        If the MLP cannot be made integer.
    ModelError
        If it is too large for C's int.

    Notes
    -----
    The values of each layer live on the stack, 4 bytes each.

    relu and identity give the same bits everywhere where floats are IEEE 754 and multiplications and additions are not
    fused (``-ffp-contract=off``; gcc's default with ``-std=c99``). Other activations call the C library's tanhf, expf
    or erff.

    Examples
    --------
    >>> import tempfile, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, 2.0], [0.5, -1.0]])], name="two ways")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     code, header = gm.to_c(mlp, folder + "/net.c")
    ...     print(header.read_text().splitlines()[-7])
    int two_ways_predict(const float *row);
    """
    one_mlp(mlp, "to_c")
    file = Path(path)
    if not re.fullmatch(r"[0-9A-Za-z_.+-]+\.c", file.name):
        raise InvalidInput(f"the file's name must be of plain letters and end in .c, got {file.name!r}")
    if dtype not in DTYPES:
        raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if name is not None and name != identifier(name):
        raise InvalidInput(f"{name!r} is no name for C functions; {identifier(name)!r} would be one")
    if max(mlp.features, *(layer.weight.size for layer in mlp.layers)) > _MOST:
        raise ModelError(f"the MLP is too large for C's int, which ends at {_MOST:,}")
    plan = _Plan(mlp, name or identifier(mlp.name), "float" if dtype == "float32" else "unsigned char", dtype)
    header = file.with_suffix(".h")
    code = _float_code(plan, header.name) if dtype == "float32" else _int8_code(plan, header.name)
    write_text(header, _header(plan))
    write_text(file, code)
    return file, header


# ---- the header -----------------------------------------------------------------------------------------------------


def _header(plan: _Plan) -> str:
    mlp, name, upper = plan.mlp, plan.name, plan.upper
    widths = "-".join(str(width) for width in (mlp.features_read, *mlp.hidden, mlp.outputs))
    lines = [
        f"/* {comment(mlp.name)}: {widths}, head {mlp.head}, {plan.dtype} weights. Written by gigamlp. */",
        f"#ifndef {upper}_H",
        f"#define {upper}_H",
        "",
        f"#define {upper}_FEATURES {mlp.features}",
        f"#define {upper}_OUTPUTS {mlp.outputs}",
    ]
    if mlp.classes is not None and mlp.head in ("softmax", "sigmoid"):
        kind = "const char *const" if mlp.classes.dtype.kind == "U" else "const long long"
        lines += [
            f"#define {upper}_CLASSES {len(mlp.classes)}",
            "",
            "/* labels of the classes */",
            f"extern {kind} {name}_classes[{upper}_CLASSES];",
        ]
    lines += [
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        f"/* row: {upper}_FEATURES numbers; logits: {upper}_OUTPUTS */",
        f"void {name}_logits(const {plan.row} *row, float *logits);",
    ]
    if mlp.head == "multilabel":
        lines += [
            "",
            f"/* labels: {upper}_OUTPUTS times 0 or 1 */",
            f"void {name}_predict(const {plan.row} *row, int *labels);",
        ]
    elif mlp.head != "regression":
        lines += [
            "",
            "/* returns the index of the class; ties go to the lowest */",
            f"int {name}_predict(const {plan.row} *row);",
        ]
    lines += ["", "#ifdef __cplusplus", "}", "#endif", "", "#endif", ""]
    return "\n".join(lines)


# ---- the code -------------------------------------------------------------------------------------------------------


def _start(plan: _Plan, header: str, activations: Sequence[str], *, half: bool) -> list[str]:
    used = [name for name in ACTIVATIONS if name in set(activations) and name != "identity"]
    maths = half or any(name != "relu" for name in used)
    parts = [f"/* {comment(plan.mlp.name)}. Written by gigamlp; C99, no dependencies. See {comment(header)}. */"]
    # fused multiply-adds would give other bits; gcc knows no such pragma, and fuses nothing with -std=c99
    parts.append("#if defined(__clang__)\n#pragma STDC FP_CONTRACT OFF\n#endif")
    parts.append("\n".join(([] if not maths else ["#include <math.h>"]) + [f'#include "{comment(header)}"']))
    mlp = plan.mlp
    if mlp.classes is not None and mlp.head in ("softmax", "sigmoid"):
        if mlp.classes.dtype.kind == "U":
            kind, labels = "const char *const", [string_literal(label) for label in mlp.classes.tolist()]
        else:
            kind, labels = "const long long", [_whole(label) for label in mlp.classes.tolist()]
        parts.append(f"{kind} {plan.name}_classes[{plan.upper}_CLASSES] = {{\n    " + ",\n    ".join(labels) + "\n};")
    if half:
        parts.append(HALF)
    return parts + [ACTIVATIONS[name] for name in used]


def _whole(value: int) -> str:
    return f"{value}LL" if value > -(2**63) else f"({value + 1}LL - 1)"


def _applied(activation: str, value: str) -> str:
    return value if activation == "identity" else f"act_{activation}({value})"


def _floats(name: str, values: Any, shape: str) -> str:
    return table("float", name, shape, (float_literal(value) for value in np.ravel(values)))


def _gather(plan: _Plan, value: str) -> list[str]:
    """Return the loops that read the features of a row, one for each run of columns."""
    lines, begin = [], 0
    for start, stop in plan.mlp.columns or ((0, plan.mlp.features),):
        lines += [
            f"    for (i = 0; i < {stop - start}; i++) {{",
            f"        {value.format(to=_plus('i', begin), of=_plus('i', start))}",
            "    }",
        ]
        begin += stop - start
    return lines


def _plus(name: str, number: int) -> str:
    return f"{name} + {number}" if number else name


def _float_code(plan: _Plan, header: str) -> str:
    mlp = plan.mlp
    parts = _start(plan, header, [layer.activation for layer in mlp.layers], half=False)
    plain = mlp.columns is None and np.all(mlp.input_scale == 1) and not np.any(mlp.input_offset)
    body = [] if plain else [f"    float h0[{mlp.features_read}];"]
    per_feature = {"scale": np.ndim(mlp.input_scale) == 1, "offset": np.ndim(mlp.input_offset) == 1}
    for which, values in (("scale", mlp.input_scale), ("offset", mlp.input_offset)):
        if per_feature[which]:
            parts.append(_floats(f"input_{which}", values, f"[{mlp.features_read}]"))
    scale = "input_scale[{to}]" if per_feature["scale"] else float_literal(mlp.input_scale)
    offset = "input_offset[{to}]" if per_feature["offset"] else float_literal(mlp.input_offset)
    for index, layer in enumerate(mlp.layers):
        parts += _layer_tables(index, layer)
        if index < len(mlp.layers) - 1:
            body.append(f"    float h{index + 1}[{len(layer.weight)}];")
    body.append("    int i, j;")
    if not plain:
        body += _gather(plan, f"h0[{{to}}] = row[{{of}}] * {scale} + {offset};")
    for index, layer in enumerate(mlp.layers):
        last = index == len(mlp.layers) - 1
        bias = "" if layer.bias is None else f" + b{index}[j]"
        width = layer.weight.shape[1]
        body += [
            f"    for (j = 0; j < {len(layer.weight)}; j++) {{",
            "        float sum = 0.0f;",
            f"        for (i = 0; i < {width}; i++) {{",
            f"            sum += {'row' if plain and index == 0 else f'h{index}'}[i] * w{index}[j][i];",
            "        }",
            f"        {'logits' if last else f'h{index + 1}'}[j] = {_applied(layer.activation, f'sum{bias}')};",
            "    }",
        ]
    return _finished(plan, parts, body)


def _layer_tables(index: int, layer: Layer) -> list[str]:
    out, width = layer.weight.shape
    tables = [_rows_table("float", f"w{index}", f"[{out}][{width}]", layer.weight, float_literal)]
    if layer.bias is not None:
        tables.append(_floats(f"b{index}", layer.bias, f"[{out}]"))
    return tables


def _rows_table(kind: str, name: str, shape: str, values: Any, literal: Any) -> str:
    words = ([literal(value) for value in row] for row in values)
    braced = (["{" + row[0], *row[1:-1], row[-1] + "}"] if len(row) > 1 else ["{" + row[0] + "}"] for row in words)
    return table(kind, name, shape, (word for row in braced for word in row))


def _int8_code(plan: _Plan, header: str) -> str:
    """Return the code of the scheme's reference, step by step: see `gigamlp.integer.Integer`."""
    form = integer_form(plan.mlp, "uint8")
    layers = form.layers
    parts = _start(plan, header, [form.activation, *(layer.activation for layer in layers)], half=bool(layers))
    out, width = form.codes.shape
    parts.append(_rows_table("signed char", "w0", f"[{out}][{width}]", form.codes, str))
    parts += [_floats("scale0", form.scale, f"[{out}]"), _floats("b0", form.bias, f"[{out}]")]
    copied = plan.mlp.columns is not None
    body = [f"    unsigned char x[{width}];"] if copied else []
    for index, layer in enumerate(layers, start=1):
        halves = layer.weight.astype(np.float16).astype(np.float32)
        parts.append(_rows_table("float", f"w{index}", f"[{len(halves)}][{halves.shape[1]}]", halves, float_literal))
        parts.append(_floats(f"b{index}", layer.bias, f"[{len(halves)}]"))
        body.append(f"    float h{index}[{halves.shape[1]}];")
    body += ["    int i, j;", *(_gather(plan, "x[{to}] = row[{of}];") if copied else [])]
    value = _applied(form.activation, "(float)sum * scale0[j] + b0[j]")
    body += [
        f"    for (j = 0; j < {out}; j++) {{",
        "        long sum = 0; /* fits 32 bits */",
        f"        for (i = 0; i < {width}; i++) {{",
        f"            sum += (long){'x' if copied else 'row'}[i] * w0[j][i];",
        "        }",
        f"        {f'h1[j] = to_half({value})' if layers else f'logits[j] = {value}'};",
        "    }",
    ]
    for index, layer in enumerate(layers, start=1):
        last = index == len(layers)
        value = _applied(layer.activation, f"(float)(sum + b{index}[j])")
        body += [
            f"    for (j = 0; j < {len(layer.weight)}; j++) {{",
            "        double sum = 0.0;",
            f"        for (i = 0; i < {layer.weight.shape[1]}; i++) {{",
            f"            sum += (double)h{index}[i] * w{index}[j][i];",
            "        }",
            f"        {f'logits[j] = {value}' if last else f'h{index + 1}[j] = to_half({value})'};",
            "    }",
        ]
    return _finished(plan, parts, body)


def _finished(plan: _Plan, parts: list[str], body: list[str]) -> str:
    mlp, name = plan.mlp, plan.name
    parts.append("\n".join([f"void {name}_logits(const {plan.row} *row, float *logits) {{", *body, "}"]))
    logits = f"    float logits[{mlp.outputs}];\n"
    call = f"    {name}_logits(row, logits);\n"
    if mlp.head == "softmax":
        parts.append(
            f"int {name}_predict(const {plan.row} *row) {{\n{logits}    int j, best = 0;\n{call}"
            f"    for (j = 1; j < {mlp.outputs}; j++) {{\n        if (logits[j] > logits[best]) {{\n"
            "            best = j;\n        }\n    }\n    return best;\n}"
        )
    elif mlp.head == "sigmoid":
        parts.append(f"int {name}_predict(const {plan.row} *row) {{\n{logits}{call}    return logits[0] > 0.0f;\n}}")
    elif mlp.head == "multilabel":
        parts.append(
            f"void {name}_predict(const {plan.row} *row, int *labels) {{\n{logits}    int j;\n{call}"
            f"    for (j = 0; j < {mlp.outputs}; j++) {{\n        labels[j] = logits[j] > 0.0f;\n    }}\n}}"
        )
    return "\n\n".join(parts) + "\n"
