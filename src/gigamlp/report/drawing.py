"""How the report draws: matplotlib's object API, no pyplot, no display, and colours that the page decides."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from gigamlp.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MUTED", "SERIES", "legend_above", "log_scale", "plain_ticks", "require_matplotlib", "shorten", "svg"]

_WIDTH = 10.5  # inches; an SVG scales to the page

# Stand-ins that the SVG's colours are replaced by: the page's style sheet then decides, for light, dark and paper.
INK, MUTED, GRID = "#010203", "#010204", "#010205"
SERIES = tuple(f"#0102{code:02x}" for code in range(0x10, 0x18))
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    **{color: f"var(--series-{index + 1})" for index, color in enumerate(SERIES)},
}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be found, copied and coloured by the page
    "svg.hashsalt": "gigamlp",  # the same figure gives the same bytes
    "text.parse_math": False,  # a model's name may hold a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
}


def require_matplotlib() -> None:
    """Raise `Unsupported`, with the way to get it, if matplotlib is not installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise Unsupported("the report's figures need matplotlib: pip install 'gigamlp[report]'")


def shorten(text: str, length: int = 60) -> str:
    """Return `text`, cut to `length` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def log_scale(ax: Axes, values: Sequence[float]) -> bool:
    """Use a logarithmic x axis if the values span a factor of 20 or more; return whether it is one."""
    positive = [v for v in values if v > 0]
    if not positive or max(positive) < 20 * min(positive):
        return False
    ax.set_xscale("log")
    ax.set_xlim(min(positive) / 2, max(positive) * 1.2)
    plain_ticks(ax)
    return True


def plain_ticks(ax: Axes, axis: str = "x") -> None:
    """Label a logarithmic axis, ``x`` or ``y``, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    decades = math.log10(high / low) if low > 0 else 9.0
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    ticks = ax.xaxis if axis == "x" else ax.yaxis
    ticks.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    ticks.set_minor_formatter(NullFormatter())


def legend_above(ax: Axes, columns: int = 3) -> None:
    """Put the legend above the axes."""
    handles, names = ax.get_legend_handles_labels()
    figure = ax.figure
    figure.legend(handles, names, loc="outside upper left", ncols=columns, fontsize=9)


def svg(draw: Callable[[Axes], None], *, height: float, prefix: str) -> str:
    """Return what `draw` draws as an SVG element; `prefix` begins its ids."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(buffer.getvalue(), prefix)


def _inline(text: str, prefix: str) -> str:
    """Turn matplotlib's SVG file into an element of an HTML page: no prolog, unique ids, the page's colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)  # it would style the whole page
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)  # HTML knows the name spaces of SVG
    text = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", text)
    text = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", text)
    text = text.replace("<svg", '<svg aria-hidden="true"', 1)
    return re.sub("|".join(_VARIABLES), lambda found: _VARIABLES[found.group()], text)
