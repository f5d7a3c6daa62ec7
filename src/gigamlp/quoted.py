"""Figures that are not ours: quoted beside our rows, always labelled so."""

from __future__ import annotations

from gigamlp.record import Row

__all__ = ["QUOTED", "quoted_rows"]

_ARTICLE = "quoted: the article, NVIDIA Tesla T4, fp16 resident input, CUDA Graph replay"

# Rows that others measured on hardware that we do not have. Nothing here was run by gigamlp.
QUOTED: tuple[Row, ...] = (
    Row(
        name="ridge-512",
        hidden=[512],
        accuracy=0.9239,
        quoted=True,
        note="quoted: the article, ridge-ELM before fine-tuning",
    ),
    Row(
        name="finetuned-512",
        engine="torch_graph",
        hidden=[512],
        features_read_bytes=1568,
        batch=1024,
        residence="hot",
        input_dtype="float16",
        output="logits",
        samples_per_s=27.8e6,
        accuracy=0.9679,
        quoted=True,
        note=_ARTICLE,
    ),
    Row(
        name="finetuned-512",
        engine="torch_graph",
        hidden=[512],
        features_read_bytes=1568,
        batch=1,
        residence="hot",
        input_dtype="float16",
        output="logits",
        p50_us=9.22,
        accuracy=0.9679,
        quoted=True,
        note=f"{_ARTICLE}, one row; the article does not say how it was taken",
    ),
    Row(
        name="reader-40",
        hidden=[40],
        batch=10_000,
        residence="hot",
        input_dtype="float16",
        samples_per_s=86.8e6,
        accuracy=0.9691,
        quoted=True,
        note="quoted: a reader's 784-40-10 script, NVIDIA Tesla T4, transfer not counted",
    ),
    Row(
        name="reader-40",
        hidden=[40],
        batch=10_000,
        residence="hot",
        input_dtype="float16",
        samples_per_s=810e6,
        quoted=True,
        note="quoted: a reader, the 784-40-10 network on an NVIDIA RTX 5090",
    ),
)


def quoted_rows(name: str | None = None) -> list[Row]:
    """Return the quoted rows, of one network if `name` is given."""
    return [row for row in QUOTED if name is None or row.name == name]
