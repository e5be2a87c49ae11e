"""The parts between attention layers: norms, hyper-connection streams and experts."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import softplus

from anymla.testing.oracle.config import OracleConfig
from anymla.testing.oracle.weights import Weights


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide by sqrt(mean(x^2) + eps); multiply by the weight if there is one."""
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


@dataclasses.dataclass(frozen=True)
class Site:
    """A hyper-connection around one sub-layer."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weights: Weights, prefix: str) -> Site:
        """Read ``{prefix}_fn``, ``{prefix}_base`` and ``{prefix}_scale``."""
        return cls(*(weights[f"{prefix}_{part}"] for part in ("fn", "base", "scale")))

    def _mix(self, h: Tensor, config: OracleConfig) -> Tensor:
        return rms_norm(h.flatten(1), None, config.norm_eps) @ self.fn.T

    def pre(self, h: Tensor, config: OracleConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Return collapsed streams [T, D], post [T, N] and comb [T, N, N] of h [T, N, D]."""
        pre, post, comb = self.gates(h, config)
        return collapse(h, pre), post, comb

    def gates(self, h: Tensor, config: OracleConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre [T, N], post [T, N] and comb [T, N, N] of h [T, N, D]."""
        n = h.shape[1]
        mix = self._mix(h, config)
        pre = torch.sigmoid(mix[:, :n] * self.scale[0] + self.base[:n]) + config.hc_eps
        post = 2 * torch.sigmoid(mix[:, n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        comb = (mix[:, 2 * n :] * self.scale[2] + self.base[2 * n :]).unflatten(1, (n, n))
        comb = comb.softmax(-1) + config.hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        for _ in range(config.sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + config.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        return pre, post, comb

    def head(self, h: Tensor, config: OracleConfig) -> Tensor:
        """Collapse the streams for the head: [T, N, D] -> [T, D]."""
        pre = torch.sigmoid(self._mix(h, config) * self.scale + self.base) + config.hc_eps
        return torch.einsum("tn,tnd->td", pre, h)


def stream_count(weights: Weights) -> int:
    """Return the number N of streams: a site has (2 + N) N gates."""
    return round((len(weights["layers.0.hc_attn_base"]) + 1) ** 0.5) - 1


@dataclasses.dataclass
class Gates:
    """Gates through which sites read the streams.

    Attributes:
        pre: gates [T, N] of the last delayed site; None before the first.
    """

    pre: Tensor | None = None

    def enter(self, site: Site, h: Tensor, config: OracleConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Return a site's input [T, D], post and comb; V4.1 reads through the last site's gates."""
        if config.sharing is None:
            return site.pre(h, config)
        before = self.pre
        if before is None:
            before = torch.zeros(h.shape[:2], dtype=h.dtype)
            before[:, 0] = 1
        self.pre, post, comb = site.gates(h, config)
        return collapse(h, before), post, comb


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    """Compute sum_n pre_n h_n: [T, D]."""
    return torch.einsum("tn,tnd->td", pre, h)


def hyper_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Compute h'_j = post_j u + sum_i comb_ij h_i."""
    return post.unsqueeze(-1) * u.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, h)


def swiglu(x: Tensor, weights: Weights, prefix: str, limit: float) -> Tensor:
    """Run one expert: w2(silu(min(w1 x, L)) * clamp(w3 x, -L, L))."""
    gate = weights.apply(x, f"{prefix}.w1").clamp(max=limit)
    up = weights.apply(x, f"{prefix}.w3").clamp(-limit, limit)
    inner = gate * torch.sigmoid(gate) * up
    return weights.apply(inner, f"{prefix}.w2")


def expert_scores(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """Compute sqrt(softplus(logits)) [T, E]."""
    scores: Tensor = softplus(x @ weights[f"{prefix}.gate.weight"].T, threshold=1e9).sqrt()
    return scores


def mixture(
    x: Tensor, scores: Tensor, chosen: Tensor, weights: Weights, prefix: str, config: OracleConfig
) -> Tensor:
    """Run routed experts ``chosen`` [T, k], weighted by their scores, plus the shared expert."""
    share = scores.gather(1, chosen)
    share = share / share.sum(1, keepdim=True) * config.routed_scaling
    out = swiglu(x, weights, f"{prefix}.shared_experts", config.swiglu_limit)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        routed = swiglu(x[token], weights, f"{prefix}.experts.{expert}", config.swiglu_limit)
        out.index_add_(0, token, routed * share[token, place].unsqueeze(1))
    return out
