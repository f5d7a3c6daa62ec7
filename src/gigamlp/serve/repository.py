"""The models that a server has: found on the command line and in folders, loaded, and replaced while it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gigamlp import models
from gigamlp.errors import InvalidInput
from gigamlp.mlp import load
from gigamlp.plan import Plan
from gigamlp.serve.errors import Refused
from gigamlp.serve.served import Served, choose, natural_input
from gigamlp.serve.settings import Settings

__all__ = ["Repository", "Source", "find", "load_source", "stamp"]

Stamp = tuple[tuple[int, int, int] | None, ...]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MODEL_FILE = "model.safetensors"
PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Source:
    """Where a model version comes from: a file, or a shipped model (then `path` is its name)."""

    name: str
    version: str
    path: str
    plan: str | None = None


def find(settings: Settings) -> tuple[Source, ...]:
    """Return what the settings name, as it lies there now.

    Raises
    ------
    FileNotFoundError, InvalidInput
        If there is nothing of that name, two models have the same one, or a name cannot be part of a URL.
    """
    found: dict[tuple[str, str], Source] = {}
    for word in settings.models:
        for source in _sources(word, settings.plan):
            if found.setdefault((source.name, source.version), source) != source:
                raise InvalidInput(f"two models are called {source.name!r}; give one another name: NAME=PATH")
    return tuple(found.values())


def _sources(word: str, plan: str | None) -> Iterator[Source]:
    name, equals, rest = word.partition("=")
    where = rest if equals and not Path(word).exists() else word
    path = Path(where)
    if path.is_dir():
        if equals and where is rest:
            raise InvalidInput(f"{word}: a folder's models have the names of its folders; leave out {name}=")
        yield from _folder(path)
        return
    if not path.is_file() and where not in models.names():
        raise FileNotFoundError(f"no model file or folder at {where}; shipped models: {', '.join(models.names())}")
    called = name if where is rest else where if where in models.names() and not path.is_file() else path.stem
    yield Source(_checked(called, word), "1", where, plan)


def _folder(folder: Path) -> Iterator[Source]:
    some = False
    for path in sorted(folder.glob(f"*/*/{MODEL_FILE}")):
        version, name = path.parent.name, path.parent.parent.name
        if not version.isdecimal() or str(int(version)) != version or version == "0":
            raise InvalidInput(f"{path}: the folder of a version must be a whole number >= 1, as models/{name}/1/")
        plan = path.parent / PLAN_FILE
        some = True
        yield Source(_checked(name, str(path)), version, str(path), str(plan) if plan.is_file() else None)
    if not some:
        raise FileNotFoundError(f"{folder} holds no model; put one at {folder / 'NAME' / '1' / MODEL_FILE}")


def _checked(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{where}: {name!r} cannot be a model's name in a URL (letters, digits, '.', '_', '-'); name it: NAME=PATH"
        )
    return name


def stamp(source: Source) -> Stamp:
    """Return what changes when the files of `source` do: inode, time and size of each; None for a shipped model."""
    found: list[tuple[int, int, int] | None] = []
    for path in (source.path, source.plan):
        try:
            status = None if path is None else Path(path).stat()
        except OSError:
            status = None
        found.append(None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def load_source(source: Source, settings: Settings) -> Served:
    """Read, build and warm up a model version. Errors are those of `gigamlp.load` and `gigamlp.Session`."""
    mlp = load(source.path)
    plan = None if source.plan is None else Plan.load(source.plan)
    session = choose(mlp, settings, plan)
    try:
        planned = session._choice.dtypes if plan is not None else ()
        dtype = settings.input_dtype or (planned[0] if planned else natural_input(mlp))
        served = Served(source.name, source.version, mlp, session, dtype)
        served.warm()
    except BaseException:
        session.close()
        raise
    return served


class Repository:
    """The model versions that are served, by name.

    Parameters
    ----------
    settings : Settings
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._models: dict[str, dict[str, Served]] = {}
        self.loaded = False
        self.stamps: dict[Source, Stamp] = {}

    def load(self) -> None:
        """Load all that the settings name. An error ends the server before it listens."""
        for source in find(self.settings):
            self.stamps[source] = stamp(source)  # before it is read: what is written meanwhile is seen as a change
            self.put(load_source(source, self.settings))
        self.loaded = True

    def put(self, served: Served) -> Served | None:
        """Serve `served`, and return what it replaces."""
        versions = dict(self._models.get(served.name, {}))
        old = versions.get(served.version)
        versions[served.version] = served
        self._models[served.name] = dict(sorted(versions.items(), key=lambda item: int(item[0])))
        return old

    def remove(self, name: str, version: str) -> Served | None:
        """Serve a version no more, and return it."""
        versions = dict(self._models.get(name, {}))
        old = versions.pop(version, None)
        self._models[name] = versions
        if not versions:
            del self._models[name]
        return old

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._models)

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, the oldest first."""
        return list(self._models.get(name, {}))

    def get(self, name: str, version: str = "") -> Served:
        """Return a version of a model; the newest one if none is named.

        Raises
        ------
        Refused
            404 if there is none.
        """
        versions = self._models.get(name)
        if versions is None:
            raise Refused(404, f"no model is called {name[:80]!r}; POST /v2/repository/index lists them")
        if not version:
            return next(reversed(versions.values()))
        if version not in versions:
            raise Refused(404, f"{name!r} has no version {version[:80]!r}; it has {', '.join(versions)}")
        return versions[version]

    def __iter__(self) -> Iterator[Served]:
        for versions in self._models.values():
            yield from versions.values()

    def close(self) -> None:
        """Free all models."""
        for served in self:
            served.close()
