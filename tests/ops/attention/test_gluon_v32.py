"""The Hopper kernel for V3.2's rows: its text on the host, and itself on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from paged import a_device
from test_gluon_attention import Cache, asked, fake, hopper  # noqa: F401, a fixture
from test_gluon_kernels import combined, schedule_of

from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops.attention import sparse_attention
from anymla.ops.attention.gluon_sm90_decode_launch import schedule_constants
from anymla.ops.attention.gluon_sm90_decode_m64 import decode_m64_kernel
from anymla.testing.conformance.expected import attend
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.device_bridge import on_device
from crossrun.hopper import Descriptor
from crossrun.hopper import run as run_kernel

CHANNELS, VALUES = 576, 512


def run(made, schedule, scale=CHANNELS**-0.5, empty=-torch.inf):
    """The kernel, and its partials combined."""
    q, main = made.q, made.main
    tokens, heads, _ = q.shape
    out = torch.full((tokens, heads, VALUES), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    part = torch.full((schedule.slots(tokens), 64, VALUES), torch.nan, dtype=torch.float16)
    sums = torch.full((schedule.slots(tokens), 64, 4), torch.nan)
    spans = torch.full((tokens * schedule.head_tiles + schedule.ctas, 2), -9, dtype=torch.int32)
    flags = torch.full((schedule.split_count(tokens), 64), torch.nan)
    sink = torch.zeros(heads) if made.sink is None else made.sink.float()
    limit = len(main.cache) * main.cache.shape[1]
    rows = lambda x: Descriptor(x.view(-1, VALUES), [64, VALUES // 2])  # noqa: E731
    run_kernel(
        decode_m64_kernel, schedule.ctas,
        q, main.cache, main.cache, main.indices, main.indices, main.lengths, main.lengths, sink,
        out, lse, part, sums, spans, flags,
        tokens, heads, main.indices.shape[1], main.indices.shape[1], limit, limit,
        main.indices.stride(0), main.indices.stride(0), schedule.splits,
        q.stride(0) // 2, out.stride(0), torch.tensor(scale, dtype=torch.float32).item(), empty,
        lse, lse, lse, 0, ROPE_DIM=0,
        **schedule_constants(schedule, tokens) | {"SIZE": 128},
        TWO=False, LENGTH0=True, LENGTH1=False,
        PAGE0=main.cache.shape[1], PAGE1=main.cache.shape[1],
        STEP0=main.cache.stride(0), STEP1=main.cache.stride(0), SINK=made.sink is not None,
        Q_HEAD=q.stride(1) // 2, OUT_HEAD=out.stride(1), CONSUMER1_REGISTERS=0,
        PRODUCER_REGISTERS=0, V32=True, CODEC0=None, CODEC1=None, q_desc=None,
        out_desc=rows(out) if heads % 64 == 0 else None,
        part_desc=rows(part) if schedule.cut else None,
    )  # fmt: skip
    if schedule.cut:
        sink = sink if made.sink is not None else None
        combined(schedule, part, sums, spans, sink, out, lse, empty, lifted=VALUES)
    return out, lse


@pytest.mark.parametrize(
    ("heads", "tokens", "page", "way"),
    [
        (36, 4, 64, "whole"), (36, 4, 64, "aligned"), (66, 2, 1, "whole"), (36, 4, 53, "stream"),
        (64, 2, 1, "aligned"),
    ],
)  # fmt: skip
def test_any_lists(heads, tokens, page, way):
    lengths = [200, 0, 7, 64][:tokens]
    made = Scene(
        torch.randn(tokens, heads, CHANNELS).bfloat16(),
        scope(tokens, 200, lengths=lengths, page=page, layout=V32_FP8, poison_behind=True),
        sink=torch.tensor([0.0, torch.inf, -torch.inf, 2.0, -1.0])[torch.arange(heads) % 5],
        value_dim=VALUES,
    )
    made.expected().check(run(made, schedule_of(heads, tokens, way, 3)))


@pytest.mark.parametrize(
    ("what", "way"),
    [
        ("large scale", "whole"), ("large scale", "aligned"), ("large scale", "stream"),
        ("small scale", "whole"), ("negative scale", "whole"), ("large q", "stream"),
        ("q's tail", "aligned"), ("tail", "whole"), ("NaN", "stream"),
    ],
)  # fmt: skip
def test_what_float16_cannot_hold(what, way):
    heads = 64
    q = torch.randn(2, heads, CHANNELS).bfloat16()
    main = scope(2, 70, lengths=[70, 66], layout=V32_FP8)
    made = Scene(q, main, sink=torch.zeros(heads), value_dim=VALUES)
    data, _ = get_layout(V32_FP8).planes(main.cache)
    bad = int(main.indices[0, 17])
    page, offset = divmod(bad, main.cache.shape[1])
    scales = data[page, offset, 512:528].view(torch.float32)
    scale = CHANNELS**-0.5
    if what == "large scale":
        scales[3] = 2.0**13
        scale = 2.0**-24
    elif what == "small scale":
        scales[1] = 2.0**-60
    elif what == "negative scale":
        scales[2] *= -1
    elif what == "large q":
        q[0] *= 2.0**30
        q[1] *= 2.0**-8
        scale = 2.0**-34
    elif what == "q's tail":
        q[0, :, 512:] *= 2.0**12
        scale = 2.0**-14
    elif what == "tail":
        data[page, offset, 528:] = torch.full((64,), 3e5).bfloat16().view(torch.uint8)
        scale = 2.0**-22
    else:
        data[page, offset, 100] = 0x7F
    out, lse = run(made, schedule_of(heads, 2, way, 3), scale)
    if what == "NaN":
        lists = torch.tensor([bad in main.indices[t, :n] for t, n in enumerate((70, 66))])
        assert out[lists].isnan().any(-1).all()
        assert lse[lists].isnan().all()
        assert out[~lists].isfinite().all()
        assert lse[~lists].isfinite().all()
        return
    rows = [main.rows(token) for token in range(2)]
    attend(q, rows, made.sink, scale, VALUES).check((out, lse))


def test_blocks_whose_codes_are_zeros_may_have_the_smallest_scale():
    """Other writers divide by the largest magnitude, but by no less than the smallest float32."""
    made = Scene(
        torch.randn(2, 64, CHANNELS).bfloat16(), scope(2, 70, layout=V32_FP8), value_dim=VALUES
    )
    data, _ = get_layout(V32_FP8).planes(made.main.cache)
    for slot in made.main.indices[0, :9].tolist():
        page, offset = divmod(slot, made.main.cache.shape[1])
        data[page, offset, 128:256] = 0
        data[page, offset, 512:528].view(torch.float32)[1] = 2.0**-126
    made.expected().check(run(made, schedule_of(64, 2, "whole", 2)))


def test_the_lse_of_a_token_without_rows_is_what_was_asked_for():
    q = torch.randn(2, 40, CHANNELS).bfloat16()
    made = Scene(q, scope(2, 9, lengths=[0, 9], layout=V32_FP8), value_dim=VALUES)
    out, lse = run(made, schedule_of(40, 2, "whole", 2), empty=torch.inf)
    assert (lse[0] == torch.inf).all()
    assert not out[0].any()
    assert lse[1].isfinite().all()


# What it takes ----------------------------------------------------------------------------------


def wide_call(heads=64, **more):
    q = more.pop("q", fake(shape=(2, heads, CHANNELS)))
    return asked(q, Cache(stride=41984), layout=V32_FP8, **{"value_dim": VALUES} | more)


@pytest.mark.usefixtures("hopper")
def test_what_it_takes_and_refuses():
    assert wide_call()
    assert wide_call(heads=128)
    for reason, arguments in (
        ("more than 32 heads", {"heads": 32}),
        ("one cache", {"extra": (Cache(), V32_FP8)}),
        ("channels", {"value_dim": None}),
        ("channels", {"value_dim": 500}),
        ("bfloat16", {"q": fake(torch.float16, shape=(2, 64, CHANNELS))}),
        ("scale", {"scale": 0.0}),
    ):
        answer = wide_call(**arguments)
        assert not answer
        assert reason in answer.reason


# What it computes -------------------------------------------------------------------------------


@pytest.fixture
def attention():
    """The operation on CPU tensors, run on the GPU on the same bytes."""
    return on_device(sparse_attention, a_device())


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [33, 64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_number_of_tokens(attention, heads, tokens, batch_invariant):
    lengths = torch.randint(-1, 402, (tokens,)).clamp(0, 400).tolist()
    made = Scene(
        torch.randn(tokens, heads, CHANNELS).bfloat16(),
        scope(tokens, 400, lengths=lengths, page=53, layout=V32_FP8, poison_behind=True),
        sink=torch.randn(heads),
        value_dim=VALUES,
    )
    arguments, keywords = made.arguments()
    keywords |= {"batch_invariant": batch_invariant, "backend": "gluon_sm90"}
    first = attention(*arguments, **keywords)
    made.expected().check(first)
    again = attention(*arguments, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    if batch_invariant:
        q, rows = arguments
        last = slice(tokens - 1, tokens)
        alone = attention(q[last], [each.part(last) for each in rows], **keywords)
        assert all(torch.equal(a, b[last]) for a, b in zip(alone, first, strict=True))


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("tokens", [3, 140])
@pytest.mark.parametrize("what", ["tail", "scale", "small scale", "q"])
def test_what_float16_cannot_hold_on_a_gpu(attention, tokens, what):
    q = torch.randn(tokens, 64, CHANNELS).bfloat16()
    made = Scene(q, scope(tokens, 500, layout=V32_FP8), sink=torch.zeros(64), value_dim=VALUES)
    data, _ = get_layout(V32_FP8).planes(made.main.cache)
    page, offset = divmod(int(made.main.indices[0, 17]), made.main.cache.shape[1])
    scales = data[page, offset, 512:528].view(torch.float32)
    scale = 2.0**-24
    if what == "tail":
        data[page, offset, 528:] = torch.full((64,), 3e5).bfloat16().view(torch.uint8)
    elif what == "scale":
        scales[3] = 2.0**13
    elif what == "small scale":
        scales[1] = 2.0**-60
        scale = CHANNELS**-0.5
    else:
        q[0] *= 2.0**30
        q[1:] *= 2.0**-8
        scale = 2.0**-34
    arguments, keywords = made.arguments()
    result = attention(*arguments, **keywords, scale=scale, backend="gluon_sm90")
    rows = [made.main.rows(token) for token in range(tokens)]
    attend(q, rows, made.sink, scale, VALUES).check(result)
