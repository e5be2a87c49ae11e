"""Attention in steps that verify drafts, several queries a request, beside FlashMLA.

The queries of a request stand at neighbouring positions. So their windows overlap, and they see the
same compressed entries of ratio 128, while those of ratio 4 are chosen for each. All subjects run
in one process on the same bytes, by graph replay over rotating lists (so that rows are cold); times
are medians, and work is shared out once per shape. Rows are read in the two ways that layers have:
by slots, and decoded once per request. Both are also timed with the output rotated back and
quantised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for
from anymla.bench.random_caches import shared_rows
from anymla.bench.runner import Case, Clock, Subject, Values, beside
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.layers.caches import CACHE_FORMATS, LayerCache
from anymla.layers.request_rows import request_rows
from anymla.layers.rows import GroupStep, RequestRows
from anymla.ops.attention import (
    InverseRopeQuant,
    prefill_attention,
)
from anymla.ops.attention.decode_shapes import FLASH_DECODE
from anymla.ops.attention.plan import decoding_pays_in_steps
from anymla.ops.device import target_of
from anymla.ops.streams import scratch_scope
from lab.cases.sparse_attention import Decode, DecodeInputs, decode_fields, first_result
from lab.peers.flash_mla import FlashMla

PART = "attention of verification steps beside FlashMLA"
IN_LABEL = ("batch", "rows", "heads", "extra", "chosen", "backend")
_WINDOW = FLASH_DECODE.window
_PAGE, _EXTRA_PAGE = 256, 64
_WINDOW_SLOTS, _EXTRA_SLOTS = 1 << 17, 1 << 19
_MOST_LISTS = 8
_LEAST, _LEAST_CHOSEN = 2.0, 1.25
# Groups of the output projection; positions and channels of the rotary table.
_GROUPS, _POSITIONS, _ROPE_DIM = 8, 4096, 64


Calls = list[Callable[[], Tensor]]


@dataclasses.dataclass(frozen=True)
class Verification:
    """Shape of one measured verification step.

    Attributes:
        batch: number of requests.
        rows: queries per request.
        heads: number of query heads.
        extra: compressed entries that a query sees.
        chosen: True if entries are chosen for each query, False if a request's queries see the
            same.
    """

    batch: int
    rows: int
    heads: int
    extra: int = 0
    chosen: bool = False

    @property
    def decode(self) -> Decode:
        """The same call as a decode shape with lists."""
        return Decode(self.batch, self.rows, self.heads, self.extra, _EXTRA_PAGE)

    @property
    def fields(self) -> Values:
        """Fields of the shape in a row of results."""
        return dataclasses.asdict(self)

    @property
    def label(self) -> str:
        """Short description of the shape for people."""
        how = " chosen" if self.chosen else ""
        return f"h{self.heads} b{self.batch} s_q{self.rows} {_WINDOW}" + (
            f"+{self.extra}{how}" if self.extra else ""
        )


def shapes() -> Iterator[Verification]:
    """Yield steps of V4-Flash's three kinds of layer, of V4-Pro's, and of a rank's heads.

    Contexts are 8,192 and 131,072 tokens.
    """
    for batch in (1, 8, 32, 128):
        for rows in (6, 7, 8):
            for extra in (0, 64, 1024):
                yield Verification(batch, rows, 64, extra)
            yield Verification(batch, rows, 64, 512, chosen=True)
    for batch in (2, 4, 16, 64):
        yield Verification(batch, 8, 64)
    for batch in (1, 8, 32):
        for heads, extra in ((128, 0), (128, 64), (128, 1024), (16, 0), (16, 64), (16, 1024)):
            yield Verification(batch, 8, heads, extra)


@dataclasses.dataclass(frozen=True)
class VerificationInputs(DecodeInputs):
    """Tensors of a verification shape.

    Attributes:
        requests: rows of the requests for each set of lists, the same rows that the lists name.
    """

    requests: list[RequestRows] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, shape: Verification, device: torch.device) -> VerificationInputs:
        """Draw random inputs, with enough sets of lists to keep the rows cold."""
        batch, rows, extra = shape.batch, shape.rows, shape.extra
        q = torch.randn(batch, rows, shape.heads, 512, device=device).bfloat16()
        seen = batch * (_WINDOW + rows + extra * (rows if shape.chosen else 1))
        copies = min(_MOST_LISTS, copies_for(seen * get_layout(MAIN_FP8).entry_bytes))
        sets = [_rows(shape, device) for _ in range(copies)]
        full = functools.partial(torch.full, (batch,), dtype=torch.int32, device=device)
        return cls(
            shape.decode, q, torch.randn(shape.heads, device=device),
            shared_rows(MAIN_FP8, _WINDOW_SLOTS, _PAGE, device),
            shared_rows(MAIN_FP8, _EXTRA_SLOTS, _EXTRA_PAGE, device) if extra else None,
            full(_WINDOW), full(extra) if extra else None,
            [(window, entries) for window, entries, _ in sets],
            [requests for *_, requests in sets],
        )  # fmt: skip

    def ways(self, backend: str, *, chosen: bool) -> dict[str, tuple[Calls, Calls]]:
        """Make calls for each way of reading rows, with the plain and with the quantised output.

        Args:
            backend: backend of attention.
            chosen: True if entries are chosen for each query.
        """
        flat = self.q.flatten(0, 1)
        positions = torch.randint(0, _POSITIONS, (len(flat),), device=flat.device)
        table = torch.randn(_POSITIONS, _ROPE_DIM, device=flat.device)
        fp8 = {"epilogue": InverseRopeQuant(positions, table, _GROUPS), "backend": backend}
        quantized = self.ours(planned=True, **fp8)
        found = {"slots": (self.attention(backend, planned=True), quantized)}
        out, partial = torch.empty_like(flat), functools.partial
        if not chosen:
            found["decoded"] = (
                [
                    partial(self._decoded_once, each, out=out, backend=backend)
                    for each in self.requests
                ],
                [partial(self._decoded_once, each, **fp8) for each in self.requests],
            )
        return found

    def _decoded_once(self, rows: RequestRows, **options: Any) -> Tensor:
        with scratch_scope():
            return first_result(
                prefill_attention, *self._workspace(rows), window=rows.window,
                entries=rows.entries, sink=self.sink, **options,
            )  # fmt: skip

    def _workspace(self, rows: RequestRows) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self.q.dtype
        cache = LayerCache(CACHE_FORMATS["fp8"], self.cache, self.extra_cache)
        decoded = rows.decode(cache, dtype)
        return self.q.flatten(0, 1), decoded, rows.ranges

    def error(self, out: Tensor) -> float:
        """Return the relative L2 error of first and last queries of three requests in float64."""
        rows = self.shape.rows
        out = out.reshape(self.shape.batch, rows, -1, out.shape[-1])
        found = []
        for j in {0, rows - 1}:
            window, extra = self.lists[0]
            one = dataclasses.replace(
                self,
                shape=dataclasses.replace(self.shape, rows=1),
                q=self.q[:, j : j + 1],
                lists=[(window[:, j : j + 1], None if extra is None else extra[:, j : j + 1])],
            )
            found.append(DecodeInputs.error(one, out[:, j : j + 1]))
        return max(found)


def _rows(shape: Verification, device: torch.device) -> tuple[Tensor, Tensor | None, RequestRows]:
    """Draw lists of the queries' windows and entries, and the same rows by request."""
    batch, rows, extra = shape.batch, shape.rows, shape.extra
    width = _WINDOW + rows - 1
    table = torch.randperm(_WINDOW_SLOTS // _PAGE, device=device)[: 2 * batch].view(batch, 2)
    start = torch.randint(0, 2 * _PAGE - width, (batch, 1), device=device)
    at = start + torch.arange(width, device=device)
    slots = (table.gather(1, at // _PAGE) * _PAGE + at % _PAGE).int()
    windows = slots.unfold(1, _WINDOW, 1).contiguous()
    positions = at[:, _WINDOW - 1 :].flatten()
    request = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(rows)
    see = functools.partial(
        request_rows, positions, request, (at[:, -1] + 1).int(),
        GroupStep(table.int(), slots, _PAGE), window=_WINDOW, queries=rows,
    )  # fmt: skip
    if not extra:
        return windows, None, see()
    if shape.chosen:
        size = (batch, rows, extra)
        chosen = torch.randint(0, _EXTRA_SLOTS, size, dtype=torch.int32, device=device)
        return windows, chosen, see()
    count = -(-extra // _EXTRA_PAGE)
    table = torch.randint(0, _EXTRA_SLOTS // _EXTRA_PAGE, (batch, count), device=device)
    entries = table.unsqueeze(2) * _EXTRA_PAGE + torch.arange(_EXTRA_PAGE, device=device)
    entries = entries.flatten(1)[:, :extra].int()
    made = dataclasses.replace(
        see(compressed=GroupStep(table.int(), slots, _EXTRA_PAGE), ratio=1, entries=extra),
        visible=torch.full((batch,), extra, dtype=torch.int32, device=device),
    )
    made.ranges[:, 3] = extra
    return windows, entries.unsqueeze(1).expand(-1, rows, -1).contiguous(), made


def verification_cases(
    chosen: Iterable[Verification], backend: str, peers: Sequence[FlashMla]
) -> Iterator[Case]:
    """Yield cases of verification as layers run it, the other way, and by builds of FlashMLA."""
    for shape in chosen:
        least = _LEAST_CHOSEN if shape.chosen else _LEAST
        yield Case(
            PART,
            shape.label,
            functools.partial(_verification, shape, backend, peers),
            shape.fields | {"backend": backend},
            beside(
                "microseconds",
                decode_fields(peers),
                least,
                f"at least {least:g} times FlashMLA's speed",
            ),
        )


def _verification(
    shape: Verification, backend: str, peers: Sequence[FlashMla], clock: Clock
) -> Iterator[Subject]:
    inputs = VerificationInputs.of(shape, clock.device)
    ways = inputs.ways(backend, chosen=shape.chosen)
    taken = _way(shape, target_of(clock.device).sm_count)
    attend, quantized = ways.pop(taken)
    facts = {"decoded": taken == "decoded"}
    yield inputs.checked(attend, "microseconds", "error", after=lambda _: facts)
    yield Subject("quantized_microseconds", quantized)
    for name, (attend, quantized) in ways.items():
        yield inputs.checked(attend, f"{name}_microseconds", f"{name}_error")
        yield Subject(f"{name}_quantized_microseconds", quantized)
    yield from inputs.beside(peers)


def _way(shape: Verification, sm_count: int) -> str:
    """Return how layers with FP8 projections read the rows, "decoded" or "slots"."""
    batch, rows, heads = shape.batch, shape.rows, shape.heads
    pays = decoding_pays_in_steps(batch, rows, heads, shape.extra, sm_count)
    return "decoded" if pays and not shape.chosen else "slots"
