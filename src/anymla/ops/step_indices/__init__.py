"""Which slots and rows a token writes and reads: slot mappings, windows, selected entries."""

from anymla.ops.step_indices.interface import (
    combine_topk_swa_indices,
    compressed_rows,
    compute_global_topk_indices_and_lens,
    slot_mapping,
    token_to_request,
    window_rows,
)

__all__ = [
    "combine_topk_swa_indices",
    "compressed_rows",
    "compute_global_topk_indices_and_lens",
    "slot_mapping",
    "token_to_request",
    "window_rows",
]
