"""The page at ``/``: the models at work, for eyes. Its files are served as they lie; nothing is built or fetched."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gigamlp.cascade import Cascade
from gigamlp.errors import InvalidInput
from gigamlp.measure.clock import HostClock
from gigamlp.serve import protocol
from gigamlp.serve.errors import Gone, Refused
from gigamlp.serve.http import JSON, OCTETS, header, whole_number
from gigamlp.serve.served import Served

__all__ = ["describe", "routes"]

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but asked about each time: a new version of gigamlp shows at once
}
_PIXELS = 784
_DIGITS = tuple("0123456789")
_MNIST = Path(__file__).parents[2] / "data" / "mnist_idx"
_TEST_FILES = {"images": "t10k-images-idx3-ubyte.gz", "labels": "t10k-labels-idx1-ubyte.gz"}
_MOST_LABELS = 100  # that are listed with a model
_TOP = 10  # classes of an answer
_MOST_AT_ONCE = 8  # answers with their own time: each has a run of its own, which is not merged
_UNFIT = "{name!r} was asked for {n} rows; this path answers one, POST /v2/models/{name}/infer answers many"


def routes(models: Iterable[Served]) -> list[BaseRoute]:
    """Return the page and what it asks for.

    What is under ``/page/`` needs the token, where there is one; the page itself says nothing about the models.

    Parameters
    ----------
    models : iterable of Served
        The server's; looked at anew for each request.

    Returns
    -------
    list of starlette.routing.BaseRoute
    """
    timing = _Timing()

    async def listing(request: Request) -> Response:
        return _json({"models": [describe(served) for served in models], "max_rows": request.app.settings.max_rows})

    return [
        Route("/", _index),
        Route("/static/{name}", _file),
        Route("/page/models", listing),
        Route("/page/models/{model}/versions/{version}/answer", timing.answer, methods=["POST"]),
        Route("/page/test/{part}", _test_part),
    ]


def describe(served: Served) -> dict[str, Any]:
    """Return what the page shows of a model version, as JSON-ready values."""
    mlp = served.mlp
    labels = [] if mlp.classes is None else [str(label) for label in mlp.classes[:_MOST_LABELS].tolist()]
    digits = (
        served.features == _PIXELS
        and served.classifies
        and served.input_dtype in ("uint8", "float32")
        and 0 < len(labels) <= 10
        and all(label in _DIGITS for label in labels)
    )
    stages = mlp.stages if isinstance(mlp, Cascade) else (mlp,)
    schemes = dict.fromkeys(stage.scheme.name for stage in stages if stage.scheme is not None)
    scale = stages[0].input_scale
    # a model of floats that does not scale its rows was trained on pixels of 0..1
    scaled = served.input_dtype == "uint8" or (np.ndim(scale) == 0 and float(scale) < 0.01)
    return {
        "name": served.name,
        "version": served.version,
        "engine": ", ".join(served.engines),
        "device": served.session.device,
        "scheme": ", ".join(schemes) or None,
        "widths": [mlp.features, *mlp.hidden, mlp.outputs],
        "head": mlp.head,
        "datatype": served.datatype,
        "features": served.features,
        "outputs": [each.to_json() for each in served.outputs],
        "output_datatype": served.raw_datatype.decode(),
        "classes": 0 if mlp.classes is None else len(mlp.classes),
        "labels": labels,
        "digits": digits,
        "pixel_scale": 1.0 if scaled else 1 / 255,
    }


class _Timing:
    """Answers one row and says what the model alone took."""

    def __init__(self) -> None:
        self._busy = 0

    async def answer(self, request: Request) -> Response:
        app, at = request.app, request.path_params
        served: Served = app.models.get(at["model"], at["version"])
        if self._busy >= _MOST_AT_ONCE:
            raise Refused(503, "too many ask for answers with times; try again", retry_after=1, dropped="queue_full")
        self._busy += 1
        served.enter()
        try:
            rows = await self._row(request, served)
            # between two runs of the thread that owns the device: nothing else is in this time
            answers, seconds = await app.batcher.errand(lambda: _timed(served, rows))
        finally:
            served.leave()
            self._busy -= 1
        return _json({**_answer(served, answers), "model_us": seconds * 1e6})

    @staticmethod
    async def _row(request: Request, served: Served) -> Any:
        app, raw = request.app, header(request.scope, b"content-type") == OCTETS
        length = app.bodies.admit(request.scope)
        try:
            body = await app.bodies.read(request.receive, length)
        except Gone:
            raise Refused(400, "the request ended before its body did") from None
        try:
            if raw:
                rows = protocol.parse_raw(body, served, 1)
            elif len(body) > app.settings.max_json_bytes:
                raise Refused(413, f"more than {app.settings.max_json_bytes:,} bytes of JSON")
            else:
                name = b"inference-header-content-length"
                size = whole_number(header(request.scope, name), "Inference-Header-Content-Length")
                rows = protocol.parse(body, size, served, 1).rows
            if len(rows) != 1:
                raise Refused(400, _UNFIT.format(name=served.name, n=len(rows)))
            try:
                served.check(rows)
            except InvalidInput as error:
                raise Refused(400, str(error)) from None
            return rows.copy()  # the body is released here
        finally:
            app.bodies.release(len(body))


def _timed(served: Served, rows: Any) -> tuple[Any, float]:
    kind = "class" if isinstance(served.mlp, Cascade) else "logits"
    begin = HostClock.now()
    answers = served.run(kind, rows)
    return answers, HostClock.now() - begin


def _answer(served: Served, logits: Any) -> dict[str, Any]:
    """Return the answer of one row: the best classes with their probabilities, or the numbers; a cascade's class."""
    if isinstance(served.mlp, Cascade):
        return {"class": str(served.finish("class", "class", logits)[0]), "top": []}
    first = served.finish(served.first, "logits", logits)[0]
    if not served.classifies:
        return {"prediction": np.atleast_1d(first).tolist()}
    proba = served.finish("proba", "logits", logits)[0]
    best = np.argsort(-proba, kind="stable")[:_TOP]
    # all of them in their own order if they are few: digits keep their places
    shown = np.sort(best) if len(proba) <= _TOP else best
    labels = served.mlp.classes
    assert labels is not None
    return {
        "class": str(first),
        "top": [{"label": str(labels[i]), "proba": float(proba[i])} for i in shown.tolist()],
    }


