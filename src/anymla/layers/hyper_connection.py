"""Manifold-constrained hyper-connections: parallel residual streams, mixed around a sub-layer."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from anymla.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre
from anymla.ops.norm_rope import rms_norm


@dataclasses.dataclass(frozen=True)
class Mix:
    """How a site's output returns to the streams: ``post`` [T, N] and ``comb`` [T, N, N]."""

    post: Tensor
    comb: Tensor


@dataclasses.dataclass(frozen=True)
class HyperConnectionOptions:
    """Constants of all sites of a model."""

    norm_eps: float
    eps: float
    iterations: int


class HyperConnection(nn.Module):
    """The site around one sub-layer, together with the RMSNorm in front of it.

    Attributes:
        fn: float32 [(2 + N) * N, N * hidden].
        base: float32 [(2 + N) * N].
        scale: float32 [3], of the pre, post and comb gates.
        norm: [hidden], RMSNorm weight of the sub-layer's input.
    """

    def __init__(
        self,
        *,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        options: HyperConnectionOptions,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.fn = fn
        self.base = base
        self.scale = scale
        self.norm = norm
        self.options = options
        self.backend = backend

    def enter(self, h: Tensor) -> tuple[Tensor, Mix]:
        """Collapse the streams [T, N, hidden] to the sub-layer's normalised input [T, hidden]."""
        y, post, comb = hc_pre(
            h,
            self.fn,
            self.base,
            self.scale,
            norm_eps=self.options.norm_eps,
            hc_eps=self.options.eps,
            iters=self.options.iterations,
            backend=self.backend,
        )
        return rms_norm(y, self.norm, self.options.norm_eps, backend=self.backend), Mix(post, comb)

    def leave(self, u: Tensor, h: Tensor, mix: Mix) -> Tensor:
        """Return the sub-layer's output [T, hidden] to the streams [T, N, hidden]."""
        out: Tensor = hc_post(u, h, mix.post, mix.comb, backend=self.backend)
        return out

    def follow(self, u: Tensor, h: Tensor, mix: Mix) -> tuple[Tensor, Tensor, Mix]:
        """Leave the previous site with ``mix`` and enter this one, in one operation.

        Returns:
            The streams, this sub-layer's normalised input, and this site's mix.
        """
        h, y, post, comb = hc_post_pre_norm(
            u,
            h,
            mix.post,
            mix.comb,
            self.fn,
            self.base,
            self.scale,
            self.norm,
            norm_eps=self.options.norm_eps,
            hc_eps=self.options.eps,
            iters=self.options.iterations,
            backend=self.backend,
        )
        return h, y, Mix(post, comb)


class HyperConnectionHead(nn.Module):
    """Collapse the streams after the last layer and normalise.

    Attributes:
        fn: float32 [N, N * hidden].
        base: float32 [N].
        scale: float32 [1].
        norm: [hidden], weight of the final RMSNorm.
    """

    def __init__(
        self,
        *,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        options: HyperConnectionOptions,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.fn = fn
        self.base = base
        self.scale = scale
        self.norm = norm
        self.options = options
        self.backend = backend

    def forward(self, h: Tensor) -> Tensor:
        """Map streams [n, N, hidden] to [n, hidden]."""
        y = hc_head(
            h,
            self.fn,
            self.base,
            self.scale,
            norm_eps=self.options.norm_eps,
            hc_eps=self.options.eps,
            backend=self.backend,
        )
        out: Tensor = rms_norm(y, self.norm, self.options.norm_eps, backend=self.backend)
        return out
