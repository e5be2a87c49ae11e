"""Hopper's decode kernels with rows above 2^31 bytes of a cache, and on two streams at a time."""

import pytest
import torch

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention

PAGES, PAGE, BYTES = 16, 64, 2_500_000_000

pytestmark = pytest.mark.gpu("sm_90")


def small_cache(kind):
    layout = get_layout(kind)
    made = layout.allocate(PAGES, PAGE)
    rows = torch.randn(PAGES * PAGE, layout.channels)
    layout.write(made, torch.arange(PAGES * PAGE), rows)
    return made


def call_of(kind, heads, tokens):
    q = torch.randn(tokens, heads, get_layout(kind).channels).bfloat16()
    indices = torch.randint(0, PAGES * PAGE, (tokens, 300), dtype=torch.int32)
    return q, indices, {"value_dim": 512, "sink": torch.randn(heads)}


def on_gpu(q, cache, kind, indices, more):
    more = more | {"sink": more["sink"].cuda(), "backend": "gluon_sm90"}
    return sparse_attention(q.cuda(), [CacheRows(cache, kind, indices.cuda())], **more)


@pytest.mark.parametrize(("kind", "heads"), [(MAIN_FP8, 16), (MAIN_FP8, 64), (V32_FP8, 64)])
@pytest.mark.parametrize("tokens", [3, 200])
def test_rows_beyond_two_gibibytes(kind, heads, tokens):
    small = small_cache(kind)
    step = small.stride(0)
    pages = BYTES // step
    memory = torch.zeros(pages * step, dtype=torch.uint8, device="cuda")
    bytes_of = torch.empty(0, dtype=torch.uint8).set_(small.untyped_storage())[: PAGES * step]
    first = (pages - PAGES) * step
    memory[first : first + len(bytes_of)] = bytes_of.cuda()
    large = memory.as_strided((pages, *small.shape[1:]), small.stride())
    q, indices, more = call_of(kind, heads, tokens)
    want = on_gpu(q, small.cuda(), kind, indices, more)
    got = on_gpu(q, large, kind, indices + (pages - PAGES) * PAGE, more)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_two_streams_at_a_time():
    """Whole, cut and merged calls beside each other, not recorded: the bits of one at a time."""
    caches = {kind: small_cache(kind).cuda() for kind in (MAIN_FP8, V32_FP8)}
    calls = []
    for kind, heads, tokens in ((MAIN_FP8, 64, 150), (V32_FP8, 64, 5), (MAIN_FP8, 16, 9)):
        q, indices, more = call_of(kind, heads, tokens)
        more["sink"] = more["sink"].cuda()
        calls.append((q.cuda(), caches[kind], kind, indices.cuda(), more))
    alone = [on_gpu(*call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 2]):
            number = turn * 7 % 5 % len(calls)
            results.append((number, on_gpu(*calls[number])))
    torch.cuda.synchronize()
    for number, result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, alone[number], strict=True))
