"""Sizes of a model that is small enough for benchmarks on a CPU."""

from anymla.ops.linear.shapes import LayerShape
from anymla.ops.moe.shapes import ExpertsShape

LAYER = LayerShape(
    hidden=256, q_rank=128, heads=4, groups=2, inner=128, head_dim=128, o_rank=128, index_heads=8,
    index_dim=64,
)  # fmt: skip
# Fields of a published configuration that make its layers small.
CONFIG = {
    "hidden_size": 256, "num_attention_heads": 4, "o_groups": 2, "o_lora_rank": 128,
    "q_lora_rank": 128, "index_n_heads": 4, "index_topk": 16, "moe_intermediate_size": 128,
}  # fmt: skip


def experts_of(tokens: int, experts: int) -> ExpertsShape:
    """Two of so many experts a token."""
    return ExpertsShape(tokens, 2, experts, LAYER.inner, LAYER.hidden)
