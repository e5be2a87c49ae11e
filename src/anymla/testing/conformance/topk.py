"""Cases I3, I4 and I10: selection of the best of given scores."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.tolerance import assert_identical


@case("I3", "top 512 and top 1024, far beyond four times as many tokens", "topk_per_row")
def large_selections(ops: Ops) -> None:
    logits = torch.randn(3, 9000)
    starts = torch.tensor([0, 100, 8000], dtype=torch.int32)
    ends = torch.tensor([9000, 8900, 8500], dtype=torch.int32)
    for k in (512, 1024):
        _check_topk(ops, logits, starts, ends, k, f"top {k}")


def _check_topk(
    ops: Ops, logits: Tensor, starts: Tensor, ends: Tensor, k: int, name: str
) -> Tensor:
    """Require the best k, best first, the only answer without ties."""
    chosen: Tensor = ops.topk_per_row(logits, starts, ends, k)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        count = min(k, max(end - start, 0))
        want = logits[row, start:end].double().topk(count).indices
        assert_identical(chosen[row, :count].long(), want, name=f"{name}, row {row}")
        expect(bool((chosen[row, count:] == -1).all()), f"{name}, row {row}: -1 behind")
    return chosen


@case("I4", "among equal scores the lower entry first", "topk_per_row")
def ties(ops: Ops) -> None:
    logits = torch.zeros(3, 50)
    logits[0, [7, 30]] = torch.tensor([1.0, 2.0])
    logits[1, ::2] = -0.0
    logits[2] = torch.tensor([1.0, 2.0]).repeat(25)
    zeros = torch.zeros(3, dtype=torch.int32)
    chosen = ops.topk_per_row(logits, zeros, zeros + 50, 10)
    expect(chosen[0].tolist() == [30, 7, 0, 1, 2, 3, 4, 5, 6, 8], f"got {chosen[0].tolist()}")
    expect(chosen[1].tolist() == list(range(10)), f"0 and -0 are equal: {chosen[1].tolist()}")
    expect(chosen[2].tolist() == list(range(1, 21, 2)), f"got {chosen[2].tolist()}")


@case("I10", "every length around the number selected, into a buffer used before", "topk_per_row")
def lengths_around_k(ops: Ops) -> None:
    logits = torch.randn(2, 1100)
    buffer: dict[int, Tensor] = {k: torch.full((2, k), 77, dtype=torch.int32) for k in (512, 1024)}
    for entries in (496, 511, 512, 513, 640, 800, 1023, 1024, 1025, 1075):
        lens = torch.tensor([entries, entries - 1], dtype=torch.int32)
        zeros = torch.zeros_like(lens)
        stale = logits.clone()
        stale[:, entries:] = torch.inf  # scores of an earlier, longer sequence
        for k, out in buffer.items():
            fresh = _check_topk(ops, stale, zeros, lens, k, f"{entries} entries, top {k}")
            again = ops.topk_per_row(stale, zeros, lens, k, out=out)
            expect(again.data_ptr() == out.data_ptr(), "the result must be the caller's buffer")
            assert_identical(again, fresh, name=f"{entries} entries into a used buffer")
