from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import (
    ALL_BACKENDS,
    ARC_A,
    INTEL,
    TRITON,
    make_cache,
    runnable,
    skip_float64,
    use_backend,
)
from torch import Tensor

from anymla.formats.page_layout import (
    INDEX_FP8,
    MAIN_FP8,
    V32_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_LAYOUTS,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.ops.attention import CacheRows, sparse_attention, sparse_attention_rows, torch_cpu
from anymla.ops.attention.decode_config import Tile, choose_tile
from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.expected import Attention, attend
from anymla.testing.conformance.scene import Scene, Scope, scope
from anymla.testing.generate import hostile_indices
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, ulps

LAYOUTS = (MAIN_FP8, *V41_LAYOUTS, "rows_bf16_512", "rows_fp32_512")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SINKS = (None, "ordinary", "huge", "infinite")


# Rows loaded a block ahead, as for NVIDIA's GPUs other than Hopper: decoded by instructions where
# these are used, and by words.
BY_WORDS = "triton ahead by words"
RUNS = (*ALL_BACKENDS, BY_WORDS, INTEL, ARC_A)


def use_run(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    backend = use_backend("triton" if name == BY_WORDS else name, monkeypatch)
    if name in (BY_WORDS, TRITON[1]):
        from anymla.ops.attention import triton_decode_launch as launch

        def ahead(heads, keys, tokens, mode, *given, **more) -> Tile:
            tile = choose_tile(heads, keys, tokens, mode, *given, **more)
            coded = mode == "float16"
            words = coded and name == BY_WORDS
            # Of rows that are decoded by words, 64 are more than sm_89's shared memory holds.
            rows = min(tile.keys, 32) if words else tile.keys
            return dataclasses.replace(tile, keys=rows, ahead=coded, words=words, copied=False)

        monkeypatch.setattr(launch, "choose_tile", ahead)
    return backend


@pytest.fixture(params=RUNS)
def backend(request, monkeypatch):
    return use_run(request.param, monkeypatch)


def sink_of(kind: str | None, heads: int) -> Tensor | None:
    if kind is None:
        return None
    special = {"huge": (1e4, -1e4, 3e38, -3e38), "infinite": (torch.inf, -torch.inf)}
    values = torch.tensor(special.get(kind, (0.0, 2.0, -2.0, 1.0, 0.5)))
    return values[torch.arange(heads) % len(values)]


def ragged(limit: int, tokens: int) -> list[int]:
    """Lengths from 0 to the limit, both ends likely."""
    return torch.randint(-1, limit + 2, (tokens,)).clamp(0, limit).tolist()


def bounded(backend: str, tokens: int, most: int = 4) -> int:
    """Fewer tokens where kernels are interpreted, which takes tens of milliseconds a token."""
    return min(tokens, most) if backend == "triton" else tokens


def run(given_: Scene, backend: str, **more) -> tuple[Tensor, Tensor]:
    arguments, keywords = given_.arguments()
    return sparse_attention(*arguments, **keywords, **more, backend=backend)


def check(given_: Scene, out: Tensor, lse: Tensor) -> None:
    """Against the float64 result, in the precision that q asks for."""
    want = given_.expected()
    dtype = given_.q.dtype
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    if dtype == torch.bfloat16:
        want.check((out, lse))
        return
    # Scores and sums in float32 (float64 for float64 q): two dot products of at most 512 terms
    # and as many rows; the output is rounded once to q's dtype.
    error = accumulation(512, lse.dtype, c=4.0)
    rounding = ulps(dtype, 0.5)
    assert_close(out, want.out, atol=error, rtol=error + rounding, scale=want.weight, name="out")
    assert_close(lse, want.lse, atol=error, rtol=error, scale=8.0, name="lse")


# Against float64 mathematics of the same bytes --------------------------------------------------


@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(0, 9),
    heads=st.sampled_from([1, 2, 3, 8, 20]),
    widths=st.tuples(st.sampled_from([0, 1, 7, 40]), st.sampled_from([None, 0, 1, 5, 33])),
    pages=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 53, 64])),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    sink=st.sampled_from(SINKS),
    dtype=st.sampled_from(FLOATS),
    name=st.sampled_from(runnable(RUNS)),
)
def test_any_lists_in_any_caches(seed, tokens, heads, widths, pages, layouts, sink, dtype, name):
    if name.startswith("triton"):
        dtype = torch.float32 if dtype == torch.float64 else dtype
        tokens = min(tokens, 3)
    torch.manual_seed(seed)
    scopes = [
        None
        if width is None
        else scope(tokens, width, lengths=ragged(width, tokens), page=page, layout=layout)
        for width, page, layout in zip(widths, pages, layouts, strict=True)
    ]
    assert scopes[0] is not None
    for each in scopes:
        if each is not None and each.indices.numel():
            hit = torch.rand(each.indices.shape) < 0.1
            hostile = hostile_indices(each.cache.shape[0] * each.cache.shape[1], *hit.shape)
            each.indices = torch.where(hit, hostile, each.indices)
    q = (torch.randn(tokens, heads, 512) * 2).to(dtype)
    drawn = Scene(q, scopes[0], scopes[1], sink_of(sink, heads))
    if not tokens:
        out, lse = sparse_attention(q, [CacheRows(scopes[0].cache, layouts[0], scopes[0].indices)])
        assert out.shape == (0, heads, 512)
        assert lse.shape == (0, heads)
        return
    with pytest.MonkeyPatch.context() as patch:
        check(drawn, *run(drawn, use_run(name, patch)))


def windows(tokens: int, first: int, window: int, page: int = 64) -> Scope:
    """Neighbouring tokens whose sliding windows overlap, as in a chunk of a prompt."""
    total = first + tokens
    made = scope(1, total, page=page)
    order = made.indices[0]
    positions = torch.arange(first, total).unsqueeze(1) - (window - 1) + torch.arange(window)
    lengths = (torch.arange(first, total) + 1).clamp(max=window).int()
    left = torch.where(positions[:, :1] < 0, positions - positions[:, :1], positions)
    used = torch.arange(window) < lengths.unsqueeze(1)
    hostile = hostile_indices(made.cache.shape[0] * page, tokens, window)
    indices = torch.where(used, order[left.clamp(0, total - 1)], hostile)
    return Scope(made.guarded, made.layout, indices, lengths)


