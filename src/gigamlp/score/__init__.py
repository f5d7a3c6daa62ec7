"""Scoring files: rows of files in, answers in files out, nothing lost, as fast as the slowest wire allows."""

from gigamlp.score.stream import Scored, score

__all__ = ["Scored", "score"]
