"""The text of ``gluon_sm80_decode``, run on a CPU against float64: see ``crossrun.hopper``.

``pytest -m gpu --ptx-target sm_80`` runs the compiled kernel on a newer GPU.
"""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")

from anymla.ops.attention import gluon_sm80_decode as kernels
from anymla.ops.attention import sparse_attention
from anymla.ops.attention import triton_decode_launch as launch
from anymla.ops.attention.decode_config import AHEAD_SHARED_BYTES, copied_tiles
from anymla.ops.attention.triton_decode_combine import SUMS, AttentionOut, combine_float32
from anymla.ops.device import target_of
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.generate import hostile_indices
from anymla.testing.tolerance import assert_identical
from crossrun.hopper import run as run_kernel

CHANNELS = 512
TILES = sorted(
    {(t.heads, t.warps, t.ahead) for large in (False, True) for t in copied_tiles(64, large=large)}
)


def run(made, splits=1, native=False, seed=0, replacements=None, tile=TILES[0]):
    """The kernel, and its partials combined if there are splits."""
    q, (heads, warps, ahead) = made.q, tile
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
        first.indices.stride(0), second.indices.stride(0),
        *(each.cache.shape[1].bit_length() - 1 for each in (first, second)),
        *(cache.stride(0) // 4 for cache in (cache0, cache1)), splits, splits, 0, 1, 1,
        int(made.sink is not None), CHANNELS**-0.5, -torch.inf,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        HEADS=heads, TWO=len(scopes) > 1, AHEAD=ahead, SPLIT=splits > 1, NATIVE=native,
        num_warps=warps, seed=seed, replacements=replacements,
    )  # fmt: skip
    if splits > 1:
        combine_float32(part, sums, made.sink, AttentionOut(out, lse))
    return out, lse


def refused(*_):
    raise AssertionError("computed again in bfloat16")


IN_FLOAT16 = {kernels._bf16_pair: refused}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("of", "tokens"), [(3, 4), (20, 2), (40, 1)])
def test_any_lists(of, tokens, splits, tile):
    made = Scene(
        torch.randn(tokens, of, CHANNELS).bfloat16(),
        scope(tokens, 130, lengths=[130, 0, 7, 64][:tokens]),
        scope(tokens, 100, lengths=[100, 0, 0, 33][:tokens], page=2, poison_behind=True),
        torch.tensor([0.0, torch.inf, -torch.inf, 2.0, -1.0])[torch.arange(of) % 5],
    )
    made.expected().check(run(made, splits, tile=tile, replacements=IN_FLOAT16))


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


def with_scale(made, byte):
    """Give one block of a listed row a scale and small codes."""
    cache, slot = made.main.cache, int(made.main.indices[0, 5])
    page, entry = divmod(slot, cache.shape[1])
    data = cache[page].view(-1)
    data[cache.shape[1] * 576 + entry * 8 + 4] = byte
    data[entry * 576 + 4 * 64 : entry * 576 + 5 * 64] = torch.randint(0, 0x40, (64,)).byte()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("byte", [104, 105, 127, 128, 0, 255])
def test_every_scale_is_exact_or_noticed(byte, native):
    made = Scene(torch.randn(1, 2, CHANNELS).bfloat16(), scope(1, 40))
    with_scale(made, byte)
    got = run(made, native=native, replacements=IN_FLOAT16 if 105 <= byte <= 127 else None)
    if byte == 255:
        assert got[0].isnan().all()
    else:
        made.expected().check(got)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_listed_nan_is_seen_and_no_other(code, native):
    check_nan(lambda made: run(made, native=native), code)


def check_nan(call, code):
    made = Scene(torch.randn(2, 2, CHANNELS).bfloat16(), scope(2, 40, lengths=[40, 9]))
    cache, slot = made.main.cache, int(made.main.indices[0, 30])
    made.main.indices[1, :9] = made.main.indices[0, :9]
    page, entry = divmod(slot, cache.shape[1])
    cache[page].view(-1)[entry * 576 + 300] = code
    out, lse = call(made)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


# The compiled kernel -----------------------------------------------------------------------------


