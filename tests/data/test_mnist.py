"""MNIST from the package: content, the cache and its failures, concurrency, time."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gigamlp.data import load_mnist, mnist
from gigamlp.errors import FileFormatError

SIZE = 70000 * 785
PACKAGE = Path(mnist.__file__).parent / "mnist_idx"


def assert_mnist(parts: tuple[np.ndarray, ...]) -> None:
    x_train, y_train, x_test, y_test = parts
    for x, y, n in ((x_train, y_train, 60000), (x_test, y_test, 10000)):
        assert x.shape == (n, 784)
        assert x.dtype == np.uint8
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert y.shape == (n,)
        assert y.dtype == np.int64
        assert y.flags.writeable
    digests = [hashlib.sha256(a.astype(np.uint8).tobytes()).hexdigest()[:16] for a in parts]
    raw = [gzip.decompress((PACKAGE / name).read_bytes())[skip:] for name, skip in FILES]
    assert digests == [hashlib.sha256(data).hexdigest()[:16] for data in raw]


FILES = [
    ("train-images-idx3-ubyte.gz", 16),
    ("train-labels-idx1-ubyte.gz", 8),
    ("t10k-images-idx3-ubyte.gz", 16),
    ("t10k-labels-idx1-ubyte.gz", 8),
]


def test_content_without_cache() -> None:
    parts = load_mnist(cache=False)
    assert_mnist(parts)
    assert parts[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # as printed all over the literature
    assert parts[3][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(parts[3]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_the_package_files_have_the_published_digests() -> None:
    notice = (PACKAGE / "NOTICE").read_text()
    for name, _ in FILES:
        digest = hashlib.sha256(gzip.decompress((PACKAGE / name).read_bytes())).hexdigest()
        assert f"{digest}  {name.removesuffix('.gz')}" in notice


def test_cache_is_made_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    assert_mnist(load_mnist(cache_dir=folder))
    assert [p.name for p in folder.iterdir()] == ["mnist-uint8.bin"]
    assert (folder / "mnist-uint8.bin").stat().st_size == SIZE
    monkeypatch.setattr(mnist, "_read_package", lambda: pytest.fail("the cache was not used"))
    assert_mnist(load_mnist(cache_dir=folder))


def test_no_cache_means_no_file(tmp_path: Path) -> None:
    load_mnist(cache=False, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["first byte", "last byte", "middle bit", "short", "long", "empty"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    load_mnist(cache_dir=tmp_path)
    path = tmp_path / "mnist-uint8.bin"
    good = path.read_bytes()
    data = bytearray(good)
    if damage == "short":
        del data[-1]
    elif damage == "long":
        data += b"\0"
    elif damage == "empty":
        data.clear()
    else:
        data[{"first byte": 0, "last byte": -1, "middle bit": SIZE // 2}[damage]] ^= 1
    path.write_bytes(data)
    x_train, _, x_test, y_test = load_mnist(cache_dir=tmp_path)
    assert x_train[0, 0] == 0
    assert x_train.shape == (60000, 784)
    assert x_test.shape == (10000, 784)
    assert y_test[-1] == 6
    assert path.read_bytes() == good


def test_an_unusable_cache_place_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    assert load_mnist(cache_dir=file)[0].shape == (60000, 784)  # a file where a folder is needed
    (tmp_path / "mnist-uint8.bin").mkdir()
    assert load_mnist(cache_dir=tmp_path)[0].shape == (60000, 784)  # a folder where the file is needed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mnist-uint8.bin"]  # no .part file left


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere, so the refusal is played
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(mnist, "atomic_write", refuse)
    assert load_mnist(cache_dir=tmp_path)[0].shape == (60000, 784)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("home", ["absent", "unset"])
def test_absent_home(tmp_path: Path, home: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    if home == "absent":
        env["HOME"] = "/proc/no/such/home"
    else:
        env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    code = "import gigamlp.data as d; print(d.load_mnist()[0].shape)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "(60000, 784)\n", done.stderr
    assert not (tmp_path / "~").exists()


def test_a_home_that_cannot_be_told_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *a, **k: "~/.cache/gigamlp")
    assert mnist._cache_path(None) is None


def test_a_damaged_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PACKAGE, tmp_path / "mnist_idx")
    labels = tmp_path / "mnist_idx" / FILES[3][0]
    data = bytearray(gzip.decompress(labels.read_bytes()))
    data[100] ^= 1
    labels.write_bytes(gzip.compress(data))
    monkeypatch.setattr(mnist, "__file__", str(tmp_path / "mnist.py"))
    with pytest.raises(FileFormatError, match=r"t10k-labels.*expected sha256 ff7bcfd4.*install gigamlp again"):
        load_mnist(cache=False)


def test_the_arrays_of_two_calls_are_independent(tmp_path: Path) -> None:
    first, second = load_mnist(cache_dir=tmp_path), load_mnist(cache_dir=tmp_path)
    first[0][:] = 255
    first[3][:] = 0
    assert second[0][0, 0] == 0
    assert load_mnist(cache_dir=tmp_path)[3][0] == 7


def test_many_at_once(tmp_path: Path) -> None:
    # four processes and two threads each start with no cache, then meet a damaged one
    code = (
        "import sys, gigamlp.data as d\n"
        "p = d.load_mnist(cache_dir=sys.argv[1])\n"
        "print(p[0].sum(), p[1].sum(), p[2].sum(), p[3].sum())"
    )
    for _ in range(2):
        command = [sys.executable, "-c", code, str(tmp_path)]
        jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        with ThreadPoolExecutor(2) as pool:
            here = list(pool.map(lambda _: load_mnist(cache_dir=tmp_path)[0].sum(), range(2)))
        outputs = {job.communicate(timeout=120)[0] for job in jobs}
        assert len(outputs) == 1
        assert {int(next(iter(outputs)).split()[0])} == {int(n) for n in here}
        assert [p.name for p in tmp_path.iterdir()] == ["mnist-uint8.bin"]
        (tmp_path / "mnist-uint8.bin").write_bytes(b"damaged")


def test_loading_is_quick(tmp_path: Path) -> None:
    load_mnist(cache_dir=tmp_path)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        load_mnist(cache_dir=tmp_path)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3  # 0.065 s here with SHA instructions
