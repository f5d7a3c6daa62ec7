"""Draw the README's picture from records: accuracy against speed, with the memory roof of the fastest device.

python benchmarks/readme_figure.py docs/images/accuracy-speed.svg RECORD.json... --ours RECORD.json...
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from gigamlp._atomic import write_text
from gigamlp.record import Record, Row

COLOURS = ("#1b6ac9", "#c2500a", "#147d4f")
QUOTED = "#6b7280"


def shown(record: Record) -> list[Row]:
    """The rows of more than one row a batch whose input was on the device."""
    rows = [r for r in record.rows if r.samples_per_s and r.accuracy and (r.batch or 0) > 1]
    return [r for r in rows if r.quoted or r.residence in ("hot", "cold")]


def draw(records: list[Record], ours: list[Record], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for record, colour in zip(records, COLOURS, strict=False):
        mine = [r for r in shown(record) if not r.quoted]
        for residence, marker in (("hot", "o"), ("cold", "s")):
            some = [r for r in mine if r.residence == residence]
            axes.scatter(
                [r.samples_per_s or 0 for r in some],
                [100 * (r.accuracy or 0) for r in some],
                marker=marker,
                color=colour,
                alpha=0.75,
                label=f"{record.device['name']}, {residence}",
            )
    quoted = [r for r in shown(records[0]) if r.quoted]
    axes.scatter(
        [r.samples_per_s or 0 for r in quoted],
        [100 * (r.accuracy or 0) for r in quoted],
        marker="D",
        facecolors="none",
        edgecolors=QUOTED,
        label="quoted: Tesla T4",
    )
    fused = [r for record in ours for r in shown(record) if r.engine == "cuda_fused" and r.residence == "cold"]
    axes.scatter(
        [r.samples_per_s or 0 for r in fused],
        [100 * (r.accuracy or 0) for r in fused],
        marker="*",
        s=60,
        color="#a3195b",
        label="our kernels there, cold; beyond the roof\na part of each row is read",
    )
    read = records[0].extra["roofs"]["read_bytes_s"]
    for size, text in ((1568, "float16 rows"), (784, "uint8 rows")):
        axes.axvline(read / size, color=COLOURS[0], linestyle="--", linewidth=1)
        axes.text(read / size * 0.93, 92.2, f"memory roof, {text}", rotation=90, ha="right", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("samples per second")
    axes.set_ylabel("accuracy on MNIST's test images, %")
    axes.set_ylim(92, 99.9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="center left")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--ours", type=Path, nargs="*", default=[], help="records of our kernels on the first's device")
    args = parser.parse_args()
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "gigamlp"
    records, ours = ([Record.load(path) for path in paths] for paths in (args.records, args.ours))
    draw(records, ours, args.out)


if __name__ == "__main__":
    main()
