"""The command line: what it prints where, its exit codes, and that `--help` stays light."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.cli import main
from gigamlp.errors import BudgetExceeded, Unsupported
from gigamlp.plan import Candidate, Plan
from gigamlp.quoted import quoted_rows
from gigamlp.record import Record, Row
from gigamlp.reproduce import Reproduction
from gigamlp.spec import Spec, Variant

COMMANDS = ("reproduce", "train", "bench", "optimize", "predict", "convert", "export", "info", "doctor")


def make_mlp(name="toy", features=8, classes=("a", "b", "c,d"), hidden=(16,), seed=0):
    rng = np.random.default_rng(seed)
    widths = (features, *hidden, len(classes))
    layers = [
        gm.Layer(rng.normal(size=(out, width)), rng.normal(size=out), "relu" if i < len(hidden) else "identity")
        for i, (width, out) in enumerate(pairwise(widths))
    ]
    return gm.MLP(layers, name=name, classes=list(classes))


def make_record(command="gigamlp bench", name="toy", **changes):
    values = {
        "engine": "torch_eager",
        "variant": "op=linear pad=10",
        "hidden": [16],
        "batch": 1024,
        "residence": "hot",
        "input_dtype": "uint8",
        "output": "class",
        "samples_per_s": 1.5e6,
        "wall_us": 682.0,
        "iqr": 3.0,
        "p50_us": 690.0,
        "p99_us": 800.0,
        "accuracy": 0.9679,
        "roof_share": 0.5,
    }
    row = Row(name=name, **(values | changes))
    return Record({"name": "Test CPU [v1]"}, {"gigamlp": "0"}, command, [row], {"latency_samples": {name: [1.0, 2.0]}})


def make_plan(name="toy"):
    spec = Spec("cpu", 1024)
    fast = Candidate(spec, "torch_eager", Variant.of(op="mm"), wall_us=10.0, iqr=0.1, repeats=5, build_s=0.1)
    lost = Candidate(spec, "torch_compile", Variant.of(mode="default"), rejected="RuntimeError: no [compiler] here")
    return Plan({"device": "Test CPU"}, {"torch": "2"}, "ab" * 32, name, (fast, lost))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "toy.safetensors"
    make_mlp().save(path)
    return path


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.random.default_rng(1).normal(size=(7, 8)).astype(np.float32))
    return path


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Run a command line in this process, in an empty directory; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*argv):
        code = main([str(word) for word in argv])
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


def shell(*argv, env=None, **more):
    return subprocess.run(
        [sys.executable, "-m", "gigamlp.cli", *map(str, argv)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=120,
        **more,
    )


# ---- help -----------------------------------------------------------------------------------------------------------


def test_help_lists_all_commands(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert all(f" {name} " in out for name in COMMANDS)


def test_no_arguments_show_the_help(call):
    assert call() == call("--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_and_json(call, name):
    code, out, _ = call(name, "--help")
    assert code == 0
    assert "--json" in out
    assert "--debug" in out
    assert f"Examples:\n  gigamlp {name}" in out


@pytest.mark.parametrize("name", [c for c in COMMANDS if c not in ("convert", "export", "info", "doctor")])
def test_what_runs_something_takes_a_device(call, name):
    assert "--device" in call(name, "--help")[1]


def test_version(call):
    assert call("--version") == (0, f"{gm.__version__}\n", "")


def test_help_is_quick_and_imports_nothing_heavy():
    code = """
