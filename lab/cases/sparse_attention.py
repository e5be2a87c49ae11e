"""Decode attention over the paged FP8 caches, beside FlashMLA and vLLM's path for XPU.

All subjects run in one process on the same bytes, by graph replay over rotating lists (so that rows
are cold); times are medians. Work is shared out once per shape where a library does so, and both
libraries' combines are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for
from anymla.bench.random_caches import shared_rows
from anymla.bench.runner import Case, Clock, Subject, Values, Verdict, beside
from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops._reference import attend
from anymla.ops.attention import (
    CacheRows,
    InverseRopeQuant,
    sparse_attention,
    sparse_attention_plan,
)
from anymla.ops.attention.decode_shapes import FLASH_DECODE, V32_DECODE, AttentionShape
from anymla.ops.compile_ahead import compiled_together
from anymla.ops.kv_cache import dequant_gather_slots
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from lab.peers.flash_mla import FlashMla
from lab.peers.vllm import VllmXpu

PART = "decode attention beside FlashMLA"
RANDOM = "decode attention of random shapes beside FlashMLA"
V32 = "decode attention over V3.2's rows beside FlashMLA"
FP8_HEADS = "decode attention with FP8 heads"
PORTABLE = "portable decode attention beside vLLM's"
# Numbers of heads of random shapes: those of shards, some between tiles of 64, and whole models'.
RANDOM_HEADS = (8, 16, 24, 32, 40, 64, 80, 96, 112, 128)
_MOST_REQUESTS, _MOST_QUERIES, _MOST_ENTRIES = 300, 8, 2048
_INPUT_SEEDS = 1000  # seeds reserved for the inputs of each draw of shapes
# Fields that the label already shows.
IN_LABEL = (
    "batch", "rows", "heads", "extra", "page", "ragged", "lengths", "backend", "width", "draw",
    "number",
)  # fmt: skip

# Targets as multiples of the peer's speed: for few heads, for V3.2's rows, and against vLLM's path.
_LEAST_HEADS, _LEAST, _LEAST_V32, _LEAST_PORTABLE = (8, 16, 32), 1.6, 0.9, 2.0
_WINDOW_SLOTS, _EXTRA_SLOTS = 1 << 17, 1 << 18  # more rows than an L2 cache
_MOST_LISTS = 16
_POSITIONS, _ROTATED, _GROUPS, _PEER_HEADS = 1 << 12, 64, 8, 64


@dataclasses.dataclass(frozen=True)
class Decode:
    """Shape of one measured call of decode attention.

    Attributes:
        batch: number of requests.
        rows: queries per request, FlashMLA's s_q.
        heads: number of query heads.
        extra: slots of the second list; 0 for none.
        page: entries per page of the second cache.
        ragged: True if lengths of the second list are random.
        lengths: True if lengths are given; if not, lists are full.
        width: slots of the first list.
        v32: True for DeepSeek-V3.2's rows, which have one list and no sinks.
    """

    batch: int
    rows: int
    heads: int
    extra: int
    page: int = 64
    ragged: bool = False
    lengths: bool = True
    width: int = FLASH_DECODE.window
    v32: bool = False

    @property
    def model(self) -> AttentionShape:
        """Named shape of the model whose rows these are."""
        return V32_DECODE if self.v32 else FLASH_DECODE

    @property
    def layouts(self) -> tuple[str, str]:
        """Names of the page layouts of both lists' rows."""
        return (V32_FP8, V32_FP8) if self.v32 else (MAIN_FP8, MAIN_FP8)

    @property
    def widths(self) -> tuple[int, ...]:
        """Slots of each list that exists."""
        return (self.width, self.extra) if self.extra else (self.width,)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        shape = dataclasses.replace(
            self.model,
            tokens=self.batch * self.rows,
            heads=self.heads,
            window=self.width,
            entries=self.extra,
        )
        return shape.flops

    @property
    def fields(self) -> Values:
        """Fields of the shape in a row of results."""
        own = ("width",) if self.v32 else ("extra", "page", "ragged", "lengths")
        return {name: getattr(self, name) for name in ("batch", "rows", "heads", *own)}

    @property
    def label(self) -> str:
        """Short description of the shape for people."""
        what = f"h{self.heads} b{self.batch} s_q{self.rows} {self.width}"
        if self.v32:
            return f"V3.2 {what}"
        extra = f"+{self.extra}" if self.extra else ""
        page = f" page {self.page}" if self.page != 64 else ""
        return what + extra + page + (" ragged" if self.ragged else "")


