"""The Hopper kernel of windows that queries share, its own text on a CPU, against float64."""

import pytest
import torch

pytest.importorskip("triton")

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.sparse_attention import sparse_attention
from anymla.ops.sparse_attention import gluon_sm90_windows as module
from anymla.ops.sparse_attention.gluon_sm90_windows import windows_kernel
from anymla.testing.gluon import Deadlock, Descriptor, Hazard
from anymla.testing.gluon import run as run_kernel

LAYOUT = get_layout(MAIN_FP8)
LOG2E = 1.4426950408889634


class Call:
    """Requests of some queries each, whose windows lie anywhere in a cache."""

    def __init__(self, requests, queries, heads, window=128, page=64, seed=0, sink=True):
        torch.manual_seed(seed)
        self.queries, self.window = queries, window
        columns = window + queries - 1
        pages = -(-requests * columns // page) + 1
        self.cache = LAYOUT.allocate(pages, page)
        rows = torch.randn(pages * page, 512) * 2 ** torch.randint(-3, 3, (pages * page, 1))
        LAYOUT.write(self.cache, torch.arange(pages * page), rows)
        self.slots = torch.randperm(pages * page)[: requests * columns].view(requests, -1).int()
        self.q = torch.randn(requests * queries, heads, 512).bfloat16()
        self.sink = torch.randn(heads) if sink else None
        self.counts = None

    def lists(self):
        lists = self.slots.unfold(1, self.window, 1).clone()
        if self.counts is not None:
            gone = torch.arange(self.queries) >= self.counts.unsqueeze(1)
            lists[gone] = -1
        return lists.flatten(0, 1)

    def expected(self):
        sink = None if self.sink is None else self.sink.double()
        return sparse_attention(
            self.q.double(), self.cache, self.lists(), sink=sink, backend="reference"
        )

    def run(self, group, seed=0, changed=None):
        tokens, heads, _ = self.q.shape
        requests, groups = len(self.slots), -(-self.queries // group)
        tiles = -(-heads // 64)
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full((tokens, heads), torch.nan)
        run_kernel(
            windows_kernel, requests * groups * tiles,
            Descriptor(self.q.view(-1, 512), (64, 256)), self.cache, self.slots,
            self.slots if self.counts is None else self.counts,
            lse if self.sink is None else self.sink, out, lse,
            self.queries, group, groups, heads, len(self.cache) * self.cache.shape[1],
            self.slots.stride(0), 512**-0.5 * LOG2E, -torch.inf,
            HEAD_TILES=tiles, WINDOW=self.window, PAGE=self.cache.shape[1],
            STEP=self.cache.stride(0), SINK=self.sink is not None,
            COUNTS=self.counts is not None, WHOLE=heads % 64 == 0,
            WEIGHING_REGISTERS=0, UPDATER_REGISTERS=0, seed=seed, replacements=changed,
        )  # fmt: skip
        return out, lse

    def check(self, group, seed=0, changed=None):
        out, lse = self.run(group, seed, changed)
        want, want_lse = self.expected()
        # The weights are rounded to bfloat16, and so is the output: 2^-9 each, as a root mean
        # square 2^-9 / sqrt(3) of a number between powers of two.
        error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < 2.5e-3
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
        return out


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_numbers(group):
    for seed in range(2):
        Call(2, 8, 64, seed=seed).check(group, seed)


@pytest.mark.parametrize("heads", [16, 100, 128])
def test_any_number_of_heads(heads):
    Call(2, 5, heads).check(3)