import sys
from gigamlp.cli import main
assert main(["--help"]) == 0 and main(["bench", "--help"]) == 0
heavy = {"torch", "numpy", "matplotlib", "sklearn", "pandas", "onnx", "ray", "cuda", "pynvml", "safetensors"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        assert shell("--help").returncode == 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.6  # the target; the best of five, as other work may share this machine


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], ["trian", 'Did you mean "train"']),
        (["bench", "x", "--bacth", "1"], ["--bacth", "Did you mean --batch"]),
        (["bench", "x", "--residence", "hott"], ["hott", "did you mean 'hot'"]),
        (["bench", "x", "--engine", "torch_eagr"], ["torch_eagr", "did you mean 'torch_eager'"]),
        (["bench", "x", "--batch", "0"], ["--batch", "whole number >= 1"]),
        (["bench", "x", "--batch", "1,two"], ["'two'"]),
        (["bench", "x", "--batch", ""], ["--batch"]),
        (["bench", "x", "--device", "gpu"], ["gpu", "auto, cpu, cuda, cuda:N"]),
        (["bench", "x", "--threads", "0"], ["--threads"]),
        (["bench"], ["MODEL"]),
        (["info"], ["MODEL"]),
        (["info", "a", "b"], ["b"]),
        (["reproduce", "--grid", "half"], ["half", "full"]),
        (["reproduce", "--budget", "-1"], ["--budget"]),
        (["reproduce", "--seed", "-1"], ["--seed"]),
        (["optimize", "x", "--min-accuracy", "97"], ["--min-accuracy"]),
        (["predict", "x", "y", "--proba", "--logits"], ["--proba", "--logits"]),
        (["predict", "x", "y", "--out", "z.txt"], [".npy or .csv"]),
        (["train", "--hidden", "8,4", "--from", "ridge"], ["one hidden layer", "--from scratch"]),
        (["train", "--method", "ridge", "--epochs", "3"], ["--epochs"]),
        (["train", "--from", "scratch", "--alpha", "1"], ["--alpha"]),
        (["train", "--labels", "y.npy"], ["--labels needs --data"]),
    ],
)
def test_a_wrong_command_line_is_exit_2_with_a_hint(call, argv, words):
    code, out, err = call(*argv)
    assert (code, out) == (2, "")
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert "--help" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["info", "absent.safetensors"], ["absent.safetensors"]),
        (["info", "rows.npy"], ["rows.npy", "safetensors"]),
        (["predict", "toy.safetensors", "absent.npy"], ["absent.npy"]),
        (["predict", "toy.safetensors", "narrow.npy"], ["3 features", "'toy' takes 8"]),
        (["predict", "toy.safetensors", "rows.npy", "--plan", "rows.npy"], ["rows.npy", "JSON"]),
        (["predict", "toy.safetensors", "rows.npy", "--out", "toy.safetensors/x.npy"], ["toy.safetensors"]),
        (["predict", "toy.safetensors", "rows.npy", "--device", "cuda:99"], ["cuda"]),
        (["train", "--data", "rows.npy"], ["without labels", "--labels"]),
        (["info", "."], ["."]),
    ],
)
def test_an_expected_failure_is_one_line_and_exit_1(call, model, rows, argv, words):
    np.save("narrow.npy", np.zeros((2, 3), np.float32))
    code, out, err = call(*argv)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err


