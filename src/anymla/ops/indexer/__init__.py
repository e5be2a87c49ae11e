"""The lightning indexer: cheap scores for every compressed entry, and the best entries of each."""

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