@pytest.mark.parametrize("heads", [2, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_of_a_prompt(backend, heads, dtype):
    tokens = {"torch": 70, "triton": 5}.get(backend, 12)
    chunk = Scene(
        torch.randn(tokens, heads, 512).to(dtype),
        windows(tokens, 0, 16),
        scope(tokens, 9, lengths=[t // 8 for t in range(tokens)], page=2),
        torch.randn(heads),
    )
    shared = chunk.extra.indices[-1].clone()
    for t, length in enumerate(chunk.extra.lengths.tolist()):
        chunk.extra.indices[t, :length] = shared[:length]
    check(chunk, *run(chunk, backend))


def test_chunks_share_decoded_rows(monkeypatch):
    decoded = []
    read = torch_cpu.read_side_by_side

    def counting(sources, out):
        decoded.append(out.shape[0] * out.shape[1])
        return read(sources, out)

    monkeypatch.setattr(torch_cpu, "read_side_by_side", counting)
    chunk = Scene(torch.randn(64, 2, 512).bfloat16(), windows(64, 128, 128))
    check(chunk, *run(chunk, "torch"))
    assert sum(decoded) < 64 * 128 / 8


def test_requests_of_different_lengths_in_a_batch(backend):
    batch = Scene(
        torch.randn(9, 4, 512).bfloat16(),
        scope(9, 16, lengths=[16, 1, 0, 16, 3, 16, 0, 2, 16]),
        scope(9, 600, lengths=[0, 600, 0, 5, 0, 70, 300, 1, 600]),
        torch.randn(4),
    )
    check(batch, *run(batch, backend))


@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_keep_float32_accuracy_where_they_are_large(backend, dtype):
    skip_float64(backend, dtype)
    # Scores of about +-60: rounded to bfloat16 they would be wrong by up to 0.25.
    large = Scene((torch.randn(4, 8, 512) * 60).to(dtype), scope(4, 200))
    out, lse = run(large, backend)
    want = large.expected()
    error = accumulation(512, torch.float32, c=4.0) * 60.0
    assert_close(lse, want.lse, atol=error, rtol=ulps(torch.bfloat16, 2.0**-9), name="lse")
    # Relative to a probability, an error of its score; then p and the output are rounded.
    error = error + ulps(dtype if dtype.itemsize == 2 else torch.float32, 1)
    weight = want.weight
    if dtype == torch.bfloat16:
        # Matrix instructions in float16 lose probabilities below 2^-25 of a split's largest.
        lost = [2.0**-25 * large.main.rows(token).abs().sum(0) for token in range(4)]
        weight = weight + torch.stack(lost).unsqueeze(1) / float(error)
    assert_close(out, want.out, atol=error, rtol=error, scale=weight, name="out")


# What a slot list means -------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_slot_listed_twice_counts_twice(backend, tokens):
    tokens = bounded(backend, tokens)
    once = scope(1, 6)
    indices = once.indices.expand(tokens, 6).clone()
    indices[:, 3:5] = indices[:, :1]
    q = torch.randn(tokens, 2, 512)
    given_ = Scene(q, Scope(once.guarded, once.layout, indices, torch.tensor([6] * tokens)))
    out, lse = sparse_attention(q, [CacheRows(once.cache, MAIN_FP8, indices)], backend=backend)
    check(given_, out, lse)
    _, single = sparse_attention(
        q, [CacheRows(once.cache, MAIN_FP8, once.indices.expand(tokens, 6))], backend=backend
    )
    assert not torch.allclose(lse, single)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("which", ["main", "extra"])
@pytest.mark.parametrize(("length", "read"), [(9, 5), (-4, 0)])
def test_lengths_beyond_the_list_and_below_zero(backend, tokens, which, length, read):
    """One token's length among ordinary ones, or alone."""
    made = Scene(torch.randn(tokens, 2, 512), scope(tokens, 5), scope(tokens, 5, page=2))
    changed = made.main if which == "main" else made.extra
    lengths = [5] * tokens
    lengths[-1] = length
    changed.lengths = torch.tensor(lengths, dtype=torch.int32)
    out, lse = run(made, backend)
    changed.lengths = None
    changed.indices[-1, read:] = -1
    want, want_lse = run(made, backend)
    assert_close(out, want, atol=accumulation(512, torch.float32), scale=4.0)
    assert_close(lse, want_lse, atol=accumulation(512, torch.float32), scale=8.0)


def test_ranks_that_flash_mla_callers_use(backend):
    made = Scene(torch.randn(3, 2, 512), scope(3, 5), scope(3, 4, page=2))
    want = run(made, backend)
    (q, rows), keywords = made.arguments()
    ranked = [
        each._replace(cache=each.cache.unsqueeze(2), indices=each.indices.unsqueeze(1))
        for each in rows
    ]
    got = sparse_attention(q, ranked, backend=backend, **keywords)
    for each, other in zip(got, want, strict=True):
        assert_identical(each, other)


def test_nothing_to_attend(backend):
    q = torch.randn(2, 3, 512).bfloat16()
    layout = get_layout(MAIN_FP8)
    full = scope(2, 4)
    nobody = torch.full((2, 4), -1, dtype=torch.int32)
    cases = {
        "no columns": (full.cache, full.indices[:, :0]),
        "no pages": (layout.allocate(0, 64), full.indices),
        "only -1": (full.cache, nobody),
    }
    for cache, indices in cases.values():
        out, lse = sparse_attention(
            q, [CacheRows(cache, MAIN_FP8, indices)], sink=torch.zeros(3), backend=backend
        )
        assert not out.any()
        assert (lse == -torch.inf).all()


# Poison -----------------------------------------------------------------------------------------


def poisoned(kind: str, slot: int, made: Scope) -> None:
    """Make one entry NaN: by code, by scale byte or by its bfloat16 tail."""
    layout = get_layout(MAIN_FP8)
    data, scales = layout.planes(made.cache)
    page, offset = divmod(slot, made.cache.shape[1])
    if kind == "scale":
        scales[page, offset, 2] = 255
    elif kind == "rope":
        data[page, offset, 500:502] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    else:
        data[page, offset, 100] = int(kind, 16)


@pytest.mark.parametrize("kind", ["7F", "FF", "scale", "rope"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [2, 20])
def test_nan_reaches_those_who_list_it_and_nobody_else(backend, kind, dtype, tokens):
    tokens = bounded(backend, tokens)
    chunk = Scene(torch.randn(tokens, 4, 512).to(dtype), windows(tokens, 20, 8))
    clean, clean_lse = run(chunk, backend)
    weight = chunk.expected().weight
    bad = int(chunk.main.indices[tokens // 2, 3])
    poisoned(kind, bad, chunk.main)
    out, lse = run(chunk, backend)
    lists = (chunk.main.indices == bad).any(1)
    assert out[lists].isnan().any(-1).all()
    assert lse[lists].isnan().all()
    same((out[~lists], lse[~lists]), (clean[~lists], clean_lse[~lists]), weight[~lists])


def test_padding_of_shorter_lists_is_not_a_listed_row(backend):
    # The largest slot is NaN; tokens with shorter lists are padded while they are batched.
    made = scope(1, 8)
    slots = made.indices[0].sort().values
    indices = slots.flip(0).expand(3, 8).clone()
    indices[1:, :4] = slots[:4]
    poisoned("7F", int(slots[-1]), made)
    lengths = torch.tensor([8, 4, 1], dtype=torch.int32)
    q = torch.randn(3, 4, 512).bfloat16()
    out, lse = sparse_attention(
        q, [CacheRows(made.cache, MAIN_FP8, indices, lengths)], backend=backend
    )
    assert out[0].isnan().any()
    assert out[1:].isfinite().all()
    assert lse[1:].isfinite().all()


def test_infinite_rows_stay_with_those_who_list_them(backend):
    tokens = bounded(backend, 20)
    chunk = Scene(torch.randn(tokens, 4, 512).bfloat16(), windows(tokens, 20, 8))
    bad = int(chunk.main.indices[tokens // 2, 3])
    page, offset = divmod(bad, chunk.main.cache.shape[1])
    get_layout(MAIN_FP8).planes(chunk.main.cache)[0][page, offset, 500:502] = torch.tensor(
        [0x80, 0x7F], dtype=torch.uint8
    )
    out, lse = run(chunk, backend)
    lists = (chunk.main.indices == bad).any(1)
    assert out[~lists].isfinite().all()
    assert lse[~lists].isfinite().all()
    assert not out[lists].isfinite().all(-1).any()


# Where rows lie ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gap", "start"), [(0, 0), (576, 0), (64, 16), (1000, 4), (4, 100)])
@pytest.mark.parametrize("entries", [1, 2, 53, 64])
def test_any_page_stride_and_offset(backend, layout, gap, start, entries):
    if backend == "triton" and (entries in (2, 64) or (layout in V41_LAYOUTS and entries == 1)):
        pytest.skip("interpreted kernels take their time, and divide by any size alike")
    plain = make_cache(layout, 3, entries)
    moved = make_cache(layout, 3, entries, gap=gap, start=start)
    rows = torch.randn(3 * entries, 512)
    for cache in (plain, moved):
        cache.layout.write(cache.tensor, torch.arange(3 * entries), rows)
    q = torch.randn(2, 3, 512).bfloat16()
    indices = torch.randint(0, 3 * entries, (2, 9), dtype=torch.int32)
    want = sparse_attention(q, [CacheRows(plain.tensor, layout, indices)], backend=backend)
    got = sparse_attention(q, [CacheRows(moved.tensor, layout, indices)], backend=backend)
    for each, other in zip(got, want, strict=True):
        assert_identical(each, other)


@pytest.mark.parametrize("byte", [0, 1, 2, 3, 60, 127, 134, 135, 180, 246])
@pytest.mark.parametrize("heads", [2, 32])
def test_every_scale_byte_decodes_exactly(backend, byte, heads):
    # One row a token: the output is the row itself, rounded to bfloat16. Many heads and rows
    # choose the bfloat16 products where they are exact.
    rows = bounded(backend, 256)
    cache = make_cache(MAIN_FP8, 4, 64)
    data, scales = cache.layout.planes(cache.tensor)
    data[:] = torch.randint(0, 0x7F, data.shape, dtype=torch.uint8)
    data[:] |= torch.randint(0, 2, data.shape, dtype=torch.uint8) << 7
    data[..., 448:] = 0
    scales[..., :7] = byte
    indices = torch.arange(rows, dtype=torch.int32).unsqueeze(1)
    q = torch.zeros(rows, heads, 512).bfloat16()
    out, lse = sparse_attention(q, [CacheRows(cache.tensor, MAIN_FP8, indices)], backend=backend)
    want = ROW_FORMATS[MAIN_FP8].decode(*read_entries(cache.tensor, torch.arange(rows), MAIN_FP8))
    assert (lse == 0).all()
    assert torch.equal(out, want.bfloat16().unsqueeze(1).expand(rows, heads, 512))  # -0 equals 0


# Rows of DeepSeek-V4.1 ---------------------------------------------------------------------------

MIXED = [
    (V41_MAIN_FP8, V41_COMPRESSED_NVFP4),
    (V41_MAIN_FP8_SPLIT, V41_COMPRESSED_NVFP4),
    (V41_MAIN_FP8, V41_COMPRESSED_NVFP4_SPLIT),
    (V41_MAIN_FP8, V41_MAIN_FP8_SPLIT),
    (V41_MAIN_FP8, V41_MAIN_FP8),
    (MAIN_FP8, V41_COMPRESSED_NVFP4),
    (V41_COMPRESSED_NVFP4, MAIN_FP8),
]


@pytest.mark.parametrize(
    ("window", "compressed", "pages"),
    [
        *((*records, (32, 64)) for records in MIXED),
        *((*MIXED[0], pages) for pages in ((64, 128), (7, 2))),
        (*MIXED[1], (64, 128)),
        (*MIXED[2], (7, 2)),
    ],
)
def test_window_and_compressed_rows_of_their_own_records(backend, window, compressed, pages):
    """V4.1's decode step: a window, all entries that a token lists, pages of both kinds."""
    made = Scene(
        torch.randn(4, 16, 512).bfloat16(),
        scope(4, 32, lengths=[32, 1, 0, 17], page=pages[0], layout=window),
        scope(4, 48, lengths=[48, 0, 33, 5], page=pages[1], layout=compressed),
        sink_of("ordinary", 16),
    )
    check(made, *run(made, backend))
    check(made, *run(made, backend, batch_invariant=True))
    # Each scope's rows are those of its own record: with the two swapped it is another result.
    (q, (first, second)), keywords = made.arguments()
    swapped = [first._replace(layout=compressed), second._replace(layout=window)]
    if get_layout(window).row_elements != get_layout(compressed).row_elements:
        with pytest.raises(ValueError, match="must be"):
            sparse_attention(q, swapped, backend=backend, **keywords)
    elif window != compressed:
        out, _ = sparse_attention(q, swapped, backend=backend, **keywords)
        assert not torch.equal(out, run(made, backend)[0])


@pytest.mark.parametrize("layout", [V41_COMPRESSED_NVFP4, V41_COMPRESSED_NVFP4_SPLIT])
@pytest.mark.parametrize("heads", [2, 32])
def test_every_nvfp4_scale_decodes_exactly(backend, layout, heads):
    """Negative, zero and subnormal ones, and those beyond float16 after the lift; all codes."""
    rows = bounded(backend, 128, 32)
    cache = make_cache(layout, 2, 64)
    data, scales = cache.layout.planes(cache.tensor)
    data[:] = torch.randint(0, 256, data.shape, dtype=torch.uint8)
    bytes_ = torch.arange(256, dtype=torch.uint8)
    bytes_ = bytes_[(bytes_ & 0x7F) != 0x7F]
    scales[:] = bytes_[torch.randint(len(bytes_), scales.shape)]
    if backend == "triton":
        scales[0, :8] = (
            torch.arange(256, dtype=torch.uint8)
            .view(8, 32)
            .where(
                (torch.arange(256).view(8, 32) & 0x7F) != 0x7F,
                torch.tensor(0x38, dtype=torch.uint8),
            )
        )
    indices = torch.arange(rows, dtype=torch.int32).unsqueeze(1)
    q = torch.zeros(rows, heads, 512).bfloat16()
    out, lse = sparse_attention(q, [CacheRows(cache.tensor, layout, indices)], backend=backend)
    want = ROW_FORMATS[layout].decode(*read_entries(cache.tensor, torch.arange(rows), layout))
    assert (lse == 0).all()
    assert torch.equal(out, want.bfloat16().unsqueeze(1).expand(rows, heads, 512))


@pytest.mark.parametrize("layout", [V41_MAIN_FP8, V41_MAIN_FP8_SPLIT])
@pytest.mark.parametrize("byte", [0, 3, 104, 105, 127, 128, 180, 246])
def test_every_v41_scale_byte_decodes_exactly(backend, layout, byte):
    rows = bounded(backend, 128)
    cache = make_cache(layout, 4, 32)
    data, scales = cache.layout.planes(cache.tensor)
    data[:] = torch.randint(0, 0x7F, data.shape, dtype=torch.uint8)
    data[:] |= torch.randint(0, 2, data.shape, dtype=torch.uint8) << 7
    scales[:] = byte
    indices = torch.arange(rows, dtype=torch.int32).unsqueeze(1)
    q = torch.zeros(rows, 3, 512).bfloat16()
    out, lse = sparse_attention(q, [CacheRows(cache.tensor, layout, indices)], backend=backend)
    want = ROW_FORMATS[layout].decode(*read_entries(cache.tensor, torch.arange(rows), layout))
    assert (lse == 0).all()
    assert torch.equal(out, want.bfloat16().unsqueeze(1).expand(rows, 3, 512))


@pytest.mark.parametrize("layout", V41_LAYOUTS)
@pytest.mark.parametrize("channel", [0, 130, 450, 511])
def test_nan_of_a_v41_row_reaches_those_who_list_it_and_nobody_else(backend, layout, channel):
    """Unlisted entries hold NaN scales anyway, as unused slots of a page do."""
    made = Scene(
        torch.randn(3, 4, 512).bfloat16(), scope(3, 24, layout=layout), sink=torch.zeros(4)
    )
    made.main.indices[1:] = made.main.indices[1:].where(
        made.main.indices[1:] != made.main.indices[0, 3], made.main.indices[0, 4]
    )
    clean, clean_lse = run(made, backend)
    page, offset = divmod(int(made.main.indices[0, 3]), 64)
    _, scales = get_layout(layout).planes(made.main.cache)
    block = 512 // scales.shape[2]
    scales[page, offset, channel // block] = 0xFF
    out, lse = run(made, backend)
    assert out[0].isnan().any(-1).all()
    assert lse[0].isnan().all()
    assert_identical(out[1:], clean[1:])
    assert_identical(lse[1:], clean_lse[1:])


def test_rows_that_triton_does_not_decode_are_left_to_torch():
    cache = make_cache(INDEX_FP8, 2, 4)
    q, indices = torch.randn(1, 1, 128).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
    reason = sparse_attention.supports(
        q, [CacheRows(cache.tensor, INDEX_FP8, indices)], backend="triton"
    ).reason
    assert "decoded by torch" in reason or "not installed" in reason


# Rows of DeepSeek-V3.2, and values narrower than rows --------------------------------------------


@pytest.mark.parametrize(("heads", "values"), [(1, 512), (20, 512), (5, 576), (5, 100)])
def test_v32_rows(backend, heads, values):
    given_ = Scene(
        torch.randn(4, heads, 576).bfloat16(),
        scope(4, 40, lengths=[40, 0, 7, 33], page=53, layout=V32_FP8),
        scope(4, 9, lengths=[0, 0, 9, 2], page=1, layout=V32_FP8),
        sink_of("infinite", heads),
        value_dim=values,
    )
    out, lse = run(given_, backend)
    assert out.shape == (4, heads, values)
    check(given_, out, lse)
    again, _ = run(given_, backend, out=torch.empty(4, heads, values, dtype=torch.bfloat16))
    assert_identical(again, out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", [300, 448])
def test_values_are_the_first_channels(backend, layout, values):
    given_ = Scene(
        torch.randn(3, 2, 512).bfloat16(),
        scope(3, 20, layout=layout),
        scope(3, 9, lengths=[9, 0, 4], page=2),
        torch.randn(2),
        value_dim=values,
    )
    check(given_, *run(given_, backend))


def test_an_empty_row_has_the_lse_that_was_asked_for(backend):
    given_ = Scene(torch.randn(3, 2, 512).bfloat16(), scope(3, 70, lengths=[70, 0, 2]))
    for more in ({}, {"batch_invariant": True}):
        out, lse = run(given_, backend, empty_lse=math.inf, **more)
        plain, usual = run(given_, backend, **more)
        assert_identical(out, plain)
        assert (lse[1] == math.inf).all()
        assert (usual[1] == -math.inf).all()
        assert_identical(lse[[0, 2]], usual[[0, 2]])


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_largest_scores(backend, tokens, dtype):
    """Rows that are listed twice, or behind the length, and neighbours that share rows."""
    tokens = bounded(backend, tokens)
    q, kv = torch.randn(tokens, 3, 64).to(dtype), torch.randn(30, 64).to(dtype)
    start = torch.arange(tokens).unsqueeze(1) // 3
    indices = ((start + torch.arange(12)) % 30).int()
    indices[:, 5] = indices[:, 4]
    indices[0, 2] = -1
    lengths = torch.full((tokens,), 10, dtype=torch.int32)
    lengths[-1] = 0 if tokens > 1 else 10
    peaks = torch.empty(tokens, 3)
    for more in ({}, {"batch_invariant": True}):
        peaks.fill_(torch.nan)
        out, lse = sparse_attention_rows(
            q, kv, indices, lengths, value_dim=64, max_logits=peaks, backend=backend, **more
        )
        used = [
            kv[indices[t, : lengths[t]][indices[t, : lengths[t]] >= 0].long()].double()
            for t in range(tokens)
        ]
        want = [
            (q[t].double() @ rows.T / 8).amax(1) if len(rows) else torch.full((3,), -math.inf)
            for t, rows in enumerate(used)
        ]
        slack = accumulation(64, torch.float32, c=4.0)
        assert_close(peaks, torch.stack(want), atol=slack, rtol=slack, scale=4.0, name="peaks")
        expected = attend(q, used, scale=0.125)
        error = ulps(dtype, 1) + accumulation(64, torch.float32, c=4.0)
        assert_close(out, expected.out, atol=error, rtol=error, scale=expected.weight, name="out")
        assert_close(lse, expected.lse, atol=slack, rtol=slack, scale=4.0, name="lse")


@pytest.mark.parametrize("name", runnable(TRITON))
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("what", ["rope", "infinite rope", "scale", "tiny scale", "q"])
def test_what_float16_cannot_hold_of_v32_rows(name, splits, what, monkeypatch):
    forced(monkeypatch, Tile(16, 16, 4), splits)
    q = torch.randn(2, 3, 576).bfloat16()
    given_ = Scene(q, scope(2, 50, layout=V32_FP8), sink=torch.zeros(3), value_dim=512)
    page, offset = divmod(int(given_.main.indices[0, 17]), given_.main.cache.shape[1])
    entry = given_.main.cache[page, offset]
    scales = entry[512:528].view(torch.float32)
    if what == "rope":
        entry[528:] = torch.full((64,), 1e5).bfloat16().view(torch.uint8)
    elif what == "infinite rope":
        # A score of -inf for every head: the row has no weight, and makes no NaN.
        q[0, :, 512:] = -q[0, :, 512:].abs()
        entry[528:] = torch.full((64,), torch.inf).bfloat16().view(torch.uint8)
    elif what == "scale":
        scales[2] = 2.0**9
    elif what == "tiny scale":
        scales[:] = 2.0**-40
    else:
        q[0] *= 2.0**30
        q[1] *= 2.0**-30
    arguments, keywords = given_.arguments()
    scale = 2.0**-34 if what == "q" else 2.0**-24
    out, lse = sparse_attention(
        *arguments, **keywords, scale=scale, backend=use_backend(name, monkeypatch)
    )
    rows = [given_.main.rows(token) for token in range(2)]
    attend(q, rows, given_.sink, scale, value_dim=512).check((out, lse))


@pytest.mark.parametrize("name", runnable(TRITON))
def test_scales_that_are_no_powers_of_two_cost_a_rounding_of_the_keys(name, monkeypatch):
    given_ = Scene(torch.randn(3, 4, 576).bfloat16(), scope(3, 60, layout=V32_FP8), value_dim=512)
    data, _ = get_layout(V32_FP8).planes(given_.main.cache)
    scales = data[..., 512:528].contiguous().view(torch.float32) * 0.7731
    data[..., 512:528] = scales.view(torch.uint8)
    out, lse = run(given_, use_backend(name, monkeypatch))
    want = given_.expected()
    # A score is off by |q| |k| scale / sqrt(D) * 2^-11, which is about 2^-11 here, or, where the
    # range of float16 does not do, 2^-9; the mean over the rows by less.
    assert_close(lse, want.lse, atol=2.0**-9, name="lse")
    error = ulps(torch.bfloat16, 1) + 2.0**-9
    assert_close(out, want.out, atol=error, rtol=error, scale=want.weight, name="out")


def test_v32_rows_at_odd_addresses_are_left_to_torch():
    cache = make_cache(V32_FP8, 2, 3, start=2)
    q, indices = torch.randn(1, 1, 576).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
    reason = sparse_attention.supports(
        q, [CacheRows(cache.tensor, V32_FP8, indices)], backend="triton"
    ).reason
    assert "multiples of 4 bytes" in reason or "not installed" in reason


# Laws -------------------------------------------------------------------------------------------


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Equal up to the order and precision of sums, roundings of p, and those of the output."""
    error = ulps(got[0].dtype, 2) + accumulation(512, got[1].dtype)
    assert_close(got[0], want[0], atol=error, rtol=error, scale=weight, name="out")
    assert_close(got[1], want[1], atol=2.0**-16, rtol=2.0**-16, name="lse")


def test_order_and_padding_of_the_list_do_not_matter(backend):
    made = Scene(torch.randn(5, 6, 512).bfloat16(), scope(5, 30), sink=torch.randn(6))
    want, weight = run(made, backend), made.expected().weight
    order = torch.rand(5, 30).argsort(1)
    made.main.indices = made.main.indices.gather(1, order)
    same(run(made, backend), want, weight)
    holes = torch.full((5, 11), -1, dtype=torch.int32)
    mixed = torch.cat((made.main.indices, holes), 1)
    made.main.indices = mixed.gather(1, torch.rand(5, 41).argsort(1))
    made.main.lengths[:] = 41
    same(run(made, backend), want, weight)


def moved_pages(cache: Tensor, page: int, order: Tensor) -> tuple[Tensor, Tensor]:
    """The cache with its pages elsewhere, and where each slot is then."""
    pages = len(order)
    moved = get_layout(MAIN_FP8).allocate(pages, page)
    moved.view(pages, -1)[order] = cache.reshape(pages, -1)
    slots = torch.arange(pages * page)
    return moved, order[slots // page] * page + slots % page


def test_moved_pages_do_not_matter(backend):
    made = Scene(torch.randn(4, 6, 512).bfloat16(), scope(4, 100, page=16))
    want = run(made, backend)
    order = torch.randperm(made.main.cache.shape[0])
    moved, at = moved_pages(made.main.cache, 16, order)
    indices = at[made.main.indices.long()].int()
    got = sparse_attention(made.q, [CacheRows(moved, MAIN_FP8, indices)], backend=backend)
    for each, other in zip(got, want, strict=True):
        assert_identical(each, other)


@pytest.mark.parametrize("first", [0, 300])
def test_moved_pages_do_not_matter_to_neighbours(backend, first):
    """Tokens of a prompt, whose windows overlap: rows may be read once for several of them."""
    tokens, width, page = bounded(backend, 150, 10), 40, 8
    rows, layout = torch.randn(512, 512), get_layout(MAIN_FP8)
    made = layout.allocate(len(rows) // page, page)
    layout.write(made, torch.arange(len(rows)), rows)
    q = torch.randn(tokens, 8, 512).bfloat16()
    position = torch.arange(first, first + tokens).unsqueeze(1)
    seen = position - width + 1 + torch.arange(width)
    # Lists begin with the first row that there is, and end before their width.
    seen += (-seen[:, :1]).clamp(min=0)
    listed = torch.where(seen <= position, seen, -1)
    lengths = (position[:, 0] + 1).clamp(max=width).int()
    pages, results = len(rows) // page, []
    for order in (torch.arange(pages), torch.arange(pages).flip(0), torch.randperm(pages)):
        cache, at = moved_pages(made, page, order)
        slots = torch.where(listed < 0, -1, at[listed]).int()
        given_lengths = (None, lengths) if first else (lengths,)
        results.append(
            [
                sparse_attention(q, [CacheRows(cache, MAIN_FP8, slots, n)], backend=backend)
                for n in given_lengths
            ]
        )
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_identical(got[0], want[0])
            assert_identical(got[1], want[1])


def test_parts_merge_by_their_lse(backend):
    made = Scene(torch.randn(4, 6, 512), scope(4, 50), scope(4, 31, page=2))
    out, lse = run(made, backend)
    left, right = (
        sparse_attention(made.q, [each.listed], backend=backend) for each in (made.main, made.extra)
    )
    merged = torch.logaddexp(left[1], right[1])
    parts = [part * (each - merged).exp().unsqueeze(-1) for part, each in (left, right)]
    error = accumulation(512, torch.float32)
    assert_close(lse, merged, atol=error, rtol=error, scale=8.0)
    assert_close(out, sum(parts), atol=error, rtol=error, scale=made.expected().weight)


def test_a_sink_is_a_key_without_a_value(backend):
    made = Scene(torch.randn(4, 6, 512), scope(4, 50))
    out, lse = run(made, backend)
    made.sink = torch.randn(6) * 3
    with_sink, same_lse = run(made, backend)
    assert_identical(same_lse, lse)
    kept = torch.exp(lse.double() - torch.logaddexp(lse.double(), made.sink.double()))
    error = accumulation(512, torch.float32)
    assert_close(with_sink, out.double() * kept.unsqueeze(-1), atol=error, rtol=error)


@pytest.mark.parametrize("dtype", FLOATS)
def test_alone_as_in_a_batch(backend, dtype):
    skip_float64(backend, dtype)
    tokens = bounded(backend, 24)
    queries = torch.randn(tokens, 4, 512).to(dtype)
    made = Scene(queries, windows(tokens, 30, 12), sink=torch.randn(4))
    whole = run(made, backend)
    (q, (listed,)), keywords = made.arguments()
    each_alone = [slice(t, t + 1) for t in range(tokens)]
    rows = [
        sparse_attention(q[one], [listed.part(one)], backend=backend, **keywords)
        for one in each_alone
    ]
    alone = tuple(torch.cat(part) for part in zip(*rows, strict=True))
    same(alone, whole, made.expected().weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant_rows_are_the_same_bits_in_any_batch(backend, dtype):
    tokens = bounded(backend, 24, 3)
    lengths = [300, 40, 170] * 8
    batch = Scene(
        torch.randn(tokens, 20, 512).to(dtype),
        windows(tokens, 30, 12),
        scope(tokens, 300, lengths=lengths[:tokens], page=2),
        torch.randn(20),
    )
    want = run(batch, backend, batch_invariant=True)
    check(batch, *want)
    (q, rows), keywords = batch.arguments()
    for t in range(0, tokens, 2):
        row = slice(t, t + 1)
        alone = [each.part(row) for each in rows]
        got = sparse_attention(q[row], alone, batch_invariant=True, backend=backend, **keywords)
        for each, other in zip(got, want, strict=True):
            assert torch.equal(each, other[row])


# Results and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_callers_output_is_written(backend, dtype):
    skip_float64(backend, dtype)
    made = Scene(torch.randn(5, 3, 512).to(dtype), scope(5, 9))
    want, _ = run(made, backend)
    contiguous = torch.empty(5, 3, 512, dtype=dtype)
    strided = torch.full((5, 6, 700), 7.0, dtype=dtype)[:, ::2, 100:612]
    for out in (contiguous, strided):
        got, _ = run(made, backend, out=out)
        assert got is out
        assert_identical(out.contiguous(), want)


def test_scale_multiplies_scores_only(backend):
    made = Scene(torch.randn(3, 2, 512), scope(3, 9))
    out, lse = run(made, backend, scale=0.125)
    rows = [made.main.rows(token) for token in range(3)]
    want: Attention = attend(made.q, rows, scale=0.125)
    error = accumulation(512, torch.float32, c=4.0)
    assert_close(out, want.out, atol=error, rtol=error, scale=want.weight)
    assert_close(lse, want.lse, atol=error, rtol=error, scale=8.0)


def check_scale_of_zero(tokens: int, heads: int, dtype: torch.dtype, backend: str) -> None:
    """All listed rows weigh the same, whatever the queries."""
    made = Scene(torch.randn(tokens, heads, 512).to(dtype), scope(tokens, 150, page=2))
    rows = [made.main.rows(token) for token in range(tokens)]
    attend(made.q, rows, scale=0.0).check(run(made, backend, scale=0.0))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scale_of_zero(backend, tokens, dtype):
    check_scale_of_zero(tokens, 2, dtype, backend)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_scale_of_zero_where_bfloat16_products_are_fast(tokens, monkeypatch):
    """There a product of factor 0 returns early and leaves its result as it was allocated."""
    real = torch.baddbmm

    def product(addend, left, right, *, beta=1, alpha=1):
        if alpha == 0:
            return addend.clone()
        return real(addend, left, right, beta=beta, alpha=alpha)

    monkeypatch.setattr(torch, "baddbmm", product)
    monkeypatch.setattr(torch_cpu, "_bfloat16_products_are_fast", lambda: True)
    check_scale_of_zero(tokens, 40, torch.bfloat16, "torch")


def test_inputs_are_left_alone(backend):
    made = Scene(torch.randn(9, 3, 512), windows(9, 9, 5), scope(9, 3), torch.randn(3))
    tensors = [made.q, made.main.indices, made.main.lengths, made.extra.indices, made.sink]
    before = [each.clone() for each in tensors]
    run(made, backend)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    assert not made.main.guarded.changed().numel()
    assert not made.extra.guarded.changed().numel()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 3, 512).int()}, TypeError, "q must be bfloat16 or .*got int32"),
        ({"q": torch.zeros(2, 3, 256)}, ValueError, "layout must be one of 256 channels"),
        ({"q": torch.zeros(2, 512)}, ValueError, r"q must be .*\[T, H, D\]"),
        ({"indices": torch.zeros(2, 4).long()}, TypeError, "indices must be int32"),
        ({"indices": torch.zeros(3, 4).int()}, ValueError, r"indices must be int32 \[T=2, K\]"),
        ({"lengths": torch.zeros(3).int()}, ValueError, r"lengths must be int32 \[T=2\]"),
        ({"sink": torch.zeros(4)}, ValueError, r"sink must be .*\[H=3\]"),
        ({"sink": torch.zeros(3).bfloat16()}, TypeError, "sink must be float32 or float64"),
        ({"out": torch.zeros(2, 3, 512)}, TypeError, "out must be bfloat16"),
        ({"layout": "rows_fp32_512"}, TypeError, "cache must be torch.float32 for layout"),
        ({"layout": "no such"}, ValueError, "unknown cache layout"),
        ({"cache": torch.zeros(2, 4, 500).byte()}, ValueError, r"cache must be \[P, B, 584\]"),
        ({"rows": []}, ValueError, "rows must be one CacheRows or two, got 0"),
        ({"rows": torch.zeros(2, 4, 584)}, TypeError, "rows must be a list of CacheRows"),
        ({"rows": [torch.zeros(2, 4, 584)]}, TypeError, "list of CacheRows, got .*Tensor"),
        ({"epilogue": (torch.zeros(2).long(), torch.zeros(4, 64), 1)}, TypeError, "epilogue must"),
        ({"backend": "no such"}, BackendUnavailable, "no backend 'no such'"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    cache = get_layout(MAIN_FP8).allocate(2, 4)
    rows = CacheRows(cache, MAIN_FP8, torch.zeros(2, 4, dtype=torch.int32))
    of_rows = {name: value for name, value in change.items() if name in CacheRows._fields}
    call = {"q": torch.zeros(2, 3, 512).bfloat16(), "rows": [rows._replace(**of_rows)]}
    others = {name: value for name, value in change.items() if name not in of_rows}
    with pytest.raises(error, match=f"sparse_attention: .*{message}|^{message}"):
        sparse_attention(**(call | others))


def test_a_compiler_sees_through():
    made = Scene(torch.randn(3, 2, 512), scope(3, 9))
    (q, rows), _ = made.arguments()

    @torch.compile(backend="eager", fullgraph=True)
    def twice(q: Tensor) -> Tensor:
        out, lse = sparse_attention(q, rows)
        return out * 2 + lse.unsqueeze(-1)

    out, lse = sparse_attention(q, rows)
    assert_identical(twice(q), out * 2 + lse.unsqueeze(-1))


# The Triton kernels' own choices ----------------------------------------------------------------


def forced(monkeypatch: pytest.MonkeyPatch, chosen: Tile, splits: int) -> None:
    launcher = pytest.importorskip("anymla.ops.attention.triton_decode_launch")
    monkeypatch.setattr(launcher, "choose_tile", lambda *_, **__: chosen)
    monkeypatch.setattr(launcher, "choose_splits", lambda *_: splits)


@pytest.mark.parametrize("name", runnable(TRITON))
@pytest.mark.parametrize(
    ("splits", "heads", "once"), [(1, 16, True), (3, 64, False), (3, 16, True), (1, 64, False)]
)
def test_every_way_to_compute_gives_the_same(name, splits, heads, once, monkeypatch):
    forced(monkeypatch, Tile(heads, 32, 4, once=once), splits)
    lengths = [90, 0, 33]
    given_ = Scene(
        torch.randn(3, 20, 512).bfloat16(),
        scope(3, 40, lengths=[40, 0, 0], page=53),
        scope(3, 90, lengths=lengths, page=2),
        sink_of("huge", 20),
    )
    check(given_, *run(given_, use_backend(name, monkeypatch)))


@pytest.mark.parametrize("name", runnable(TRITON))
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("what", ["rope", "scale", "q"])
def test_what_float16_cannot_hold_is_computed_in_bfloat16(name, splits, what, monkeypatch):
    forced(monkeypatch, Tile(16, 16, 4), splits)
    q = torch.randn(2, 3, 512).bfloat16()
    given_ = Scene(q, scope(2, 50), sink=torch.zeros(3))
    data, scales = get_layout(MAIN_FP8).planes(given_.main.cache)
    page, offset = divmod(int(given_.main.indices[0, 17]), given_.main.cache.shape[1])
    if what == "rope":
        tail = torch.full((64,), 3e4).bfloat16().view(torch.uint8)
        data[page, offset, 448:] = tail
    elif what == "scale":
        scales[page, offset, 3] = 140
    else:
        q[0] *= 2.0**30
        q[1] *= 2.0**-30
    # Scores of this size would hide the sums behind one row.
    arguments, keywords = given_.arguments()
    scale = 2.0**-34 if what == "q" else 2.0**-24
    out, lse = sparse_attention(
        *arguments, **keywords, scale=scale, backend=use_backend(name, monkeypatch)
    )
    rows = [given_.main.rows(token) for token in range(2)]
    attend(q, rows, given_.sink, scale).check((out, lse))


@pytest.mark.parametrize("name", runnable(TRITON))
def test_more_tokens_than_the_workspace_holds(name, monkeypatch):
    forced(monkeypatch, Tile(16, 16, 4), 2)
    launcher = pytest.importorskip("anymla.ops.attention.triton_decode_launch")
    monkeypatch.setattr(launcher, "_WORKSPACE_BYTES", 2 * 4 * 2 * 3 * 512)
    given_ = Scene(torch.randn(5, 3, 512).bfloat16(), scope(5, 40, lengths=[40, 3, 0, 17, 33]))
    check(given_, *run(given_, use_backend(name, monkeypatch)))


@pytest.mark.parametrize("backend", ["reference", "torch", *runnable(TRITON)])
@pytest.mark.parametrize(
    ("channels", "values", "dtypes"),
    [
        (576, 512, (torch.bfloat16, torch.bfloat16)),
        (576, 576, (torch.float32, torch.float32)),
        (512, 512, (torch.bfloat16, torch.float16)),
        (80, 33, (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_rows_of_any_width(backend, channels, values, dtypes, monkeypatch):
    backend = use_backend(backend, monkeypatch)
    q = torch.randn(3, 5, channels).to(dtypes[0])
    kv = torch.randn(50, channels).to(dtypes[1])
    kv[7] = torch.nan
    listed = torch.stack([torch.randperm(42)[:20] + 8 for _ in range(3)])
    indices = torch.cat((listed, hostile_indices(50, 3, 4)), 1).int()
    lengths = torch.tensor([24, 0, 9], dtype=torch.int32)
    indices[2, 9:] = 7
    sink = torch.randn(5)
    out, lse = sparse_attention_rows(
        q, kv, indices, lengths, sink=sink, value_dim=values, backend=backend
    )
    used = [kv[listed[0]].double(), kv[:0].double(), kv[listed[2, :9]].double()]
    want = attend(q, used, sink)
    part = dataclasses.replace(want, out=want.out[..., :values], weight=want.weight[..., :values])
    part.check((out, lse))


def test_triton_refuses_what_it_does_not_compute():
    made = Scene(torch.randn(2, 3, 512).double(), scope(2, 5))
    with pytest.raises(BackendUnavailable, match=r"float64|triton is not installed"):
        run(made, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [MAIN_FP8, *V41_LAYOUTS])
@pytest.mark.parametrize("heads", [1, 8, 16, 20])
def test_a_device_attends_to_long_lists_with_few_heads(heads, layout):
    # Lists of more blocks of rows than are loaded ahead, some of which end within a block.
    lengths = [600, 0, 1, 33, 512, 599, 64]
    given_ = Scene(
        torch.randn(7, heads, 512).bfloat16(),
        scope(7, 128, page=64),
        scope(7, 600, lengths=lengths, page=64, layout=layout),
        torch.randn(heads),
    )
    check(given_, *run(given_, "triton"))
