"""Greedy choice: the most probable token of each row of logits, with its log-probability."""

from anymla.ops.choice.interface import best_logits

__all__ = ["best_logits"]
