"""A client that is not ours: Triton's own, against a real server process, over all test images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from tests.serve.helpers import Process, serving

http = pytest.importorskip("tritonclient.http")


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with serving("mnist-16", "forty=mnist-40") as found:
        yield found


@pytest.fixture
def client(server: Process) -> Iterator[Any]:
    made = http.InferenceServerClient(f"127.0.0.1:{server.port}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def images() -> Any:
    return gm.data.load_mnist()[2]


def expected(name: str, rows: Any) -> tuple[Any, Any]:
    with gm.Session(gm.load(name), device="cpu", engine="cpu_fused") as session:
        return session.predict(rows), session.predict_proba(rows)


def test_it_finds_the_server_and_its_models(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mnist-16")
    assert client.is_model_ready("forty", "1")
    assert not client.is_model_ready("nope")
    assert {each["name"] for each in client.get_model_repository_index()} == {"mnist-16", "forty"}
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    words = client.get_model_metadata("mnist-16")
    assert words["inputs"] == [{"name": "rows", "datatype": "UINT8", "shape": [-1, 784]}]
    assert [(each["name"], each["datatype"]) for each in words["outputs"]] == [
        ("class", "INT64"), ("proba", "FP32"), ("logits", "FP32"),
    ]  # fmt: skip
    assert words["platform"].startswith("gigamlp_")


@pytest.mark.parametrize("binary", [True, False])
def test_all_test_images_are_answered_rightly(client: Any, images: Any, binary: bool) -> None:
    classes, proba = expected("mnist-40", images)
    step = 1000 if binary else 250  # JSON is bounded
    for begin in range(0, len(images), step):
        rows = images[begin : begin + step]
        given = http.InferInput("rows", list(rows.shape), "UINT8")
        given.set_data_from_numpy(rows, binary_data=binary)
        asked = [http.InferRequestedOutput(name, binary_data=binary) for name in ("class", "proba")]
        answer = client.infer("forty", [given], outputs=asked, request_id="r7")
        assert answer.get_response()["id"] == "r7"
        np.testing.assert_array_equal(answer.as_numpy("class"), classes[begin : begin + step])
        np.testing.assert_allclose(answer.as_numpy("proba"), proba[begin : begin + step], rtol=1e-4, atol=1e-6)


def test_rows_one_at_a_time_and_all_outputs(client: Any, images: Any) -> None:
    classes, _ = expected("mnist-16", images[:50])
    for row, label in zip(images[:50], classes, strict=True):
        given = http.InferInput("rows", [1, 784], "UINT8")
        given.set_data_from_numpy(row[None])
        answer = client.infer("mnist-16", [given])
        assert answer.as_numpy("class").tolist() == [label]
        assert answer.as_numpy("logits").shape == (1, 10)


def test_errors_reach_the_client_in_words(client: Any, images: Any) -> None:
    given = http.InferInput("rows", [1, 784], "FP32")
    given.set_data_from_numpy(images[:1].astype(np.float32))
    with pytest.raises(Exception, match="takes one input, 'rows', UINT8"):
        client.infer("mnist-16", [given])


def test_raw_rows_of_the_test_set(server: Process, images: Any) -> None:
    classes, _ = expected("mnist-40", images)
    status, body = server.ask(
        "POST", "/v2/models/forty/infer", images.tobytes(), {"Content-Type": "application/octet-stream"}
    )
    assert status == 200
    np.testing.assert_array_equal(np.frombuffer(body, np.uint8), classes)
