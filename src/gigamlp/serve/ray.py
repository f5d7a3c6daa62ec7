"""The server on many machines: a Ray Serve deployment around the same application.

Every replica is a whole server (its own models, batcher and metrics); Ray's proxies share requests out among them.
"""

from __future__ import annotations

from typing import Any

from gigamlp.serve.settings import Settings

__all__ = ["deployment"]


def deployment(settings: Settings, **options: Any) -> Any:
    """Return a Ray Serve application that answers as `gigamlp serve` does.

    The model files must lie at the same paths on every machine. What belongs to a listening socket (``host``,
    ``port``, ``workers``, the time limits of connections) is Ray's here, and not looked at; limits on sizes, the queue,
    the token and reloading hold for each replica.

    Parameters
    ----------
    settings : Settings
    **options
        Of ``ray.serve.deployment``: ``num_replicas``, ``ray_actor_options``, ``autoscaling_config``, ...; by default
        a replica takes one CPU, or one GPU if ``settings.device`` names CUDA, and 1,000 requests at a time.

    Returns
    -------
    ray.serve.Application
        For ``ray.serve.run``.

    Raises
    ------
    ImportError
        If Ray is not installed: ``pip install 'gigamlp[ray]'``.

    Examples
    --------
    >>> from gigamlp.serve.settings import Settings
    >>> settings = Settings(models=("mnist-40",), device="cpu")
    >>> from ray import serve  # doctest: +SKIP
    >>> handle = serve.run(deployment(settings, num_replicas=4))  # doctest: +SKIP
    """
    from ray import serve

    gpu = settings.device.startswith("cuda")
    own: dict[str, Any] = {
        "name": "gigamlp",
        "max_ongoing_requests": 1000,  # the batcher merges them; Ray's default of a few would keep its batches small
        "ray_actor_options": {"num_gpus": 1} if gpu else {"num_cpus": 1},
    }
    made = serve.deployment(serve.ingress(_builder(settings))(Replica))
    return made.options(**{**own, **options}).bind()


def _builder(settings: Settings) -> Any:
    def build() -> Any:
        from gigamlp.serve.app import create_app

        return create_app(settings)

    return build


class Replica:
    """What Ray makes an actor of: it has nothing of its own, requests go to the application."""
