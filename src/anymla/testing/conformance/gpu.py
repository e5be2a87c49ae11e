"""Cases A6 and M4: captured graphs, and compilation at run time. They need a CUDA device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows
from anymla.testing.conformance.expected import Attention
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import NotApplicable, case, expect
from anymla.testing.conformance.scene import Scene, scene
from anymla.testing.device_bridge import to_device
from anymla.testing.generate import hostile_indices
from anymla.testing.tolerance import assert_identical

_DEVICE = torch.device("cuda")
_INSERT = "quantize_and_insert_k_cache"


def _on_device(given: Scene) -> tuple[Tensor, list[CacheRows], dict[str, Any]]:
    """Return the arguments of ``sparse_attention``: queries, rows, and the rest by name."""
    (q, rows), keywords = to_device(given.arguments()[0], _DEVICE), given.arguments()[1]
    return q, rows, dict(zip(keywords, to_device([*keywords.values()], _DEVICE), strict=True))


@case(
    "A6",
    "padding rows of a captured graph write nothing shared and change no other row",
    "sparse_attention",
    _INSERT,
    gpu=True,
)
def graph_padding(ops: Ops) -> None:
    tokens, real = 8, 5
    given = scene(tokens=tokens, sink=True)
    want = given.expected()
    q, listed, keywords = _on_device(given)
    target = to_device(get_layout(MAIN_FP8).allocate(2, 64, fill=0xFF), _DEVICE)
    rows = torch.randn(tokens, 512, device=_DEVICE).bfloat16()
    slots = torch.arange(3, 3 + 9 * tokens, 9, device=_DEVICE)

    def step() -> tuple[Tensor, Tensor | None]:
        ops.quantize_and_insert_k_cache(rows, target, slots)
        result: tuple[Tensor, Tensor | None] = ops.sparse_attention(q, listed, **keywords)
        return result

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = step()
        slots[real:] = -1
        q[real:], rows[real:] = torch.nan, torch.nan
        for each in listed:
            hostile = hostile_indices(listed[0].limit, tokens - real, each.width)
            each.indices[real:] = hostile.to(_DEVICE)
            assert each.lengths is not None
            each.lengths[real:] = 0
        target.fill_(0xFF)
        graph.replay()
        stream.synchronize()
    expected = Attention(
        want.out[:real], want.lse[:real], want.weight[:real], want.score_norm[:real]
    )
    its_lse = None if lse is None else lse[:real].cpu()
    expected.check((out[:real].cpu(), its_lse), f"{real} of {tokens} rows replayed")
    expect(bool((out[real:] == 0).all()), "padding rows must give exactly 0")
    alone = torch.full_like(target, 0xFF)
    ops.quantize_and_insert_k_cache(rows[:real], alone, slots[:real])
    assert_identical(target.cpu(), alone.cpu(), name="cache after the padded step")


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """Collect names of the kernels that Triton compiles inside the block."""
    try:
        from triton import knobs
    except ImportError:
        raise NotApplicable("triton, which could compile, is not installed") from None
    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> None:
        names.append(str(kwargs.get("repr", "a kernel")).split(" ")[0])

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


@case(
    "M4",
    "no compilation for a token count not seen before",
    "sparse_attention",
    "topk_per_row",
    "hc_pre",
    "hc_post",
    gpu=True,
)
def no_new_compilation(ops: Ops) -> None:
    most = 128
    q, listed, keywords = _on_device(scene(tokens=most, heads=2, extra=0))
    logits = torch.randn(most, 600, device=_DEVICE)
    ends = torch.full((most,), 600, dtype=torch.int32, device=_DEVICE)
    h, u = torch.randn(most, 4, 64, device=_DEVICE), torch.randn(most, 64, device=_DEVICE)
    fn, base = torch.randn(24, 256, device=_DEVICE) / 16, torch.randn(24, device=_DEVICE)
    scale = torch.ones(3, device=_DEVICE)

    def step(tokens: int) -> None:
        some = slice(0, tokens)
        ops.sparse_attention(q[some], [each.part(some) for each in listed], **keywords)
        ops.topk_per_row(logits[some], torch.zeros_like(ends[some]), ends[some], 512)
        _, post, comb = ops.hc_pre(h[some], fn, base, scale, norm_eps=1e-6, hc_eps=1e-6, iters=20)
        ops.hc_post(u[some], h[some], post, comb)

    # An engine warms up powers of two.
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        step(tokens)
    with _compilations() as compiled:
        for tokens in (3, 5, 7, 11, 17, 31, 48, 80, 100, 127):
            step(tokens)
            expect(not compiled, f"{tokens} tokens compiled {', '.join(compiled)}")
    torch.cuda.synchronize()
