"""The choice of the most probable token among logits."""

from anymla.ops.choice.interface import best_logits

__all__ = ["best_logits"]
