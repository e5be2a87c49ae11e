"""Mixture of experts: the two routers, the clamped SwiGLU and the routed experts."""

from anymla.ops.moe.interface import experts, route_biased, route_hash, swiglu

__all__ = ["experts", "route_biased", "route_hash", "swiglu"]
