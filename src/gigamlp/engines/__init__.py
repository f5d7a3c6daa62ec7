"""Engines: the ways to execute an MLP."""

from gigamlp.engines.base import Engine, Runner, Spec, Unsupported, Variant
from gigamlp.engines.registry import engine, engine_names

__all__ = ["Engine", "Runner", "Spec", "Unsupported", "Variant", "engine", "engine_names"]
