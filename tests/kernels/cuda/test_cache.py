"""The cache of compiled kernels: what decides a key, damage, folders that cannot be written, many processes."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.errors import Unsupported
from gigamlp.kernels.cuda import cache as kept
from gigamlp.kernels.cuda.cache import CubinCache, cubin_for, key_of, pack, unpack
from gigamlp.kernels.cuda.compile import Cubin

CUBIN = Cubin(b"\x7fELF and more", "sm_90a", "ptxas info: Used 12 registers\nπ")
KEY = "a" * 64


@given(st.binary(), st.text(), st.text())
def test_what_is_packed_comes_back(image, arch, log):
    made = Cubin(image, arch, log)
    assert unpack(pack(made)) == made


def test_any_flipped_byte_and_any_cut_is_seen():
    whole = pack(CUBIN)
    for index in range(len(whole)):
        assert unpack(whole[:index]) is None
        assert unpack(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :]) is None
    assert unpack(whole + b"\0") is None


def test_it_is_made_once(tmp_path):
    cache = CubinCache(tmp_path / "new" / "folder")
    assert cache.get(KEY, lambda: CUBIN) == CUBIN
    assert cache.get(KEY, _never) == CUBIN
    assert CubinCache(tmp_path / "new" / "folder").get(KEY, _never) == CUBIN
    assert (cache.compiled, cache.found) == (1, 1)
    assert [each.name for each in cache.folder.iterdir()] == [f"{KEY}.cubin"]  # no temporary file is left


def _never() -> Cubin:
    raise AssertionError("compiled again")


@pytest.mark.parametrize("damage", [b"", b"garbage", pack(CUBIN)[:-1]])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    cache = CubinCache(tmp_path)
    cache.path(KEY).write_bytes(damage)
    assert cache.get(KEY, lambda: CUBIN) == CUBIN
    assert unpack(cache.path(KEY).read_bytes()) == CUBIN


def test_a_folder_that_cannot_be_made_or_read_costs_only_time(tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    cache = CubinCache(file / "cubins")  # its parent is a file: nothing can be written, whoever runs this
    assert cache.get(KEY, lambda: CUBIN) == CUBIN
    assert cache.get(KEY, lambda: CUBIN) == CUBIN
    assert cache.compiled == 2
    cache = CubinCache(tmp_path)
    cache.path(KEY).mkdir()  # the file's name is taken by a folder
    assert cache.get(KEY, lambda: CUBIN) == CUBIN


@pytest.mark.skipif(
    os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_folder_costs_only_time(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert CubinCache(tmp_path).get(KEY, lambda: CUBIN) == CUBIN
    finally:
        tmp_path.chmod(0o700)


def test_errors_of_the_compiler_come_through(tmp_path):
    def fails() -> Cubin:
        raise Unsupported("no")

    with pytest.raises(Unsupported, match="no"):
        CubinCache(tmp_path).get(KEY, fails)
    assert list(tmp_path.iterdir()) == []


def test_the_key_holds_all_that_decides_the_code(monkeypatch):
    base = key_of("source", "sm_90a", (13, 5))
    assert len(base) == 64
    others = {
        key_of("source ", "sm_90a", (13, 5)),
        key_of("source", "sm_90", (13, 5)),
        key_of("source", "sm_90a", (13, 4)),
        key_of("source", "sm_90a", (12, 5)),
    }
    assert len(others) == 4
    assert base not in others
    monkeypatch.setattr(kept, "OPTIONS", ("std=c++20",))
    assert key_of("source", "sm_90a", (13, 5)) not in {base, *others}


def test_cubin_for_asks_the_cache_first(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(kept, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(kept, "compile_cubin", lambda source, arch: calls.append((source, arch)) or CUBIN)
    cache = CubinCache(tmp_path)
    for _ in range(3):
        assert cubin_for("source", "sm_90a", cache) == CUBIN
    assert cubin_for("other", "sm_90a", cache) == CUBIN
    assert calls == [("source", "sm_90a"), ("other", "sm_90a")]


def _hammer(folder: str, seed: int) -> int:
    cache, wrong = CubinCache(folder), 0
    for index in range(40):
        key = f"{index % 4}" * 64
        want = Cubin(key.encode() * 200, "sm_80", "")
        wrong += cache.get(key, lambda want=want: want) != want
        if index % 3 == seed % 3:
            cache.path(key).unlink(missing_ok=True)
    return wrong


def test_many_processes_share_a_folder(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(_hammer, [(str(tmp_path), seed) for seed in range(3)]) == [0, 0, 0]
    assert not [each for each in tmp_path.iterdir() if each.suffix != ".cubin"]
