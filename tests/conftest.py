"""What all tests share: hypothesis without wall-clock deadlines, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# a deadline per example fails at random on a busy machine; pytest-timeout bounds each test instead
settings.register_profile("gigamlp", deadline=None)
settings.load_profile("gigamlp")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the user's cache out of the tests, also out of the processes that they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platformdirs.user_cache_dir", lambda *args, **options: str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder))  # for child processes
        yield folder


@pytest.fixture(autouse=True)
def own_plans(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a folder of kept plans of its own, and return it; it is not there yet."""
    folder = own_cache / f"plans-{uuid.uuid4().hex}"
    monkeypatch.setattr("gigamlp.plancache.default_folder", lambda: folder)
    return folder


def _no_cuda() -> str | None:
    """Return why GPU tests cannot run, or None if they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    # torch is imported only if some collected test wants a GPU
    reason = _no_cuda() if gpu_tests else None
    if reason is not None:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))
