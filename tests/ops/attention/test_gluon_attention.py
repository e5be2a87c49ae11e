"""The Hopper kernels of sparse attention: what they take, and on a GPU what they compute."""

import types

import pytest
import torch
from paged import a_device

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.attention import decode_support as support
from anymla.ops.device import TARGETS, Support
from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.expected import attend
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.device_bridge import on_device, to_device

BACKEND = "gluon_sm90"


# What they take ---------------------------------------------------------------------------------


def fake(dtype=torch.bfloat16, shape=(2, 64, 512), at=0, stride=37440):
    return types.SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, shape=shape, data_ptr=lambda: at,
        numel=lambda: 1, stride=lambda dim: stride, __len__=lambda: shape[0],
    )  # fmt: skip


class Cache:
    def __init__(self, at=0, stride=37440, entries=64):
        self.shape = (3, entries, 584)
        self._at, self._stride = at, stride

    def numel(self):
        return 1

    def data_ptr(self):
        return self._at

    def stride(self, _):
        return self._stride

    def __len__(self):
        return 3


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(support, "triton_support", lambda q: Support(True))


def asked(q=None, cache=None, layout=MAIN_FP8, extra=(), **keywords):
    """The kernels' answer; ``extra`` is the second cache and its layout."""
    rows = [CacheRows(cache or Cache(), layout, None)]
    if extra:
        rows.append(CacheRows(*extra, None))
    return support.gluon_attention_support(q or fake(), rows, **keywords)


@pytest.mark.usefixtures("hopper")
def test_what_they_take():
    assert asked()
    assert asked(extra=(Cache(stride=1728, entries=2), MAIN_FP8))
    assert asked(fake(torch.float16))
    assert not asked(fake(torch.float16)).automatic


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        ("bfloat16 or float16", {"q": fake(torch.float32)}),
        ("v4_main_fp8", {"layout": "rows_bf16_512"}),
        ("v4_main_fp8", {"extra": (Cache(), "rows_bf16_512")}),
        ("16 bytes", {"cache": Cache(at=8)}),
        ("16 bytes", {"extra": (Cache(stride=37448), MAIN_FP8)}),
        ("below", {"cache": Cache(entries=1 << 24)}),
        ("scale", {"scale": -0.1}),
        ("scale", {"scale": 0.0}),
        ("values", {"value_dim": 448}),
    ],
)
def test_what_they_refuse(reason, arguments):
    answer = asked(**arguments)
    assert not answer
    assert reason in answer.reason


def test_other_machines_say_what_they_need(monkeypatch):
    made = Scene(torch.randn(2, 3, 512).bfloat16(), scope(2, 5))
    arguments, keywords = made.arguments()
    with pytest.raises(BackendUnavailable, match=r"capability 9\.0"):
        sparse_attention(*arguments, **keywords, backend=BACKEND)
    monkeypatch.setattr(support, "target_of", lambda device: TARGETS["sm_100"])
    assert "9.0" in asked().reason


