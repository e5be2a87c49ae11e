"""Weights asked for before the product that reads them is launched."""

from __future__ import annotations

from torch import Tensor

from anymla.ops._triton import target_of, triton_support


def ask_ahead(weight: Tensor, most: int) -> None:
    """Let the first ``most`` bytes of a weight come into the L2 cache; returns at once.

    Where that has been seen to work (sm_90), and the weight is contiguous; elsewhere nothing is
    done. The weight must not be written meanwhile.
    """
    if target_of(weight.device).name != "sm_90" or not triton_support(weight):
        return
    if weight.is_contiguous() and weight.data_ptr() % 16 == 0:
        from anymla.ops.linear import triton_ahead

        triton_ahead.ask_ahead(weight, most)
