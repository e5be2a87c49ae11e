"""Peers of the routed experts: grouped products of MXFP4 weights.

A peer has its own copy of the weights in its own layout, which is made once and not timed. The time
covers everything that a layer needs: from tokens and their chosen experts to the weighted sums,
including whatever sorting, quantising and adding the peer does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.peers import Peer

# Largest accepted error of a peer relative to a reference without quantised activations, root mean
# square. Rounding to bfloat16 contributes 0.0017, and a result passes at most five such roundings
# in each of both, together 0.0053; a wrong layout or scale gives an error near 1.
BFLOAT16_BOUND = 0.008
# The same bound for peers that round the inputs of both products to e4m3, which gives an error of
# 0.046 (docs/vllm.md, "Experts and linears").
E4M3_BOUND = 0.07
# Lists of the experts' matrices and scales, by the names that ``experts`` gives them.
Weights = dict[str, list[Tensor]]
# Function from tokens [T, D], ids [T, K] and weights [T, K] to results [T, D].
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertsPeer(Peer):
    """A library that runs MXFP4 experts.

    Attributes:
        bound: largest accepted distance of its results from the reference's.
        note: difference of its computation, or of what is timed, from this package's.
    """

    bound: float
    note: str

    def prepare(self, weights: Weights, limit: float) -> Run:
        """Convert weights to the peer's layout; return a function of tokens.

        Args:
            weights: codes and scales of w1, w3 and w2.
            limit: bound of the clamped SwiGLU.
        """
        raise NotImplementedError


def stacked(weights: Weights, *names: str) -> Tensor:
    """Return one tensor of all experts, with the named matrices' rows after each other."""
    return torch.cat([torch.stack(weights[name]) for name in names], 1)


def kernels() -> Any:
    """Import the kernels that peers need around their own, which need Triton."""
    return importlib.import_module("lab.peers._triton_experts")
