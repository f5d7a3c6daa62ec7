"""`gigamlp train --recipe distill --quick` on a CPU: does a small teacher pay, or none? Writes a record.

Each variant trains four seeds of each width on 55,000 training rows of MNIST and chooses on the other 5,000; the test
rows are answered once, afterwards.

    python benchmarks/distill_quick.py --out distill-quick.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gigamlp import Record, agreement
from gigamlp.data import hold_out, load_mnist
from gigamlp.measure.clock import stopwatch, timestamp
from gigamlp.measure.telemetry import device_info, snapshot, versions
from gigamlp.record import Row
from gigamlp.train import ConvTeacher, distill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", default="40")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, help="default: what --quick does")
    given = parser.parse_args()
    widths = tuple(int(word) for word in given.hidden.split(","))
    x, y, x_test, y_test = load_mnist()
    x_fit, y_fit, x_val, y_val = hold_out(x, y, 5000, seed=0)
    rows, extra = [], {"made": timestamp(), "state_before": snapshot("cpu"), "variants": {}}
    for variant, teacher in (("no teacher", None), ("conv teacher, one epoch", "conv")):
        with stopwatch() as watch:
            found = distill(
                x_fit,
                y_fit,
                widths,
                seeds=given.seeds,
                teacher=teacher,
                epochs=given.epochs,
                quick=True,
                validation=(x_val, y_val),
                device="cpu",
                image_shape=(28, 28),
            )
        settings = found.settings
        facts = {
            "seconds": watch.seconds,
            "pool_seconds": found.pool_seconds,
            "teacher_seconds": found.teacher_seconds,
            "student_seconds": found.student_seconds,
            "teacher": asdict(settings.teacher) if isinstance(settings.teacher, ConvTeacher) else None,
            "teacher_validation_accuracy": found.teacher_accuracy,
            "recipe": asdict(settings.recipe),
            "copies": len(settings.strengths),
            "widths": {},
        }
        for width in widths:
            own = [student for student in found.students if student.hidden == (width,)]
            scores = [agreement(student.mlp, x_test, y_test) for student in own]
            best = own.index(found.best(width))
            facts["widths"][str(width)] = {
                "validation": [student.validation_accuracy for student in own],
                "test_float32": [score.accuracy_float32 for score in scores],
                "test_int8": [score.accuracy_integer for score in scores],
                "chosen": best,
            }
            mean = float(np.mean([score.accuracy_float32 for score in scores]))
            note = f"{variant}: {watch.seconds:.0f} s for all widths; test mean of {given.seeds} seeds {mean:.4f}"
            print(f"H={width}: {note}, chosen {scores[best].accuracy_float32:.4f}", flush=True)
            rows.append(
                Row(
                    name=f"distilled-{width}",
                    variant=variant,
                    hidden=[width],
                    features_read_bytes=784,
                    input_dtype="uint8",
                    output="class",
                    accuracy=scores[best].accuracy_float32,
                    note=note,
                )
            )
        extra["variants"][variant] = facts
    extra["state_after"] = snapshot("cpu")
    command = shlex.join(["python", "benchmarks/distill_quick.py", *sys.argv[1:]])
    Record(device_info("cpu"), versions(), command, rows, extra).save(given.out)


if __name__ == "__main__":
    main()
