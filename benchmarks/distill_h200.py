"""Train the shipped MNIST models: teacher, pool and students in one go, then the test rows, once, in int8.

What is chosen (the seed of each width) is chosen on 5,000 of the 60,000 training rows, which nothing is trained on. The
test rows are read after that only, by the integer reference of scheme w8: for every seed, so that mean and spread are
known. The chosen models are saved as safetensors, with a record, ``distill.json``, beside them.

    python benchmarks/distill_h200.py --out OUT                   on a GPU: two to four minutes
    python benchmarks/distill_h200.py --out OUT --windows         networks that read a part of each row, too
    python benchmarks/distill_h200.py --out OUT --smoke           anywhere: half a minute, useless models
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gigamlp import Record, agreement
from gigamlp.data import hold_out, load_mnist
from gigamlp.measure.clock import Stopwatch, stopwatch, timestamp
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.record import Row
from gigamlp.train import ConvTeacher, Crop, Distillation, Segments, Window, bytes_moved, distill
from gigamlp.train.distill_values import Trained

WIDTHS = (16, 32, 40, 64, 128, 512)
WANTED = {16: 0.969, 32: 0.982, 40: 0.984, 64: 0.989, 128: 0.992, 512: 0.9945}  # of the mean over the seeds
WINDOWS = {40: (None, Window(384), Window(352), Crop(20, 20)), 64: (None, Segments(12))}  # None: whole rows
WANTED_OF_WINDOWS = {(40, "w384"): 0.972, (40, "c20"): 0.982, (64, "s12"): 0.983}
RESERVE_S = 25.0  # for the test rows, the files and the table


def reporter(watch: Stopwatch) -> Callable[[int, int, str], None]:
    """Return a progress function that prints a line at each new stage and each tenth of one."""
    seen: dict[str, int] = {}

    def tell(done: int, total: int, text: str) -> None:
        stage = text.partition(",")[0]
        tenth = 10 * done // max(total, 1)
        if seen.get(stage) != tenth:
            seen[stage] = tenth
            print(f"[{watch.seconds:6.1f} s] {text}: {done}/{total}", flush=True)

    return tell


def measured(found: Distillation, rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Answer validation and test rows with every student, in float32 and in int8."""
    x_val, y_val, x_test, y_test = rows
    table = []
    for student in found.students:
        held, test = agreement(student.mlp, x_val, y_val), agreement(student.mlp, x_test, y_test)
        table.append(
            {
                "hidden": list(student.hidden),
                "reads": student.reads,
                "seed": student.seed,
                "chosen": found.best(student.hidden, student.reads) is student,
                "validation_float32": held.accuracy_float32,
                "validation_int8": held.accuracy_integer,
                "validation_loss": student.validation_loss,
                "test_float32": test.accuracy_float32,
                "test_int8": test.accuracy_integer,
            }
        )
    return table


def name_of(width: int, reads: str | None) -> str:
    return f"mnist-{width}" + (f"-{reads}" if reads else "")