@dataclasses.dataclass(frozen=True)
class Drawn(Decode):
    """A shape drawn at random.

    Attributes:
        draw: seed of the draw that this shape belongs to.
        number: index of the shape in its draw.
    """

    draw: int = 0
    number: int = 0

    @property
    def input_seed(self) -> int:
        """Seed of the shape's lengths, lists and queries."""
        return _INPUT_SEEDS * self.draw + self.number

    @property
    def fields(self) -> Values:
        """Fields of the shape in a row of results, with everything that was drawn."""
        names = ("width", "draw", "number")
        return super().fields | {name: getattr(self, name) for name in names}


def random_shapes(count: int, seed: int) -> Iterator[Drawn]:
    """Yield random shapes, for which nothing was tuned.

    A longer draw begins with the shapes of a shorter one. Requests are log-uniform from 1 to 300.
    Each has 1 to 3 queries, or up to 8 in every tenth shape. Every tenth shape has no entries
    beside the window; the others have up to 2,048, half the time a multiple of 64. Pages have 64 or
    2 entries. Lengths are random in half of the shapes, full in a quarter, and absent in a quarter.
    """
    draw = random.Random(seed)
    for number in range(count):
        batch = round(_MOST_REQUESTS ** draw.random())
        rows = draw.randint(1, _MOST_QUERIES if draw.random() < 0.1 else 3)
        step = draw.choice((1, 64))
        extra = 0 if draw.random() < 0.1 else step * draw.randint(1, _MOST_ENTRIES // step)
        heads, page = draw.choice(RANDOM_HEADS), draw.choice((64, 2))
        lengths = draw.choice(("random", "random", "full", "none"))
        ragged = lengths == "random" and extra > 0
        yield Drawn(
            batch, rows, heads, extra, page, ragged, lengths != "none", draw=seed, number=number
        )


def draws(count: int, seeds: Iterable[int]) -> Iterator[Drawn]:
    """Yield the random shapes of several seeds in turn, ``count`` of each."""
    for of_one_number in zip(*(random_shapes(count, seed) for seed in seeds), strict=True):
        yield from of_one_number


def shapes() -> Iterator[Decode]:
    """Yield shapes with one query a request, shards, FlashMLA's own, windows, and long lists."""
    batches = (1, 8, 32, 64, 128, 256)
    for heads, extra in ((64, 512), (128, 1024)):
        for batch in batches:
            yield Decode(batch, 1, heads, extra)
    # Few heads, as under tensor parallelism.
    for batch in batches:
        for heads in (8, 16, 32):
            yield Decode(batch, 1, heads, 512)
    # Shapes from FlashMLA's public benchmark program.
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
    """Yield shapes with one query a request for attention with FP8 heads, most important first."""
    for heads, extra, batch in (
        (64, 512, 1), (64, 512, 8), (64, 512, 32), (64, 512, 128), (128, 1024, 1), (128, 1024, 32),
        (128, 1024, 128), (16, 512, 1), (16, 512, 32), (16, 512, 128), (64, 512, 64),
        (128, 1024, 64),
    ):  # fmt: skip
        yield Decode(batch, 1, heads, extra)


def portable_shapes() -> Iterator[Decode]:
    """Yield shapes of V4-Flash's 64 heads with one query a request."""
    for batch in (1, 8, 32, 64, 128, 256):
        yield Decode(batch, 1, 64, 512)


def v32_shapes() -> Iterator[Decode]:
    """Yield FlashMLA's batches for DeepSeek-V3.2, from its public benchmark program."""
    for batch in (2, 64, 74, 128):
        heads, width = V32_DECODE.heads, V32_DECODE.window
        yield Decode(batch, 2, heads, 0, lengths=False, width=width, v32=True)


@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """Tensors of a shape; ``lists`` holds several sets of slots to rotate through."""

    shape: Decode
    q: Tensor
    sink: Tensor | None
    cache: Tensor
    extra_cache: Tensor | None
    lengths: Tensor | None
    extra_lengths: Tensor | None
    lists: list[tuple[Tensor, Tensor | None]]

    @classmethod
    def draw(cls, shape: Decode, device: torch.device) -> DecodeInputs:
        """Draw random inputs, with enough sets of lists to keep the rows cold."""
        page = 64 if shape.v32 else 256
        cache = shared_rows(shape.layouts[0], _WINDOW_SLOTS, page, device)
        extra_cache = None
        if shape.extra:
            extra_cache = shared_rows(shape.layouts[1], _EXTRA_SLOTS, shape.page, device)
        batch, rows = shape.batch, shape.rows
        q = torch.randn(batch, rows, shape.heads, shape.model.dim, device=device).bfloat16()
        lengths = extra = None
        if shape.lengths:
            lengths = torch.full((batch,), shape.width, dtype=torch.int32, device=device)
        if shape.extra and shape.lengths:
            extra = torch.full((batch,), shape.extra, dtype=torch.int32, device=device)
            if shape.ragged:
                extra = torch.randint_like(extra, 0, shape.extra + 1)
        entry, more = (get_layout(each).entry_bytes for each in shape.layouts)
        moved = batch * rows * (shape.width * entry + shape.extra * more)
        draw = functools.partial(torch.randint, dtype=torch.int32, device=device)
        lists = [
            (
                draw(0, _WINDOW_SLOTS, (batch, rows, shape.width)),
                draw(0, _EXTRA_SLOTS, (batch, rows, shape.extra)) if shape.extra else None,
            )
            for _ in range(min(_MOST_LISTS, copies_for(moved)))
        ]
        sink = None if shape.v32 else torch.randn(shape.heads, device=device)
        return cls(shape, q, sink, cache, extra_cache, lengths, extra, lists)

    def cache_rows(self, window: Tensor, extra: Tensor | None) -> list[CacheRows]:
        """Return the rows that one set of lists names."""

        def listed(cache: Tensor, layout: str, slots: Tensor, lengths: Tensor | None) -> CacheRows:
            each = None if lengths is None else lengths.repeat_interleave(self.shape.rows)
            return CacheRows(cache, layout, slots.flatten(0, 1), each)

        layout, extra_layout = self.shape.layouts
        rows = [listed(self.cache, layout, window, self.lengths)]
        if extra is not None and self.extra_cache is not None:
            rows.append(listed(self.extra_cache, extra_layout, extra, self.extra_lengths))
        return rows

    def ours(self, *, planned: bool = False, **keywords: Any) -> list[Callable[[], Tensor]]:
        """Return calls of ``sparse_attention``, one for each set of lists.

        Args:
            planned: True to share out work once for all of them, as FlashMLA does.
            keywords: further keyword arguments of the operation.
        """
        shape = self.shape
        rows = [self.cache_rows(*each) for each in self.lists]
        if planned:
            keywords["plan"] = sparse_attention_plan(
                *(each.lengths for each in rows[0]),
                heads=shape.heads,
                width=shape.width,
                extra_width=shape.extra or None,
            )
        call = functools.partial(
            first_result, sparse_attention, self.q.flatten(0, 1), sink=self.sink, **keywords
        )
        return [functools.partial(call, each) for each in rows]

    def attention(self, backend: str, *, planned: bool = False) -> list[Callable[[], Tensor]]:
        """Return calls whose output is written to one tensor."""
        flat, values = self.q.flatten(0, 1), self.shape.model.values
        out = flat.new_empty(*flat.shape[:2], self.shape.model.out_dim)
        return self.ours(out=out, value_dim=values, backend=backend, planned=planned)

    @functools.cached_property
    def decoded_caches(self) -> tuple[Tensor, int]:
        """Rows of both caches in bfloat16 [N, D], and the number of those of the first cache.

        bfloat16 represents exactly what the FP8 rows of DeepSeek-V4 represent.
        """
        caches = [cache for cache in (self.cache, self.extra_cache) if cache is not None]
        counts = [cache.shape[0] * cache.shape[1] for cache in caches]
        rows = self.q.new_empty(sum(counts), self.shape.model.dim)
        for out, cache, layout in zip(rows.split(counts), caches, self.shape.layouts, strict=False):
            slots = torch.arange(len(out), dtype=torch.int32, device=out.device)
            dequant_gather_slots(out, cache, slots, layout=layout)
        return rows, counts[0]

    def error(self, out: Tensor) -> float:
        """Return the relative L2 error of the first queries of three requests against float64."""
        shape, model = self.shape, self.shape.model
        out = out.reshape(shape.batch, shape.rows, -1, model.out_dim)[:, :, : shape.heads]
        wrong = right = 0.0
        for b, want in self._exact.items():
            wrong += (out[b, 0].cpu().double() - want).norm().item() ** 2
            right += want.norm().item() ** 2
        return (wrong / right) ** 0.5

    @functools.cached_property
    def _exact(self) -> dict[int, Tensor]:
        """Results of the first queries of three requests in float64, by request."""
        shape, model = self.shape, self.shape.model
        window, extra = self.lists[0]
        exact = {}
        for b in {0, shape.batch // 2, shape.batch - 1}:
            layout, extra_layout = shape.layouts
            keys = self._decoded(self.cache, window[b, 0], layout)
            if extra is not None and self.extra_cache is not None:
                length = self.extra_lengths
                used = extra[b, 0, : shape.extra if length is None else int(length[b])]
                more = self._decoded(self.extra_cache, used, extra_layout)
                keys = torch.cat((keys, more))
            sink = None if self.sink is None else self.sink.cpu().double()
            exact[b], *_ = attend(self.q[b, 0].cpu().double(), keys, sink, None, model.out_dim)
        return exact

    def _decoded(self, cache: Tensor, slots: Tensor, layout: str) -> Tensor:
        data, scales = read_entries(cache, slots.long(), layout)
        return ROW_FORMATS[layout].decode(data.cpu(), scales.cpu()).double()

    def checked(
        self, calls: list[Callable[[], Tensor]], field: str, error: str, **more: Any
    ) -> Subject:
        """Make a subject of calls of attention, whose error is measured before they are timed."""
        return Subject(field, calls, before=lambda: {error: self.error(calls[0]())}, **more)

    def beside(self, peers: Sequence[FlashMla]) -> Iterator[Subject]:
        """Make subjects of builds of FlashMLA on the same inputs."""
        for peer, field in zip(peers, decode_fields(peers), strict=True):
            yield self.checked(peer.decode(self), field, f"{peer.name}_error")


def decode_fields(peers: Sequence[FlashMla]) -> list[str]:
    """Return the names of the fields that hold the peers' microseconds."""
    return [f"{peer.name}_microseconds" for peer in peers]


def compile_ahead(
    chosen: Iterable[Decode], backend: str, device: torch.device, *, planned: bool = False
) -> None:
    """Compile the kernels that the shapes launch on all cores, on targets that compile.

    Random shapes share few kernels, but each takes seconds when compiled one after the other.
    Inputs are drawn again when a shape is timed.
    """
    with compiled_together() as only_compiled, torch.inference_mode():
        for shape in chosen if only_compiled else ():
            inputs = DecodeInputs.draw(shape, device)
            inputs = dataclasses.replace(inputs, lists=inputs.lists[:1])
            for call in inputs.attention(backend, planned=planned):
                call()


def first_result(
    function: Callable[..., tuple[Tensor, ...]], *args: Any, **keywords: Any
) -> Tensor:
    """Call a function and return the first of its results."""
    return function(*args, **keywords)[0]


def decode_cases(
    chosen: Iterable[Decode], backend: str, peers: Sequence[FlashMla], *, planned: bool = False
) -> Iterator[Case]:
    """Yield cases of decode attention, beside the given builds of FlashMLA.

    Args:
        chosen: shapes, all of one model.
        backend: backend of ``sparse_attention`` to measure.
        peers: builds of FlashMLA, whose fastest counts.
        planned: True to share out work once for all calls.
    """
    for shape in chosen:
        part, least, seed = PART, _LEAST if shape.heads in _LEAST_HEADS else 1.0, 0
        if shape.v32:
            part, least = V32, _LEAST_V32
        if isinstance(shape, Drawn):
            part, least, seed = RANDOM, 1.0, shape.input_seed
        words = f"at least {least:g} times FlashMLA's speed"
        yield Case(
            part,
            shape.label,
            functools.partial(_decode, shape, backend, peers, planned),
            shape.fields | {"backend": backend} | ({"planned": True} if planned else {}),
            beside("microseconds", decode_fields(peers), least, words),
            seed,
        )


def _decode(
    shape: Decode, backend: str, peers: Sequence[FlashMla], planned: bool, clock: Clock
) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)

    def after(us: float) -> Values:
        if shape.v32:
            return {"teraflops": shape.flops / us * 1e-6}
        if shape.ragged and inputs.extra_lengths is not None:
            return {"mean_extra_length": float(inputs.extra_lengths.double().mean())}
        return {}

    ours = inputs.attention(backend, planned=planned)
    yield inputs.checked(ours, "microseconds", "error", after=after)
    yield from inputs.beside(peers)


def portable_cases(chosen: Iterable[Decode], peer: VllmXpu) -> Iterator[Case]:
    """Yield cases of decode attention by portable Triton, beside vLLM's Triton path for XPU."""
    words = f"at least {_LEAST_PORTABLE:g} times the speed of vLLM's path"
    for shape in chosen:
        yield Case(
            PORTABLE,
            shape.label,
            functools.partial(_portable, shape, peer),
            shape.fields | {"backend": "triton"},
            beside("us", "xpu_us", _LEAST_PORTABLE, words),
        )


def _portable(shape: Decode, peer: VllmXpu, clock: Clock) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)
    yield inputs.checked(inputs.attention("triton"), "us", "error")
    yield inputs.checked(peer.decode(inputs), "xpu_us", "xpu_error")


