"""The report: valid, self-contained, escaped, and complete whatever a record lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.plan import Candidate, Plan
from gigamlp.quoted import quoted_rows
from gigamlp.record import Record, Row
from gigamlp.report.html import render, write_report
from gigamlp.report.layout import article_rows, clean, extra_rows, footnotes, labels, number, row_of_samples, source
from gigamlp.spec import Spec, Variant

EVIL = "<script>alert('$x$ & \"y\"')</script>"
VOID = {"meta", "br", "link", "img", "input", "hr"}

pytest.importorskip("matplotlib", reason="the report needs matplotlib")


class Page(HTMLParser):
    """Reads a page and keeps what matters: tags, ids, references, text; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "srcset", "data"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def row(name="ridge-512", batch=1024, speed=91e6, accuracy=0.92, **changes):
    wall = batch / speed * 1e6
    values = {
        "engine": "torch_graph",
        "variant": "op=linear pad=16",
        "hidden": [512],
        "residence": "hot",
        "input_dtype": "float16",
        "output": "logits",
        "wall_us": wall,
        "iqr": wall / 50,
        "p50_us": wall + 6,
        "p99_us": wall + 12,
        "roof_share": 0.3,
    }
    return Row(name=name, batch=batch, samples_per_s=speed, accuracy=accuracy, **(values | changes))


def key_of(r, device="cuda:0"):
    return f"{r.name} {r.engine} {r.variant} {device} batch={r.batch} {r.input_dtype} -> {r.output} {r.residence}"


def make_record(rows=None, **extra):
    if rows is None:
        rows = [
            row(),
            row(batch=1, speed=0.1e6),
            row("reader-40", 10_000, 1068e6, 0.9757),
            row("reader-40", 10_000, 483e6, 0.9757, residence="cold", input_dtype="uint8", output="class"),
            row("reader-40", 10_000, 20e6, 0.9757, residence="host-pinned", h2d_us=16.2, d2h_us=2.1, enqueue_us=4.0),
            *quoted_rows(),
        ]
    samples = {key_of(r): [r.p50_us * (1 + i / 1000) for i in range(100)] for r in rows if r.p50_us and not r.quoted}
    device = {"name": "NVIDIA H200", "driver": None}
    extra = {
        "latency_samples": samples,
        "seed": 0,
        "roofs": {"read_bytes_s": 4.53e12, "macs_s": {"float16": 3e14}},
    } | extra
    return Record(device, {"torch": "2.11", "numpy": "2.3"}, "gigamlp reproduce --device cuda", rows, extra)


def make_plan(name="reader-40"):
    spec = Spec("cuda:0", 1024, "float16", "logits")
    return Plan(
        {"device": "NVIDIA H200"},
        {},
        "ab" * 32,
        name,
        (
            Candidate(spec, "torch_graph", Variant.of(op="mm"), wall_us=11.0, iqr=0.1, build_s=0.1, accuracy=0.97),
            Candidate(spec, "torch_eager", Variant.of(op="mm"), wall_us=44.0, iqr=0.1, build_s=0.1, accuracy=0.97),
            Candidate(spec, "torch_compile", Variant(), rejected=f"RuntimeError: {EVIL}"),
        ),
        {"validation_rows": 5000},
    )


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_holds_what_was_run_and_measured(tmp_path):
    path = tmp_path / "report.html"
    write_report(make_record(), path, plans={"reader-40": make_plan()}, extra={"selected": "finetuned-768"})
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for words in (
        "NVIDIA H200",
        "gigamlp reproduce --device cuda",
        "torch 2.11, numpy 2.3",
        "read 4530 GB/s, float16 300 TMAC/s",
        "finetuned-768",
        "quoted [1]",
        "Tesla T4",
        "1,068",
        "host-pinned",
        "16.2",
        "reader-40: 3 candidates",
        "chosen",
        "slower",
        "rejected: RuntimeError",
    ):
        assert words in page.text, words
    assert page.tags.count("svg") == 3
    assert text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert '<html lang="en">' in text


