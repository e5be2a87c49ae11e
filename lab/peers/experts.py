"""Peers of the routed experts: grouped products of MXFP4 weights.

A peer has its own copy of the weights, in its own layout, which is made once and not timed. Timed
is what a layer asks for: from tokens and the experts that each has chosen to the weighted sums,
with whatever sorting, quantising and adding up a peer does for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.peers import Peer

# A peer's results may be so far from the reference that quantises no activations, relative to it,
# root of the mean square. Rounding to bfloat16 is 0.0017, and a result passes at most five of them
# here and five there, 0.0053 together; a wrong layout or a wrong scale is near 1.
BFLOAT16_BOUND = 0.008
# Rounding the inputs of both products to e4m3 is 0.046 (docs/vllm.md, "Experts and linears").
E4M3_BOUND = 0.07
# Lists of the experts' matrices and scales, by the names that ``experts`` gives them.
Weights = dict[str, list[Tensor]]
# Takes tokens [T, D], ids [T, K] and weights [T, K]; gives [T, D].
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
        """The weights in its layout, as a function of tokens.

        Args:
            weights: codes and scales of w1, w3 and w2.
            limit: bound of the clamped SwiGLU.
        """
        raise NotImplementedError


def stacked(weights: Weights, *names: str) -> Tensor:
    """One tensor of all experts, the named matrices' rows after each other."""
    return torch.cat([torch.stack(weights[name]) for name in names], 1)


def kernels() -> Any:
    """Kernels that peers need around their own; they need Triton."""
    return importlib.import_module("lab.peers._triton_experts")
