"""RMS norms, rotary position embedding, and insertion of rotated keys into a cache."""

from anymla.ops.norm_rope.interface import (
    fused_q_kv_rmsnorm,
    qnorm_rope_kv_insert,
    rms_norm,
    rope,
)
from anymla.ops.norm_rope.rope_tables import YarnScaling, cos_sin_table, inv_freq

__all__ = [
    "YarnScaling",
    "cos_sin_table",
    "fused_q_kv_rmsnorm",
    "inv_freq",
    "qnorm_rope_kv_insert",
    "rms_norm",
    "rope",
]