def test_the_page_asks_no_server_for_anything():
    text = render(make_record(), plans=[make_plan()])
    page = Page(text)
    assert all(reference.startswith("#") for reference in page.references), set(page.references)
    assert not re.search(r"(https?:)?//\w", text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert "@import" not in text


def test_ids_are_unique_and_references_resolve():
    page = Page(render([make_record(), make_record()], plans=[make_plan()]))
    assert page.tags.count("svg") == 6
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)


def test_colours_come_from_the_style_sheet():
    text = render(make_record())
    body = text[text.index("<body>") :]
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{3,8})", body)) == set()
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert {"--ink", "--series-1", "--series-2"} <= used
    for theme in re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL):
        assert used <= set(re.findall(r"(--[\w-]+):", theme))


def test_names_are_escaped_everywhere():
    rows = [row(EVIL, engine=EVIL, variant=EVIL, note=EVIL), row(EVIL, quoted=True, note=EVIL)]
    record = Record(
        {"name": EVIL, EVIL: EVIL}, {EVIL: EVIL}, EVIL, rows, {"latency_samples": {EVIL: [1.0, 2.0]}, "seed": EVIL}
    )
    text = render(record, plans=[make_plan(EVIL)], extra={EVIL: {EVIL: [EVIL]}})
    assert "<script" not in text.lower()
    assert "alert(&#x27;" in text
    page = Page(text)
    assert "script" not in page.tags
    assert EVIL in page.text


def test_control_characters_are_shown_not_sent():
    text = render(make_record([row("a\x00\x1b[2J\u202eb")]))
    assert not re.search(r"[\x00\x1b\u202e]", text)
    assert "a\\x00\\x1b[2J\\u202eb" in text


# ---- records that lack something ------------------------------------------------------------------------------------

