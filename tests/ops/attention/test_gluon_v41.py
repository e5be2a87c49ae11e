"""The Hopper kernels over V4.1's rows: their text on the host, and themselves on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from paged import a_device
from test_gluon_attention import Cache, asked, hopper  # noqa: F401, a fixture
from test_gluon_kernels import CHANNELS, run, schedule_of

from anymla.formats.page_layout import (
    MAIN_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.ops._epilogue import QuantizedOut
from anymla.ops.attention import InverseRopeQuant, sparse_attention
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.testing.conformance.expected import attend
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.device_bridge import on_device

FP8, FP4 = V41_MAIN_FP8, V41_COMPRESSED_NVFP4
FP8_SPLIT, FP4_SPLIT = V41_MAIN_FP8_SPLIT, V41_COMPRESSED_NVFP4_SPLIT
PAIRS = [(FP8, FP4), (FP8, FP8), (FP8, FP8_SPLIT), (FP4_SPLIT, FP8_SPLIT), (FP4, FP4), (FP4, None)]


def two_scopes(tokens, layouts, lengths=(130, 0, 7, 64), more=(200, 0, 0, 129)):
    first, second = layouts
    main = scope(
        tokens, max(lengths), lengths=list(lengths)[:tokens], page=32, layout=first,
        poison_behind=True,
    )  # fmt: skip
    extra = None
    if second is not None:
        extra = scope(tokens, max(more), lengths=list(more)[:tokens], page=16, layout=second)
    for each in (main, extra):
        if each is not None:  # a row that is not there among those that are
            each.indices[0, 3] = -1
    return main, extra


def sink_of(heads):
    return torch.tensor([0.0, torch.inf, -torch.inf, 2.0, -1.0])[torch.arange(heads) % 5]


@pytest.mark.parametrize("layouts", PAIRS)
@pytest.mark.parametrize(
    ("heads", "tokens", "way"),
    [
        (3, 4, "longest first"), (20, 4, "one block"), (36, 4, "tail, longest first"),
        (36, 4, "stream-K"), (66, 2, "by width"), (64, 2, "whole"),
    ],
)  # fmt: skip
def test_any_lists(layouts, heads, tokens, way):
    q = torch.randn(tokens, heads, CHANNELS).bfloat16()
    made = Scene(q, *two_scopes(tokens, layouts), sink_of(heads))
    made.expected().check(run(made, schedule_of(heads, tokens, way, 3)))


@pytest.mark.parametrize("layouts", [(FP8, FP4), (FP4, FP8)])
@pytest.mark.parametrize("heads", [3, 34])
def test_producers_run_ahead_where_lists_change(layouts, heads):
    """Short lists: the block that is loaded is of another kind than the one that is decoded."""
    lengths, more = [0, 64, 1, 0, 130, 0, 65, 5], [70, 0, 64, 0, 1, 65, 0, 128]
    main, extra = two_scopes(8, layouts, lengths, more)
    main.indices[:, 3] = main.indices[:, 2]
    extra.indices[:, 3] = extra.indices[:, 2]
    made = Scene(torch.randn(8, heads, CHANNELS).bfloat16(), main, extra)
    for seed in (1, 2):
        made.expected().check(run(made, schedule_of(heads, 8, "whole", 1), seed=seed))


@pytest.mark.parametrize(
    ("heads", "way"), [(3, "whole"), (20, "tail"), (36, "stream-K"), (36, "whole")]
)
@pytest.mark.parametrize("large", [False, True])
def test_heads_leave_as_the_fp8_that_a_second_kernel_would_make_of_them(heads, way, large):
    main, extra = two_scopes(4, (FP8, FP4))
    if large:
        _scales(extra, 0)[5] = 0x70
    q = torch.randn(4, heads, CHANNELS).bfloat16()
    made, schedule = Scene(q, main, extra, torch.zeros(heads)), schedule_of(heads, 4, way, 3)
    table, positions = torch.randn(9, 64), torch.tensor([8, 3, 0, 5])
    out, _ = run(made, schedule)
    to = QuantizedOut.allocate(made.q, InverseRopeQuant(positions, table, 1), native=False)
    run(made, schedule, to=to)
    want = inverse_rope_fp8_quant(out, positions, table, n_groups=1, backend="triton")
    got = to.results(1)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


def _scales(listed, column):
    """Scale bytes of the row in a column of the first token's list."""
    page, offset = divmod(int(listed.indices[0, column]), listed.cache.shape[1])
    return get_layout(listed.layout).planes(listed.cache)[1][page, offset]


