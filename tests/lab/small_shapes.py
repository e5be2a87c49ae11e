"""Sizes of a model that is small enough for benchmarks on a CPU."""

from anymla.ops.linear.shapes import LayerShape
from anymla.ops.moe.shapes import ExpertsShape

LAYER = LayerShape(
    hidden=256, q_rank=128, heads=4, groups=2, inner=128, head_dim=128, o_rank=128, index_heads=8,
    index_dim=64,
)  # fmt: skip


def experts_of(tokens: int, experts: int) -> ExpertsShape:
    """Two of so many experts a token."""
    return ExpertsShape(tokens, 2, experts, LAYER.inner, LAYER.hidden)
