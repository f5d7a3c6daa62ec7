"""Hot reload: model files are looked at now and then, and what changed is served as soon as it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gigamlp.errors import GigaMLPError
from gigamlp.serve.batcher import Batcher
from gigamlp.serve.logs import event
from gigamlp.serve.metrics import Metrics
from gigamlp.serve.repository import Repository, Source, find, load_source, stamp
from gigamlp.serve.served import Served

__all__ = ["Watch"]


class Watch:
    """Keeps what is served equal to what lies in the files. A file that cannot be served leaves the old model in place.

    Parameters
    ----------
    models : Repository
    batcher : Batcher
    metrics : Metrics
    """

    def __init__(self, models: Repository, batcher: Batcher, metrics: Metrics) -> None:
        self._models, self._batcher, self._metrics = models, batcher, metrics
        self._seen = dict(models.stamps)
        self._complaint = ""

    async def run(self) -> None:
        """Look every ``reload_s`` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._models.settings.reload_s)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001  (what serves goes on serving)
                event("reload failed", level="error", error=error)

    async def look(self) -> None:
        """Load what is new or changed, and give up what is gone."""
        try:
            sources = await asyncio.to_thread(find, self._models.settings)
            stamps = await asyncio.to_thread(lambda: {source: stamp(source) for source in sources})
        except (GigaMLPError, OSError) as error:  # a file that is just being replaced, or gone: the old one serves on
            if str(error) != self._complaint:
                event("reload failed", level="error", reason=str(error))
            self._complaint = str(error)
            return
        self._complaint = ""
        for source, now in stamps.items():
            if self._seen.get(source) != now:
                self._seen[source] = now  # also if it fails: it is tried again when it changes again
                await self._load(source)
        for source in [each for each in self._seen if each not in stamps]:
            del self._seen[source]
            if not any((each.name, each.version) == (source.name, source.version) for each in stamps):
                self._retire(self._models.remove(source.name, source.version), "removed")

    async def _load(self, source: Source) -> None:
        settings = self._models.settings
        work: Callable[[], Served] = lambda: load_source(source, settings)  # noqa: E731
        try:
            # on a GPU the thread that owns the device builds, between two runs; a CPU has another core
            on_cpu = all(served.on_cpu for served in self._models)
            served = await (asyncio.to_thread(work) if on_cpu else _as_served(self._batcher.errand(work)))
        except (GigaMLPError, OSError) as error:
            self._metrics.reloaded(source.name, "failed")
            event("reload failed", level="error", model=source.name, version=source.version, reason=str(error))
            return
        old = self._models.put(served)
        self._metrics.reloaded(source.name, "ok")
        self._metrics.serving(served)
        event("model loaded", model=served.name, version=served.version, engines=served.engines)
        self._retire(old, "replaced", served)

    def _retire(self, old: Served | None, why: str, by: Served | None = None) -> None:
        if old is None:
            return
        if by is None or by.engines != old.engines:
            self._metrics.serving(old, on=False)
        event("model retired", model=old.name, version=old.version, why=why)
        old.retire(lambda: self._forget(old))

    def _forget(self, old: Served) -> None:
        self._batcher.forget(old)
        self._batcher.errand(old.close)  # between two runs, as a run may be using it still


def _as_served(work: Awaitable[Any]) -> Awaitable[Served]:
    return work