def _codes(listed, column):
    page, offset = divmod(int(listed.indices[0, column]), listed.cache.shape[1])
    return get_layout(listed.layout).planes(listed.cache)[0][page, offset]


def test_every_code_and_every_scale_that_float16_holds():
    """A row of each scale that has every code in each place of a byte, and the sign of zero."""
    tokens = 2
    main = scope(tokens, 130, lengths=[130, 107], page=16, layout=FP4)
    scales = [s for s in range(256) if s & 0x7F <= 0x6A]
    for row, first in enumerate(range(0, len(scales), 32)):
        some = scales[first : first + 32]
        _scales(main, row)[: len(some)] = torch.tensor(some, dtype=torch.uint8)
        _codes(main, row)[:] = (torch.arange(256) * 7 + row).to(torch.uint8)
    made = Scene(torch.randn(tokens, 3, CHANNELS).bfloat16() * 0.01, main)
    made.expected().check(run(made, schedule_of(3, tokens, "whole", 1)))


@pytest.mark.parametrize(("heads", "way"), [(5, "every"), (34, "tail"), (34, "stream-K")])
@pytest.mark.parametrize(
    "what",
    ["FP8 scale", "small FP8 scale", "last FP8 scale", "FP4 scale", "negative FP4 scale", "large q",
     "NaN code", "NaN FP8 scale", "NaN FP4 scale"],
)  # fmt: skip
def test_what_float16_cannot_hold(heads, way, what):
    q = torch.randn(2, heads, CHANNELS).bfloat16()
    main, extra = two_scopes(2, (FP8, FP4), (70, 66), (40, 65))
    main.indices[0, 3], extra.indices[0, 3] = main.indices[0, 2], extra.indices[0, 2]
    listed = extra if "FP4" in what else main
    bad = int(listed.indices[0, 17])
    scale = CHANNELS**-0.5
    if what in ("FP8 scale", "last FP8 scale"):
        _scales(main, 17)[15 if "last" in what else 4] = 140
        scale = 2.0**-24
    elif what == "small FP8 scale":
        _scales(main, 17)[9] = 60
    elif what == "FP4 scale":
        _scales(extra, 17)[31] = 0x6B
        scale = 2.0**-12
    elif what == "negative FP4 scale":
        _scales(extra, 17)[0] = 0xFE
        scale = 2.0**-14
    elif what == "large q":
        q[0] *= 2.0**30
        q[1] *= 2.0**-8
        scale = 2.0**-34
    elif what == "NaN code":
        _codes(main, 17)[500] = 0x7F
    elif what == "NaN FP8 scale":
        _scales(main, 17)[3] = 255
    else:
        _scales(extra, 17)[20] = 0xFF
    out, lse = run(Scene(q, main, extra, torch.zeros(heads)), schedule_of(heads, 2, way, 3), scale)
    if "NaN" in what:
        lists = torch.tensor([bad in listed.indices[t, : listed.lengths[t]] for t in range(2)])
        assert lists[0]
        assert out[lists].isnan().any(-1).all()
        assert lse[lists].isnan().all()
        assert out[~lists].isfinite().all()
        assert lse[~lists].isfinite().all()
        return
    rows = [torch.cat((main.rows(token), extra.rows(token))) for token in range(2)]
    attend(q, rows, torch.zeros(heads), scale).check((out, lse))


