"""The application in Ray Serve, with two replicas: the same answers through Ray's proxy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.serve.settings import Settings
from tests.serve.helpers import free_port

pytest.importorskip("ray.serve", reason="Ray Serve is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    import ray
    from ray import serve

    from gigamlp.serve.ray import deployment

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    port = free_port()
    try:
        serve.start(http_options={"port": port})
        settings = Settings(models=("mnist-40",), device="cpu", reload_s=0)
        serve.run(deployment(settings, num_replicas=2, ray_actor_options={"num_cpus": 0.5}), route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_it_answers_as_the_server_does(address: str) -> None:
    _, _, x, _ = gm.data.load_mnist()
    with urllib.request.urlopen(f"{address}/v2/models/mnist-40") as answer:
        assert json.load(answer)["platform"] == "gigamlp_cpu_fused"
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"{address}/v2/models/mnist-40/infer", x[:1000].tobytes(), headers)
    expected = gm.Session(gm.load("mnist-40"), device="cpu", engine="cpu_fused").predict(x[:1000])
    for _ in range(6):  # of both replicas
        with urllib.request.urlopen(request, timeout=20) as answer:
            np.testing.assert_array_equal(np.frombuffer(answer.read(), np.uint8), expected)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(request.full_url, b"123", headers), timeout=20)
    assert refused.value.code == 400
