"""The whole story on a few rows: every step runs, and the record says what happened."""

from __future__ import annotations

import numpy as np
import pytest

from gigamlp.data import load_mnist
from gigamlp.errors import InvalidInput
from gigamlp.record import Record
from gigamlp.reproduce import reproduce
from gigamlp.reproduce_settings import ARTICLE_WIDTHS, Settings, settings_for
from gigamlp.tune import Effort

TINY = Settings(
    widths=(32, 48, 256),
    batch=512,
    reader_batch=600,
    epochs=1,
    holdout=400,
    screen=Effort(min_s=0.002, warmup_s=0.002, latency_top=0, compile=False),
    final=Effort(min_s=0.002, warmup_s=0.002, latency_calls=20, compile=False),
    repeats=5,
    min_s=0.002,
    speed_ratio_min=0.01,
    survivors_max=2,
    accuracy_loss_max=0.05,
)


@pytest.fixture(scope="module")
def story():
    x, y, x_test, y_test = load_mnist()
    said: list[tuple[int, int, str]] = []
    done = reproduce(
        device="cpu",
        settings=TINY,
        data=(x[:3000], y[:3000], x_test[:500], y_test[:500]),
        progress=lambda *a: said.append(a),
        command="test",
    )
    return done, said


def test_the_named_rows_exist_measured_and_quoted(story) -> None:
    done, _ = story
    measured = {r.name for r in done.record.rows if not r.quoted}
    assert {"ridge-32", "finetuned-32", "reader-40"} <= measured
    assert {r.name for r in done.record.rows if r.quoted} == {"ridge-512", "finetuned-512", "reader-40"}
    assert all(r.note.startswith("quoted") for r in done.record.rows if r.quoted)


def test_every_measured_row_is_complete(story) -> None:
    for row in (r for r in story[0].record.rows if not r.quoted):
        assert row.engine in (
            "numpy",
            "torch_eager",
            "cpu_fused",
            "onnxruntime",
            "openvino",
        )  # whichever is quicker here
        assert row.variant
        assert row.batch
        assert row.residence in ("hot", "cold", "host-pageable")
        assert 0.1 < row.accuracy <= 1
        assert row.wall_us > 0
        assert row.iqr >= 0
        assert row.roof_share > 0
        assert row.p50_us > 0
        assert row.p99_us >= row.p50_us


def test_the_article_rows_and_the_ones_that_it_leaves_out(story) -> None:
    rows = [r for r in story[0].record.rows if not r.quoted]
    kinds = {(r.name, r.batch, r.input_dtype, r.output, r.residence) for r in rows}
    assert ("reader-40", 600, "float32", "logits", "hot") in kinds
    assert ("reader-40", 1, "float32", "logits", "hot") in kinds
    for extra in ("hot", "cold", "host-pageable"):
        assert ("reader-40", 600, "uint8", "class", extra) in kinds


def test_the_guard_rail_is_in_the_record_and_the_plans(story) -> None:
    done, _ = story
    networks = {n["hidden"]: n["rejected"] for n in done.record.extra["guard_rail"]["networks"]}
    assert set(networks) == {32, 48, 256}
    assert sum(reason is None for reason in networks.values()) == 2
    dead = next(h for h, reason in networks.items() if reason)
    assert all("guard-rail" in c.rejected for c in done.plans[f"ridge-{dead}"].candidates if c.wall_us)
    assert done.plans["reader-40"].mlp_digest == done.models["reader-40"].digest()


def test_selection_is_by_held_out_accuracy(story) -> None:
    done, _ = story
    scores = {t["name"]: t["validation_accuracy"] for t in done.record.extra["finetune"] if t["name"] != "reader-40"}
    assert done.record.extra["selected"] == max(scores, key=lambda n: scores[n])


def test_every_fine_tuned_survivor_has_rows_and_a_plan(story) -> None:
    done, _ = story
    alive = [n["hidden"] for n in done.record.extra["guard_rail"]["networks"] if n["rejected"] is None]
    rows = {(r.name, r.batch) for r in done.record.rows if r.samples_per_s and not r.quoted}
    for width in alive:
        assert {(f"finetuned-{width}", 512), (f"finetuned-{width}", 1)} <= rows
        assert done.plans[f"finetuned-{width}"].winners
    assert done.plans["ridge-32"].settings["guard_rail_screening"]
    missed = done.record.extra["accuracy_target"]["missed"]
    assert set(missed) == {
        t["name"] for t in done.record.extra["finetune"] if t["name"] != "reader-40"
    }  # after 1 epoch


def test_progress_goes_up_to_the_end(story) -> None:
    percents = [done for done, _, _ in story[1]]
    assert percents == sorted(percents)
    assert percents[-1] == 100


def test_the_record_is_json(story) -> None:
    record = story[0].record
    assert Record.from_json(record.to_json()) == record
    assert np.isfinite(record.extra["seconds"])


def test_settings() -> None:
    assert settings_for("cpu").widths == ARTICLE_WIDTHS
    assert settings_for("cpu").input_dtype == "float32"
    assert settings_for("cuda:0").input_dtype == "float16"
    assert settings_for("cuda:0").survivors_max == 4
    assert not settings_for("cpu", quick=True).final.compile
    assert settings_for("cpu", budget_s=5).budget_s == 5
    full = settings_for("cuda:0", grid="full")
    assert full.final.full
    assert full.screen.full
    assert full.screen.compile
    assert full.survivors_max == len(ARTICLE_WIDTHS)
    with pytest.raises(InvalidInput, match="grid"):
        settings_for("cpu", grid="huge")
    with pytest.raises(InvalidInput, match="budget"):
        settings_for("cpu", budget_s=0)