BARE = Row(name="bare")
CASES = {
    "no rows": [],
    "a row of nothing": [BARE],
    "quoted only": quoted_rows(),
    "one row at batch 1": [row(batch=1, speed=1e5)],
    "no accuracy": [row(accuracy=None)],
    "no roof": [row(roof_share=None)],
    "no latency": [row(p50_us=None, p99_us=None)],
    "no speed": [Row(name="x", accuracy=0.5, batch=4, note="not measured: out of memory")],
    "zero speed": [Row(name="z", samples_per_s=0.0, accuracy=0.0, batch=1024)],
    "equal speeds": [row("a"), row("b")],
    "a wide span": [row("a", speed=1.0), row("b", speed=1e12)],
    "many rows": [row(f"network-{i}", speed=1e6 * (i + 1)) for i in range(70)],
    "long names": [row("n" * 300), row("m" * 300, engine="e" * 200, variant="v" * 400)],
    "no engine or path": [row(engine=None, variant=None, input_dtype=None, output=None, residence=None)],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_any_record_gives_a_page(name):
    rows = CASES[name]
    Page(render(Record({"name": None}, {}, "", rows)))
    page = Page(render(make_record(rows)))
    assert all(clean(r.name) in page.text for r in rows)


@pytest.mark.parametrize("extra", [{"latency_samples": None}, {"latency_samples": {"k": []}}, {"roofs": None}])
def test_odd_extras_give_a_page(extra):
    assert "91.0" in Page(render(make_record([row()], **extra))).text


def test_latency_samples_that_are_not_times_are_left_out():
    samples = {"a": [float("nan"), float("inf"), -1.0, 0.0, None], "b": [5.0]}
    page = Page(render(make_record([row(p50_us=None, p99_us=None)], latency_samples=samples)))
    assert page.tags.count("svg") == 3


def test_no_record_is_refused():
    with pytest.raises(InvalidInput, match="at least one record"):
        render([])


def test_rendering_leaves_matplotlib_as_it_was():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    first = render(make_record())
    assert dict(mpl.rcParams) == before
    assert render(make_record()) == first  # the same record, the same bytes


def test_rendering_uses_neither_pyplot_nor_a_display(tmp_path):
    code = """
import sys
from gigamlp.record import Record, Row
from gigamlp.report import write_report
write_report(Record({"name": "x"}, {}, "c", [Row(name="a", batch=4, samples_per_s=1e6, accuracy=0.5)]), sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    environment = {"PATH": "/usr/bin", "MPLBACKEND": "TkAgg"}
    argv = [sys.executable, "-c", code, str(tmp_path / "r.html")]
    subprocess.run(argv, check=True, env=environment, timeout=60)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'gigamlp\[report\]'"):
        write_report(make_record(), tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_a_failed_report_leaves_the_old_one(tmp_path):
    path = tmp_path / "r.html"
    path.write_text("old")
    with pytest.raises(InvalidInput):
        write_report([], path)
    assert path.read_text() == "old"


# ---- arrangement ----------------------------------------------------------------------------------------------------


def test_article_rows_are_grouped_and_quoted_ones_come_last():
    found = [(r.name, r.quoted) for r in article_rows(make_record())]
    assert found == [
        *[("ridge-512", False)] * 2,
        ("ridge-512", True),
        ("reader-40", False),
        *[("reader-40", True)] * 2,
        *[("finetuned-512", True)] * 2,
    ]


def test_every_row_is_in_exactly_one_table():
    record = make_record()
    assert len(article_rows(record)) + len(extra_rows(record)) == len(record.rows)
    assert {r.residence for r in extra_rows(record)} == {"cold", "host-pinned"}


def test_labels_tell_rows_apart_with_as_few_words_as_do():
    assert labels([row("a"), row("b")]) == ["a", "b"]
    assert labels([row("a"), row("a", batch=1)]) == ["a · batch 1,024", "a · batch 1"]
    assert labels([row("a", engine="x"), row("a", engine="y")]) == ["a · x", "a · y"]
    assert labels([row("a", engine="x"), row("b", engine="y")]) == ["a", "b"]
    assert labels([]) == []


def test_samples_find_their_row():
    record = make_record()
    keys = list(record.extra["latency_samples"])
    found = [row_of_samples(record, key) for key in keys]
    assert [key_of(r) for r in found] == keys
    assert row_of_samples(record, "something else") is None


def test_samples_keys_are_those_of_jobs():
    from gigamlp.jobs import Job
    from tests.test_cli import make_mlp

    job = Job(make_mlp("m"), Spec("cpu", 64, threads=2), "torch_eager", Variant.of(op="mm", pad=10), "cold")
    r = Row(
        name="m",
        engine="torch_eager",
        variant=job.variant.label,
        batch=64,
        residence="cold",
        input_dtype="uint8",
        output="class",
    )
    other = Row(**{**r.__dict__, "batch": 6})
    assert row_of_samples(Record({}, {}, "", [other, r]), job.key) is r


def test_sources():
    assert source(row()) == "measured"
    assert source(row(note="only 3 repeats")) == "measured; only 3 repeats"
    assert source(row(quoted=True, note="quoted: the article")) == "quoted: the article"
    assert source(row(quoted=True)) == "quoted: origin not given"
    assert source(Row(name="x", note="not measured: why; and so")) == "not measured: why; and so"
    assert source(BARE) == "not measured"
    assert footnotes([Row(name="x", note="not measured: a; b: c")]) == (["not measured [1]"], ["a; b: c"])
    rows = [row(), row(quoted=True, note="n"), row(quoted=True, note="n"), row(note="few; odd"), BARE]
    assert footnotes(rows) == (
        ["measured", "quoted [1]", "quoted [1]", "measured [2]", "not measured"],
        ["n", "few; odd"],
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (1234567.8, "1,234,568"), (12.3456, "12.35"), (0.5, "0.5000"), (1e-9, "0.000000001000")],
)
def test_numbers(value, text):
    assert number(value) == text
