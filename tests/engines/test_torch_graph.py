"""torch_graph: CUDA Graphs that replay what was captured, on any stream, whatever happens to other graphs."""

from __future__ import annotations

import gc
import threading

import pytest

from gigamlp.engines import Runner, engine
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import assert_answers, net, rows

torch = pytest.importorskip("torch")

GRAPH = engine("torch_graph")


def test_a_cpu_has_no_cuda_graphs():
    assert GRAPH.unavailable("cpu") == "CUDA Graphs need a CUDA device"
    for refuse in (GRAPH.variants, GRAPH.build):
        with pytest.raises(Unsupported, match="CUDA Graphs need a CUDA device"):
            refuse(net(20, 6, 5), Spec("cpu", 16))
    if not torch.cuda.is_available():
        assert "sees no CUDA device" in GRAPH.unavailable("cuda:0")


def answers(runner, x):
    y = runner.run(x.to(runner.spec.device))
    torch.cuda.synchronize()
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("output", ["class", "margin", "logits", "proba"])
def test_every_variant_and_three_inputs_through_one_graph(dtype, output):
    # 37 features: no multiple of any vector; 10 classes: the article's padding to 16; 65 rows: past a tile of 64
    mlp = net(37, 24, 10) if dtype in ("uint8", "int8") else net(37, 24, 10, scale=1.0, offset=0.1)
    spec = Spec("cuda:0", 65, dtype, output)
    for variant in GRAPH.variants(mlp, spec, full=True):
        runner = GRAPH.build(mlp, spec, variant)
        for seed in (1, 2, 3):
            x = rows(mlp, 65, dtype, seed)
            assert_answers(mlp, spec, runner.variant, x, answers(runner, x))
        x = rows(mlp, 65, dtype, 4)
        runner.input.copy_(x)
        assert_answers(mlp, spec, runner.variant, x, answers(runner, runner.input))
        runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "widths"),
    [
        (1, (784, 40, 10)),  # one row: cuBLAS takes a matrix-vector product
        (7, (17, 13, 11, 7, 4)),  # depth 4, odd widths
        (1024, (784, 512, 10)),  # the article's network
        (10_000, (784, 40, 10)),  # the reader's network
        (64, (16, 10)),  # depth 1: the graph reads the static input and writes the output in one product
    ],
)
def test_shapes(batch, widths):
    mlp = net(*widths)
    spec = Spec("cuda:0", batch, "uint8", "logits")
    for variant in GRAPH.variants(mlp, spec):
        runner = GRAPH.build(mlp, spec, variant)
        x = rows(mlp, batch, "uint8")
        assert_answers(mlp, spec, runner.variant, x, answers(runner, x))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [((3, 17),), ((0, 4), (9, 10), (20, 30))])
@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_columns(columns, dtype):
    scale = 1 / 255 if dtype == "uint8" else 1.0
    mlp = net(sum(b - a for a, b in columns), 8, 10, columns=columns, features=30, scale=scale)
    spec = Spec("cuda:0", 64, dtype, "logits")
    for variant in GRAPH.variants(mlp, spec):
        runner = GRAPH.build(mlp, spec, variant)
        x = rows(mlp, 64, dtype)
        assert_answers(mlp, spec, runner.variant, x, answers(runner, x))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["close", "drop"])
def test_deleting_one_graph_leaves_the_others_running(how):
    # pytorch #193402. 40 graphs: torch hands out 32 streams in turn, so that at least eight share one.
    mlp = net(784, 512, 10)
    spec = Spec("cuda:0", 256, "uint8", "logits")
    x = rows(mlp, 256, "uint8")
    runners = [GRAPH.build(mlp, spec, Variant.of(pad=16)) for _ in range(40)]
    expected = answers(runners[0], x).clone()
    for _ in range(20):
        gone = runners.pop(0)
        gone.run(gone.input)
        if how == "close":
            gone.close()
        del gone
        gc.collect()
        torch.cuda.empty_cache()  # gives freed workspaces back to the driver: a replay that used one would fault
    noise = [torch.full((1 << 20,), float("nan"), device="cuda:0") for _ in range(64)]
    for runner in runners:
        assert torch.equal(answers(runner, x), expected)
    assert all(bool(block.isnan().all()) for block in noise)  # and nobody else's memory was written


@pytest.mark.gpu
def test_clearing_workspaces_does_not_pull_them_from_under_a_graph():
    # what Inductor does whenever it records a graph of its own
    mlp = net(784, 512, 10)
    spec = Spec("cuda:0", 256, "uint8", "logits")
    x = rows(mlp, 256, "uint8")
    runner = GRAPH.build(mlp, spec)
    expected = answers(runner, x).clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    noise = [torch.full((1 << 20,), float("nan"), device="cuda:0") for _ in range(64)]
    assert torch.equal(answers(runner, x), expected)
    assert all(bool(block.isnan().all()) for block in noise)


