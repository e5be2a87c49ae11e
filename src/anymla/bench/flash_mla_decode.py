"""Decode attention on a Hopper GPU beside FlashMLA, in one process, on the same bytes.

Graph replay over rotating lists (cold rows), medians. FlashMLA's scheduler metadata is made once
for a shape, as an engine does; its merge and ours are both counted. Where FlashMLA does not take
the number of heads, it gets zero queries up to 64, which is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for, time_us
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.sparse_attention import sparse_attention, sparse_attention_plan
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries

_WINDOW = 128
_WINDOW_SLOTS, _EXTRA_SLOTS = 1 << 17, 1 << 18
_LEAST_HEADS = 64


@dataclasses.dataclass(frozen=True)
class Decode:
    """One call.

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


def production() -> Iterator[Decode]:
    """FlashMLA's own configurations of DeepSeek-V4, from its public benchmark program."""
    for heads, extra, page, ragged in (
        (64, 512, 64, False),
        (128, 1024, 64, False),
        (64, 1024, 2, True),
        (128, 1024, 2, True),
    ):
        for batch in (2, 64, 74, 128, 148, 256):
            yield Decode(batch, 2, heads, extra, page, ragged, lengths=ragged)


def single() -> Iterator[Decode]:
    """One query a request."""
    for heads, extra in ((64, 512), (128, 1024)):
        for batch in (1, 8, 32, 64, 128, 256):
            yield Decode(batch, 1, heads, extra)


def shards() -> Iterator[Decode]:
    """Few heads, as tensor parallelism leaves them."""
    for batch in (1, 8, 32, 64, 128, 256):
        for heads in (8, 16, 32):
            yield Decode(batch, 1, heads, 512)


def others() -> Iterator[Decode]:
    """Windows alone, and long lists."""
    yield Decode(128, 1, 64, 0)
    yield Decode(64, 1, 128, 0)
    yield Decode(128, 1, 64, 4608)
    yield Decode(16, 1, 64, 16384, ragged=True)


