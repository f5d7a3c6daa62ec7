"""One request for answers, from its head to its last byte: the way that most requests go, kept short."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.serve import protocol
from gigamlp.serve.batcher import Batcher
from gigamlp.serve.errors import Refused
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
    unless_gone,
    whole_number,
)
from gigamlp.serve.repository import Repository
from gigamlp.serve.served import Served
from gigamlp.serve.settings import Settings

__all__ = ["Infer"]

Array = NDArray[Any]


class Infer:
    """Answers requests for ``infer``.

    Parameters
    ----------
    settings : Settings
    models : Repository
    batcher : Batcher
    bodies : Bodies
    """

    def __init__(self, settings: Settings, models: Repository, batcher: Batcher, bodies: Bodies) -> None:
        self._models, self._batcher, self._bodies = models, batcher, bodies
        self._max_rows, self._max_json = settings.max_rows, settings.max_json_bytes

    async def __call__(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> int:
        """Read the request, answer it, and return how many rows it had.

        Raises
        ------
        Refused, Gone
        """
        model = self._models.get(name, version)
        length = self._bodies.admit(scope)
        head = whole_number(header(scope, b"inference-header-content-length"), "Inference-Header-Content-Length")
        content = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
        raw = (content == OCTETS and head is None) or head == 0
        if length is not None:
            self._check_size(length, head, raw, model)
        if header(scope, b"content-encoding") not in (None, b"identity"):
            raise Refused(415, "this server takes no compressed bodies; send it without Content-Encoding", close=True)
        body = await self._bodies.read(receive)
        try:
            self._check_size(len(body), head, raw, model)
            if raw:
                rows = protocol.parse_raw(body, model, self._max_rows)
                out, headers = await self._raw(model, rows, receive)
                await respond(send, 200, out, OCTETS, headers)
                return len(rows)
            query = protocol.parse(body, head, model, self._max_rows)
            answers = await self._answers(model, query.kind, query.rows, receive)
            out, size = protocol.encode(model, query, answers)
        finally:
            self._bodies.release(len(body))
        if size is None:
            await respond(send, 200, out, JSON)
        else:
            await respond(send, 200, out, OCTETS, ((b"inference-header-content-length", b"%d" % size),))
        return len(query.rows)

    def _check_size(self, length: int, head: int | None, raw: bool, model: Served) -> None:
        if raw:
            protocol.check_raw_size(length, model, self._max_rows)
            return
        if head is not None and head > length:
            raise Refused(
                400, f"Inference-Header-Content-Length is {head}, but the body has {length} bytes", close=True
            )
        if (length if head is None else head) > self._max_json:
            raise Refused(
                413,
                f"more than {self._max_json:,} bytes of JSON; send rows as binary tensors or octet-stream",
                close=True,
            )

    async def _raw(self, model: Served, rows: Array, receive: Receive) -> tuple[bytes, Pairs]:
        kind = "class" if model.classifies else "logits"
        answers = await self._answers(model, kind, rows, receive)
        if not model.classifies:
            answers = model.finish(model.first, kind, answers)
        return answers.astype(model.raw_dtype).tobytes(), ((b"output-datatype", model.raw_datatype),)

    async def _answers(self, model: Served, kind: str, rows: Array, receive: Receive) -> Array:
        try:
            model.check(rows)
        except InvalidInput as error:
            raise Refused(400, str(error)) from None
        if not len(rows):
            return np.empty(0, np.int64) if kind == "class" else np.empty((0, model.mlp.outputs), np.float32)
        answers = self._batcher.at_once(model, kind, rows)
        if answers is not None:
            return answers
        return await unless_gone(self._batcher.submit(model, kind, rows), receive)