# ---- files ---------------------------------------------------------------------------------------------------------


async def _index(request: Request) -> Response:
    content = (_STATIC / "index.html").read_bytes()
    if request.app.settings.token is not None:  # else the page would have to fail first to find out
        content = content.replace(b'data-token="no"', b'data-token="yes"')
    return _send(request, content, _TYPES[".html"])


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    for path in _STATIC.iterdir():  # no part of a request becomes a path
        if path.name == name and path.suffix in _TYPES:
            return _send(request, path.read_bytes(), _TYPES[path.suffix])
    raise Refused(404, "the page has no file of this name")


async def _test_part(request: Request) -> Response:
    file = _TEST_FILES.get(request.path_params["part"])
    if file is None:
        raise Refused(404, f"the test rows have two parts: {', '.join(_TEST_FILES)}")
    packed = await asyncio.to_thread((_MNIST / file).read_bytes)
    if "gzip" in (request.headers.get("accept-encoding") or ""):
        return _send(request, packed, OCTETS.decode(), {"content-encoding": "gzip", "vary": "accept-encoding"})
    content = await asyncio.to_thread(gzip.decompress, packed)
    return _send(request, content, OCTETS.decode(), {"vary": "accept-encoding"})


def _send(request: Request, content: bytes, media_type: str, more: dict[str, str] | None = None) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag, **(more or {})}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


def _json(content: Any) -> Response:
    return Response(protocol.dumps(content), media_type=JSON.decode(), headers={"cache-control": "no-store"})