def summary(table: list[dict[str, Any]], student: Trained) -> dict[str, Any]:
    width, reads = student.hidden[0], student.reads
    own = [row for row in table if row["hidden"] == [width] and row["reads"] == reads]
    scores = [row["test_int8"] for row in own]
    chosen = next(row for row in own if row["chosen"])
    return {
        "name": name_of(width, reads),
        "hidden": width,
        "reads": reads,
        "columns": student.mlp.columns,
        "features_read": student.mlp.features_read,
        "bytes_moved_64": bytes_moved(student.mlp.columns, student.mlp.features),
        "seeds": len(own),
        "chosen_seed": chosen["seed"],
        "validation_mean_float32": float(np.mean([row["validation_float32"] for row in own])),
        "validation_chosen_float32": chosen["validation_float32"],
        "test_mean_int8": float(np.mean(scores)),
        "test_sd_int8": float(np.std(scores)),
        "test_min_int8": min(scores),
        "test_max_int8": max(scores),
        "test_mean_float32": float(np.mean([row["test_float32"] for row in own])),
        "test_chosen_int8": chosen["test_int8"],
        "test_chosen_float32": chosen["test_float32"],
        "wanted_mean": WANTED.get(width) if reads is None else WANTED_OF_WINDOWS.get((width, reads)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record and the models")
    parser.add_argument("--hidden", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--windows", action="store_true", help="networks that read a part of each row, too")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2000, help="fewer if the budget asks for it")
    parser.add_argument("--teachers", type=int, default=3, help="networks of the teacher")
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smoke", action="store_true", help="a few rows and epochs, to see that all parts run")
    given = parser.parse_args(argv)
    widths = tuple(int(word) for word in given.hidden.split(","))
    if given.windows and not set(WINDOWS) <= set(widths):
        parser.error(f"--windows needs --hidden with {', '.join(map(str, WINDOWS))}")
    watch = stopwatch()
    given.out.mkdir(parents=True, exist_ok=True)
    device = resolve_device(given.device)
    torch.zeros(1, device=device)  # starts CUDA
    x, y, x_test, y_test = load_mnist(cache=False)
    x_fit, y_fit, x_val, y_val = hold_out(x, y, 5000, given.seed)
    teacher = ConvTeacher(nets=given.teachers)
    epochs, batch = given.epochs, 1024
    if given.smoke:
        x_fit, y_fit, x_val, y_val = x_fit[:2000], y_fit[:2000], x_val[:500], y_val[:500]
        x_test, y_test = x_test[:500], y_test[:500]
        teacher, epochs, batch = ConvTeacher(1, (4, 8), 1, 256), 4, 128
    start_s = watch.seconds
    print(f"[{start_s:6.1f} s] {device}: {len(x_fit):,} rows to train on, {len(x_val):,} to choose by", flush=True)
    found = distill(
        x_fit,
        y_fit,
        widths,
        seeds=given.seeds,
        teacher=teacher,
        epochs=epochs,
        batch=batch,
        validation=(x_val, y_val),
        seed=given.seed,
        device=device,
        image_shape=(28, 28),
        columns=WINDOWS if given.windows else None,
        progress=reporter(watch),
        budget_s=max(given.budget_s - start_s - RESERVE_S, 1.0),
    )
    trained_s = watch.seconds
    settings = found.settings
    print(
        f"[{trained_s:6.1f} s] pool {found.pool_seconds:.1f} s ({len(settings.strengths)} copies), teacher "
        f"{found.teacher_seconds:.1f} s (validation {100 * (found.teacher_accuracy or 0):.2f} %), choosing what to "
        f"read {found.selection_seconds:.1f} s, students "
        f"{found.student_seconds:.1f} s ({len(found.students)} for {settings.recipe.epochs} epochs)",
        flush=True,
    )
    for each in found.chosen:
        print(
            f"{name_of(each.hidden[0], each.label)} reads {each.columns}, of {len(each.tried) or 1} tried", flush=True
        )
    chosen = [each for each in found.students if found.best(each.hidden, each.reads) is each]
    for student in chosen:
        name = name_of(student.hidden[0], student.reads)
        student.mlp.with_(name=name).save(given.out / f"{name}.safetensors")
    with stopwatch() as testing:
        table = measured(found, (x_val, y_val, x_test, y_test))
    summaries = [summary(table, student) for student in chosen]
    for each in summaries:
        wanted = each["wanted_mean"]
        verdict = "" if wanted is None else f", wanted {100 * wanted:.2f}: {each['test_mean_int8'] >= wanted}"
        print(
            f"{each['name']:<14} validation {100 * each['validation_mean_float32']:.2f} mean; test int8 "
            f"{100 * each['test_mean_int8']:.2f} +- {100 * each['test_sd_int8']:.2f} mean of {each['seeds']}, "
            f"{100 * each['test_chosen_int8']:.2f} chosen (float32 {100 * each['test_mean_float32']:.2f} mean){verdict}"
        )
    note = "int8 first layer (w8), NumPy's integer reference over {} test rows; mean of {} seeds {:.4f}"
    rows = [
        Row(
            name=each["name"],
            engine="numpy",
            scheme="w8",
            hidden=[each["hidden"]],
            features_read_bytes=each["features_read"],
            input_dtype="uint8",
            output="class",
            accuracy=each["test_chosen_int8"],
            note=note.format(len(x_test), each["seeds"], each["test_mean_int8"]),
        )
        for each in summaries
    ]
    made = settings.teacher
    extra = {
        "made": timestamp(),
        "smoke": given.smoke,
        "seconds": {
            "start_and_data": start_s,
            "pool": found.pool_seconds,
            "teacher_and_its_answers": found.teacher_seconds,
            "choosing_what_to_read": found.selection_seconds,
            "students": found.student_seconds,
            "training_in_all": trained_s - start_s,
            "test_rows": testing.seconds,
            "in_all": watch.seconds,
        },
        "widths": summaries,
        "students": table,
        "teacher_validation_accuracy": found.teacher_accuracy,
        "what_was_read": [asdict(each) for each in found.chosen],
        "history": [asdict(each) for each in found.history],
        "settings": {
            "recipe": asdict(settings.recipe),
            "teacher": asdict(made) if isinstance(made, ConvTeacher) else None,
            "augment": asdict(settings.augment) if settings.augment is not None else None,
            "choices": {"x".join(map(str, key)): asdict(choice) for key, choice in settings.choices.items()},
            "seeds": list(settings.seeds),
            "copies": {str(s): settings.strengths.count(s) for s in dict.fromkeys(settings.strengths)},
            "rows": settings.rows,
            "validation_rows": settings.validation_rows,
            "seed": given.seed,
        },
        "state_after": snapshot(device),
    }
    command = shlex.join(["python", "benchmarks/distill_h200.py", *(argv if argv is not None else sys.argv[1:])])
    Record(device_info(device), versions(), command, rows, extra).save(given.out / "distill.json")
    print(f"[{watch.seconds:6.1f} s] wrote {given.out / 'distill.json'} and {len(chosen)} models")


if __name__ == "__main__":
    main()
