"""Windows of neighbouring queries: what each query sees, and how many share a CTA."""

import pytest
import torch

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_fp8_quant,
    sparse_attention_windows,
    sparse_attention_windows_fp8_quant,
)
from anymla.ops.sparse_attention.config import choose_window_group
from anymla.ops.sparse_attention.interface import window_lists

LAYOUT = get_layout(MAIN_FP8)


def call_of(requests=3, queries=4, window=6, heads=2):
    cache = LAYOUT.allocate(5, 16)
    LAYOUT.write(cache, torch.arange(80), torch.randn(80, 512))
    slots = torch.randint(-1, 81, (requests, window + queries - 1)).int()
    return torch.randn(requests * queries, heads, 512), cache, slots


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("counted", [False, True])
def test_a_query_sees_the_columns_from_its_own_number_on(backend, counted):
    q, cache, slots = call_of()
    counts = torch.tensor([4, 0, 2], dtype=torch.int32) if counted else None
    sink = torch.randn(2)
    out, lse = sparse_attention_windows(
        q, cache, slots, counts, queries=4, sink=sink, scale=0.1, backend=backend
    )
    for token in range(12):
        r, j = divmod(token, 4)
        seen = slots[r : r + 1, j : j + 6]
        if counts is not None and j >= counts[r]:
            seen = torch.full_like(seen, -1)
        want, want_lse = sparse_attention(
            q[token : token + 1], cache, seen, sink=sink, scale=0.1, backend="reference"
        )
        torch.testing.assert_close(out[token : token + 1], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[token : token + 1], want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_quantised_it_is_what_decode_makes_of_the_same_lists(backend):
    q, cache, slots = call_of(heads=4)
    counts = torch.tensor([4, 0, 2], dtype=torch.int32)
    table, positions = torch.randn(20, 64), torch.arange(12)
    codes, scales = sparse_attention_windows_fp8_quant(
        q, cache, slots, counts, positions, table, queries=4, n_groups=2, backend=backend
    )
    want, want_scales = sparse_attention_fp8_quant(
        q, cache, window_lists(slots, counts, 4), None, positions, table, n_groups=2,
        backend=backend,
    )  # fmt: skip
    assert codes.shape == (12, 2, 1024)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales, want_scales)


def test_quantised_arguments_are_checked():
    q, cache, slots = call_of()
    given = (q, cache, slots, None, torch.arange(12), torch.randn(20, 64))
    with pytest.raises(ValueError, match="multiple of 3 groups"):
        sparse_attention_windows_fp8_quant(*given, queries=4, n_groups=3)
    with pytest.raises(ValueError, match="queries must be 1 to C=9"):
        sparse_attention_windows_fp8_quant(*given, queries=12, n_groups=2)


@pytest.mark.parametrize(("queries", "tokens"), [(0, 12), (10, 12), (3, 12)])
def test_queries_must_fit(queries, tokens):
    q, cache, slots = call_of()
    with pytest.raises(ValueError, match="sparse_attention_windows"):
        sparse_attention_windows(q[:tokens], cache, slots, queries=queries)


@pytest.mark.parametrize(
    ("requests", "queries", "tiles", "group"),
    [(1, 6, 1, 1), (8, 8, 1, 1), (32, 6, 1, 2), (32, 8, 1, 2), (32, 8, 2, 4), (8, 8, 2, 1)],
)
def test_queries_share_a_tile_where_tiles_would_not_fit_in_a_wave(requests, queries, tiles, group):
    assert choose_window_group(requests, queries, tiles, 132) == group


# On a GPU ---------------------------------------------------------------------------------------


class OnHopper:
    """A call of random rows, and what is right by lists of each query."""

    def __init__(self, requests, queries, heads, page=64):
        total = 8192
        rows = torch.randn(total, 512)
        self.cache = LAYOUT.allocate(total // page, page)
        LAYOUT.write(self.cache, torch.arange(total), rows)
        self.cache = self.cache.cuda()
        self.q = torch.randn(requests * queries, heads, 512).bfloat16().cuda()
        self.sink = torch.randn(heads).cuda()
        self.slots = torch.empty(requests, 127 + queries, dtype=torch.int32, device="cuda")
        self.counts = torch.empty(requests, dtype=torch.int32, device="cuda")
        self.queries = queries
        self.positions = torch.randint(0, 900, (requests * queries,), device="cuda")
        self.table = torch.randn(900, 64, device="cuda")
        self.draw()

    def draw(self):
        self.slots.random_(-500, 9000)
        self.counts.random_(0, self.queries + 1)

    def __call__(self, backend, dtype=torch.bfloat16):
        return sparse_attention_windows(
            self.q.to(dtype), self.cache, self.slots, self.counts, queries=self.queries,
            sink=self.sink, backend=backend,
        )  # fmt: skip

    def quantised(self):
        return sparse_attention_windows_fp8_quant(
            self.q, self.cache, self.slots, self.counts, self.positions, self.table,
            queries=self.queries, n_groups=2, sink=self.sink, backend="gluon_sm90",
        )  # fmt: skip

    def check_quantised(self, codes, scales):
        """Bits of separate calls."""
        out, _ = self("gluon_sm90")
        want = inverse_rope_fp8_quant(out, self.positions, self.table, n_groups=2)
        assert torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(scales, want[1])

    def check(self, out, lse):
        want, want_lse = self("torch", torch.float64)
        assert (out.double() - want).norm() < 2.5e-3 * want.norm().clamp(min=1e-9)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


def on_hopper(*sizes):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return OnHopper(*sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_the_hopper_kernel(queries, heads):
    """Slots that are no rows, requests of fewer queries and of none."""
    call = on_hopper(7, queries, heads)
    call.check(*call("gluon_sm90"))
    call.check_quantised(*call.quantised())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("requests", "queries", "heads"), [(1, 6, 64), (33, 8, 64), (9, 7, 128), (3, 9, 20)]
)
def test_the_hopper_kernel_and_its_graph(requests, queries, heads):
    call = on_hopper(requests, queries, heads)
    call.check(*call("gluon_sm90"))
    call.quantised()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call("gluon_sm90")
        codes, scales = call.quantised()
    for _ in range(3):
        call.draw()
        graph.replay()
        call.check(out, lse)
        call.check_quantised(codes, scales)
        once = out.clone()
        for _ in range(10):
            graph.replay()
        assert torch.equal(once, out)
