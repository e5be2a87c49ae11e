"""Decode attention over the paged FP8 caches, beside FlashMLA and vLLM's path for XPU.

In one process, on the same bytes: graph replay over rotating lists (cold rows), medians. Work is
shared out once for a shape where a library does so; both combines are counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for
from anymla.bench.peers.flash_mla import FlashMla
from anymla.bench.peers.vllm import VllmXpu
from anymla.bench.runner import Case, Clock, Subject, Values, Verdict, at_least
from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_fp8_quant,
    sparse_attention_plan,
)
from anymla.ops.sparse_attention.shapes import V32_DECODE
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries

PART = "decode attention beside FlashMLA"
V32 = "decode attention over V3.2's rows beside FlashMLA"
FP8_HEADS = "decode attention with FP8 heads"
PORTABLE = "portable decode attention beside vLLM's"
# Fields that a label says.
IN_LABEL = ("batch", "rows", "heads", "extra", "page", "ragged", "lengths", "backend", "width")

# What was asked of a shape, times as fast as a peer: few heads, V3.2's rows, vLLM's path.
_LEAST_HEADS, _LEAST, _LEAST_V32, _LEAST_PORTABLE = (8, 16, 32), 1.6, 0.9, 2.0
_WINDOW = 128
_WINDOW_SLOTS, _EXTRA_SLOTS = 1 << 17, 1 << 18
_V32_SLOTS, _V32_PAGE = 1 << 17, 64  # 86 MB of rows: more than an L2 cache
_MOST_LISTS = 16
_POSITIONS, _ROTATED, _GROUPS, _PEER_HEADS = 1 << 12, 64, 8, 64


@dataclasses.dataclass(frozen=True)
class Decode:
    """One call over DeepSeek-V4's rows.

    Attributes:
        batch: requests.
        rows: queries of a request, FlashMLA's s_q.
        heads: query heads.
        extra: slots of the second list; 0 for none.
        page: entries of a page of the second cache.
        ragged: lengths of the second list are random.
        lengths: lengths are given; if not, lists are full.
    """

    batch: int
    rows: int
    heads: int
    extra: int
    page: int = 64
    ragged: bool = False
    lengths: bool = True

    @property
    def label(self) -> str:
        """For people."""
        lists = f"{_WINDOW}+{self.extra}" if self.extra else f"{_WINDOW}"
        page = f" page {self.page}" if self.page != 64 else ""
        ragged = " ragged" if self.ragged else ""
        return f"h{self.heads} b{self.batch} s_q{self.rows} {lists}{page}{ragged}"


def shapes() -> Iterator[Decode]:
    """One query a request, shards, FlashMLA's own configurations, windows alone and long lists."""
    batches = (1, 8, 32, 64, 128, 256)
    for heads, extra in ((64, 512), (128, 1024)):
        for batch in batches:
            yield Decode(batch, 1, heads, extra)
    # Few heads, as tensor parallelism leaves them.
    for batch in batches:
        for heads in (8, 16, 32):
            yield Decode(batch, 1, heads, 512)
    # From FlashMLA's public benchmark program.
    for heads, extra, page, ragged in (
        (64, 512, 64, False),
        (128, 1024, 64, False),
        (64, 1024, 2, True),
        (128, 1024, 2, True),
    ):
        for batch in (2, 64, 74, 128, 148, 256):
            yield Decode(batch, 2, heads, extra, page, ragged, lengths=ragged)
    yield Decode(128, 1, 64, 0)
    yield Decode(64, 1, 128, 0)
    yield Decode(128, 1, 64, 4608)
    yield Decode(16, 1, 64, 16384, ragged=True)


def fp8_heads_shapes() -> Iterator[Decode]:
    """One query a request, most important first."""
    for heads, extra, batch in (
        (64, 512, 1), (64, 512, 8), (64, 512, 32), (64, 512, 128), (128, 1024, 1), (128, 1024, 32),
        (128, 1024, 128), (16, 512, 1), (16, 512, 32), (16, 512, 128), (64, 512, 64),
        (128, 1024, 64),
    ):  # fmt: skip
        yield Decode(batch, 1, heads, extra)


def portable_shapes() -> Iterator[Decode]:
    """Flash with 64 heads, one query a request."""
    for batch in (1, 8, 32, 64, 128, 256):
        yield Decode(batch, 1, 64, 512)


