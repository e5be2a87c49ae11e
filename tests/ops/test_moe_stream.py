"""Hopper's stream of experts on the host: the kernel's own text, with torch tensors for Gluon's.

See ``gluon_on_host`` for what that shows and what not. Copies land at once here, so a stage that is
asked for before its place is free overwrites what is still needed.
"""

import contextlib
import importlib
import sys

import gluon_on_host as host
import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.moe import experts
from anymla.testing.tolerance import assert_close, assert_identical, ulps

PARTS = ("stream", "requests", "products")
E, K, D, I = 4, 2, 512, 512  # noqa: E741
LIMIT = 1.5


class Language(host.Language):
    def load(self, pointer, mask=True, other=0, cache_modifier=""):
        return super().load(pointer, mask, other)

    def where(self, condition, a, b):
        if isinstance(a, host.Pointer):
            address = torch.where(condition, a.address, b.address)
            return host.Pointer(a.dtype, host.value(address))
        return super().where(condition, a, b)

    def maximum(self, a, b):
        return host.value(torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)))

    def exp(self, x):
        return torch.exp(x)


def spoken(monkeypatch, *parts):
    """The first part, imported anew with all of them, and the language it speaks."""
    language = Language()
    names = [f"anymla.ops.moe.gluon_sm90_{part}" for part in parts]
    names += ["anymla.ops.pdl", "anymla.ops._gluon"]
    stand_ins = host._stand_ins(language)
    copies = stand_ins["triton.experimental.gluon.language.nvidia.ampere"].async_copy
    copies.async_copy_global_to_shared = lambda to, pointer, mask=True: to.store(
        language.load(pointer, mask)
    )
    for name in [name for name in sys.modules if name.startswith("triton") or name in names]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module(names[0]), language
    for name in names:
        sys.modules.pop(name, None)
        with contextlib.suppress(AttributeError):
            package, _, part = name.rpartition(".")
            delattr(sys.modules[package], part)


@pytest.fixture
def stream(monkeypatch):
    """The kernel's module, and the language that it speaks."""
    yield from spoken(monkeypatch, *PARTS)


def operands(x):
    """Codes in the order of decoded words, and scales."""
    codes, scales = quantize_fp8_rows(x)
    place = torch.arange(x.shape[1])
    within = place % 32
    channel = place - within + 8 * (within // 4 % 4) + 2 * (within % 4) + within // 16
    return codes[:, channel].contiguous(), scales.contiguous()


def plan(ids, columns, experts=E):
    """Pairs by expert, and blocks without gaps between them."""
    order, blocks = [], []
    for expert in range(experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        starts = range(0, len(mine), columns)
        ends = [min(start + columns, len(mine)) for start in starts]
        blocks += [
            (expert, len(order) + a, len(order) + b) for a, b in zip(starts, ends, strict=True)
        ]
        order += mine
    most = ids.numel() // columns + min(ids.numel(), experts)
    table = torch.full((3, most), 1 << 30, dtype=torch.int32)
    table[:, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32).T
    table = torch.cat((table.flatten(), torch.tensor([len(blocks)], dtype=torch.int32)))
    return torch.tensor(order, dtype=torch.int32), table, most


def launched(stream, x, x_scales, weights, made, tensors, out, columns, form):
    """One of the two products by a kernel of ``form``: programs, rows, channels, LATER."""
    module, language = stream
    programs, rows, channels, later = form
    order, table, most = made
    matrices, storages = [], {}
    for tensor in tensors:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        base = storages.setdefault(whole.data_ptr(), language.memory.pointer(whole))
        matrices += [base + tensor.storage_offset(), tensor.stride(0), None]
    given = [
        None if each is None else language.memory.pointer(each)
        for each in (x, x_scales, weights, order, table)
    ]
    language.programs = programs
    up = len(tensors) == 4
    width = x.shape[1]
    for program in range(programs):
        language.program = program
        module.stream_kernel(
            *given, *matrices, *([] if up else [None] * 6), language.memory.pointer(out),
            host.value(most), host.value(LIMIT), K=host._constexpr(width), OUT=out.shape[1],
            PER_TOKEN=K if up else 1, M=rows, N=columns, CHUNK=channels,
            STAGES=width // channels - 1, UP=up, W_UNIT=1,
            WARPS=rows // 16, TOGETHER=1, BATCH=2, LATER=later, PDL=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "columns", "up", "down"),
    [
        (1, 8, (3, 64, 256, 4), (2, 128, 256, 0)),
        (11, 16, (4, 128, 256, 0), (3, 64, 256, 4)),
    ],
)
def test_the_stream_of_experts(stream, tokens, columns, up, down):
    w1, w3, w2 = (torch.randn(E, n, k) / 9 for n, k in ((I, D), (I, D), (D, I)))
    # What one access reads is in one tensor here.
    (w13, s13), (w2, s2) = quantize_mxfp4(torch.stack((w1, w3))), quantize_mxfp4(w2)
    s2[1, 5, 3], s2[1, 9, 2] = 0, 255
    x, weights = torch.randn(tokens, D).bfloat16(), torch.rand(tokens, K)
    ids = torch.rand(tokens, E).argsort(1)[:, :K].int()
    ids[0, 0] = E + 3
    made = plan(ids, columns)
    inner, results = (torch.full((tokens * K, n), torch.nan).bfloat16() for n in (I, D))
    flat = weights.flatten()
    launched(stream, *operands(x), flat, made, (w13[0], s13[0], w13[1], s13[1]), inner, columns, up)
    launched(stream, inner, None, flat, made, (w2, s2), results, columns, down)
    here = (ids < E).flatten()
    assert results[~here].isnan().all()
    results[~here] = 0
    got = results.view(tokens, K, D).float().sum(1).bfloat16()
    want = experts(
        x, ids, weights, *(list(w) for w in (*w13, w2)), *(list(s) for s in (*s13, s2)),
        weight_format="mxfp4", swiglu_limit=LIMIT, quantize_activations=True, backend="reference",
    )  # fmt: skip
    spoiled = want.isnan()
    assert torch.equal(got.isnan(), spoiled)
    assert spoiled.any() == (ids == 1).any()
    # Sums in another order, after which a value may round the other way.
    assert_close(got[~spoiled], want[~spoiled], atol=ulps(torch.bfloat16, 4))


@pytest.mark.parametrize(
    ("tokens", "columns", "count"), [(2, 8, E), (9, 8, E), (90, 16, E), (150, 8, 70)]
)
def test_pairs_by_expert_and_operands(tokens, columns, count):
    triton_prepare = pytest.importorskip("anymla.ops.moe.triton_prepare")
    ids = torch.rand(tokens, count).argsort(1)[:, :K].int() + 3
    ids[0, 0], ids[-1, 1] = -1, count + 3
    x = torch.randn(tokens, 128).bfloat16()
    matrices = [[torch.empty(I, 64, dtype=torch.uint8)] * count] * 3
    call = triton_prepare.Call(x, ids, torch.rand(tokens, K), matrices, [], "mxfp4", 0.0, True, 3)
    coded, scales, made = triton_prepare.prepare(call, columns)
    order, table, most = plan(ids - 3, columns, count)
    assert made.most == most
    assert_identical(made.order[: len(order)], order)
    blocks = int(table[-1])
    assert made.table[-1] == blocks
    got, want = made.table[:-1].view(3, most), table[:-1].view(3, most)
    assert_identical(got[:, :blocks], want[:, :blocks])
    want_codes, want_scales = operands(x)
    assert_identical(coded, want_codes)
    assert_identical(scales, want_scales)