def fp8_heads_cases(
    chosen: Iterable[Decode], backend: str, peers: Sequence[FlashMla]
) -> Iterator[Case]:
    """Yield cases that time attention alone, with its epilogue as a second step, and fused."""
    for shape in chosen:
        yield Case(
            FP8_HEADS,
            f"{shape.label}, FP8 heads",
            functools.partial(_fp8_heads, shape, backend, peers),
            shape.fields | {"backend": backend},
            functools.partial(_no_slower_than_apart, decode_fields(peers)),
        )


def _no_slower_than_apart(theirs: Sequence[str], values: Values) -> tuple[Values, Verdict]:
    values, _ = beside("microseconds", theirs, 0.0, "")(values)
    met = values["same_bytes"] and values["microseconds"] <= values["apart_microseconds"]
    return values, ("the bytes of separate kernels, in no more time", met)


def _fp8_heads(
    shape: Decode, backend: str, peers: Sequence[FlashMla], clock: Clock
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
    epilogue = InverseRopeQuant(positions, table, groups)
    fused = inputs.ours(epilogue=epilogue, backend=backend)

    def same_bytes(_: float) -> Values:
        mine, theirs = (calls[0]().view(torch.uint8) for calls in (fused, apart))
        return {"same_bytes": torch.equal(mine, theirs)}

    yield Subject("attention_microseconds", attention)
    yield Subject("apart_microseconds", apart)
    yield Subject("microseconds", fused, after=same_bytes)
    for peer in peers if shape.heads >= _PEER_HEADS else ():
        theirs = [functools.partial(with_epilogue, call) for call in peer.decode(inputs)]
        yield Subject(f"{peer.name}_microseconds", theirs)