@functools.cache
def cache(slots: int, page: int) -> Tensor:
    """A cache of random rows."""
    layout = get_layout(MAIN_FP8)
    made = layout.allocate(slots // page, page, device="cuda")
    for start in range(0, slots, 1 << 15):
        some = torch.arange(start, start + (1 << 15), device="cuda")
        layout.write(made, some, torch.randn(len(some), layout.channels, device="cuda"))
    return made


def caches(shape: Decode) -> tuple[Tensor, Tensor]:
    """The rows that a shape's lists point into."""
    return cache(_WINDOW_SLOTS, 256), cache(_EXTRA_SLOTS, shape.page)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors of a shape; ``lists`` holds some sets of slots to go through."""

    shape: Decode
    q: Tensor
    sink: Tensor
    lengths: Tensor | None
    extra_lengths: Tensor | None
    lists: list[tuple[Tensor, Tensor | None]]

    @classmethod
    def draw(cls, shape: Decode) -> Inputs:
        """Random inputs, as many sets of lists as make the rows cold."""
        batch, rows = shape.batch, shape.rows
        q = torch.randn(batch, rows, shape.heads, 512, device="cuda").bfloat16()
        lengths = extra = None
        if shape.lengths:
            lengths = torch.full((batch,), _WINDOW, dtype=torch.int32, device="cuda")
        if shape.extra and shape.lengths:
            extra = torch.full((batch,), shape.extra, dtype=torch.int32, device="cuda")
            if shape.ragged:
                extra = torch.randint_like(extra, 0, shape.extra + 1)
        moved = batch * rows * (_WINDOW + shape.extra) * get_layout(MAIN_FP8).entry_bytes
        draw = functools.partial(torch.randint, dtype=torch.int32, device="cuda")
        lists = [
            (
                draw(0, _WINDOW_SLOTS, (batch, rows, _WINDOW)),
                draw(0, _EXTRA_SLOTS, (batch, rows, shape.extra)) if shape.extra else None,
            )
            for _ in range(min(16, copies_for(moved)))
        ]
        sink = torch.randn(shape.heads, device="cuda")
        return cls(shape, q, sink, lengths, extra, lists)


def ours(inputs: Inputs, backend: str, *, planned: bool = False) -> list[Callable[[], Tensor]]:
    """Calls of this package's operation, one for each set of lists.

    ``planned``: work is shared out once for all of them, as FlashMLA's is.
    """
    shape = inputs.shape
    q = inputs.q.flatten(0, 1)
    out = torch.empty_like(q)
    repeat = functools.partial(torch.repeat_interleave, repeats=shape.rows)
    lengths = None if inputs.lengths is None else repeat(inputs.lengths)
    keywords: dict[str, Any] = {"sink": inputs.sink, "out": out, "backend": backend}
    if shape.extra:
        keywords["extra_cache"] = cache(_EXTRA_SLOTS, shape.page)
    if inputs.extra_lengths is not None:
        keywords["extra_lengths"] = repeat(inputs.extra_lengths)
    if planned:
        keywords["plan"] = sparse_attention_plan(
            lengths,
            keywords.get("extra_lengths"),
            heads=shape.heads,
            width=_WINDOW,
            extra_width=shape.extra or None,
        )
    calls: list[Callable[[], Tensor]] = []
    for window, extra in inputs.lists:
        more = {} if extra is None else {"extra_indices": extra.flatten(0, 1)}
        arguments = (q, cache(_WINDOW_SLOTS, 256), window.flatten(0, 1), lengths)
        calls.append(functools.partial(_first, sparse_attention, *arguments, **keywords, **more))
    return calls


def flash_mla(inputs: Inputs, module: Any) -> list[Callable[[], Tensor]]:
    """Calls of FlashMLA's function, one for each set of lists."""
    shape = inputs.shape
    q, sink = inputs.q, inputs.sink
    if shape.heads < _LEAST_HEADS:
        q = torch.zeros(*q.shape[:2], _LEAST_HEADS, 512, device="cuda").bfloat16()
        q[:, :, : shape.heads] = inputs.q
        sink = torch.full((_LEAST_HEADS,), -torch.inf, device="cuda")
        sink[: shape.heads] = inputs.sink
    schedule, _ = module.get_mla_metadata()
    calls: list[Callable[[], Tensor]] = []
    for window, extra in inputs.lists:
        more: dict[str, Any] = {"attn_sink": sink, "topk_length": inputs.lengths}
        if extra is not None:
            more["extra_k_cache"] = cache(_EXTRA_SLOTS, shape.page).unsqueeze(2)
            more["extra_indices_in_kvcache"] = extra
            more["extra_topk_length"] = inputs.extra_lengths
        calls.append(
            functools.partial(
                _first, module.flash_mla_with_kvcache, q, cache(_WINDOW_SLOTS, 256).unsqueeze(2),
                None, None, 512, schedule, None, 512**-0.5, False, True, window, **more,
            )
        )  # fmt: skip
    return calls


def _first(function: Callable[..., tuple[Tensor, ...]], *args: Any, **keywords: Any) -> Tensor:
    return function(*args, **keywords)[0]


def error(out: Tensor, inputs: Inputs) -> float:
    """Relative L2 error of some rows against float64 on the same bytes."""
    shape = inputs.shape
    window, extra = inputs.lists[0]
    out = out.reshape(shape.batch, shape.rows, -1, 512)[:, :, : shape.heads]
    wrong = right = 0.0
    for b in {0, shape.batch // 2, shape.batch - 1}:
        rows = [_decoded(cache(_WINDOW_SLOTS, 256), window[b, 0])]
        if extra is not None:
            length = inputs.extra_lengths
            used = extra[b, 0, : shape.extra if length is None else int(length[b])]
            rows.append(_decoded(cache(_EXTRA_SLOTS, shape.page), used))
        keys = torch.cat(rows)
        scores = inputs.q[b, 0].cpu().double() @ keys.T * 512**-0.5
        both = torch.cat((scores, inputs.sink.cpu().double().unsqueeze(1)), 1).softmax(1)
        want = both[:, :-1] @ keys
        wrong += (out[b, 0].cpu().double() - want).norm().item() ** 2
        right += want.norm().item() ** 2
    return (wrong / right) ** 0.5


def _decoded(rows: Tensor, slots: Tensor) -> Tensor:
    data, scales = read_entries(rows, slots.long(), MAIN_FP8)
    return ROW_FORMATS[MAIN_FP8].decode(data.cpu(), scales.cpu()).double()


def compare(
    shape: Decode,
    module: Any | None,
    backend: str = "gluon_sm90",
    repetitions: int = 20,
    *,
    planned: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """One row: microseconds and errors of both; FlashMLA is left out without its module.

    ``seed``: of the inputs, with them of lengths that are random.
    """
    torch.manual_seed(seed)
    inputs = Inputs.draw(shape)
    row: dict[str, Any] = {"label": shape.label, **dataclasses.asdict(shape), "backend": backend}
    row["seed"] = seed
    if shape.ragged and inputs.extra_lengths is not None:
        row["mean_extra_length"] = float(inputs.extra_lengths.double().mean())
    calls = ours(inputs, backend, planned=planned)
    if planned:
        row["planned"] = True
    row["error"] = error(calls[0](), inputs)
    row["microseconds"] = time_us(calls, repetitions)
    if module is not None:
        peers = flash_mla(inputs, module)
        row["flash_mla_error"] = error(peers[0](), inputs)
        row["flash_mla_microseconds"] = time_us(peers, repetitions)
        row["ratio"] = row["flash_mla_microseconds"] / row["microseconds"]
    return row
