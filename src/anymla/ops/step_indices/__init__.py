"""Index rows of a step: slots that tokens write, and windows and selected entries they read."""

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
