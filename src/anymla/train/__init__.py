"""Attention with gradients: what training frameworks call, forward as it serves."""

from anymla.train.plan import Plan

__all__ = ["Plan"]
