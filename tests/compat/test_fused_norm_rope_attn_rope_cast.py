"""FlashMLA's fused call: its orders of channels, its roundings, and float64 of its formulas."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anymla.compat import fused_norm_rope_attn_rope_cast as fused
from anymla.formats.page_layout import (
    MAIN_FP8,
    V32_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
)
from anymla.ops.device import triton_support
from anymla.testing.conformance.expected import Attention, attend
from anymla.testing.conformance.scene import Scope, scope
from anymla.testing.generate import hostile_indices
from anymla.testing.oracle.rounding import decode_e4m3, e4m3_values, round_to
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, ulps

BACKENDS = ("torch", "triton")
OPERATIONS = (
    "inverse_rope_fp8_quant", "qnorm_rope_kv_insert", "rope", "sparse_attention",
    "sparse_attention_rows",
)  # fmt: skip
CHANNELS, TURNED, EPS, SCALE = 512, 64, 1e-4, 512**-0.5
# (k_cache, extra_k_cache, use_legacy)
FORMATS = [
    (MAIN_FP8, None, False),
    (MAIN_FP8, MAIN_FP8, True),
    (V41_MAIN_FP8, None, False),
    (V41_MAIN_FP8, V41_MAIN_FP8, False),
    (V41_MAIN_FP8, V41_COMPRESSED_NVFP4, False),
    (V41_MAIN_FP8_SPLIT, V41_COMPRESSED_NVFP4_SPLIT, True),
]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name == "triton" and not triton_support(torch.empty(0)):
        pytest.skip("triton does not run here")
    for operation in OPERATIONS:
        chosen = functools.partial(getattr(fused, operation), backend=name)
        monkeypatch.setattr(fused, operation, chosen)
    return name


# The oracle: loops over channels by the formulas of the interface -------------------------------


def angles(rows: int, turned: int = TURNED) -> Tensor:
    """Cosines, then sines, of angles of many magnitudes; float32."""
    angle = torch.arange(rows).double()[:, None] * torch.logspace(0, -3, turned // 2).double()
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def turned(x: Tensor, positions: Tensor, table: Tensor, sign: int) -> Tensor:
    """Heads [T, H, D] with pairs of their last channels multiplied by exp(sign * i * angle)."""
    count = table.shape[1]
    cos, sin = table.double()[positions.long()].unsqueeze(1).chunk(2, -1)
    out = x.double().clone()
    pairs = torch.view_as_complex(out[..., -count:].contiguous().unflatten(-1, (-1, 2)))
    out[..., -count:] = torch.view_as_real(pairs * torch.complex(cos, sign * sin)).flatten(-2)
    return out


def in_query_order(heads: Tensor) -> Tensor:
    """Queries [T, H, D] as the permuted projection computes them."""
    tokens, count, channels = heads.shape
    out = torch.empty(tokens, count * channels, dtype=heads.dtype)
    for h in range(count):
        for d in range(channels):
            out[:, (d // 16 * count + h) * 16 + d % 16] = heads[:, h, d]
    return out.view(heads.shape)


def code_place(count: int, channels: int) -> Tensor:
    """Where channel d of a group's head h lies among the group's codes: int64 [count, channels]."""
    h, d = torch.arange(count)[:, None], torch.arange(channels)[None, :]
    return (d // 32 * count + h) * 32 + d % 32


def decoded(codes: Tensor, words: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Values of codes and their scales, float64 [T, H, D] each."""
    tokens, groups, width = codes.shape
    count = heads // groups
    place = code_place(count, width // count)
    values = decode_e4m3(codes.view(torch.uint8)).double()[:, :, place]
    words = words.long() & 0xFFFFFFFF
    scale = torch.stack([words >> 8 * byte & 0xFF for byte in range(4)], -1).flatten(-2)
    scale = torch.exp2(scale.double() - 127)[:, :, place // 32]
    shape = (tokens, heads, width // count)
    return (values * scale).reshape(shape), scale.reshape(shape)


def prepared(heads: Tensor, positions: Tensor, table: Tensor, norm: bool) -> Tensor:
    """Queries that attend, float64 [T, H, D], before they are rounded."""
    wide = heads.double()
    if norm:
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    return turned(wide, positions, table, 1)


def check_shapes(codes: Tensor, words: Tensor, tokens: int, heads: int, groups: int) -> None:
    width = heads // groups * CHANNELS
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == (tokens, groups, width)
    assert codes.is_contiguous()
    assert words.dtype == torch.int32
    assert words.shape == (tokens, groups, width // 128)
    # DeepGEMM's order: neighbouring tokens beside each other, columns of whole 16 bytes.
    if tokens:
        padded = -(-tokens // 4) * 4
        assert words.stride() == (1, width // 128 * padded, padded)


def check(
    result: tuple[Tensor, ...], want: Attention, positions: Tensor, table: Tensor, dtype
) -> None:
    """Compare codes, scales and lse with float64 attention of queries in their rounding."""
    codes, words, lse = result
    heads = want.lse.shape[1]
    empty = want.lse == -math.inf
    assert (lse[empty] == math.inf).all()
    slack = accumulation(CHANNELS, torch.float32, c=4.0)
    assert_close(lse[~empty], want.lse[~empty], atol=slack, rtol=slack, scale=8.0, name="lse")
    exact = turned(want.out, positions, table, -1)
    # What the heads may err before the codes, see ``Attention.check``; rotated with its pair.
    error = ulps(dtype, 1) + accumulation(CHANNELS, torch.float32)
    allowed = error * (want.weight + want.out.abs())
    last = allowed[..., -table.shape[1] :]
    pairs = last.unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*last.shape[:-1], -1, 2)
    allowed[..., -table.shape[1] :] = pairs.flatten(-2)
    got, scale = decoded(codes, words, heads)
    blocks = exact.unflatten(-1, (-1, 32))
    slack_of_block = allowed.unflatten(-1, (-1, 32)).amax(-1)
    amax = blocks.abs().amax(-1)
    least, most = (
        torch.exp2(torch.ceil(torch.log2(each.clamp(min=1e-4) / 448)))
        for each in ((amax - slack_of_block) * (1 - 2**-20), (amax + slack_of_block) * (1 + 2**-20))
    )
    used = scale.unflatten(-1, (-1, 32))
    assert (used == used[..., :1]).all()
    assert (least <= used[..., 0]).all()
    assert (used[..., 0] <= most).all()
    low, high = (
        round_to((exact + sign * allowed) / scale, e4m3_values()) * scale for sign in (-1, 1)
    )
    assert ((low <= got) & (got <= high)).all()
    assert (got[empty] == 0).all()


def options(positions: Tensor, table: Tensor, groups: int, *, norm: bool = True):
    return {
        "enable_q_norm": norm, "rms_norm_eps": EPS, "token_positions": positions,
        "is_rope_neox_style": False, "rope_dim": table.shape[1], "cos_sin_cache": table,
        "n_wv_group": groups, "num_per_channels": 32, "use_tma_aligned_col_major_sf": True,
        "round_sf": True, "use_packed_ue8m0": True, "sm_scale": SCALE,
    }  # fmt: skip


def listed(main: Scope, extra: Scope | None):
    found = {
        "k_cache": main.cache.unsqueeze(2).view(torch.float8_e4m3fn),
        "indices_in_kvcache": main.indices,
        "topk_length": main.lengths,
    }
    if extra is not None:
        found |= {
            "extra_k_cache": extra.cache.unsqueeze(2),
            "extra_indices_in_kvcache": extra.indices,
            "extra_topk_length": extra.lengths,
        }
    return found


def all_rows(tokens: int, *scopes: Scope | None) -> list[Tensor]:
    return [
        torch.cat([each.rows(token) for each in scopes if each is not None])
        for token in range(tokens)
    ]


# Results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("layout", "second", "legacy"), FORMATS)
def test_decode_over_the_row_formats(backend, layout, second, legacy, norm):
    """Lengths, a query without keys, sinks of both infinities, pages of other sizes."""
    tokens, heads, groups = 3, 16, 2
    table, positions = angles(40), torch.tensor([0, 39, 17], dtype=torch.int32)
    main = scope(tokens, 20, lengths=[20, 0, 7], page=8, layout=layout)
    extra = second and scope(tokens, 9, lengths=[9, 0, 2], page=2, layout=second)
    given_ = (torch.randn(tokens, heads, CHANNELS) * 3).bfloat16()
    sink = torch.randn(heads)
    sink[3], sink[4] = math.inf, -math.inf
    result = fused.decode(
        **options(positions, table, groups, norm=norm), q=in_query_order(given_),
        attn_sink=sink, use_legacy=legacy, **listed(main, extra),
    )  # fmt: skip
    check_shapes(*result[:2], tokens, heads, groups)
    q = prepared(given_, positions, table, norm).bfloat16()
    want = attend(q, all_rows(tokens, main, extra), sink, SCALE)
    check(result, want, positions, table, torch.bfloat16)
    assert (decoded(*result[:2], heads)[0][:, 3] == 0).all()


@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(0, 5),
    groups=st.sampled_from([1, 2, 3]),
    of_group=st.sampled_from([1, 2, 5, 8]),
    width=st.sampled_from([1, 8, 70]),
    turned_channels=st.sampled_from([2, 64, 512]),
    lengths=st.booleans(),
    sink=st.booleans(),
    norm=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    name=st.sampled_from(BACKENDS),
)
def test_prefill_is_norm_rope_attention_rope_and_cast(
    seed, tokens, groups, of_group, width, turned_channels, lengths, sink, norm, dtype, name
):
    torch.manual_seed(seed)
    if name == "triton":
        tokens, of_group = min(tokens, 2), min(of_group, 5)
    heads, rows = groups * of_group, 30
    table = angles(25, turned_channels)
    positions = torch.randint(0, 25, (tokens,), dtype=torch.int32)
    given_ = (torch.randn(tokens, heads, CHANNELS) * 2.0 ** torch.randint(-6, 6, (1,))).to(dtype)
    kv = (torch.randn(rows, 1, CHANNELS) * 2).to(dtype)
    indices = torch.randint(0, rows, (tokens, 1, width), dtype=torch.int32)
    hit = torch.rand(indices.shape) < 0.3
    indices = torch.where(hit, hostile_indices(rows, *indices.shape), indices)
    counts = torch.randint(-1, width + 2, (tokens,), dtype=torch.int32) if lengths else None
    sinks = torch.randn(heads) if sink else None
    with pytest.MonkeyPatch.context() as patch:
        use(name, patch)
        codes, words, peaks, lse = fused.prefill(
            **options(positions, table, groups, norm=norm), q=in_query_order(given_), kv=kv,
            indices=indices, attn_sink=sinks, topk_length=counts,
        )  # fmt: skip
    check_shapes(codes, words, tokens, heads, groups)
    assert peaks.shape == lse.shape == (tokens, heads)
    assert peaks.dtype == lse.dtype == torch.float32
    if not tokens:
        return
    found = []
    for token in range(tokens):
        row = indices[token, 0, : width if counts is None else max(int(counts[token]), 0)]
        found.append(kv[row[(row >= 0) & (row < rows)].long(), 0].double())
    q = prepared(given_, positions, table, norm).to(dtype)
    # Scores of queries without a norm may be in the hundreds; sums of float32 err with them.
    want = attend(q, found, sinks, SCALE)
    largest = max((float((q[t].double() @ found[t].T).abs().max()) for t in range(tokens)
                   if len(found[t])), default=0.0)  # fmt: skip
    if largest * SCALE < 30:
        check((codes, words, lse), want, positions, table, dtype)
    for token in range(tokens):
        if not len(found[token]):
            assert (peaks[token] == -math.inf).all()
            continue
        scores = q[token].double() @ found[token].T * SCALE
        magnitude = q[token].double().abs() @ found[token].T.abs() * SCALE
        slack = accumulation(CHANNELS, torch.float32, c=4.0) + ulps(dtype, 0.01)
        assert_close(
            peaks[token], scores.amax(1), atol=slack, scale=magnitude.amax(1), name="max_logits"
        )


def test_float64_has_no_rounding_but_that_of_the_codes():
    """The formulas alone: every code is the nearest, every scale the smallest that fits."""
    tokens, heads, groups = 4, 6, 3
    table, positions = angles(40).double(), torch.tensor([3, 39, 0, 8], dtype=torch.int32)
    given_ = torch.randn(tokens, heads, CHANNELS, dtype=torch.float64)
    main = scope(tokens, 12, page=4, layout=V41_MAIN_FP8)
    result = fused.decode(
        **options(positions, table, groups), q=in_query_order(given_), **listed(main, None)
    )
    q = prepared(given_, positions, table, True)
    exact = turned(attend(q, all_rows(tokens, main), None, SCALE).out, positions, table, -1)
    got, scale = decoded(*result[:2], heads)
    amax = exact.unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=1e-4)
    assert torch.equal(scale[..., ::32], torch.exp2(torch.ceil(torch.log2(amax / 448))))
    nearest = round_to(exact / scale, e4m3_values()) * scale
    assert_close(got, nearest, atol=1e-9, scale=1.0, name="codes")


def test_a_head_below_the_floor_keeps_its_scale(backend):
    """Blocks whose magnitudes are below 1e-4 share one scale, as those of zeros."""
    table, positions = angles(4), torch.zeros(1, dtype=torch.int32)
    kv = torch.full((1, 1, CHANNELS), 2.0**-20).bfloat16()
    _, words, _, _ = fused.prefill(
        **options(positions, table, 1), q=torch.randn(1, 1, CHANNELS).bfloat16(), kv=kv,
        indices=torch.zeros(1, 1, 1, dtype=torch.int32),
    )  # fmt: skip
    floor = 127 + math.ceil(math.log2(1e-4 / 448))
    assert (words == floor * 0x01010101).all()


def test_rounding_of_the_queries_is_where_it_is_said_to_be(backend):
    """One key and a sink of 0 make the output a sigmoid of one score: it shows q' to the bit."""
    table, positions = angles(9), torch.tensor([5], dtype=torch.int32)
    given_ = torch.randn(1, 1, CHANNELS).bfloat16()
    kv = torch.zeros(CHANNELS, 1, CHANNELS)
    kv[:, 0] = torch.eye(CHANNELS) * 64
    indices = torch.arange(CHANNELS, dtype=torch.int32).view(1, 1, -1)
    seen = []
    for channel in (0, 100, CHANNELS - 64, CHANNELS - 1):
        _, _, peak, _ = fused.prefill(
            **options(positions, table, 1), q=in_query_order(given_), kv=kv.bfloat16(),
            indices=indices[..., channel : channel + 1].contiguous(),
        )  # fmt: skip
        seen.append(float(peak) / SCALE / 64)
    want = prepared(given_, positions, table, True).bfloat16()[0, 0]
    for found, channel in zip(seen, (0, 100, CHANNELS - 64, CHANNELS - 1), strict=True):
        assert found == pytest.approx(float(want[channel]), rel=1e-5)


def test_lists_behind_their_length_are_not_read(backend):
    table, positions = angles(9), torch.tensor([5, 2], dtype=torch.int32)
    main = scope(2, 24, lengths=[10, 24], layout=V41_MAIN_FP8, poison_behind=True)
    given_ = torch.randn(2, 4, CHANNELS).bfloat16()
    result = fused.decode(
        **options(positions, table, 1), q=in_query_order(given_), **listed(main, None)
    )
    q = prepared(given_, positions, table, True).bfloat16()
    want = attend(q, all_rows(2, main), None, SCALE)
    check(result, want, positions, table, torch.bfloat16)


def test_a_compiler_sees_through():
    table, positions = angles(9), torch.tensor([5, 2], dtype=torch.int32)
    main = scope(2, 7, layout=V41_MAIN_FP8)

    def call(q: Tensor) -> tuple[Tensor, ...]:
        return fused.decode(**options(positions, table, 2), q=q, **listed(main, None))

    q = torch.randn(2, 4, CHANNELS).bfloat16()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for one, other in zip(compiled(q), call(q), strict=True):
        assert_identical(one, other)


# Weights -----------------------------------------------------------------------------------------


def columns(words: Tensor) -> Tensor:
    """The same values with stride 1 along rows."""
    return words.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_the_query_projection_computes_queries_in_their_order(heads):
    channels, rank = 48, 128
    weight = torch.randn(heads * channels, rank).to(torch.float8_e4m3fn)
    scales = columns(torch.randint(-(2**31), 2**31 - 1, (heads * channels, 1)).int())
    moved, moved_scales = fused.permute_q_b_proj((weight, scales), heads, channels)
    x = torch.randn(5, rank, dtype=torch.float64)
    plain = (x @ weight.double().T).view(5, heads, channels)
    assert torch.equal(x @ moved.double().T, in_query_order(plain).view(5, -1))
    assert moved.is_contiguous()
    assert moved_scales.stride(0) == 1
    for h in range(heads):
        for d in range(channels):
            place = (d // 16 * heads + h) * 16 + d % 16
            assert moved_scales[place] == scales[h * channels + d]


@pytest.mark.parametrize("of_group", [1, 2, 8])
def test_the_output_projection_reads_codes_in_their_order(of_group):
    groups, rank, channels = 3, 6, 128
    width = of_group * channels
    weight = torch.randn(groups, rank, width).to(torch.float8_e4m3fn)
    exponents = torch.randint(0, 255, (groups, rank, width // 32), dtype=torch.uint8)
    scales = columns(exponents.view(torch.int32))
    moved, moved_scales = fused.permute_wv_proj((weight, scales), of_group, channels)
    place = code_place(of_group, channels).flatten()
    assert moved.is_contiguous()
    assert torch.equal(moved.view(torch.uint8)[..., place], weight.view(torch.uint8))
    assert moved_scales.stride() == (width // 128 * 8, 1, 8)
    found = moved_scales.contiguous().view(torch.uint8)
    assert torch.equal(found[..., place // 32], exponents.repeat_interleave(32, -1))


def test_weights_and_call_together_are_the_projection_of_the_heads(backend):
    """Queries by one permuted weight, codes read by the other: no order is left to see."""
    heads, groups, rank, tokens = 4, 2, 24, 3
    table, positions = angles(9), torch.tensor([5, 2, 7], dtype=torch.int32)
    latent = torch.randn(tokens, 32, dtype=torch.float64)
    w_q = (torch.randn(heads * CHANNELS, 32)).to(torch.float8_e4m3fn)
    w_v = torch.randn(groups, rank, heads // groups * CHANNELS).to(torch.float8_e4m3fn)
    ones = torch.full((groups, rank, heads // groups * CHANNELS // 128), 0x7F7F7F7F).int()
    zero = torch.zeros(heads * CHANNELS, 1, dtype=torch.int32)
    q_perm, _ = fused.permute_q_b_proj((w_q, zero), heads, CHANNELS)
    v_perm, v_scales = fused.permute_wv_proj((w_v, ones), heads // groups, CHANNELS)
    assert (v_scales == 0x7F7F7F7F).all()
    q = (latent @ q_perm.double().T).bfloat16().view(tokens, heads, CHANNELS)
    main = scope(tokens, 12, layout=V41_MAIN_FP8)
    codes, words, _ = fused.decode(**options(positions, table, groups), q=q, **listed(main, None))
    scale = words.contiguous().view(torch.uint8).repeat_interleave(32, -1).double()
    values = decode_e4m3(codes.view(torch.uint8)).double() * torch.exp2(scale - 127)
    got = torch.einsum("tgj,gnj->tgn", values, v_perm.double())

    plain = (latent @ w_q.double().T).bfloat16().view(tokens, heads, CHANNELS)
    ready = prepared(plain, positions, table, True).bfloat16()
    out = turned(attend(ready, all_rows(tokens, main), None, SCALE).out, positions, table, -1)
    grouped = out.view(tokens, groups, -1)
    want = torch.einsum("tgj,gnj->tgn", grouped, w_v.double())
    magnitude = torch.einsum("tgj,gnj->tgn", grouped.abs(), w_v.double().abs())
    # A code is within 2^-4 of its value or, below 2^-6 of the scale, within 2^-10 of the scale.
    assert_close(got, want, atol=2**-4, scale=magnitude, name="projection")
    assert float((got - want).norm() / want.norm()) < 0.05


# Errors ------------------------------------------------------------------------------------------


def call(**changes):
    table, positions = angles(4), torch.zeros(2, dtype=torch.int32)
    arguments = options(positions, table, 2) | listed(scope(2, 4), None)
    arguments["q"] = torch.randn(2, 4, CHANNELS).bfloat16()
    return fused.decode(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"is_rope_neox_style": True}, ValueError, "is_rope_neox_style must be False, got True"),
        ({"num_per_channels": 128}, ValueError, "num_per_channels must be 32, got 128"),
        ({"use_tma_aligned_col_major_sf": False}, ValueError, "col_major_sf must be True"),
        ({"round_sf": False}, ValueError, "round_sf must be True"),
        ({"use_packed_ue8m0": False}, ValueError, "use_packed_ue8m0 must be True"),
        ({"n_wv_group": 3}, ValueError, "n_wv_group must be a divisor of the 4 heads, got 3"),
        ({"d_v": 256}, ValueError, "d_v must be 512, got 256"),
        ({"q": torch.zeros(2, 4, 576).bfloat16()}, ValueError, r"q must be \[s_q, H, 512\]"),
        ({"rope_dim": 32}, ValueError, "cos_sin_cache must be"),
        ({"token_positions": torch.zeros(2).long()}, TypeError, "token_positions must be int32"),
        ({"token_positions": torch.zeros(3).int()}, ValueError, "token_positions must be"),
        ({"indices_in_kvcache": torch.zeros(2, 4).long()}, TypeError, "indices_in_kvcache must be"),
        ({"k_cache": torch.zeros(2, 2, 1, 512)}, TypeError, "k_cache must be a tensor of bytes"),
        (
            {"k_cache": scope(2, 4, layout=V32_FP8).cache.unsqueeze(2)},
            ValueError,
            "of 512 channels",
        ),
        ({"extra_topk_length": torch.zeros(2).int()}, ValueError, "extra_topk_length must be None"),
        (
            {"extra_indices_in_kvcache": torch.zeros(2, 4).int()},
            ValueError,
            "extra_indices_in_kvcache must be given together with extra_k_cache",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, kind, words):
    with pytest.raises(kind, match=words):
        call(**changes)


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "words"),
    [
        ("permute_q_b_proj", ((64, 4), (64, 1), 2, 24), ValueError, "d_q must be a multiple of 16"),
        ("permute_q_b_proj", ((64, 4), (64, 1), 3, 16), ValueError, r"weight must be \[3 \* 16, K"),
        ("permute_wv_proj", ((2, 4, 64), (2, 4, 1), 2, 24), ValueError, "d_o must be a multiple"),
        ("permute_wv_proj", ((2, 4, 64), (2, 4, 1), 1, 128), ValueError, r"weight must be \[G, N,"),
        ("permute_wv_proj", ((2, 4, 256), (2, 4, 1), 2, 128), ValueError, "of 32 columns a byte"),
    ],
)
def test_weights_that_do_not_fit_are_named(function, arguments, kind, words):
    weight, scales, *sizes = arguments
    given_ = torch.zeros(weight).to(torch.float8_e4m3fn), torch.zeros(scales, dtype=torch.int32)
    with pytest.raises(kind, match=words):
        getattr(fused, function)(given_, *sizes)