@functools.cache
def random_rows(layout_id: str, slots: int, page: int, device: torch.device) -> Tensor:
    """A cache of random rows, which all cases share; their seeds do not depend on it."""
    layout, random = get_layout(layout_id), torch.Generator(device).manual_seed(0)
    made = layout.allocate(slots // page, page, device=device)
    for start in range(0, slots, 1 << 15):
        some = torch.arange(start, min(start + (1 << 15), slots), device=device)
        size = len(some), layout.channels
        layout.write(made, some, torch.randn(size, device=device, generator=random))
    return made


@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """Tensors of a shape; ``lists`` holds some sets of slots to go through."""

    shape: Decode
    q: Tensor
    sink: Tensor
    cache: Tensor
    extra_cache: Tensor | None
    lengths: Tensor | None
    extra_lengths: Tensor | None
    lists: list[tuple[Tensor, Tensor | None]]

    @classmethod
    def draw(cls, shape: Decode, device: torch.device) -> DecodeInputs:
        """Random inputs, as many sets of lists as make the rows cold."""
        cache = random_rows(MAIN_FP8, _WINDOW_SLOTS, 256, device)
        extra_cache = None
        if shape.extra:
            extra_cache = random_rows(MAIN_FP8, _EXTRA_SLOTS, shape.page, device)
        batch, rows = shape.batch, shape.rows
        q = torch.randn(batch, rows, shape.heads, 512, device=device).bfloat16()
        lengths = extra = None
        if shape.lengths:
            lengths = torch.full((batch,), _WINDOW, dtype=torch.int32, device=device)
        if shape.extra and shape.lengths:
            extra = torch.full((batch,), shape.extra, dtype=torch.int32, device=device)
            if shape.ragged:
                extra = torch.randint_like(extra, 0, shape.extra + 1)
        moved = batch * rows * (_WINDOW + shape.extra) * get_layout(MAIN_FP8).entry_bytes
        draw = functools.partial(torch.randint, dtype=torch.int32, device=device)
        lists = [
            (
                draw(0, _WINDOW_SLOTS, (batch, rows, _WINDOW)),
                draw(0, _EXTRA_SLOTS, (batch, rows, shape.extra)) if shape.extra else None,
            )
            for _ in range(min(_MOST_LISTS, copies_for(moved)))
        ]
        sink = torch.randn(shape.heads, device=device)
        return cls(shape, q, sink, cache, extra_cache, lengths, extra, lists)

    def ours(
        self, operation: Callable[..., Any], *args: Any, planned: bool = False, **keywords: Any
    ) -> list[Callable[[], Tensor]]:
        """Calls of one of this package's operations, one for each set of lists.

        Args:
            operation: ``sparse_attention``, or with its output quantised.
            args: after those of ``sparse_attention``.
            planned: work is shared out once for all of them, as FlashMLA's is.
            keywords: of the operation.
        """
        shape = self.shape
        repeat = functools.partial(torch.repeat_interleave, repeats=shape.rows)
        lengths = None if self.lengths is None else repeat(self.lengths)
        keywords |= {"sink": self.sink, "extra_cache": self.extra_cache}
        if self.extra_lengths is not None:
            keywords["extra_lengths"] = repeat(self.extra_lengths)
        if planned:
            keywords["plan"] = sparse_attention_plan(
                lengths,
                keywords.get("extra_lengths"),
                heads=shape.heads,
                width=_WINDOW,
                extra_width=shape.extra or None,
            )
        calls: list[Callable[[], Tensor]] = []
        for window, extra in self.lists:
            more = {} if extra is None else {"extra_indices": extra.flatten(0, 1)}
            given = (self.q.flatten(0, 1), self.cache, window.flatten(0, 1), lengths, *args)
            calls.append(functools.partial(_first, operation, *given, **keywords, **more))
        return calls

    def attention(self, backend: str, *, planned: bool = False) -> list[Callable[[], Tensor]]:
        """Calls of ``sparse_attention``."""
        out = torch.empty_like(self.q.flatten(0, 1))
        return self.ours(sparse_attention, out=out, backend=backend, planned=planned)

    def error(self, out: Tensor) -> float:
        """Relative L2 error of some rows against float64 on the same bytes."""
        shape = self.shape
        window, extra = self.lists[0]
        out = out.reshape(shape.batch, shape.rows, -1, 512)[:, :, : shape.heads]

        def want(b: int) -> Tensor:
            keys = _decoded(MAIN_FP8, self.cache, window[b, 0])
            if extra is not None and self.extra_cache is not None:
                length = self.extra_lengths
                used = extra[b, 0, : shape.extra if length is None else int(length[b])]
                keys = torch.cat((keys, _decoded(MAIN_FP8, self.extra_cache, used)))
            scores = self.q[b, 0].cpu().double() @ keys.T * 512**-0.5
            both = torch.cat((scores, self.sink.cpu().double().unsqueeze(1)), 1).softmax(1)
            return both[:, :-1] @ keys

        return _relative_error(out, want)


def _first(function: Callable[..., tuple[Tensor, ...]], *args: Any, **keywords: Any) -> Tensor:
    return function(*args, **keywords)[0]


def _decoded(layout_id: str, cache: Tensor, slots: Tensor) -> Tensor:
    data, scales = read_entries(cache, slots.long(), layout_id)
    return ROW_FORMATS[layout_id].decode(data.cpu(), scales.cpu()).double()


def _relative_error(out: Tensor, want: Callable[[int], Tensor]) -> float:
    """Of the first queries [B, rows, H, D] of three requests."""
    wrong = right = 0.0
    for b in {0, len(out) // 2, len(out) - 1}:
        wanted = want(b)
        wrong += (out[b, 0].cpu().double() - wanted).norm().item() ** 2
        right += wanted.norm().item() ** 2
    return (wrong / right) ** 0.5


def _times(ours: str, theirs: str, verdict: Callable[[Values], Verdict]) -> Any:
    """A judge: the ratio of both times, where there are both, and what is asked of it."""

    def judge(values: Values) -> tuple[Values, Verdict]:
        if theirs in values:
            values["ratio"] = values[theirs] / values[ours]
        return values, verdict(values)

    return judge


def decode_cases(
    chosen: Iterable[Decode], backend: str, peer: FlashMla | None, *, planned: bool = False
) -> Iterator[Case]:
    """DeepSeek-V4's decode attention, beside FlashMLA if it is given."""
    for shape in chosen:
        least = _LEAST if shape.heads in _LEAST_HEADS else 1.0
        verdict = at_least(least, f"at least {least:g} times FlashMLA's speed")
        yield Case(
            PART,
            shape.label,
            functools.partial(_decode, shape, backend, peer, planned),
            {**dataclasses.asdict(shape), "backend": backend},
            _times("microseconds", "flash_mla_microseconds", verdict),
        )


def _decode(
    shape: Decode, backend: str, peer: FlashMla | None, planned: bool, clock: Clock
) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)
    calls = inputs.attention(backend, planned=planned)

    def before() -> Values:
        found: Values = {"planned": True} if planned else {}
        if shape.ragged and inputs.extra_lengths is not None:
            found["mean_extra_length"] = float(inputs.extra_lengths.double().mean())
        return found | {"error": inputs.error(calls[0]())}

    yield Subject("microseconds", calls, before=before)
    if peer is not None:
        theirs = peer.decode(inputs)
        yield Subject(
            "flash_mla_microseconds",
            theirs,
            before=lambda: {"flash_mla_error": inputs.error(theirs[0]())},
        )


def portable_cases(chosen: Iterable[Decode], peer: VllmXpu) -> Iterator[Case]:
    """The same by portable Triton, beside vLLM's path of that kind."""
    words = f"at least {_LEAST_PORTABLE:g} times the speed of vLLM's path"
    for shape in chosen:
        yield Case(
            PORTABLE,
            shape.label,
            functools.partial(_portable, shape, peer),
            {**dataclasses.asdict(shape), "backend": "triton"},
            _times("us", "xpu_us", at_least(_LEAST_PORTABLE, words)),
        )


def _portable(shape: Decode, peer: VllmXpu, clock: Clock) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)
    mine, theirs = inputs.attention("triton"), peer.decode(inputs)
    yield Subject("us", mine, before=lambda: {"error": inputs.error(mine[0]())})
    yield Subject("xpu_us", theirs, before=lambda: {"xpu_error": inputs.error(theirs[0]())})


