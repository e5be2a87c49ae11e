"""Hopper's score kernel on a CPU, see ``crossrun.hopper``: its arguments, and its warps.

Without layouts nobody knows which thread has which key, so that a warpgroup gives a buffer back at
once.
"""

import pytest
import torch
from index_scores import D

pytest.importorskip("triton")

from anymla.ops.indexer import gluon_sm90_scores
from anymla.ops.indexer.config import GROUP, padded_entries
from crossrun.hopper import Descriptor, Machine

H, PAGE, WARPS = 64, 64, 4


def machine(seed=0):
    """That runs the kernel."""

    def release(scratch, stage, scale, lane):
        cta, at = made.cta, int(scratch + 8 * stage)
        cta.arrive(made.raw.barrier(at), WARPS)
        return scale

    made = Machine(seed=seed, num_warps=WARPS, replacements={gluon_sm90_scores._release: release})
    return made


def in_pages(cache):
    """Keys and words of FP8 pages."""
    pages, stride = len(cache), cache.stride(0)
    flat = cache.as_strided((pages, stride), (stride, 1))
    keys = flat.view(torch.float8_e4m3fn).as_strided((pages, PAGE, D), (stride, D, 1))
    return keys, flat[:, : PAGE * (D + 4)].view(torch.float32)


def score(
    q, keys, words, weights, lengths, table, k, *, starts, owners, together, span,
    context=0, overlap=False, programs=None, seed=0,
):  # fmt: skip
    """Scores and maxima as the kernel leaves them: NaN and 77 where it wrote nothing.

    With a context there are no maxima; without a table pages are in order.
    """
    rows, pages = len(q), len(keys)
    covered = PAGE * (pages if table is None else table.shape[1])
    columns = padded_entries(max(covered, context))
    scores = torch.full((rows, columns), torch.nan)
    maxima = torch.full((rows, columns // GROUP), 77, dtype=torch.int32)
    requests = 1 if table is None else len(table)
    machine(seed).launch(
        gluon_sm90_scores.scores_kernel,
        (programs or -(-rows // together), -(-max(covered, context) // span)),
        Descriptor(q.flatten(0, 1), (together * H, D)),
        Descriptor(keys, (1, PAGE, D)),
        Descriptor(words, (1, PAGE)),
        table,
        *((0, 0) if table is None else table.stride()),
        lengths,
        starts,
        owners,
        weights,
        weights.stride(0),
        scores,
        scores.stride(0),
        None if context else maxima,
        maxima.stride(0),
        0,
        rows,
        max(rows // requests, 1),
        requests,
        pages,
        covered,
        k,
        span,
        context,
        -(-rows // together),
        ROWS=together,
        STAGES=4,
        OVERLAP=overlap,
        CONSUMER_REGISTERS=112,
        PRODUCER_REGISTERS=24,
        FILL=context > 0,
        PDL=True,
    )
    return scores, maxima
