"""The picture of a frontier: accuracy against speed, what is dominated in grey."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING

from gigamlp.report.drawing import require_matplotlib
from gigamlp.report.layout import clean, number

if TYPE_CHECKING:
    from gigamlp.frontier import Point

__all__ = ["frontier_svg"]

_INK, _GREY, _LINE = "#1b6ac9", "#9aa1ab", "#6b7280"


def frontier_svg(points: Sequence[Point], device: str) -> str:
    """Return the picture as the text of an SVG file.

    Parameters
    ----------
    points : sequence of Point
    device : str
        What the title says was measured.

    Raises
    ------
    Unsupported
        If matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    tested = all(point.test_accuracy is not None for point in points)

    def height(point: Point) -> float:
        return 100 * (point.test_accuracy if tested and point.test_accuracy is not None else point.validation_accuracy)

    best = [point for point in points if not point.dominated]
    rest = [point for point in points if point.dominated]
    with mpl.rc_context({"svg.hashsalt": "gigamlp", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        ax = figure.subplots()
        speeds = [point.samples_per_s / 1e6 for point in rest]
        ax.scatter(speeds, [height(point) for point in rest], color=_GREY, s=18, label="dominated")
        speeds = [point.samples_per_s / 1e6 for point in best]
        ax.plot(speeds, [height(point) for point in best], color=_LINE, linewidth=1, zorder=1)
        ax.scatter(speeds, [height(point) for point in best], color=_INK, s=34, label="on the frontier", zorder=2)
        for point in best:
            text = f"{clean(point.name)}, {point.scheme or 'float'}, {number(point.samples_per_s / 1e6, 3)} M/s"
            where = (point.samples_per_s / 1e6, height(point))
            ax.annotate(text, where, (4, 5), textcoords="offset points", fontsize=7)
        ax.set_xscale("log")
        ax.margins(x=0.15, y=0.12)
        ax.set_title(clean(device), fontsize=10)
        ax.set_xlabel("million samples per second, measured")
        ax.set_ylabel(f"{'test' if tested else 'validation'} accuracy, %")
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, loc="lower left")
        buffer = StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
