"""The lightning indexer: scores of compressed entries, and each token's entries of top score."""

from anymla.ops.indexer.interface import (
    indexer_q_rope_quant,
    mask_candidates,
    mqa_logits,
    paged_mqa_logits,
    select_candidate_blocks,
    select_topk,
    topk_per_row,
)

__all__ = [
    "indexer_q_rope_quant",
    "mask_candidates",
    "mqa_logits",
    "paged_mqa_logits",
    "select_candidate_blocks",
    "select_topk",
    "topk_per_row",
]