def test_lists_without_lengths_get_endless_ones(monkeypatch):
    pytest.importorskip("triton")
    launcher = pytest.importorskip("anymla.ops.attention.gluon_sm90_decode_launch")
    capturing = [True]
    monkeypatch.setattr(launcher, "_endless", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def lengths_of(tokens, given=None):
        indices = torch.zeros(tokens, 1, dtype=torch.int32)
        rows = CacheRows(torch.zeros(1, 1, 584), MAIN_FP8, indices, given)
        return launcher._with_lengths(rows).lengths

    given = torch.tensor([3], dtype=torch.int32)
    assert lengths_of(1, given) is given
    assert lengths_of(1) is None
    capturing[0] = False
    for tokens in (1, 5000, 20):
        made = lengths_of(tokens)
        assert made.dtype == torch.int32
        assert made.tolist() == [2**31 - 1] * tokens


# What they compute ------------------------------------------------------------------------------


@pytest.fixture
def attention():
    """The operation on CPU tensors, run on the GPU on the same bytes."""
    return on_device(sparse_attention, a_device())


def lengths(width, tokens):
    return torch.randint(-1, width + 2, (tokens,)).clamp(0, width).tolist()


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 33, 64, 100, 128])
@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_number_of_heads_and_tokens(attention, heads, tokens, batch_invariant):
    made = Scene(
        torch.randn(tokens, heads, 512).bfloat16(),
        scope(tokens, 128, lengths=lengths(128, tokens)),
        scope(tokens, 300, lengths=lengths(300, tokens), page=2, poison_behind=True),
        torch.randn(heads),
    )
    arguments, keywords = made.arguments()
    first = attention(*arguments, **keywords, batch_invariant=batch_invariant, backend=BACKEND)
    made.expected().check(first)
    again = attention(*arguments, **keywords, batch_invariant=batch_invariant, backend=BACKEND)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    if batch_invariant:
        last = slice(tokens - 1, tokens)
        q, rows = arguments
        alone = attention(
            q[last], [each.part(last) for each in rows], **keywords,
            batch_invariant=True, backend=BACKEND,
        )  # fmt: skip
        assert all(torch.equal(a, b[last]) for a, b in zip(alone, first, strict=True))


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("tokens", [3, 140])
@pytest.mark.parametrize("what", ["rope", "scale", "small scale", "q"])
def test_what_float16_cannot_hold(attention, heads, tokens, what):
    q = torch.randn(tokens, heads, 512).bfloat16()
    made = Scene(q, scope(tokens, 500, page=53), sink=torch.zeros(heads))
    data, scales = get_layout(MAIN_FP8).planes(made.main.cache)
    page, offset = divmod(int(made.main.indices[0, 17]), made.main.cache.shape[1])
    scale = 2.0**-24
    if what == "rope":
        data[page, offset, 448:] = torch.full((64,), 3e5).bfloat16().view(torch.uint8)
    elif what == "scale":
        scales[page, offset, 3] = 140
    elif what == "small scale":
        scales[page, offset, 3] = 60
        scale = 512**-0.5
    else:
        q[0] *= 2.0**30
        scale = 2.0**-34
        q[1:] *= 2.0**-8
    arguments, keywords = made.arguments()
    result = attention(*arguments, **keywords, scale=scale, backend=BACKEND)
    rows = [made.main.rows(token) for token in range(tokens)]
    attend(q, rows, made.sink, scale).check(result)


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("tokens", [2, 140])
def test_nan_reaches_those_who_list_it_and_nobody_else(attention, heads, tokens):
    made = Scene(torch.randn(tokens, heads, 512).bfloat16(), scope(tokens, 400))
    arguments, keywords = made.arguments()
    clean = attention(*arguments, **keywords, backend=BACKEND)
    data, _ = get_layout(MAIN_FP8).planes(made.main.cache)
    bad = int(made.main.indices[1, 3])
    page, offset = divmod(bad, made.main.cache.shape[1])
    data[page, offset, 100] = 0x7F
    out, lse = attention(*arguments, **keywords, backend=BACKEND)
    lists = (made.main.indices == bad).any(1)
    assert out[lists].isnan().any(-1).all()
    assert lse[lists].isnan().all()
    assert torch.equal(out[~lists], clean[0][~lists])
    assert torch.equal(lse[~lists], clean[1][~lists])


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [16, 64])
def test_a_graph_follows_the_lengths(attention, heads):
    tokens, width, device = 140, 1000, a_device()
    made = Scene(torch.randn(tokens, heads, 512).bfloat16(), scope(tokens, width))
    q, rows = to_device(made.arguments()[0], device)
    run = lambda: sparse_attention(q, rows, backend=BACKEND)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for seed in range(3):
        torch.manual_seed(seed)
        made.main.lengths.copy_(torch.tensor(lengths(width, tokens)))
        rows[0].lengths.copy_(made.main.lengths)
        graph.replay()
        made.expected().check((out.cpu(), lse.cpu()))
