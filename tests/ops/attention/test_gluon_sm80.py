"""The text of ``gluon_sm80_decode``, run on a CPU against float64: see ``crossrun.hopper``."""

import pytest
import torch

pytest.importorskip("triton")

from anymla.ops.attention import gluon_sm80_decode as kernels
from anymla.ops.attention.triton_decode_combine import SUMS, AttentionOut, combine_float32
from anymla.testing.conformance.scene import Scene, scope
from crossrun.hopper import run as run_kernel

CHANNELS = 512


def run(made, heads=16, stages=1, splits=1, native=False, seed=0, replacements=None):
    """The kernel in a tile of some heads, and its partials combined if there are splits."""
    q = made.q
    tokens, of, _ = q.shape
    scopes = [made.main] if made.extra is None else [made.main, made.extra]
    first, second = scopes[0], scopes[-1]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    part = torch.full((tokens, splits, of, CHANNELS), torch.nan)
    sums = torch.full((tokens, splits, of, SUMS), torch.nan)
    sink = torch.zeros(of) if made.sink is None else made.sink.float()
    cache0, cache1 = (each.cache.view(torch.int32) for each in (first, second))
    run_kernel(
        kernels.decode_mma_kernel, tokens * -(-of // heads) * splits,
        q, cache0, first.indices, first.lengths, cache1, second.indices, second.lengths,
        sink, out, lse, part, sums, of, first.indices.shape[1], second.indices.shape[1],
        *(len(each.cache) * each.cache.shape[1] for each in (first, second)),
        first.indices.stride(0), second.indices.stride(0), splits, splits, 0, 1, 1,
        int(made.sink is not None), CHANNELS**-0.5, -torch.inf,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        HEADS=heads, BN=32, STAGES=stages, TWO=len(scopes) > 1, SPLIT=splits > 1,
        PAGE0=first.cache.shape[1], STEP0=cache0.stride(0),
        PAGE1=second.cache.shape[1], STEP1=cache1.stride(0), NATIVE=native,
        num_warps=heads // 4, seed=seed, replacements=replacements,
    )  # fmt: skip
    if splits > 1:
        combine_float32(part, sums, made.sink, AttentionOut(out, lse))
    return out, lse


def refused(*_):
    raise AssertionError("computed again in bfloat16")


IN_FLOAT16 = {kernels._bf16_pair: refused}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("heads", "of", "tokens"), [(16, 3, 4), (16, 20, 2), (32, 32, 2), (32, 40, 1)])
def test_any_lists(heads, of, tokens, stages, splits):
    made = Scene(
        torch.randn(tokens, of, CHANNELS).bfloat16(),
        scope(tokens, 130, lengths=[130, 0, 7, 64][:tokens]),
        scope(tokens, 100, lengths=[100, 0, 0, 33][:tokens], page=2, poison_behind=True),
        torch.tensor([0.0, torch.inf, -torch.inf, 2.0, -1.0])[torch.arange(of) % 5],
    )
    made.expected().check(run(made, heads, stages, splits, replacements=IN_FLOAT16))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("page", [2, 64, 256])
def test_one_cache_of_any_pages(page, native):
    made = Scene(torch.randn(2, 5, CHANNELS).bfloat16() * 30, scope(2, 70, page=page))
    made.expected().check(run(made, native=native, replacements=IN_FLOAT16))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("largest", [1e4, 1e5, 600.0, 1e-9, 1e-30])
def test_rows_that_float16_does_not_hold(largest, native):
    made = Scene(torch.randn(2, 5, CHANNELS).bfloat16(), scope(2, 70))
    rows = torch.randn(3, CHANNELS) * largest
    made.main.guarded.write(made.main.indices[0, :3].long(), rows)
    made.expected().check(run(made, splits=2, native=native))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("byte", [104, 105, 127, 128, 0, 255])
def test_every_scale_is_exact_or_noticed(byte, native):
    made = Scene(torch.randn(1, 2, CHANNELS).bfloat16(), scope(1, 40))
    cache, slot = made.main.cache, int(made.main.indices[0, 5])
    page, entry = divmod(slot, cache.shape[1])
    data = cache[page].view(-1)
    data[cache.shape[1] * 576 + entry * 8 + 4] = byte
    data[entry * 576 + 4 * 64 : entry * 576 + 5 * 64] = torch.randint(0, 0x40, (64,)).byte()
    got = run(made, native=native, replacements=IN_FLOAT16 if 105 <= byte <= 127 else None)
    if byte == 255:
        assert got[0].isnan().all()
    else:
        made.expected().check(got)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_listed_nan_is_seen_and_no_other(code, native):
    made = Scene(torch.randn(2, 2, CHANNELS).bfloat16(), scope(2, 40, lengths=[40, 9]))
    cache, slot = made.main.cache, int(made.main.indices[0, 30])
    made.main.indices[1, :9] = made.main.indices[0, :9]
    page, entry = divmod(slot, cache.shape[1])
    cache[page].view(-1)[entry * 576 + 300] = code
    out, lse = run(made, native=native)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()
