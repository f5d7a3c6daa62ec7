"""A cluster of several nodes on this machine, one of which is lost: the same bytes as by one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gigamlp.errors import DataError
from tests.score.test_farm import inputs, run, same

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="Ray's cluster utility"),
    pytest.mark.timeout(280),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        small = {"num_cpus": 1, "object_store_memory": 200 << 20, "include_dashboard": False}
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=small)
        nodes = [made.add_node(num_cpus=1, object_store_memory=200 << 20) for _ in range(2)]
        made.wait_for_nodes()
        try:
            yield made, nodes
        finally:
            ray.shutdown()
            made.shutdown()


def test_a_cluster_that_loses_a_node_writes_the_same_bytes_as_one_process(cluster: Any, tmp_path: Path) -> None:
    made, nodes = cluster
    given = inputs(tmp_path / "in")
    one = run(given, tmp_path / "one.npy", device="cpu")
    assert len(made.list_all_nodes()) == 3

    def lose(done: int, total: int, text: str) -> None:
        if len(nodes) == 2 and done > 10_000:
            made.remove_node(nodes.pop(), allow_graceful=False)

    two = run(given, tmp_path / "two.npy", ray=made.address, progress=lose)
    assert len(nodes) == 1
    same(tmp_path / "one.npy", tmp_path / "two.npy")
    assert (one.rows, one.rejected, one.bytes_in) == (two.rows, two.rejected, two.bytes_in)
    assert two.busy["compute"] > 0

    with pytest.raises(DataError, match="truncated"):
        run(given[3], tmp_path / "three.npy", ray=made.address, on_error="fail")
