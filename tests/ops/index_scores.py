"""Brute force for index scores, and index caches with keys in them."""

from __future__ import annotations

import math

import torch
from paged import Cache, make_cache
from torch import Tensor

from anymla.ops import device as device_facts
from anymla.testing.tolerance import Bound, accumulation, assert_close

D = 128


def i32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def score64(q: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [N] and the magnitude of what is summed [N]: q [H, D], weights [H], keys [N, D]."""
    q, weights, keys = q.double(), weights.double(), keys.double()
    scores, magnitude = [torch.zeros(0).double()], [torch.zeros(0).double()]
    for key in keys:
        dots = (q * key).sum(1)
        scores.append((weights * dots.clamp(min=0)).sum()[None])
        magnitude.append((weights.abs() * (q * key).abs().sum(1)).sum()[None])
    return torch.cat(scores), torch.cat(magnitude)


def score_bound(heads: int, dtype: torch.dtype = torch.float32, *, fp8: bool = False) -> Bound:
    """Relative to the magnitude: a dot product of D terms, then a sum over heads.

    ``fp8``: a device's own product of FP8 operands, which keeps fewer bits of its sums.
    """
    bound = accumulation(D + heads, dtype)
    if fp8:
        bound += Bound(2.0**-13, "FP8 products aligned to 13 bits below the largest (Hopper)")
    return bound


def multiplies_fp8(run: str) -> bool:
    """Whether a backend, as ``use_backend`` has set it up, gives FP8 operands to the hardware."""
    return (
        run in ("triton", "gluon_sm90")
        and torch.cuda.is_available()
        and device_facts.target_of(torch.device("cuda")).dot_e4m3
    )


def assert_scores(
    got: Tensor,
    want: Tensor,
    magnitude: Tensor,
    heads: int,
    dtype: torch.dtype = torch.float32,
    *,
    fp8: bool = False,
) -> None:
    assert got.dtype == dtype
    scale = torch.where(want.isfinite(), magnitude, 1.0).clamp(min=1e-30)
    assert_close(got, want, atol=score_bound(heads, dtype, fp8=fp8), scale=scale)


def key_cache(
    layout: str, pages: int, entries: int, table: Tensor, lengths: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """A cache of NaN bytes with random keys in the requests' entries; the keys as stored."""
    cache = make_cache(layout, pages, entries)
    return cache.tensor, fill(cache, table, lengths)


def fill(cache: Cache, table: Tensor, lengths: list[int]) -> list[Tensor]:
    entries = cache.tensor.shape[1]
    stored = []
    for request, length in enumerate(lengths):
        w = torch.arange(length)
        slots = table[request].long()[w // entries] * entries + w % entries
        cache.layout.write(cache.tensor, slots, torch.randn(length, D))
        stored.append(cache.layout.read(cache.tensor, slots, torch.float64))
    return stored


def paged_by_hand(
    q: Tensor, weights: Tensor, stored: list[Tensor], lens: list[list[int]], max_context: int
) -> tuple[Tensor, Tensor]:
    """[R * J, max_context] scores and magnitudes; q [R, J, H, D], lens [R][J]."""
    requests, rows = q.shape[:2]
    want = torch.full((requests * rows, max_context), -math.inf, dtype=torch.float64)
    magnitude = torch.zeros_like(want)
    for r in range(requests):
        for j in range(rows):
            m, n = r * rows + j, lens[r][j]
            want[m, :n], magnitude[m, :n] = score64(q[r, j], weights[m], stored[r][:n])
    return want, magnitude
