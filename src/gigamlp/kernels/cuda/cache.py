"""Compiled kernels kept on disk, so that a network is compiled once a machine and not once a process.

A file is named by the sha256 of all that decides its content, and holds the sha256 of what is in it. Files appear whole
or not at all. Whatever is wrong with the folder or a file, the answer is to compile: a cache never causes an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gigamlp._atomic import write_bytes
from gigamlp.kernels.cuda.compile import OPTIONS, Cubin, compile_cubin, nvrtc_version

__all__ = ["CubinCache", "cubin_for", "default_folder", "key_of", "pack", "unpack"]

_MAGIC = b"gigamlp-cubin/1\n"


def default_folder() -> Path:
    """Return the folder for compiled kernels, in the user's cache folder. It need not exist."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("gigamlp", appauthor=False)) / "cubins"


def pack(cubin: Cubin) -> bytes:
    """Return a file's content: magic, sha256 of the rest, the length of a JSON header, the header, the image."""
    header = json.dumps({"arch": cubin.arch, "log": cubin.log}).encode()
    body = len(header).to_bytes(8, "little") + header + cubin.image
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> Cubin | None:
    """Return what `pack` packed, or None if a byte of it is missing or different."""
    begin = len(_MAGIC) + 32
    digest, body = data[len(_MAGIC) : begin], data[begin:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    return Cubin(image=body[8 + size :], arch=str(header["arch"]), log=str(header["log"]))


class CubinCache:
    """A folder of compiled kernels.

    Parameters
    ----------
    folder : path-like, optional
        `default_folder` if not given. It is made when something is first written; if that fails, nothing is kept.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = CubinCache(folder)
    ...     made = [cache.get("0" * 64, lambda: Cubin(b"code", "sm_90a", "")).image for _ in range(2)]
    ...     made, cache.compiled, cache.found
    ([b'code', b'code'], 1, 1)
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.compiled = 0
        self.found = 0

    def path(self, key: str) -> Path:
        """Return the file for `key`."""
        return self.folder / f"{key}.cubin"

    def get(self, key: str, make: Callable[[], Cubin]) -> Cubin:
        """Return the kernel of `key`: from disk if it is there and whole, else from `make`, and keep it."""
        kept = self._read(self.path(key))
        if kept is not None:
            self.found += 1
            return kept
        made = make()
        self.compiled += 1
        with suppress(OSError):  # a read-only home, a full disk: the kernel is compiled again next time
            write_bytes(self.path(key), pack(made))
        return made

    def _read(self, path: Path) -> Cubin | None:
        try:
            return unpack(path.read_bytes())
        except OSError:
            return None


def key_of(source: str, arch: str, nvrtc: tuple[int, int]) -> str:
    """Return the sha256 of all that decides the code, as 64 hex digits."""
    parts = (hashlib.sha256(source.encode()).hexdigest(), *OPTIONS, arch, f"nvrtc {nvrtc[0]}.{nvrtc[1]}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cubin_for(source: str, arch: str, cache: CubinCache | None = None) -> Cubin:
    """Return `source` compiled for `arch`, from the cache if it was compiled before.

    Raises
    ------
    Unsupported
        As `compile_cubin` does.
    """
    return (cache or CubinCache()).get(key_of(source, arch, nvrtc_version()), lambda: compile_cubin(source, arch))
