"""What a server is told before it starts: one frozen value, the same for every worker process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gigamlp.errors import InvalidInput

__all__ = ["Settings"]

MIB = 1 << 20
_AT_LEAST = {
    "port": 0,
    "workers": 1,
    "max_delay_us": 0,
    "max_rows": 1,
    "max_queue_rows": 1,
    "max_body_bytes": 1,
    "max_json_bytes": 1,
    "max_bodies_bytes": 1,
    "body_timeout_s": 0,
    "grace_s": 0,
    "linger_s": 0,
    "reload_s": 0,
}


@dataclass(frozen=True)
class Settings:
    """All that decides how a server behaves.

    Parameters
    ----------
    models : tuple of str
        Model files, names of shipped models, folders ``NAME/VERSION/model.safetensors``; each may be ``NAME=PATH``.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    engine : str, optional
        Run this engine; it is an error if it cannot. Default: the Plan's, else see `gigamlp.serve.served.choose`.
    plan : str, optional
        A Plan file. Only for one model; in a folder a ``plan.json`` beside the model is used.
    threads : int, optional
        CPU threads of an engine.
    input_dtype : str, optional
        The dtype of a row for models that do not say: ``"uint8"``, ``"int8"``, ``"float16"`` or ``"float32"``.
    host, port : str, int
        Where to listen. Port 0 is one that the system chooses.
    workers : int
        Processes that share the socket; CPU only.
    max_delay_us : int
        How long a request waits for others to run with, at most. It waits only where running together saves more.
    max_rows : int
        Rows of one request, at most.
    max_queue_rows : int
        Rows that wait for the engine, at most; beyond, requests are answered 503.
    max_body_bytes, max_json_bytes : int
        Bytes of one body and of the JSON in it, at most. JSON is parsed where all requests are, so it is kept small.
    max_bodies_bytes : int
        Bytes of all bodies that a process holds, at most; beyond, requests are answered 503.
    body_timeout_s : float
        Seconds that a body may take to arrive.
    grace_s, linger_s : float
        After SIGTERM: seconds that requests have to end, and seconds in which connections are told to close.
    reload_s : float
        Seconds between two looks at the model files; 0: none.
    token : str, optional
        What callers must send as ``Authorization: Bearer TOKEN``.
    cors : tuple of str
        Origins that browsers may call from.

    Raises
    ------
    InvalidInput
        If a value is out of range, or values exclude each other.

    Examples
    --------
    >>> Settings(models=("mnist-40",)).port
    8000
    """

    models: tuple[str, ...]
    device: str = "auto"
    engine: str | None = None
    plan: str | None = None
    threads: int | None = None
    input_dtype: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_delay_us: int = 200
    max_rows: int = 65536
    max_queue_rows: int = 262_144
    max_body_bytes: int = 64 * MIB
    max_json_bytes: int = MIB
    max_bodies_bytes: int = 512 * MIB
    body_timeout_s: float = 30.0
    grace_s: float = 30.0
    linger_s: float = 0.5
    reload_s: float = 1.0
    token: str | None = field(default=None, repr=False)  # not in a log or a traceback
    cors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidInput("name at least one model to serve: a file, a folder, or a shipped model, as mnist-40")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise InvalidInput(f"{name} must be at least {least}, got {value!r}")
        if self.port > 65535:
            raise InvalidInput(f"port must be at most 65535, got {self.port}")
        if self.max_queue_rows < self.max_rows:
            raise InvalidInput(
                f"max_queue_rows ({self.max_queue_rows:,}) is less than max_rows ({self.max_rows:,}): "
                "a request of that many rows could never run"
            )
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise InvalidInput("the token must be printable ASCII, and not empty")
        if self.input_dtype not in (None, "uint8", "int8", "float16", "float32"):
            raise InvalidInput(f"input_dtype must be uint8, int8, float16 or float32 here, got {self.input_dtype!r}")

    def with_(self, **changes: object) -> Settings:
        """Return a copy with some values replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]
