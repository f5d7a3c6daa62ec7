"""The application without a network: every endpoint, every refusal, every limit, and a fuzz that finds no 5xx."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gigamlp.errors import InvalidInput
from gigamlp.serve.settings import Settings
from tests.serve.helpers import OCTETS, app_of, ask, running, served, tiny


def run(test: Callable[[Any], Coroutine[Any, Any, None]], *models: Any, **own: Any) -> None:
    async def main() -> None:
        async with running(app_of(*(models or (served(tiny()),)), **own)) as app:
            await test(app)
            assert app.bodies.held == 0
            assert app.batcher.queued_rows == 0
            assert all(each.users == 0 for each in app.models)

    asyncio.run(asyncio.wait_for(main(), 60))


def json_request(rows: list[list[int]], **more: Any) -> bytes:
    tensor = {"name": "rows", "datatype": "UINT8", "shape": [len(rows), 3], "data": rows}
    return json.dumps({"inputs": [tensor], **more}).encode()


def test_every_endpoint_of_the_protocol() -> None:
    async def test(app: Any) -> None:
        for method, path, want in (
            ("GET", "/v2", {"name": "gigamlp"}),
            ("GET", "/v2/", {"name": "gigamlp"}),
            ("GET", "/v2/health/live", {"live": True}),
            ("GET", "/v2/health/ready", {"ready": True}),
            ("GET", "/v2/models/m", {"name": "m", "versions": ["1", "2"]}),
            ("GET", "/v2/models/m/versions/1", {"name": "m", "versions": ["1", "2"]}),
            ("GET", "/v2/models/m/ready", {"name": "m", "ready": True}),
            ("GET", "/v2/models/m/versions/2/ready", {"name": "m", "ready": True}),
        ):
            answer = await ask(app, method, path)
            assert answer is not None
            assert answer.status == 200, path
            assert want.items() <= answer.json.items()
        index = await ask(app, "POST", "/v2/repository/index", b"{}")
        assert index is not None
        assert [(e["name"], e["version"], e["state"]) for e in index.json] == [("m", "1", "READY"), ("m", "2", "READY")]

    run(test, served(tiny(0), version="1"), served(tiny(1), version="2"))


def test_versions_answer_each_for_itself_and_the_newest_for_the_model() -> None:
    rows = np.random.default_rng(0).integers(0, 255, (50, 3)).astype(np.uint8)
    one, two = tiny(0), tiny(1)

    async def test(app: Any) -> None:
        for path, mlp in (("m/versions/2", one), ("m/versions/10", two), ("m", two)):
            answer = await ask(app, "POST", f"/v2/models/{path}/infer", rows.tobytes(), [OCTETS])
            assert answer is not None
            assert answer.headers[b"output-datatype"] == b"UINT8"
            np.testing.assert_array_equal(np.frombuffer(answer.body, np.uint8), mlp.predict(rows))
        assert (one.predict(rows) != two.predict(rows)).any()

    run(test, served(one, version="2"), served(two, version="10"))


def test_raw_answers_of_every_head() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (5, 3)).astype(np.uint8)
    names, value = tiny(classes=["a", "b", "c", "d"]), tiny(head="regression", outputs=2)
    many = tiny(outputs=300)

    async def test(app: Any) -> None:
        for name, dtype, want in (
            ("names", np.uint8, names.class_ids(names.logits(rows))),
            ("value", np.float32, value.logits(rows)),
            ("labels", np.uint8, (value.logits(rows) > 0).astype(np.uint8)),
            ("many", np.uint16, many.predict(rows)),
        ):
            answer = await ask(app, "POST", f"/v2/models/{name}/infer", rows.tobytes(), [OCTETS])
            assert answer is not None
            got = np.frombuffer(answer.body, dtype).reshape(want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-5)

    multi = value.with_(head="multilabel")
    run(test, *(served(m, n) for m, n in ((names, "names"), (value, "value"), (multi, "labels"), (many, "many"))))


def test_a_raw_body_may_be_announced_as_triton_does() -> None:
    async def test(app: Any) -> None:
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(6), [(b"inference-header-content-length", b"0")])
        assert answer is not None
        assert (answer.status, len(answer.body)) == (200, 2)

    run(test)


def test_refusals_are_json_and_say_what_is_wrong() -> None:
    path = "/v2/models/m/infer"
    cases: list[tuple[str, str, bytes, list[tuple[bytes, bytes]], int, str]] = [
        ("GET", "/nothing", b"", [], 404, "nothing at this path"),
        ("GET", path, b"", [], 405, "POST"),
        ("GET", "/v2/models/m/", b"", [], 404, "nothing at this path"),
        ("POST", "/v2/health/live", b"", [], 405, "GET"),
        ("GET", "/v2/models/x", b"", [], 404, "no model"),
        ("POST", "/v2/models/x/infer", b"", [], 404, "no model"),
        ("POST", "/v2/models/m/versions/9/infer", b"", [], 404, "no version"),
        ("POST", path, bytes(4), [OCTETS], 400, "whole number of rows"),
        ("POST", path, bytes(3 * 21), [OCTETS], 413, "21 rows"),
        ("POST", path, bytes(2000), [], 413, "bytes of JSON"),
        ("POST", path, bytes(70_000), [OCTETS], 413, "longer than"),
        ("POST", path, b"{}", [(b"inference-header-content-length", b"3")], 400, "the body has 2"),
        ("POST", path, b"{}", [(b"inference-header-content-length", b"-3")], 400, "whole number"),
        ("POST", path, b"{}", [(b"inference-header-content-length", b"9" * 30)], 400, "whole number"),
        ("POST", path, bytes(3), [OCTETS, (b"content-encoding", b"gzip")], 415, "compressed"),
        ("POST", "/v2/repository/index", bytes(70_000), [], 413, "longer than"),
    ]

    async def test(app: Any) -> None:
        for method, where, body, headers, status, words in cases:
            answer = await ask(app, method, where, body, headers)
            assert answer is not None
            assert answer.status == status, (method, where, answer)
            assert list(answer.json) == ["error"]
            assert words in answer.json["error"]
            assert answer.headers[b"content-type"] == b"application/json"

    run(test, max_rows=20, max_json_bytes=1000, max_body_bytes=65536)


def test_nan_is_refused_and_does_not_touch_others() -> None:
    async def test(app: Any) -> None:
        good, bad = np.ones((1, 3), np.float32), np.array([[1, np.nan, 1]], np.float32)
        answers = await asyncio.gather(
            *(ask(app, "POST", "/v2/models/m/infer", x.tobytes(), [OCTETS]) for x in (good, bad, good))
        )
        assert [each.status for each in answers if each is not None] == [200, 400, 200]
        assert answers[1] is not None
        assert "nan" in answers[1].json["error"]

    run(test, served(tiny(), dtype="float32"))


def test_a_body_is_refused_while_it_comes() -> None:
    async def test(app: Any) -> None:
        taken = 0

        def parts() -> Any:
            nonlocal taken
            for _ in range(1000):
                taken += 1
                yield bytes(1000)

        chunks = list(parts())
        answer = await ask(app, "POST", "/v2/models/m/infer", chunks, [OCTETS], length=False)
        assert answer is not None
        assert answer.status == 413

    run(test, max_body_bytes=10_000)


def test_all_bodies_together_are_bounded() -> None:
    async def test(app: Any) -> None:
        gone = asyncio.Event()
        half = [bytes(3000), bytes(3000)]
        slow = asyncio.create_task(
            ask(app, "POST", "/v2/models/m/infer", half, [OCTETS], gone, length=False, unfinished=True)
        )
        await asyncio.sleep(0.01)
        assert app.bodies.held == 6000
        for part in (bytes(6000), [bytes(3000), bytes(3000)]):
            answer = await ask(app, "POST", "/v2/models/m/infer", part, [OCTETS])
            assert answer is not None
            assert answer.status == 503
            assert answer.headers[b"retry-after"] == b"1"
            assert app.bodies.held == 6000
        gone.set()
        assert await slow is None
        assert app.bodies.held == 0
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(6000), [OCTETS])
        assert answer is not None
        assert answer.status == 200

    run(test, max_bodies_bytes=10_000, max_body_bytes=10_000)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_many_parts_is_put_together(announced: bool) -> None:
    rows = np.random.default_rng(3).integers(0, 255, (997, 3)).astype(np.uint8)
    mlp = tiny()

    async def test(app: Any) -> None:
        data = rows.tobytes()
        parts = [data[begin : begin + 100] for begin in range(0, len(data), 100)]
        answer = await ask(app, "POST", "/v2/models/m/infer", parts, [OCTETS], length=announced)
        assert answer is not None
        np.testing.assert_array_equal(np.frombuffer(answer.body, np.uint8), mlp.predict(rows))
        tensor = {"name": "rows", "datatype": "UINT8", "shape": [997, 3], "parameters": {"binary_data_size": len(data)}}
        head = json.dumps({"inputs": [tensor], "outputs": [{"name": "class"}]}).encode()
        pair = (b"inference-header-content-length", b"%d" % len(head))
        answer = await ask(app, "POST", "/v2/models/m/infer", [head[:9], head[9:], *parts], [pair], length=announced)
        assert answer is not None
        assert answer.json["outputs"][0]["data"] == mlp.predict(rows).tolist()

    run(test, served(mlp))


def test_a_large_answer_is_binary_or_refused() -> None:
    rows = np.random.default_rng(3).integers(0, 255, (9000, 3)).astype(np.uint8)
    mlp = tiny()

    async def test(app: Any) -> None:
        tensor = {"name": "rows", "datatype": "UINT8", "shape": [9000, 3], "parameters": {"binary_data_size": 27000}}
        for binary, status in ((False, 413), (True, 200)):
            request = {"inputs": [tensor], "parameters": {"binary_data_output": binary}}
            head = json.dumps(request).encode()
            pair = (b"inference-header-content-length", b"%d" % len(head))
            answer = await ask(app, "POST", "/v2/models/m/infer", head + rows.tobytes(), [pair])
            assert answer is not None
            assert answer.status == status
        size = int(answer.headers[b"inference-header-content-length"])
        classes = np.frombuffer(answer.body[size : size + 72000], "<i8")
        np.testing.assert_array_equal(classes, mlp.predict(rows))
        proba = np.frombuffer(answer.body[size + 72000 : size + 72000 + 144000], "<f4").reshape(-1, 4)
        np.testing.assert_allclose(proba, mlp.predict_proba(rows), rtol=1e-5, atol=1e-6)

    run(test, served(mlp), max_json_bytes=200_000)


def test_the_token_guards_all_but_health() -> None:
    async def test(app: Any) -> None:
        for path, method in (("/v2", "GET"), ("/v2/models/m/infer", "POST"), ("/metrics", "GET"), ("/v2x", "GET")):
            for headers in ([], [(b"authorization", b"Bearer secre")], [(b"authorization", b"secret")]):
                answer = await ask(app, method, path, b"", headers)
                assert answer is not None
                assert answer.status == 401
                assert answer.headers[b"www-authenticate"] == b"Bearer"
        good = [(b"authorization", b"Bearer secret"), OCTETS]
        for path, method, headers in (
            ("/v2/health/live", "GET", []),
            ("/v2/health/ready", "GET", []),
            ("/v2", "GET", good),
            ("/v2/models/m/infer", "POST", good),
        ):
            answer = await ask(app, method, path, bytes(3) if method == "POST" else b"", headers)
            assert answer is not None
            assert answer.status == 200, path

    run(test, token="secret")


def test_cors_is_off_unless_an_origin_is_named() -> None:
    origin = (b"origin", b"https://example.org")

    async def without(app: Any) -> None:
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS, origin])
        assert answer is not None
        assert not any(name.startswith(b"access-control") for name in answer.headers)

    async def with_it(app: Any) -> None:
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS, origin])
        assert answer is not None
        assert answer.headers[b"access-control-allow-origin"] == b"https://example.org"
        assert len(answer.body) == 1
        preflight = await ask(
            app, "OPTIONS", "/v2/models/m/infer", b"", [origin, (b"access-control-request-method", b"POST")]
        )
        assert preflight is not None
        assert preflight.status == 200
        other = await ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS, (b"origin", b"https://evil.org")])
        assert other is not None
        assert b"access-control-allow-origin" not in other.headers

    async def with_token(app: Any) -> None:
        asks = [origin, (b"access-control-request-method", b"POST")]
        preflight = await ask(app, "OPTIONS", "/v2/models/m/infer", b"", asks)
        assert preflight is not None
        assert preflight.status == 200
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS, origin])
        assert answer is not None
        assert answer.status == 401

    run(without)
    run(with_it, cors=("https://example.org",))
    run(with_token, cors=("https://example.org",), token="secret")


def test_a_failure_of_the_engine_is_a_500_in_json() -> None:
    async def test(app: Any) -> None:
        model = app.models.get("m")
        model.run = lambda kind, rows: 1 / 0
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS])
        assert answer is not None
        assert answer.status == 500
        assert "log" in answer.json["error"]

    run(test)


def test_who_hangs_up_leaves_the_queue() -> None:
    async def test(app: Any) -> None:
        model = app.models.get("m")
        began, gate, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        own = model.run

        def slow(kind: str, rows: Any) -> Any:
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)
            return own(kind, rows)

        model.run = slow
        first = asyncio.create_task(ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS]))
        await began.wait()
        leaves = asyncio.create_task(ask(app, "POST", "/v2/models/m/infer", bytes(6), [OCTETS], gone))
        await asyncio.sleep(0.05)
        assert app.batcher.queued_rows == 2
        gone.set()
        assert await leaves is None
        assert app.batcher.queued_rows == 0
        gate.set()
        answer = await first
        assert answer is not None
        assert answer.status == 200
        text = app.metrics.text().decode()
        assert 'gigamlp_dropped_total{reason="gone"} 1.0' in text
        assert 'status="499"' in text

    run(test)


def test_a_full_queue_answers_503_with_retry_after() -> None:
    async def test(app: Any) -> None:
        model = app.models.get("m")
        gate, began = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        own = model.run

        def slow(kind: str, rows: Any) -> Any:
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)
            return own(kind, rows)

        model.run = slow
        first = asyncio.create_task(ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS]))
        await began.wait()
        waiting = [asyncio.create_task(ask(app, "POST", "/v2/models/m/infer", bytes(12), [OCTETS])) for _ in range(5)]
        await asyncio.sleep(0.05)
        gate.set()
        answers = [each for each in await asyncio.gather(first, *waiting) if each is not None]
        assert sorted(each.status for each in answers) == [200, 200, 200, 503, 503, 503]
        assert all(b"retry-after" in each.headers for each in answers if each.status == 503)
        assert 'gigamlp_dropped_total{reason="queue_full"} 3.0' in app.metrics.text().decode()

    run(test, max_queue_rows=8, max_rows=8)


def test_what_has_no_room_is_refused_before_it_is_read() -> None:
    async def test(app: Any) -> None:
        model = app.models.get("m")
        gate, own = threading.Event(), model.run

        def slow(kind: str, rows: Any) -> Any:
            assert gate.wait(20)
            return own(kind, rows)

        model.run = slow
        tasks = []
        for queued in (0, 8):
            tasks.append(asyncio.create_task(ask(app, "POST", "/v2/models/m/infer", bytes(24), [OCTETS])))
            while not (app.batcher.queued_rows == queued and app.batcher._busy):
                await asyncio.sleep(0.01)
        pair = (b"content-length", b"3")  # of a body that never comes
        answer = await ask(app, "POST", "/v2/models/m/infer", [b""], [OCTETS, pair], length=False, unfinished=True)
        assert answer is not None
        assert answer.status == 503
        gate.set()
        for task in tasks:
            done = await task
            assert done is not None
            assert done.status == 200

    run(test, max_queue_rows=8, max_rows=8)


def test_metrics_are_prometheus_text() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async def test(app: Any) -> None:
        for _ in range(3):
            await ask(app, "POST", "/v2/models/m/infer", bytes(6), [OCTETS])
        await ask(app, "POST", "/v2/models/unknown/infer", bytes(6), [OCTETS])
        answer = await ask(app, "GET", "/metrics")
        assert answer is not None
        found = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
        assert {s.labels["status"]: s.value for s in found["gigamlp_requests"].samples} == {"200": 3, "404": 1}
        assert [s.value for s in found["gigamlp_rows"].samples] == [6]
        assert [s.labels["engine"] for s in found["gigamlp_model_info"].samples] == ["numpy"]
        buckets = [s.value for s in found["gigamlp_request_seconds"].samples if s.labels.get("le") == "+Inf"]
        assert buckets == [3, 1]
        assert {s.labels["model"] for s in found["gigamlp_batch_rows"].samples} == {"m"}

    run(test)


def test_draining_tells_callers_to_close_and_is_not_ready() -> None:
    async def test(app: Any) -> None:
        app.draining = True
        ready = await ask(app, "GET", "/v2/health/ready")
        assert ready is not None
        assert ready.status == 503
        answer = await ask(app, "POST", "/v2/models/m/infer", bytes(3), [OCTETS])
        assert answer is not None
        assert answer.status == 200
        assert answer.headers[b"connection"] == b"close"

    run(test)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Settings(models=("x",), token="secret"))


@pytest.mark.parametrize(
    "wrong",
    [{"models": ()}, {"port": 70000}, {"workers": 0}, {"max_rows": 10, "max_queue_rows": 5}, {"token": ""},
     {"token": "a\nb"}, {"input_dtype": "float64"}, {"max_delay_us": -1}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Settings(**{"models": ("x",), **wrong})


# ---- fuzz ------------------------------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
tensors = st.fixed_dictionaries(
    {
        "name": st.just("rows") | anything,
        "datatype": st.sampled_from(["UINT8", "FP32", "BYTES"]) | anything,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | st.just([1, 3]) | anything,
        "data": st.lists(st.integers(-1, 300), max_size=6) | st.lists(st.lists(anything, max_size=3)) | anything,
    },
    optional={"parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 9) | anything}) | anything},
)  # fmt: skip
requests = st.fixed_dictionaries(
    {"inputs": st.lists(tensors, max_size=2) | anything},
    optional={
        "id": st.text(max_size=3) | anything,
        "parameters": st.fixed_dictionaries({"binary_data_output": st.booleans() | anything}) | anything,
        "outputs": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["class", "proba", "logits", "x"]) | anything},
                                  optional={"parameters": anything}), max_size=3) | anything,
    },
)  # fmt: skip
bodies = st.one_of(
    st.binary(max_size=50),
    requests.map(lambda value: json.dumps(value).encode()),
    st.tuples(requests, st.binary(max_size=9)).map(lambda pair: json.dumps(pair[0]).encode() + pair[1]),
)
paths = st.one_of(
    st.sampled_from(["/v2/models/m/infer", "/v2/models/m/versions/1/infer", "/v2/models/m", "/v2", "/v2/health/ready",
                     "/v2/repository/index", "/metrics", "/", "/v2/models/m/versions/1/ready", "/v2/models//infer",
                     "/v2/models/../../etc/passwd/infer", "/v2/models/m/versions//infer"]),
    st.text(max_size=12).map(lambda text: f"/v2/models/{text}/infer"),
    st.text(max_size=12).map(lambda text: f"/v2/models/m/versions/{text}"),
    st.text(max_size=12).map(lambda text: f"/{text}"),
)  # fmt: skip
headers = st.lists(
    st.one_of(
        st.just(OCTETS),
        st.tuples(st.just(b"inference-header-content-length"), st.integers(-1, 60).map(b"%d".__mod__) | st.binary()),
        st.tuples(st.just(b"content-type"), st.binary(max_size=9)),
        st.tuples(st.just(b"content-length"), st.binary(max_size=9)),
        st.tuples(st.just(b"accept"), st.binary(max_size=9)),
    ),
    max_size=3,
)  # fmt: skip


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    cases=st.lists(
        st.tuples(st.sampled_from(["POST", "POST", "GET", "PUT", "OPTIONS", "HEAD"]), paths, bodies, headers),
        min_size=1,
        max_size=4,
    )
)
def test_nothing_that_is_sent_fails_the_server(cases: list[Any]) -> None:
    async def test(app: Any) -> None:
        for method, path, body, pairs in cases:
            answer = await ask(app, method, path, body, pairs)
            assert answer is not None
            assert answer.status < 500, (path, body, answer)
            assert answer.status == 200 or method == "HEAD" or path == "/" or list(answer.json) == ["error"]

    run(test)