def fp8_heads_cases(
    chosen: Iterable[Decode], backend: str, peer: FlashMla | None
) -> Iterator[Case]:
    """Attention alone, then with its epilogue (inverse RoPE, FP8) as two steps, then fused."""

    def judge(values: Values) -> tuple[Values, Verdict]:
        fused = values["microseconds"]
        if "flash_mla_microseconds" in values:
            values["ratio"] = values["flash_mla_microseconds"] / fused
        met = values["same_bytes"] and fused <= values["apart_microseconds"]
        return values, ("the bytes of separate kernels, in no more time", met)

    for shape in chosen:
        yield Case(
            FP8_HEADS,
            f"{shape.label}, FP8 heads",
            functools.partial(_fp8_heads, shape, backend, peer),
            {**dataclasses.asdict(shape), "backend": backend},
            judge,
        )


def _fp8_heads(
    shape: Decode, backend: str, peer: FlashMla | None, clock: Clock
) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)
    count = shape.batch * shape.rows
    positions = torch.randint(0, _POSITIONS, (count,), device=clock.device)
    table = torch.randn(_POSITIONS, _ROTATED, device=clock.device)
    groups = min(_GROUPS, shape.heads)

    def with_epilogue(call: Callable[[], Tensor]) -> Tensor:
        heads = call().reshape(count, -1, 512)[:, : shape.heads]
        codes: Tensor = inverse_rope_fp8_quant(heads, positions, table, n_groups=groups)[0]
        return codes

    attention = inputs.attention(backend)
    apart = [functools.partial(with_epilogue, call) for call in attention]
    fused = inputs.ours(
        sparse_attention_fp8_quant, positions, table, n_groups=groups, backend=backend
    )

    def same_bytes(_: float) -> Values:
        mine, theirs = (calls[0]().view(torch.uint8) for calls in (fused, apart))
        return {"same_bytes": torch.equal(mine, theirs)}

    yield Subject("attention_microseconds", attention)
    yield Subject("apart_microseconds", apart)
    yield Subject("microseconds", fused, after=same_bytes)
    if peer is not None and shape.heads >= _PEER_HEADS:
        theirs = [functools.partial(with_epilogue, call) for call in peer.decode(inputs)]
        yield Subject("flash_mla_microseconds", theirs)


