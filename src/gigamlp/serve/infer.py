"""One request for answers, from its head to its last byte: the way that most requests go, kept short."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.measure.clock import HostClock
from gigamlp.serve import protocol
from gigamlp.serve.batcher import Batcher
from gigamlp.serve.errors import Gone, Refused
from gigamlp.serve.http import (
    JSON,
    OCTETS,
    Bodies,
    Pairs,
    Receive,
    Scope,
    Send,
    header,
    respond,
    respond_refused,
    unless_gone,
    whole_number,
)
from gigamlp.serve.logs import event
from gigamlp.serve.metrics import Metrics
from gigamlp.serve.repository import Repository
from gigamlp.serve.served import Served
from gigamlp.serve.settings import Settings

__all__ = ["Infer"]

now = HostClock.now
_MANY = 1 << 16  # numbers whose arithmetic takes some 100 us
_JSON_BYTES = 8  # of a number, about

Array = NDArray[Any]


class Infer:
    """Answers requests for ``infer``.

    Parameters
    ----------
    settings : Settings
    models : Repository
    batcher : Batcher
    bodies : Bodies
    metrics : Metrics
    """

    def __init__(
        self, settings: Settings, models: Repository, batcher: Batcher, bodies: Bodies, metrics: Metrics
    ) -> None:
        self._metrics = metrics
        self._models, self._batcher, self._bodies = models, batcher, bodies
        self._max_rows, self._max_json = settings.max_rows, settings.max_json_bytes

    async def __call__(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a version of a model, the newest if none is named. It is counted, whatever happens."""
        begin, status, rows = now(), 200, 0
        model: Served | None = None
        try:
            model = self._models.get(name, version)
            model.enter()
            try:
                rows = await self._answer(model, scope, receive, send)
            finally:
                model.leave()
        except Refused as refused:
            status = refused.status
            if refused.dropped is not None:
                self._metrics.dropped(refused.dropped)
            await respond_refused(send, refused)
        except Gone:
            status = 499
            self._metrics.dropped("gone")
        except Exception as error:  # noqa: BLE001  (it is logged, and the caller is told)
            status = 500
            event("request failed", level="error", error=error, model=name, version=version)
            await respond_refused(send, Refused(500, "the engine failed to answer this; the server's log says why"))
        name, version = ("", "") if model is None else (model.name, model.version)
        self._metrics.answered(name, version, status, rows, now() - begin)

    async def _answer(self, model: Served, scope: Scope, receive: Receive, send: Send) -> int:
        """Read the request, answer it, and return how many rows it had."""
        length = self._bodies.admit(scope)
        head = whole_number(header(scope, b"inference-header-content-length"), "Inference-Header-Content-Length")
        content = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
        raw = (content == OCTETS and head is None) or head == 0
        if length is not None:
            self._check_size(length, head, raw, model)
            if raw:  # what has no room is refused before it is read, and read only to be dropped
                self._batcher.check_room(length // model.row_bytes)
        if header(scope, b"content-encoding") not in (None, b"identity"):
            raise Refused(415, "this server takes no compressed bodies; send it without Content-Encoding")
        body = await self._bodies.read(receive, length)
        try:
            self._check_size(len(body), head, raw, model)
            if raw:
                rows = protocol.parse_raw(body, model, self._max_rows)
                out, headers = await self._raw(model, rows, receive)
                content = OCTETS
            else:
                query = protocol.parse(body, head, model, self._max_rows)
                self._check_answer(model, query)
                rows = query.rows
                answers = await self._answers(model, query.kind, rows, receive)
                if protocol.numbers(model, query) > _MANY:  # milliseconds of arithmetic: not on the loop
                    out, size = await asyncio.to_thread(protocol.encode, model, query, answers)
                else:
                    out, size = protocol.encode(model, query, answers)
                headers = () if size is None else ((b"inference-header-content-length", b"%d" % size),)
                content = JSON if size is None else OCTETS
        finally:
            self._bodies.release(len(body))
        self._bodies.keep(len(out))
        try:
            await respond(send, 200, out, content, headers)
        finally:
            self._bodies.release(len(out))
        return len(rows)

    def _check_size(self, length: int, head: int | None, raw: bool, model: Served) -> None:
        if raw:
            protocol.check_raw_size(length, model, self._max_rows)
            return
        if head is not None and head > length:
            raise Refused(400, f"Inference-Header-Content-Length is {head}, but the body has {length} bytes")
        if (length if head is None else head) > self._max_json:
            message = f"more than {self._max_json:,} bytes of JSON; send rows as binary tensors or octet-stream"
            raise Refused(413, message)

    def _check_answer(self, model: Served, query: protocol.Query) -> None:
        """Refuse what would be answered with so much JSON that to write it stops everything else."""
        numbers, most = protocol.numbers(model, query, json_only=True), self._max_json // _JSON_BYTES
        if numbers > most:
            raise Refused(
                413,
                f"the answer would be {numbers:,} numbers of JSON, and {most:,} are the most: ask for binary outputs "
                "(binary_data), or for class alone, or send the rows in parts",
            )

    async def _raw(self, model: Served, rows: Array, receive: Receive) -> tuple[bytes, Pairs]:
        kind = "class" if model.classifies else "logits"
        answers = await self._answers(model, kind, rows, receive)
        if not model.classifies:
            answers = model.finish(model.first, kind, answers)
        return answers.astype(model.raw_dtype).tobytes(), ((b"output-datatype", model.raw_datatype),)

    async def _answers(self, model: Served, kind: str, rows: Array, receive: Receive) -> Array:
        try:
            if rows.dtype.kind == "f" and rows.size > _MANY:
                await asyncio.to_thread(model.check, rows)
            else:
                model.check(rows)
        except InvalidInput as error:
            raise Refused(400, str(error)) from None
        if not len(rows):
            return np.empty(0, np.int64) if kind == "class" else np.empty((0, model.mlp.outputs), np.float32)
        answers = self._batcher.at_once(model, kind, rows)
        if answers is not None:
            return answers
        return await unless_gone(self._batcher.submit(model, kind, rows), receive)