def test_debug_shows_the_traceback(call):
    code, _, err = call("info", "absent", "--debug")
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_is_not_hidden(call, model, monkeypatch):
    monkeypatch.setattr("gigamlp.mlp.load", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("info", model)


def test_a_missing_extra_is_named(call, model, monkeypatch):
    def load(path):
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr("gigamlp.mlp.load", load)
    code, _, err = call("info", model)
    assert code == 1
    assert "pip install 'gigamlp[torch]'" in err


def test_ctrl_c_is_exit_130(call, model, monkeypatch):
    def load(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("gigamlp.mlp.load", load)
    code, out, err = call("info", model)
    assert (code, out, err) == (130, "", "interrupted\n")


def test_ctrl_c_while_the_program_still_loads_is_exit_130():
    code = """
        import sys
        sys.path.insert(0, SRC)

        class Interrupted:
            def find_spec(self, name, path=None, target=None):
                if name == "gigamlp.cli.app":
                    raise KeyboardInterrupt

        before = set(sys.modules)
        from gigamlp.cli import main
        slow = {m for m in set(sys.modules) - before if m.partition(".")[0] != "gigamlp"} - {"__future__"}
        assert not slow, slow
        sys.meta_path.insert(0, Interrupted())
        sys.exit(main(["info"]))
    """
    code = f"SRC = {str(Path(gm.__file__).parents[1])!r}\n" + textwrap.dedent(code)
    command = [sys.executable, "-S", "-c", code]  # -S: without site-packages' .pth files, which import what they like
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_exit_codes_and_streams_of_the_process(tmp_path, model):
    done = shell("info", model)
    assert (done.returncode, done.stderr) == (0, "")
    assert "toy" in done.stdout
    assert "\x1b" not in done.stdout
    done = shell("info", tmp_path / "absent")
    assert (done.returncode, done.stdout) == (1, "")
    assert shell("nope").returncode == 2


def test_a_closed_pipe_is_not_a_failure(tmp_path, model):
    many = tmp_path / "many.npy"
    np.save(many, np.zeros((60_000, 8), np.float32))
    command = f'"{sys.executable}" -m gigamlp.cli predict "{model}" "{many}" | head -1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[1] in ("141", "0")  # 0 if all of it fitted into the pipe
    assert done.stderr == ""


def test_an_ascii_terminal_gets_escapes_instead_of_a_crash(model):
    done = shell("info", model, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2192" in done.stdout


# ---- terminals ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch, *argv, width="100"):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", width)
    return main([str(word) for word in argv]), terminal.getvalue()


def test_errors_are_red_on_a_terminal_and_no_color_is_honoured(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, text = on_terminal(monkeypatch, "info", "absent")
    assert code == 1
    assert "\x1b[31m" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in on_terminal(monkeypatch, "info", "absent")[1]


def test_a_name_cannot_steer_the_terminal(call, tmp_path, monkeypatch):
    path = tmp_path / "evil.safetensors"
    make_mlp(name="x\x1b[2J[red]y").save(path)
    _, out, _ = call("info", path)
    assert "x\\x1b[2J[red]y" in out
    assert "\x1b[2J" not in on_terminal(monkeypatch, "info", path)[1]


def test_a_narrow_terminal_says_what_it_leaves_out(monkeypatch, model):
    monkeypatch.setattr("gigamlp.bench.bench", lambda mlp, **options: make_record(variant="a-rather-long=variant " * 4))
    code, narrow = on_terminal(monkeypatch, "bench", model, width="150")
    assert code == 0
    assert "not shown on this narrow terminal: variant" in narrow
    assert "M samples/s" in narrow
    assert "not shown" not in on_terminal(monkeypatch, "bench", model, width="300")[1]


def test_progress_is_shown_on_a_terminal_only(monkeypatch, call, model):
    seen = []

    def bench(mlp, **options):
        seen.append(options["progress"])
        if options["progress"] is not None:
            options["progress"](1, 2, "half [way]")
        return make_record()

    monkeypatch.setattr("gigamlp.bench.bench", bench)
    assert call("bench", model)[0] == 0
    assert on_terminal(monkeypatch, "bench", model)[0] == 0
    assert seen[0] is None
    assert callable(seen[1])


# ---- info and predict -----------------------------------------------------------------------------------------------


def test_info_json(call, model):
    code, out, err = call("info", model, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["digest"] == make_mlp().digest()
    assert found["classes"] == ["a", "b", "c,d"]
    assert found["parameters"] == make_mlp().parameters
    assert found["layers"][0] == {"inputs": 8, "outputs": 16, "bias": True, "activation": "relu"}
    assert (found["bytes"], found["stored_as"], found["format_version"]) == (model.stat().st_size, "float32", 1)


def test_info_shows_columns_scale_and_scheme(call, tmp_path):
    path = tmp_path / "m.safetensors"
    mlp = make_mlp(features=4).with_(columns=((0, 2), (5, 7)), features=9, input_scale=np.array([1, 2, 3, 4.0]))
    mlp.with_(scheme=gm.Scheme("w8")).save(path, "float16")
    code, out, _ = call("info", path)
    assert code == 0
    for words in ("0-2, 5-7", "1 to 4, one for each of 4", "w8", "float16", "9, of which 4"):
        assert words in out


def test_predict_prints_one_label_a_line(call, model, rows):
    code, out, err = call("predict", model, rows, "--device", "cpu")
    expected = make_mlp().predict(np.load(rows)).tolist()
    assert (code, err) == (0, "")
    assert [line.strip('"') for line in out.splitlines()] == expected


@pytest.mark.parametrize(
    ("flag", "method"), [("--proba", "predict_proba"), ("--logits", "logits")], ids=["proba", "logits"]
)
def test_predict_writes_npy_and_csv(call, model, rows, flag, method):
    expected = getattr(make_mlp(), method)(np.load(rows))
    assert call("predict", model, rows, flag, "--out", "deep/er/y.npy", "--device", "cpu")[:2] == (0, "")
    np.testing.assert_allclose(np.load("deep/er/y.npy"), expected, rtol=1e-4, atol=1e-5)
    assert call("predict", model, rows, flag, "--out", "y.csv", "--device", "cpu")[:2] == (0, "")
    head, *lines = Path("y.csv").read_text(encoding="utf-8").splitlines()
    assert head == ",".join(f'"{c}"' if "," in c else c for c in (f"{flag[2:]}_{k}" for k in ("a", "b", "c,d")))
    np.testing.assert_allclose([[float(v) for v in line.split(",")] for line in lines], expected, rtol=1e-4, atol=1e-5)


def test_predict_json(call, model, rows):
    found = json.loads(call("predict", model, rows, "--json", "--device", "cpu")[1])
    assert found["values"] == make_mlp().predict(np.load(rows)).tolist()
    assert (found["rows"], found["output"], found["out"]) == (7, "class", None)


def test_predict_in_chunks_gives_the_same(call, model, rows, monkeypatch):
    whole = call("predict", model, rows, "--logits", "--device", "cpu")[1]
    monkeypatch.setattr("gigamlp.cli.predict._CHUNK_ROWS", 3)
    cut = call("predict", model, rows, "--logits", "--device", "cpu")[1]
    parse = lambda text: [[float(v) for v in line.split(",")] for line in text.splitlines()]  # noqa: E731
    np.testing.assert_allclose(parse(cut), parse(whole), rtol=1e-5)


# ---- bench and optimize ---------------------------------------------------------------------------------------------


def test_bench_passes_its_options_on(call, model, tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", x=np.zeros((6, 8), np.uint8), y=["a", "b", "a", "b", "a", "b"])
    seen = {}

    def bench(mlp, **options):
        seen.update(options, mlp=mlp)
        return make_record(command=options["command"])

    monkeypatch.setattr("gigamlp.bench.bench", bench)
    argv = ["bench", model, "--engine", "torch_eager,torch_graph", "--batch", "1,64", "--batch", "7"]
    argv += ["--residence", "hot,cold", "--input-dtype", "uint8,float32", "--threads", "2", "--data", "d.npz"]
    code, out, _ = call(*argv, "--device", "cpu", "--json", "--out", "b.json")
    assert code == 0
    assert seen["mlp"] == make_mlp()
    assert seen["engines"] == ("torch_eager", "torch_graph")
    assert (seen["batch"], seen["residence"]) == ((1, 64, 7), ("hot", "cold"))
    assert (seen["input_dtype"], seen["threads"], seen["device"]) == (("uint8", "float32"), 2, "cpu")
    assert seen["data"][0].shape == (6, 8)
    record = Record.from_json(json.loads(out))
    assert record.command.startswith("gigamlp bench ")
    assert Record.load("b.json") == record


def test_bench_tells_models_of_one_name_apart_and_joins_their_rows(call, tmp_path, monkeypatch):
    make_mlp().save(tmp_path / "a.safetensors")
    make_mlp(seed=1).save(tmp_path / "b.safetensors")
    monkeypatch.setattr("gigamlp.bench.bench", lambda mlp, **options: make_record(name=mlp.name))
    code, out, err = call("bench", "a.safetensors", "b.safetensors", "--json")
    record = Record.from_json(json.loads(out))
    assert code == 0
    assert [row.name for row in record.rows] == ["toy (a.safetensors)", "toy (b.safetensors)"]
    assert list(record.extra["latency_samples"]) == ["toy (a.safetensors)", "toy (b.safetensors)"]
    assert "not a model for MNIST" in err
    assert "96.79 %" in err  # with --json the table goes to stderr


def test_bench_table_and_skipped_engines(call, model, monkeypatch):
    record = make_record(h2d_us=12.0, d2h_us=3.0, enqueue_us=1.0, device_us=600.0)
    record.extra["skipped"] = [{"engine": "torch_graph", "spec": "cpu", "reason": "needs CUDA"}]
    monkeypatch.setattr("gigamlp.bench.bench", lambda mlp, **options: record)
    _, out, err = call("bench", model)
    for words in ("Test CPU [v1]", "682.0 ± 3.0", "H2D µs", "D2H µs", "enqueue µs", "96.79 %", "50.0 %", "1.50"):
        assert words in out
    assert "not run: torch_graph, cpu: needs CUDA" in err


def test_bench_of_a_named_engine_that_cannot_run_fails(call, model, monkeypatch):
    def bench(mlp, **options):
        raise Unsupported("engine 'torch_graph' cannot run on cpu: CUDA Graphs need a CUDA device")

    monkeypatch.setattr("gigamlp.bench.bench", bench)
    code, out, err = call("bench", model, "--engine", "torch_graph")
    assert (code, out) == (1, "")
    assert "CUDA Graphs need" in err


def test_optimize(call, model, tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", x=np.zeros((6, 8), np.uint8), y=["a", "b", "a", "b", "a", "b"])
    seen = {}

    def optimize(mlp, *args, **options):
        seen.update(options, args=args)
        return make_plan()

    monkeypatch.setattr("gigamlp.tune.optimize", optimize)
    argv = ["optimize", model, "--batch", "1,1024", "--min-accuracy", "0.9", "--data", "d.npz", "--budget", "5"]
    code, out, err = call(*argv, "--device", "cpu", "--out", "p.json", "--full", "--input-on", "device,host")
    assert code == 0
    assert seen["input_on"] == ("device", "host")
    assert seen["args"] == ("cpu", (1, 1024), "uint8", "class")
    assert (seen["min_accuracy"], seen["max_disagreement"], seen["budget_s"]) == (0.9, None, 5.0)
    assert seen["effort"].full
    assert seen["validation"][1].tolist() == ["a", "b"] * 3
    assert "rejected: RuntimeError: no [compiler] here" in out
    assert "p.json" in err
    assert Plan.load("p.json") == make_plan()
    plan = json.loads(call("optimize", model, "--json")[1])
    assert Plan.from_json(plan) == make_plan()
    assert seen["validation"] is None


def test_optimize_says_where_it_keeps_the_plan(call, model, monkeypatch, own_plans):
    monkeypatch.setattr("gigamlp.tune.optimize", lambda *args, **options: make_plan())
    err = " ".join(call("optimize", model, "--no-cache")[2].split())
    assert "the plan is not kept; --out FILE keeps it" in err
    assert not own_plans.exists()
    err = call("optimize", model)[2]
    (kept,) = own_plans.rglob("*.json")
    assert str(kept) in err.replace("\n", "")


def test_optimize_out_of_budget(call, model, monkeypatch):
    def optimize(*args, **options):
        raise BudgetExceeded("the budget ended before any candidate was measured; raise it")

    monkeypatch.setattr("gigamlp.tune.optimize", optimize)
    assert call("optimize", model, "--budget", "0.001")[0] == 1


# ---- train ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clusters(tmp_path):
    """Three well-separated clusters of bytes, with string labels."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = np.clip(rng.normal(0, 20, (240, 8)) + 60 + 80 * np.eye(8)[y], 0, 255).astype(np.uint8)
    path = tmp_path / "clusters.npz"
    np.savez(path, x=x, y=np.array(["a", "b", "c,d"])[y], x_test=x[:60], y_test=np.array(["a", "b", "c,d"])[y[:60]])
    return path


def test_train_passes_its_options_on(call, clusters, monkeypatch):
    seen = {}

    def fit_ridge(x, y, **options):
        seen["ridge"] = options
        return SimpleNamespace(mlp=make_mlp(), solver="cholesky", jitter=0.0, alpha=1.0, seconds=0.5)

    def fit_finetune(mlp, x, y, **options):
        seen["finetune"] = options | {"mlp": mlp, "rows": len(x)}
        return SimpleNamespace(mlp=make_mlp(), seconds=1.5, compile_s=0.0)

    monkeypatch.setattr("gigamlp.train.fit_ridge", fit_ridge, raising=False)
    monkeypatch.setattr("gigamlp.train.fit_finetune", fit_finetune, raising=False)
    code, out, err = call("train", "--data", clusters, "--hidden", "16", "--epochs", "2", "--seed", "3", "--json")
    found = json.loads(out)
    assert code == 0, err
    assert seen["ridge"] == {"hidden": 16, "alpha": None, "seed": 3, "device": "auto", "progress": None}
    assert seen["finetune"]["mlp"] == make_mlp()
    assert seen["finetune"]["hidden"] is None
    assert (seen["finetune"]["epochs"], seen["finetune"]["rows"]) == (2, 200)
    assert len(seen["finetune"]["validation"][0]) == 40
    assert gm.load("model.safetensors").name == "finetuned-16" == found["name"]
    assert found["from"] == "ridge"

    assert call("train", "--data", clusters, "--hidden", "16,8", "--validation", "0", "--name", "mine")[0] == 0
    assert (seen["finetune"]["mlp"], seen["finetune"]["hidden"]) == (None, (16, 8))
    assert (seen["finetune"]["rows"], seen["finetune"]["validation"]) == (240, 0)
    assert gm.load("model.safetensors").name == "mine"


def test_an_output_path_that_cannot_work_is_refused_before_the_work(call, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for words in (
        ("train", "--out", tmp_path / "folder"),
        ("optimize", "no-such-model", "--out", tmp_path / "folder"),
        ("bench", "no-such-model", "--out", tmp_path / "file" / "x.json"),
        ("reproduce", "--out", tmp_path / "file" / "x"),
    ):
        code, _, err = call(*map(str, words))
        assert code == 2, err
        assert "director" in err


def test_a_failed_training_leaves_the_old_model(call, clusters, monkeypatch):
    def fit_ridge(x, y, **options):
        raise KeyboardInterrupt

    Path("model.safetensors").write_bytes(b"old")
    monkeypatch.setattr("gigamlp.train.fit_ridge", fit_ridge, raising=False)
    assert call("train", "--data", clusters)[0] == 130
    assert Path("model.safetensors").read_bytes() == b"old"


# ---- reproduce ------------------------------------------------------------------------------------------------------


def make_story(**options):
    record = make_record(command=options.get("command", "c"), name="ridge-512", input_dtype="float32", output="logits")
    cold = make_record(name="ridge-512", residence="cold", note="only 3 repeats").rows
    record = Record(record.device, record.versions, record.command, record.rows + cold + quoted_rows(), record.extra)
    models = {"ridge-512": make_mlp(name="ridge-512"), "ridge-6144": make_mlp(name="ridge-6144")}
    return Reproduction(record, {"ridge-512": make_plan("ridge-512")}, models, {"selected": "ridge-512"})


def test_reproduce_writes_everything_and_prints_both_tables(call, monkeypatch):
    seen = {}

    def reproduce(**options):
        seen.update(options)
        return make_story(**options)

    monkeypatch.setattr("gigamlp.reproduce.reproduce", reproduce)
    code, out, err = call("reproduce", "--quick", "--seed", "7", "--device", "cpu", "--budget", "60")
    assert code == 0, err
    assert (seen["quick"], seen["seed"], seen["device"], seen["budget_s"]) == (True, 7, "cpu", 60.0)
    assert (seen["grid"], seen["command"]) == ("default", "gigamlp reproduce --quick --seed 7 --device cpu --budget 60")
    where = Path("results/reproduce")
    record = Record.load(where / "reproduce.json")
    names = ["ridge-512.safetensors", "plan-ridge-512.json", "report.html", "reproduce.json"]
    assert record.extra["files"] == names
    assert sorted(p.name for p in where.iterdir()) == sorted(names)
    assert Plan.load(where / "plan-ridge-512.json").mlp_name == "ridge-512"
    assert all(name in err for name in names)
    article, _, others = out.partition("Cold, from raw bytes")
    assert "quoted [" in article
    assert "NVIDIA Tesla T4" in article
    assert "27.8" in article
    assert "96.79 %" in article
    assert "cold" in others
    assert "only 3 repeats" in others


def test_reproduce_counts_the_rows_that_were_not_measured(call, monkeypatch):
    def reproduce(**options):
        story = make_story(**options)
        lost = Row(name="lost", batch=4, input_dtype="uint8", output="class", note="not measured: the budget; ended")
        return replace(story, record=replace(story.record, rows=[lost]))

    monkeypatch.setattr("gigamlp.reproduce.reproduce", reproduce)
    code, out, err = call("reproduce")
    assert code == 0
    assert "1 rows were not measured" in err
    assert "not measured [1]" in out
    assert "[1] the budget; ended" in out


def test_reproduce_json(call, monkeypatch):
    monkeypatch.setattr("gigamlp.reproduce.reproduce", make_story)
    code, out, _ = call("reproduce", "--json", "--out", "there")
    assert code == 0
    assert Record.from_json(json.loads(out)) == Record.load("there/reproduce.json")


def test_reproduce_without_matplotlib_says_so_and_still_writes_the_record(call, monkeypatch):
    monkeypatch.setattr("gigamlp.reproduce.reproduce", make_story)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call("reproduce", "--out", "there")
    assert code == 0
    assert "no report.html" in err
    assert "pip install 'gigamlp[report]'" in err
    record = Record.load("there/reproduce.json")
    assert "matplotlib" in record.extra["report"]
    assert not Path("there/report.html").exists()


def test_reproduce_interrupted_leaves_no_half_written_file(call, monkeypatch):
    def write_report(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("gigamlp.reproduce.reproduce", make_story)
    monkeypatch.setattr("gigamlp.report.html.write_report", write_report)
    code, _, _ = call("reproduce", "--out", "there")
    assert code == 130
    assert sorted(p.name for p in Path("there").iterdir()) == ["plan-ridge-512.json", "ridge-512.safetensors"]


# ---- the real library, on little work -----------------------------------------------------------------------------


def test_train_info_predict_optimize_and_predict_by_the_plan(call, clusters):
    pytest.importorskip("torch", reason="training needs torch")
    code, out, err = call("train", "--data", clusters, "--hidden", "16", "--epochs", "20", "--json", "--device", "cpu")
    assert code == 0, err
    found = json.loads(out)
    assert found["validation_accuracy"] > 0.9
    assert found["test_accuracy"] > 0.9
    assert found["digest"] == gm.load("model.safetensors").digest()
    argv = ["optimize", "model.safetensors", "--batch", "60", "--engine", "torch_eager", "--device", "cpu"]
    code, out, err = call(*argv, "--data", clusters, "--out", "plan.json")
    assert code == 0, err
    assert "* torch_eager" in out
    code, out, err = call("predict", "model.safetensors", clusters, "--plan", "plan.json", "--out", "y.npy")
    assert code == 0, err
    data = np.load(clusters)
    assert np.mean(np.load("y.npy") == data["y"]) > 0.9
    make_mlp().save("other.safetensors")
    code, _, err = call("predict", "other.safetensors", clusters, "--plan", "plan.json")
    assert code == 1
    assert "another model" in err


def test_train_ridge_in_float16(call, clusters):
    pytest.importorskip("torch", reason="training needs torch")
    argv = ["train", "--method", "ridge", "--data", clusters, "--hidden", "32", "--dtype", "float16", "--device", "cpu"]
    code, out, err = call(*argv)
    assert code == 0, err
    assert "test accuracy" in out
    assert "float16" in call("info", "model.safetensors")[1]


def test_bench(call, model, tmp_path):
    pytest.importorskip("torch", reason="the engine needs torch")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (200, 8), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=make_mlp().predict(x))
    argv = ["bench", model, "--engine", "torch_eager", "--batch", "64,128", "--residence", "hot,host-pageable"]
    code, out, err = call(*argv, "--data", "d.npz", "--repeats", "5", "--device", "cpu", "--json")
    assert code == 0, err
    record = Record.from_json(json.loads(out))
    assert [(r.batch, r.residence) for r in record.rows] == [
        (b, where) for b in (64, 128) for where in ("hot", "host-pageable")
    ]
    assert all(r.accuracy > 0.95 and r.samples_per_s > 0 and r.p99_us >= r.p50_us for r in record.rows)
    code, _, err = call("bench", model, "--engine", "torch_graph", "--device", "cpu")
    assert code == 1
    assert "torch_graph" in err


@pytest.mark.slow  # the whole story, on a few rows: 10 to 20 seconds
def test_reproduce(call, monkeypatch):
    pytest.importorskip("torch", reason="training needs torch")
    from gigamlp.data import load_mnist
    from tests.test_reproduce import TINY

    x, y, x_test, y_test = load_mnist()
    monkeypatch.setattr("gigamlp.reproduce.settings_for", lambda *args, **options: TINY)
    monkeypatch.setattr("gigamlp.data.load_mnist", lambda: (x[:3000], y[:3000], x_test[:500], y_test[:500]))
    code, out, err = call("reproduce", "--device", "cpu", "--out", "r")
    assert code == 0, err
    record = Record.load("r/reproduce.json")
    assert {"ridge-32", "finetuned-32", "reader-40"} <= {row.name for row in record.rows}
    assert {p.name for p in Path("r").iterdir()} == set(record.extra["files"])
    assert gm.load("r/reader-40.safetensors").digest() == Plan.load("r/plan-reader-40.json").mlp_digest
    assert "host-pageable" in out
    assert "quoted [" in out
    page = Path("r/report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor(call):
    code, out, err = call("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert "torch_eager" in json.dumps(found)
    code, out, _ = call("doctor")
    assert code == 0
    assert "torch_eager" in out
