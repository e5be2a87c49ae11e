"""Muon for the matrices inside the network, AdamW for everything else, as DeepSeek trains V4."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

# Matrices that map activations to activations; tables, gates and vectors are not among them.
_HIDDEN = re.compile(r"\.(w[123]|wq_a|wq_b|wkv|wgate|wo_a|wo_b|[eh]_proj|weights_proj)\.weight$")


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a batch [n, rows, columns], roughly.

    Newton-Schulz with the quintic coefficients of Keller Jordan's Muon.
    """
    x = g.bfloat16() if g.is_cuda else g
    flat = x.shape[-2] > x.shape[-1]
    x = x.mT if flat else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if flat else x).to(g.dtype)


class Optimizer:
    """Both at once.

    Args:
        weights: trainable tensors by name.
        ratio: Muon's learning rate over AdamW's.
        decay: Muon's weight decay.
    """

    def __init__(
        self, weights: dict[str, Tensor], *, ratio: float = 6.0, decay: float = 0.1
    ) -> None:
        self.ratio, self.decay = ratio, decay
        groups: dict[torch.Size, list[Tensor]] = {}
        others = []
        for name, weight in weights.items():
            if _HIDDEN.search(name):
                groups.setdefault(weight.shape[-2:], []).append(weight)
            else:
                others.append(weight)
        self.groups = list(groups.values())
        self.momenta = [[torch.zeros_like(w) for w in group] for group in self.groups]
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(
            others, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update from the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        lr = rate * self.ratio
        for weights, momenta in zip(self.groups, self.momenta, strict=True):
            grads = [w.grad for w in weights]
            torch._foreach_lerp_(momenta, grads, 0.05)
            updates = torch._foreach_lerp(grads, momenta, 0.95)
            rows, columns = weights[0].shape[-2:]
            batch = torch.cat([u.reshape(-1, rows, columns) for u in updates])
            batch = orthogonal(batch) * (lr * max(1.0, rows / columns) ** 0.5)
            sizes = [w.numel() // (rows * columns) for w in weights]
            parts = [u.view(w.shape) for u, w in zip(batch.split(sizes), weights, strict=True)]
            torch._foreach_mul_(weights, 1 - lr * self.decay)
            torch._foreach_sub_(weights, parts)


def clip(weights: Iterable[Tensor], most: float) -> Tensor:
    """Scale gradients so that their norm is at most ``most``; returns the norm, without waiting."""
    grads = [w.grad for w in weights if w.grad is not None]
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm
