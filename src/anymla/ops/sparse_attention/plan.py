"""Cut the work of decode attention once for several calls."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from anymla.ops._check import INT32, check
from anymla.ops.device import runs_gluon, target_of
from anymla.ops.sparse_attention.config import choose_schedule


def sparse_attention_plan(
    lengths: Tensor | None,
    extra_lengths: Tensor | None = None,
    *,
    heads: int,
    width: int,
    extra_width: int | None = None,
) -> Tensor | None:
    """Cut the work of calls of ``sparse_attention`` whose lists are as long.

    Layers of a step, or a step's calls of one layer's kind, list as many rows of each token, so
    that one plan serves them all. It says which CTA computes which splits; results
    differ by rounding alone, and stay right for lists that are shorter or longer than those it was
    made of. A plan is made on the device, without waiting for it, and may be captured in a graph.

    Args:
        lengths: [T] int32, of the first lists; None if they are full.
        extra_lengths: [T] int32, of the second lists.
        heads: query heads.
        width: columns of the first lists.
        extra_width: columns of the second lists, or None without.

    Returns:
        For ``plan`` of ``sparse_attention``: int32 on the lengths' device. None where a plan gains
        nothing (other devices, full lists, few tokens), and under torch.compile.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device of lengths.
    """
    name = "sparse_attention_plan"
    check(name, lengths=(lengths, "T", INT32), extra_lengths=(extra_lengths, "T", INT32))
    some = extra_lengths if lengths is None else lengths
    if some is None or not len(some) or not heads or torch.compiler.is_compiling():
        return None
    if not runs_gluon(some.device):
        return None

    widths = (width,) if extra_width is None else (width, extra_width)
    sms = target_of(some.device).sm_count
    schedule = choose_schedule(len(some), heads, widths, sms, lengths=True, planned=True)
    if not schedule.planned:
        return None
    kernel = importlib.import_module("anymla.ops.sparse_attention.gluon_sm90_launch")
    made: Tensor = kernel.make_plan(schedule, len(some), lengths, extra_lengths, widths)
    return made