def test_the_lse_of_a_token_without_rows_is_what_was_asked_for():
    made = Scene(torch.randn(2, 3, CHANNELS).bfloat16(), scope(2, 9, lengths=[0, 9], layout=FP8))
    out, lse = run(made, schedule_of(3, 2, "whole", 2), empty=torch.inf)
    assert (lse[0] == torch.inf).all()
    assert not out[0].any()
    assert lse[1].isfinite().all()


# What they take ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("hopper")
def test_what_they_take_and_refuse():
    for first, second in PAIRS:
        answer = asked(layout=first, extra=() if second is None else (Cache(), second))
        assert answer.automatic
    for first, second in ((MAIN_FP8, FP4), (FP8, MAIN_FP8), (FP8, "rows_bf16_512")):
        answer = asked(layout=first, extra=(Cache(), second))
        assert not answer
        assert "layouts" in answer.reason


# What they compute ------------------------------------------------------------------------------


@pytest.fixture
def device():
    return a_device()


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("layouts", [(FP8, FP4), (FP8_SPLIT, FP4_SPLIT), (FP8, FP8), (FP4, None)])
@pytest.mark.parametrize(("heads", "tokens"), [(16, 5), (32, 150), (64, 1), (64, 150), (128, 140)])
def test_any_lists_on_a_gpu(device, layouts, heads, tokens):
    lengths = torch.randint(-1, 132, (tokens,)).clamp(0, 130).tolist()
    more = torch.randint(-1, 502, (tokens,)).clamp(0, 500).tolist()
    lengths[0], more[0] = 130, 500
    q = torch.randn(tokens, heads, CHANNELS).bfloat16()
    made = Scene(q, *two_scopes(tokens, layouts, lengths, more), sink_of(heads))
    arguments, keywords = made.arguments()
    attention = on_device(sparse_attention, device)
    first = attention(*arguments, **keywords, backend="gluon_sm90")
    made.expected().check(first)
    again = attention(*arguments, **keywords, backend="gluon_sm90")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize(("heads", "tokens"), [(16, 140), (64, 3), (64, 140)])
def test_quantised_heads_on_a_gpu(device, heads, tokens):
    q = torch.randn(tokens, heads, CHANNELS).bfloat16()
    lengths, more = [130] * tokens, [300] * tokens
    made = Scene(q, *two_scopes(tokens, (FP8, FP4), lengths, more), torch.zeros(heads))
    arguments, keywords = made.arguments()
    keywords["backend"] = "gluon_sm90"
    out, _ = on_device(sparse_attention, device)(*arguments, **keywords)
    table, positions = torch.randn(9, 64), torch.arange(tokens) % 9
    want = on_device(inverse_rope_fp8_quant, device)(
        out, positions, table, n_groups=2, backend="triton"
    )
    got = on_device(sparse_attention, device)(
        *arguments, epilogue=InverseRopeQuant(positions, table, 2), **keywords
    )
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("tokens", [3, 140])
@pytest.mark.parametrize("what", ["FP8 scale", "FP4 scale"])
def test_what_float16_cannot_hold_on_a_gpu(device, tokens, what):
    q, scale = torch.randn(tokens, 64, CHANNELS).bfloat16(), 2.0**-24
    main, extra = two_scopes(tokens, (FP8, FP4), [100] * tokens, [300] * tokens)
    if what == "FP8 scale":
        _scales(main, 17)[13] = 140
    else:
        _scales(extra, 17)[13] = 0xFE
    sink = torch.zeros(64)
    arguments, keywords = Scene(q, main, extra, sink).arguments()
    attention = on_device(sparse_attention, device)
    result = attention(*arguments, **keywords, scale=scale, backend="gluon_sm90")
    rows = [torch.cat((main.rows(token), extra.rows(token))) for token in range(tokens)]
    attend(q, rows, sink, scale).check(result)
