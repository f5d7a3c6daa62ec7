"""Session on CUDA: residence, streams, pinned staging, ordering. All of it needs a GPU."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.errors import DeviceError, InvalidInput
from tests.fakes import make_mlp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FEATURES, CLASSES, BATCH = 784, 10, 1024
# graph replay keeps its input and output buffers between calls, so it shows what eager hides
ENGINES = ("torch_eager", "torch_graph")
COUNTS = (0, 1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH + 3, 7919)


@pytest.fixture(scope="module")
def mlp() -> gm.MLP:
    return make_mlp((FEATURES, 64, CLASSES), input_scale=1 / 255)


@pytest.fixture(params=ENGINES)
def session(request: pytest.FixtureRequest, mlp: gm.MLP) -> Iterator[gm.Session]:
    with gm.Session(mlp, device="cuda", engine=request.param, batch=(32, BATCH)) as made:
        yield made


def rows(count: int, dtype: str = "uint8", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, FEATURES)).astype(dtype)


def close(z: Any, mlp: gm.MLP, x: np.ndarray, atol: float = 1e-4) -> None:
    """float32: sums of 784 terms of size 0.04 err by some 1e-6; half precision is given its own `atol`."""
    z = z.cpu().numpy() if isinstance(z, torch.Tensor) else z
    np.testing.assert_allclose(z, mlp.reference_logits(x), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("count", COUNTS)
def test_host_rows(session: gm.Session, mlp: gm.MLP, count: int) -> None:
    x = rows(count)
    for given in (x, torch.from_numpy(x), torch.from_numpy(x).pin_memory()):
        z, ids = session.logits(given), session.predict(given)
        assert type(z) is type(given)
        assert type(ids) is type(given)
        if isinstance(z, torch.Tensor):
            assert z.device.type == "cpu"
        close(z, mlp, x)
        np.testing.assert_array_equal(ids, mlp.reference_logits(x).argmax(axis=1))
        np.testing.assert_allclose(session.predict_proba(given), mlp.predict_proba(x), atol=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_resident_rows(session: gm.Session, mlp: gm.MLP, count: int) -> None:
    x = rows(count)
    given = torch.from_numpy(x).cuda()
    z, ids, proba = session.logits(given), session.predict(given), session.predict_proba(given)
    assert z.device == ids.device == proba.device == given.device
    assert (z.dtype, ids.dtype, proba.dtype) == (torch.float32, torch.int64, torch.float32)
    close(z, mlp, x)
    np.testing.assert_array_equal(ids.cpu(), mlp.reference_logits(x).argmax(axis=1))
    np.testing.assert_allclose(proba.cpu(), mlp.predict_proba(x), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bool", "u1", "i1", "i2", "i4", "i8", "u2", "f2", "f4", "f8", ">f4"])
def test_host_dtypes(session: gm.Session, mlp: gm.MLP, dtype: str) -> None:
    x = (rows(2100) % 128).astype(dtype)
    close(session.logits(x), mlp, x.astype(np.float64), atol=5e-2 if dtype == "f2" else 1e-4)  # f2 computes in float16


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_tensor_dtypes(session: gm.Session, mlp: gm.MLP, dtype: str, where: str) -> None:
    given = torch.from_numpy(rows(2100) % 128).to(where, getattr(torch, dtype))
    z = session.logits(given)
    assert z.device == given.device
    half = {"float16": 5e-2, "bfloat16": 0.3}
    close(z, mlp, given.double().cpu().numpy(), atol=half.get(dtype, 1e-4))


def test_layouts(session: gm.Session, mlp: gm.MLP) -> None:
    x = rows(2100, "float32")
    frozen = x.copy()
    frozen.flags.writeable = False
    for given in (np.asfortranarray(x), x[::-1], frozen, np.repeat(x, 2, axis=1)[:, ::2]):
        close(session.logits(given), mlp, np.asarray(given))
    device = torch.from_numpy(x).cuda()
    for given in (
        device.T.contiguous().T,
        device[::2],
        device.clone().requires_grad_(),
        device.repeat(1, 2)[:, :FEATURES],
    ):
        close(session.logits(given), mlp, given.detach().cpu().numpy())


def test_rows_of_many_pinned_pieces(mlp: gm.MLP) -> None:
    x = rows(70_001)  # 55 MB: seven pieces of the ring
    with gm.Session(mlp, device="cuda", batch=65_536) as session:
        for seed in range(2):
            close(session.logits(x[seed:]), mlp, x[seed:])


def test_answers_are_owned(session: gm.Session, mlp: gm.MLP) -> None:
    for kind in ("host", "cuda"):
        x = rows(BATCH)
        given = x.copy() if kind == "host" else torch.from_numpy(x).cuda()
        z, ids = session.logits(given), session.predict(given)
        given[...] = 3
        session.logits(rows(BATCH, seed=9))
        session.predict(rows(BATCH, seed=9))
        close(z, mlp, x)
        np.testing.assert_array_equal(torch.as_tensor(ids).cpu(), mlp.reference_logits(x).argmax(axis=1))


def test_three_inputs_through_one_graph(session: gm.Session, mlp: gm.MLP) -> None:
    inputs = [torch.from_numpy(rows(BATCH, seed=seed)).cuda() for seed in range(3)]
    found = [session.logits(x) for x in inputs]
    for z, x in zip(found, inputs, strict=True):
        close(z, mlp, x.cpu().numpy())


def test_out(session: gm.Session, mlp: gm.MLP) -> None:
    x = rows(1500)
    given = torch.from_numpy(x).cuda()
    out = torch.empty(1500, CLASSES, device="cuda")
    assert session.logits(given, out=out) is out
    close(out, mlp, x)
    with pytest.raises(InvalidInput, match="cpu"):
        session.logits(given, out=torch.empty(1500, CLASSES))
    square = torch.zeros(4, FEATURES, device="cuda")
    with pytest.raises(InvalidInput, match="shares memory"):
        session.logits(square, out=square[:, :CLASSES])
    host = np.empty((1500, CLASSES), np.float32)
    assert session.logits(x, out=host) is host
    close(host, mlp, x)


def test_resident_rows_synchronise_nothing(session: gm.Session) -> None:
    given = torch.from_numpy(rows(2100)).cuda()
    calls = (session.predict, session.class_ids, session.predict_proba, session.logits)
    for call in calls:
        call(given)  # builds the runners
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call(given)
        torch.cuda._sleep(200_000_000)  # some 0.1 s of device time
        event = torch.cuda.Event()
        session.predict(given)
        event.record()
        assert not event.query(), "the call waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_work_is_on_the_callers_stream(session: gm.Session, mlp: gm.MLP) -> None:
    """Rows that the caller's stream is still going to write, and answers read on that stream: no synchronise needed."""
    x = rows(2100)
    source = torch.from_numpy(x).cuda()
    stream = torch.cuda.Stream()
    session.logits(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        given = torch.zeros_like(source)
        torch.cuda._sleep(50_000_000)
        given.copy_(source)
        z = session.logits(given) * 1
    stream.synchronize()
    close(z, mlp, x)


def test_two_streams_share_a_runner(session: gm.Session, mlp: gm.MLP) -> None:
    """The second stream's rows must not reach the buffers before the first stream has run."""
    inputs = [
        torch.from_numpy(rows(BATCH - 5, seed=seed)).cuda() for seed in range(4)
    ]  # padded: through the static input
    session.logits(inputs[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            if not found:
                torch.cuda._sleep(50_000_000)
            found.append(session.logits(x))
    torch.cuda.synchronize()
    for z, x in zip(found, inputs, strict=True):
        close(z, mlp, x.cpu().numpy())


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_threads_with_streams_of_their_own(session: gm.Session, mlp: gm.MLP, where: str) -> None:
    inputs = [torch.from_numpy(rows(1500 + i, seed=i)).to(where) for i in range(4)]
    want = [mlp.reference_logits(x.cpu().numpy()) for x in inputs]
    wrong: list[Any] = []

    def hammer(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs_ready = torch.cuda.current_stream()
                inputs_ready.wait_stream(torch.cuda.default_stream())
                for _ in range(30):
                    z = session.logits(inputs[i]).cpu().numpy()
                    if not np.allclose(z, want[i], rtol=1e-4, atol=1e-4):
                        wrong.append(i)
        except Exception as error:  # noqa: BLE001  shown by the assertion below
            wrong.append(repr(error))

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_sessions_and_the_end_of_one(mlp: gm.MLP) -> None:
    x = torch.from_numpy(rows(BATCH)).cuda()
    a = gm.Session(mlp, device="cuda", engine="torch_graph", batch=BATCH)
    b = gm.Session(mlp, device="cuda", engine="torch_graph", batch=BATCH)
    za, zb = a.logits(x), b.logits(x)
    a.close()
    for _ in range(3):
        torch.empty(1 << 26, device="cuda").fill_(7)  # would land in freed memory
        close(b.logits(x), mlp, x.cpu().numpy())
    b.close()
    close(za, mlp, x.cpu().numpy())
    close(zb, mlp, x.cpu().numpy())


def test_labels_on_the_device() -> None:
    mlp = make_mlp((FEATURES, 16, 3), classes=np.array([-7, 1 << 40, 3]), input_scale=1 / 255)
    x = rows(100)
    with gm.Session(mlp, device="cuda", batch=64) as session:
        found = session.predict(torch.from_numpy(x).cuda())
        assert found.is_cuda
        np.testing.assert_array_equal(found.cpu(), mlp.predict(x))
    named = make_mlp((FEATURES, 16, 3), classes=["a", "b", "c"])
    with gm.Session(named, device="cuda") as session, pytest.raises(InvalidInput, match="class_ids"):
        session.predict(torch.zeros(1, FEATURES, device="cuda"))


def test_dlpack_and_cuda_array_interface(session: gm.Session, mlp: gm.MLP) -> None:
    x = torch.from_numpy(rows(100, "float32")).cuda()

    class Packed:
        def __dlpack__(self, **options: Any) -> Any:
            return x.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return x.__dlpack_device__()

    class Interface:
        __cuda_array_interface__ = x.__cuda_array_interface__

    for given in (Packed(), Interface()):
        z = session.logits(given)
        assert isinstance(z, torch.Tensor)
        assert z.is_cuda
        close(z, mlp, x.cpu().numpy())


@pytest.mark.parametrize("pinned", [False, True])
def test_host_rows_are_checked_while_the_device_has_them(session: gm.Session, mlp: gm.MLP, pinned: bool) -> None:
    x = rows(3 * BATCH + 5, "float32")
    bad = x.copy()
    bad[2 * BATCH + 7, 5] = np.inf  # in the third batch: the first two have been queued by then
    given, wrong = (torch.from_numpy(each).pin_memory() if pinned else each for each in (x, bad))
    for _ in range(3):
        with pytest.raises(InvalidInput, match="row 2055 holds inf in feature 5"):
            session.logits(wrong)
        close(session.logits(given), mlp, x)  # nothing of the refused call is left under way


def test_finite_check_on_the_device(mlp: gm.MLP) -> None:
    x = torch.ones(100, FEATURES, device="cuda")
    x[41, 7] = float("nan")
    with gm.Session(mlp, device="cuda", check_finite=True) as session:
        with pytest.raises(InvalidInput, match="row 41 holds nan in feature 7"):
            session.predict(x)
        with pytest.raises(InvalidInput, match="row 41 holds nan in feature 7"):
            session.predict(x.cpu().numpy())
        assert session.predict(x[:41]).shape == (41,)
    with gm.Session(mlp, device="cuda", input_dtype="uint8") as session:
        session.predict(x[:41])
        x[3, 3] = 0.5
        with pytest.raises(InvalidInput, match=r"row 3 holds 0\.5"):
            session.predict(x[:41])


def test_rows_on_another_device(mlp: gm.MLP) -> None:
    with gm.Session(mlp, device="cpu") as session, pytest.raises(InvalidInput, match=r"cuda:0.*x.to\('cpu'\)"):
        session.predict(torch.zeros(1, FEATURES, device="cuda"))


def test_a_gpu_that_is_not_the_current_one(mlp: gm.MLP) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = rows(2100)
    for engine in ENGINES:
        with gm.Session(mlp, device="cuda:1", engine=engine, batch=BATCH) as session:
            close(session.logits(x), mlp, x)
            z = session.logits(torch.from_numpy(x).to("cuda:1"))
            assert str(z.device) == "cuda:1"
            close(z, mlp, x)
            with pytest.raises(InvalidInput, match="cuda:0"):
                session.logits(torch.from_numpy(x).to("cuda:0"))
        assert torch.cuda.current_device() == 0


def test_fork(mlp: gm.MLP) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with gm.Session(mlp, device="cuda") as session:
        session.predict(rows(3))

        def child() -> None:
            try:
                session.predict(rows(3))
            except DeviceError as error:
                queue.put(str(error))
            else:
                queue.put("no error")
            session.close()

        process = context.Process(target=child, daemon=True)
        process.start()
        assert "spawn" in queue.get(timeout=60)
        process.join(60)
        session.predict(rows(3))


def test_overhead_over_the_bare_runner(mlp: gm.MLP) -> None:
    """At equal residence at most 10 %, asserted loosely; benchmarks/session_overhead.py measures it."""
    from gigamlp.measure import clock_for, throughput

    x = torch.from_numpy(rows(65_536)).cuda()
    with gm.Session(mlp, device="cuda", engine="torch_graph", batch=len(x)) as session:
        session.predict(x)
        (bound,) = session._runners._bound.values()
        work = {"bare": lambda: bound.runner.run(x), "session": lambda: session.predict(x)}
        times = throughput(work, clock_for("cuda:0"), repeats=7)
    assert times["session"].wall_us <= 1.3 * times["bare"].wall_us
