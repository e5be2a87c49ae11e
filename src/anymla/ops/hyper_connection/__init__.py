"""Manifold-constrained hyper-connections (mHC): N residual streams, mixed around each sublayer."""

from anymla.ops.hyper_connection.interface import (
    hc_collapse_norm,
    hc_gates,
    hc_head,
    hc_post,
    hc_post_backward,
    hc_post_pre_norm,
    hc_pre,
    hc_pre_backward,
)

__all__ = [
    "hc_collapse_norm",
    "hc_gates",
    "hc_head",
    "hc_post",
    "hc_post_backward",
    "hc_post_pre_norm",
    "hc_pre",
    "hc_pre_backward",
]