@dataclasses.dataclass(frozen=True)
class DecodeV32:
    """One call over DeepSeek-V3.2's rows.

    Attributes:
        batch: requests.
        rows: queries of a request, FlashMLA's s_q.
        heads: query heads.
        width: listed rows of a query.
    """

    batch: int
    rows: int = 2
    heads: int = V32_DECODE.heads
    width: int = V32_DECODE.window

    @property
    def label(self) -> str:
        """For people."""
        return f"V3.2 h{self.heads} b{self.batch} s_q{self.rows} {self.width}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        shape = dataclasses.replace(
            V32_DECODE, tokens=self.batch * self.rows, heads=self.heads, window=self.width
        )
        return shape.flops


def v32_shapes() -> Iterator[DecodeV32]:
    """FlashMLA's batches, from its public benchmark program."""
    for batch in (2, 64, 74, 128):
        yield DecodeV32(batch)


@dataclasses.dataclass(frozen=True)
class V32Inputs:
    """Tensors of a shape; ``lists`` holds some sets of slots to go through."""

    q: Tensor
    cache: Tensor
    lists: list[Tensor]
    values: int = V32_DECODE.out_dim

    @classmethod
    def draw(cls, shape: DecodeV32, device: torch.device) -> V32Inputs:
        """Random inputs."""
        cache = random_rows(V32_FP8, _V32_SLOTS, _V32_PAGE, device)
        listed = (shape.batch, shape.rows, shape.width)
        q = torch.randn(*listed[:2], shape.heads, V32_DECODE.dim, device=device).bfloat16()
        moved = shape.batch * shape.rows * shape.width * get_layout(V32_FP8).entry_bytes
        lists = [
            torch.randint(0, _V32_SLOTS, listed, dtype=torch.int32, device=device)
            for _ in range(min(_MOST_LISTS, copies_for(moved)))
        ]
        return cls(q, cache, lists)

    def ours(self, backend: str) -> list[Callable[[], Tensor]]:
        """Calls of this package's operation, one for each set of lists."""
        flat = self.q.flatten(0, 1)
        out = flat.new_empty(*flat.shape[:2], self.values)
        keywords = {"layout": V32_FP8, "value_dim": self.values, "out": out, "backend": backend}
        return [
            functools.partial(
                _first, sparse_attention, flat, self.cache, listed.flatten(0, 1), **keywords
            )
            for listed in self.lists
        ]

    def error(self, out: Tensor) -> float:
        """Relative L2 error of some rows against float64 on the same bytes."""

        def want(b: int) -> Tensor:
            keys = _decoded(V32_FP8, self.cache, self.lists[0][b, 0])
            share = (self.q[b, 0].cpu().double() @ keys.T * self.q.shape[-1] ** -0.5).softmax(1)
            return share @ keys[:, : self.values]

        return _relative_error(out.reshape(*self.q.shape[:3], self.values), want)


def v32_cases(chosen: Iterable[DecodeV32], backend: str, peer: FlashMla | None) -> Iterator[Case]:
    """DeepSeek-V3.2's decode attention, beside FlashMLA if it is given."""
    verdict = at_least(_LEAST_V32, f"at least {_LEAST_V32:g} times FlashMLA's speed")
    for shape in chosen:
        yield Case(
            V32,
            shape.label,
            functools.partial(_v32, shape, backend, peer),
            {**dataclasses.asdict(shape), "backend": backend},
            _times("microseconds", "flash_mla_microseconds", verdict),
        )


def _v32(shape: DecodeV32, backend: str, peer: FlashMla | None, clock: Clock) -> Iterator[Subject]:
    inputs = V32Inputs.draw(shape, clock.device)
    calls = inputs.ours(backend)
    yield Subject(
        "microseconds",
        calls,
        before=lambda: {"error": inputs.error(calls[0]())},
        after=lambda us: {"teraflops": shape.flops / us * 1e-6},
    )
    if peer is not None:
        theirs = peer.decode_v32(inputs)
        yield Subject(
            "flash_mla_microseconds",
            theirs,
            before=lambda: {"flash_mla_error": inputs.error(theirs[0]())},
        )
