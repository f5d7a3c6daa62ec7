"""What limits the fused kernel on wide layers, and where a window should begin: kernels with a part of them left out.

    python benchmarks/wgmma_limits.py --out records/h200-wgmma-limits-DATE.json        on a Hopper GPU, 15 s

For 784-128-10 and 784-256-10 on the path `wgmma`, 2 M rows: the whole kernel; without the end of a step (second layer,
argmax); without loading further rows; without both. Such kernels answer nothing; only their time means something. Then
784-40-10 with a window of 384 bytes that begins at several bytes. Weights are random: nothing depends on them here.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import gigamlp as gm
from gigamlp.engines import cuda_fused
from gigamlp.kernels.cuda import source
from gigamlp.kernels.cuda.paths import Config
from gigamlp.measure.clock import clock_for
from gigamlp.measure.telemetry import device_info, snapshot, versions
from gigamlp.measure.timing import Throughput, rotating, throughput
from gigamlp.record import Record, Row
from gigamlp.spec import Spec, Variant

ROWS = 1 << 21
END = (
    "    if constexpr (LATER == 0) {\n      finish(sums, shared, at, at.first + row0, lane);\n    } else {\n      u32 h"
)
NO_END = (
    "    if constexpr (true) {\n      int any = 0;\n#pragma unroll\n"
    "      for (int j = 0; j < NB; j++) any ^= sums[j][0] ^ "
    "sums[j][1] ^ sums[j][2] ^ sums[j][3];\n      if (any == 12345678) *(u8*)at.out = 1;\n    } else {\n      u32 h"
)
LOADS = (
    "        if (u - 1 + DEPTH < UNITS) read(a, r, u - 1 + DEPTH, t);\n"
    "        else if (next < steps) read(a, after, (u - 1) % DEPTH, t);\n",
    "      if (UNITS > 0) read(a, after, (UNITS - 1) % DEPTH, t);\n      read_last(a, after, t);\n",
)
LEFT_OUT = {
    "whole": [],
    "without the end of a step": [(END, NO_END)],
    "without further rows": [(text, "") for text in LOADS],
    "without both": [(END, NO_END), *((text, "") for text in LOADS)],
}
WINDOWS = ((192, 576), (208, 592), (224, 608), (256, 640))


def random_mlp(hidden: int, window: tuple[int, int] | None = None) -> gm.MLP:
    rng = np.random.default_rng(0)
    read = 784 if window is None else window[1] - window[0]
    layers = [
        gm.Layer(rng.normal(size=(hidden, read)) / 2000, rng.normal(size=hidden), "relu"),
        gm.Layer(rng.normal(size=(10, hidden)), rng.normal(size=10)),
    ]
    return gm.quantise(gm.MLP(layers, columns=None if window is None else [window], features=784))


def runner_of(mlp: gm.MLP, config: Config, edits: list[tuple[str, str]]) -> Any:
    """A runner of the kernel with parts of its text replaced."""
    plain = source.generate

    def edited(*arguments: Any, **more: Any) -> source.Generated:
        made = plain(*arguments, **more)
        text = made.source
        for old, new in edits:
            if text.count(old) != 1:
                raise SystemExit(f"the kernel's text has changed; this is not in it once: {old!r}")
            text = text.replace(old, new)
        return replace(made, source=text)

    variant = Variant.from_json({**asdict(config), "graph": False, "dtype": "uint8", "compute": "int8"})
    with mock.patch.object(source, "generate", edited):
        return cuda_fused.CudaFused().build(mlp, Spec("cuda:0", ROWS), variant)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    _, _, images, _ = gm.data.load_mnist()
    rows = [torch.from_numpy(np.resize(np.roll(images, turn, 0), (ROWS, 784))).cuda() for turn in (0, 5000)]
    wgmma = {h: Config("wgmma", 4, 8, 6 if h > 128 else 12, "shared", h) for h in (128, 256)}
    work = {
        (f"784-{h}-10", what): runner_of(random_mlp(h), config, edits)
        for h, config in wgmma.items()
        for what, edits in LEFT_OUT.items()
    }
    for window in WINDOWS:
        name = f"784-40-10, bytes {window[0]} to {window[1]}"
        work[name, "whole"] = runner_of(random_mlp(40, window), Config("window", 1, 16, 2), [])
    calls = {str(key): rotating([lambda r=r, x=x: r.run(x) for x in rows]) for key, r in work.items()}
    times = throughput(calls, clock_for("cuda:0"), repeats=7, min_s=0.03)
    found = []
    for (name, what), runner in work.items():
        t = times[str((name, what))]
        if not isinstance(t, Throughput):
            raise t
        found.append(
            Row(
                name=name,
                engine="cuda_fused",
                variant=runner.variant.label,
                batch=ROWS,
                batches_per_launch=1,
                residence="cold",
                input_dtype="uint8",
                output="class",
                samples_per_s=ROWS / t.wall_us * 1e6,
                wall_us=t.wall_us,
                device_us=t.device_us,
                iqr=t.iqr,
                clock_mhz=snapshot("cuda:0").get("clock_mhz"),
                note="whole kernel" if what == "whole" else f"kernel {what}: it answers nothing",
            )
        )
        print(f"{name:32} {what:28} {t.wall_us:8.1f} us  {ROWS / t.wall_us:8.0f} M/s", flush=True)
    command = " ".join(["python", "benchmarks/wgmma_limits.py", *sys.argv[1:]])
    Record(device_info("cuda:0"), versions(), command, found).save(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
