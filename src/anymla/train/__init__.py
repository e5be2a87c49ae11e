"""Attention with gradients, whose forward pass is the operation that serves prompts."""

from anymla.train.attention import attention, sparse_attention
from anymla.train.plan import Plan

__all__ = ["Plan", "attention", "sparse_attention"]
