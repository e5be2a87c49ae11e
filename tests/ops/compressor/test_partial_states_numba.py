"""States of few tokens on a CPU, stored by a kernel of numba: the bytes are torch's."""

from __future__ import annotations

import pytest
import torch

from anymla.ops._few_tokens import FEW_TOKENS
from anymla.ops.compressor import save_partial_states
from anymla.ops.device import numba_problem
from anymla.ops.registry import BackendUnavailable

pytestmark = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")


@pytest.mark.parametrize("tokens", range(1, FEW_TOKENS + 1))
@pytest.mark.parametrize(("ratio", "width"), [(4, 96), (128, 33)])
def test_states_are_the_references(tokens, ratio, width):
    kv, score = torch.randn(tokens, 2 * width).split(width, dim=1)
    ape = torch.randn(ratio, width)
    positions = torch.tensor([1000, 3, 127, 2**40])[:tokens]
    slots = torch.tensor([7, -1, 24, 9])[:tokens]  # of 24
    caches = []
    for backend in ("reference", "numba"):
        storage = torch.full((3, 8 * 2 * width + 5), torch.nan)
        cache = storage.as_strided((3, 8, 2 * width), (8 * 2 * width + 5, 2 * width, 1))
        given = kv, score, ape, positions, cache, slots
        save_partial_states(*given, compress_ratio=ratio, backend=backend)
        caches.append(storage.view(torch.int32))
    assert torch.equal(*caches)


def test_what_is_taken():
    rows = torch.randn(FEW_TOKENS + 1, 16)
    at = torch.arange(len(rows))
    given = rows, rows, rows[:4], at, torch.empty(3, 8, 32)
    with pytest.raises(BackendUnavailable, match="tokens"):
        save_partial_states(*given, at, compress_ratio=4, backend="numba")
    taken = save_partial_states.resolve(*given, at[:1], compress_ratio=4)
    assert taken.name == "numba"
    doubles = [each.double() if each.is_floating_point() else each for each in given]
    assert save_partial_states.resolve(*doubles, at[:1], compress_ratio=4).name == "torch"
