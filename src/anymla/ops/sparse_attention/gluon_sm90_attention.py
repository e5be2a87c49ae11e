"""Launch sparse attention over FP8 rows on Hopper."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.ops._epilogue import QuantizedOut, epilogue_pointers
from anymla.ops.device import target_of
from anymla.ops.pdl import pdl_launch
from anymla.ops.registry import require
from anymla.ops.sparse_attention.gluon_sm90_forms import form_of
from anymla.ops.sparse_attention.gluon_sm90_lists import NOPE
from anymla.ops.sparse_attention.gluon_sm90_merging import merge
from anymla.ops.sparse_attention.gluon_sm90_plan import plan_numbers
from anymla.ops.sparse_attention.gluon_sm90_softmax import SUMS
from anymla.ops.sparse_attention.schedule import TASK_COST, Schedule, Stream, choose, seen_tokens
from anymla.ops.streams import scratch

_LARGEST_INT32 = 2**31 - 1
# Partial sums of a batch-invariant launch; more tokens take several launches.
_WORKSPACE_BYTES = 256 << 20
_CHANNELS = get_layout(MAIN_FP8).channels  # of values, in V3.2's rows as well
_WIDE = get_layout(V32_FP8).channels


@dataclasses.dataclass(frozen=True)
class Scope:
    """One cache and which of its rows each token reads; lists have unit stride along a row."""

    cache: Tensor
    indices: Tensor
    lengths: Tensor | None

    @classmethod
    def of(cls, cache: Tensor, indices: Tensor, lengths: Tensor | None) -> Scope:
        """From arguments of the operation."""
        indices = indices.squeeze(1) if indices.ndim == 3 else indices
        if indices.numel() and indices.stride(1) != 1:
            indices = indices.contiguous()
        return cls(pages_of(cache), indices, None if lengths is None else lengths.contiguous())

    def part(self, tokens: slice) -> Scope:
        """The same for some of the tokens."""
        lengths = None if self.lengths is None else self.lengths[tokens]
        return Scope(self.cache, self.indices[tokens], lengths)

    @property
    def width(self) -> int:
        """Columns of the list."""
        return self.indices.shape[1]

    @property
    def limit(self) -> int:
        """Slots are below."""
        return min(self.cache.shape[0] * self.cache.shape[1], _LARGEST_INT32)


def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    layout: str = MAIN_FP8,
    extra_layout: str = MAIN_FP8,
    value_dim: int | None = None,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    tokens, heads, channels = q.shape
    assert (channels if value_dim is None else value_dim) == _CHANNELS
    given = out
    if out is None or not _aligned(out):
        out = torch.empty((tokens, heads, _CHANNELS), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens and heads:
        first = (k_cache, indices, lengths)
        second = (extra_cache, extra_indices, extra_lengths)
        call = Call.of(q, first, second, sink, scale, batch_invariant, plan)
        empty = float("-inf") if empty_lse is None else empty_lse
        attend(
            call.q, call.scopes, call.sink, call.scale, empty, call.schedule, out, lse,
            plan=call.plan,
        )  # fmt: skip
    return (out if given is None or given is out else given.copy_(out)), lse


Listed = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclasses.dataclass(frozen=True)
class Call:
    """What ``attend`` takes of a call."""

    q: Tensor
    scopes: list[Scope]
    sink: Tensor | None
    scale: float
    schedule: Schedule
    plan: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        first: Listed,
        second: Listed,
        sink: Tensor | None,
        scale: float | None,
        batch_invariant: bool,
        plan: Tensor | None,
    ) -> Call:
        """From arguments of the operation; cache, lists and lengths of either scope."""
        plan = None if batch_invariant else plan
        tokens, heads, channels = q.shape
        scopes = []
        for cache, indices, lengths in (first, second):
            if cache is not None and indices is not None:
                scopes.append(Scope.of(cache, indices, _lengths(lengths, tokens, q.device)))
        schedule = choose(
            tokens,
            heads,
            tuple(scope.width for scope in scopes),
            target_of(q.device).sm_count,
            lengths=first[2] is not None or second[2] is not None or plan is not None,
            batch_invariant=batch_invariant,
            planned=plan is not None,
            wide=channels == _WIDE,
        )
        if channels == _WIDE and schedule.stream == Stream.WIDTHS:
            # Its producers ask for the lengths all the same.
            schedule = dataclasses.replace(schedule, stream=Stream.NO)
        if plan is not None:
            numbers = plan_numbers(schedule, tokens) if schedule.planned else 0
            require(len(plan) == numbers, "sparse_attention", "plan", f"[{numbers}]", len(plan))
        return cls(
            q if _aligned(q) else q.clone(memory_format=torch.contiguous_format),
            scopes,
            None if sink is None else sink.float().contiguous(),
            channels**-0.5 if scale is None else scale,
            schedule,
            None if plan is None else plan.contiguous(),
        )


_endless: dict[torch.device, Tensor] = {}


def _lengths(lengths: Tensor | None, tokens: int, device: torch.device) -> Tensor | None:
    """Lengths of lists; for full ones numbers that the kernels cut to the lists' width.

    With 128 heads on an H200 the kernels without lengths take an eighth longer than those with.
    """
    if lengths is not None:
        return lengths
    found = _endless.get(device)
    if found is None or len(found) < tokens:
        if torch.cuda.is_current_stream_capturing():
            return None  # what a graph writes is not there before it runs
        found = torch.full((max(4096, 2 * tokens),), _LARGEST_INT32, dtype=torch.int32).to(device)
        torch.cuda.synchronize(device)
        _endless[device] = found
    return found[:tokens]


def _aligned(x: Tensor) -> bool:
    """Whether rows of heads can be moved 16 bytes at a time."""
    step = 16 // x.element_size()
    return (
        x.stride(2) == 1
        and x.stride(1) % step == 0
        and x.stride(0) % step == 0
        and x.data_ptr() % 16 == 0
    )


def attend(
    q: Tensor,
    scopes: list[Scope],
    sink: Tensor | None,
    scale: float,
    empty: float,
    schedule: Schedule,
    out: Tensor,
    lse: Tensor,
    to: QuantizedOut | None = None,
    plan: Tensor | None = None,
) -> None:
    """Launch by a schedule, in as many parts as the workspace asks for.

    If ``to`` is given, the heads go there, and not to ``out``. ``plan`` is of a planned schedule.
    """
    tokens = len(q)
    row_bytes = 2 * _CHANNELS * schedule.heads
    step = tokens
    if schedule.cut and schedule.aligned:
        step = max(1, _WORKSPACE_BYTES // (schedule.slots(1) * row_bytes))
    for start in range(0, tokens, step):
        some = slice(start, min(start + step, tokens))
        parts = [scope.part(some) for scope in scopes] if step < tokens else scopes
        there = None if to is None else to.of(some)
        _launch(q[some], parts, sink, scale, empty, schedule, out[some], lse[some], there, plan)


def _launch(
    q: Tensor,
    scopes: list[Scope],
    sink: Tensor | None,
    scale: float,
    empty: float,
    schedule: Schedule,
    out: Tensor,
    lse: Tensor,
    to: QuantizedOut | None,
    plan: Tensor | None,
) -> None:
    tokens, heads, _ = q.shape
    slots, rows = schedule.slots(tokens), schedule.heads
    wide = q.shape[2] == _WIDE
    sums = scratch((slots, rows, SUMS.value), torch.float32, q.device)
    part = sums
    if schedule.cut:
        part = scratch((slots, rows, _CHANNELS), torch.float16, q.device)
    spans = plan
    if spans is None:
        spans = scratch((tokens * schedule.tiles + schedule.programs, 2), torch.int32, q.device)
    marks = scratch((schedule.pieces(tokens), rows), torch.float32, q.device)
    first, second = scopes[0], scopes[-1]
    # Where all tasks are cut, their merge alone writes heads.
    merged = schedule.cut and schedule.aligned
    ends = None if merged else to
    kernel, form = form_of(schedule, q, None if merged or ends is not None else out, part)
    kernel[(schedule.programs,)](
        q, first.cache, second.cache, first.indices, second.indices,
        _or(first.lengths, first.indices), _or(second.lengths, second.indices), _or(sink, lse),
        out if ends is None else ends.codes.view(torch.int16), lse, part, sums, spans, marks,
        tokens, heads, first.width, second.width, first.limit, second.limit,
        first.indices.stride(0), second.indices.stride(0), schedule.splits,
        q.stride(0) // 2, out.stride(0), scale, empty, *epilogue_pointers(ends, lse),
        SPLIT=schedule.cut, STREAM=int(schedule.stream), COST=TASK_COST,
        SIZE=seen_tokens(schedule, tokens),
        TWO=len(scopes) > 1,
        LENGTH0=first.lengths is not None, LENGTH1=second.lengths is not None,
        PAGE0=first.cache.shape[1], PAGE1=second.cache.shape[1],
        STEP0=first.cache.stride(0), STEP1=second.cache.stride(0),
        SINK=sink is not None, Q_HEAD=q.stride(1) // 2, OUT_HEAD=out.stride(1),
        ROPE_DIM=0 if ends is None else ends.rope.dim, **form, num_warps=4,
        launch_pdl=pdl_launch(q.device)["PDL"],
    )  # fmt: skip
    if schedule.cut:
        lifted = _CHANNELS if wide else NOPE.value
        merge(schedule, part, sums, spans, sink, out, lse, empty, to, lifted=lifted)


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    return other if given is None else given