@pytest.mark.gpu
def test_replays_run_on_the_callers_stream():
    mlp = net(784, 512, 10)
    spec = Spec("cuda:0", 4096, "uint8", "logits")
    runner = GRAPH.build(mlp, spec)
    x = rows(mlp, 4096, "uint8").to("cuda:0")
    expected = answers(runner, x).clone()
    runner.input.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a replay on any other stream would overtake the copy
        runner.input.copy_(x)
        mine = runner.run(runner.input).clone()
        late = torch.cuda.Event()
        late.record()
    assert not late.query(), "the replay did not wait for the caller's stream"
    stream.synchronize()
    assert torch.equal(mine, expected)


@pytest.mark.gpu
def test_bind_captures_a_graph_of_its_own():
    mlp = net(37, 24, 10)
    spec = Spec("cuda:0", 65, "uint8", "logits")
    first = GRAPH.build(mlp, spec)
    inputs = [rows(mlp, 65, "uint8", seed).to("cuda:0") for seed in range(4)]
    bound = [first.bind(x) for x in inputs]
    outputs = [runner.run(x) for runner, x in zip(bound, inputs, strict=True)]
    torch.cuda.synchronize()
    for runner, x, y in zip(bound, inputs, outputs, strict=True):
        assert runner.input is x
        assert_answers(mlp, spec, runner.variant, x.cpu(), y)
    first.close()
    bound[0].close()
    for runner, x in zip(bound[1:], inputs[1:], strict=True):
        assert_answers(mlp, spec, runner.variant, x.cpu(), answers(runner, x))


@pytest.mark.gpu
def test_a_runner_keeps_its_contract():
    mlp = net(20, 6, 5)
    spec = Spec("cuda:0", 16, "uint8", "class")
    runner = GRAPH.build(mlp, spec)
    assert isinstance(runner, Runner)
    assert (runner.engine, runner.spec, runner.variant) == ("torch_graph", spec, GRAPH.variants(mlp, spec)[0])
    assert runner.build_s > 0
    x = rows(mlp, 16, "uint8").to("cuda:0")
    assert runner.run(x).data_ptr() == runner.run(x).data_ptr()
    for bad in (x[:15], x.float(), x.cpu(), x.t().contiguous().t()):
        with pytest.raises(InvalidInput):
            runner.run(bad)
    runner.close()
    runner.close()
    with pytest.raises(InvalidInput, match="closed"):
        runner.run(x)
    with pytest.raises(InvalidInput, match="closed"):
        runner.bind(x)


@pytest.mark.gpu
def test_rows_with_gradients_leave_no_trace():
    mlp = net(20, 6, 5, scale=1.0)
    runner = GRAPH.build(mlp, Spec("cuda:0", 16, "float32", "logits"))
    x = rows(mlp, 16, "float32").to("cuda:0").requires_grad_()
    assert not runner.run(x).requires_grad
    assert not runner.input.requires_grad


@pytest.mark.gpu
def test_other_threads_may_allocate_during_a_capture():
    stop = threading.Event()

    def churn():
        held = []
        while not stop.is_set():  # each one is new memory from the driver
            held.append(torch.empty(3 << 20, device="cuda:0"))
            if len(held) == 500:
                held.clear()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        mlp = net(37, 24, 10)
        spec = Spec("cuda:0", 65, "uint8", "logits")
        for _ in range(5):
            runner = GRAPH.build(mlp, spec)
            x = rows(mlp, 65, "uint8")
            assert_answers(mlp, spec, runner.variant, x, answers(runner, x))
    finally:
        stop.set()
        thread.join()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_current():
    mlp = net(37, 24, 10)
    spec = Spec("cuda:1", 65, "uint8", "logits")
    assert torch.cuda.current_device() == 0
    runner = GRAPH.build(mlp, spec)
    x = rows(mlp, 65, "uint8").to("cuda:1")
    y = runner.run(x)
    torch.cuda.synchronize("cuda:1")
    assert_answers(mlp, spec, runner.variant, x.cpu(), y)
    assert torch.cuda.current_device() == 0
    runner.close()


@pytest.mark.gpu
def test_a_replay_is_one_launch():
    mlp = net(37, 24, 10)
    runner = GRAPH.build(mlp, Spec("cuda:0", 65, "float16", "logits"))
    runner.run(runner.input)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.run(runner.input)
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in profile.key_averages()}
    if not calls:
        pytest.skip("the profiler may not see CUDA calls on this machine")
    assert calls.get("cudaGraphLaunch") == 1
    assert not any("cudaLaunchKernel" in key or "Memcpy" in key for key in calls)