@pytest.fixture(params=TILES, ids=str)
def copied(request, monkeypatch):
    """Calls of Triton's backend, all of which must take this kernel, in one of its tiles."""
    target = target_of(torch.device("cuda"))
    if target.name == "sm_90":
        pytest.skip("Hopper has other kernels")
    choose = launch.choose_tile
    heads, warps, ahead = request.param
    if ahead and target.shared_bytes < AHEAD_SHARED_BYTES:
        pytest.skip("shared memory holds one decoded block")

    def chosen(*given, **named):
        tile = choose(*given, **named)
        assert tile.copied
        return dataclasses.replace(tile, heads=heads, warps=warps, ahead=ahead)

    monkeypatch.setattr(launch, "choose_tile", chosen)

    def call(made, **more):
        arguments, keywords = made.arguments()
        return sparse_attention(*arguments, **keywords, **more, backend="triton")

    return call


def holes(listed, share):
    """Put slots outside the cache among those that are listed."""
    of, slots = listed.indices, len(listed.cache) * listed.cache.shape[1]
    where = torch.rand(of.shape) < share
    of[where] = hostile_indices(slots, *of.shape)[where]


def drawn(draw, heads, tokens):
    """A call of which everything but its sizes is drawn; any list may be empty."""
    scopes = []
    for width in (draw.choice([1, 16, 33, 128, 130]), draw.choice([0, 1, 64, 300, 517])):
        if not width and scopes:
            continue
        lengths = [min(max(draw.randint(-2, width + 2), 0), width) for _ in range(tokens)]
        page = draw.choice([1, 2, 4, 16, 64, 256])
        scopes.append(scope(tokens, width, lengths=lengths, page=page, poison_behind=bool(scopes)))
        holes(scopes[-1], draw.choice([0.0, 0.2, 1.0]))
    sinks = torch.tensor([0.0, 2.0, -2.0, 1e4, torch.inf, -torch.inf])
    return Scene(
        torch.randn(tokens, heads, CHANNELS).bfloat16() * draw.choice([1.0, 1.0, 0.01, 30.0]),
        *(scopes if len(scopes) > 1 else [scopes[0], None]),
        draw.choice([None, sinks[torch.arange(heads) % 6]]),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17, 20, 64, 100, 128])
def test_any_calls_on_a_gpu(copied, heads):
    draw = random.Random(heads)
    for tokens in (1, 2, 5, 9):
        made = drawn(draw, heads, tokens)
        for more in ({}, {"batch_invariant": True}):
            first, again = copied(made, **more), copied(made, **more)
            made.expected().check(first)
            assert all(map(torch.equal, first, again))


@pytest.mark.gpu
def test_tokens_of_a_large_launch_have_the_bits_of_a_small_one(copied):
    """Thousands of CTAs, so that any wait that is missing shows at one of them."""
    made = drawn(random.Random(7), 64, 5)
    made.main.lengths[:] = torch.tensor([0, 33, 64, 1, 90]).clamp(max=made.main.indices.shape[1])
    few = copied(made, batch_invariant=True)
    made.expected().check(few)
    number = torch.arange(400) % 5
    scopes = [
        None if one is None
        else dataclasses.replace(one, indices=one.indices[number], lengths=one.lengths[number])
        for one in (made.main, made.extra)
    ]  # fmt: skip
    many = dataclasses.replace(made, q=made.q[number], main=scopes[0], extra=scopes[1])
    for _ in range(5):
        for got, want in zip(copied(many, batch_invariant=True), few, strict=True):
            assert_identical(got, want[number])


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [1e4, 1e5, 600.0, 1e-9, 1e-30])
def test_rows_that_float16_does_not_hold_on_a_gpu(copied, largest):
    for tokens in (2, 40):
        made = Scene(torch.randn(tokens, 20, CHANNELS).bfloat16(), scope(tokens, 170))
        rows = torch.randn(3, CHANNELS) * largest
        made.main.guarded.write(made.main.indices[0, :3].long(), rows)
        made.expected().check(copied(made))


@pytest.mark.gpu
def test_every_scale_is_exact_or_noticed_on_a_gpu(copied):
    for byte in (*range(0, 226, 15), 104, 127, 128, 255):
        made = Scene(torch.randn(1, 2, CHANNELS).bfloat16(), scope(1, 40))
        with_scale(made, byte)
        got = copied(made)
        if byte == 255:
            assert got[0].isnan().all()
        else:
            made.expected().check(got)


@pytest.mark.gpu
def test_a_listed_nan_is_seen_and_no_other_on_a_gpu(copied):
    for code in (0x7F, 0xFF):
        check_nan(copied, code)
