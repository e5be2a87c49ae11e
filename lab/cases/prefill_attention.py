"""Attention during prefill, beside a peer that takes lists of rows.

A case is the last ``tokens`` queries of a sequence of ``context`` tokens, in a layer that sees only
its window, also selected entries (ratio 4), or also all of its entries (ratio 128). The rows are
already decoded to bfloat16, as the peer wants them; decoding is timed on its own. A pipeline covers
the way from FP8 pages to the output projection, and is compared with gather-then-attend. Listed
rows are random rows of one tensor, as ``flash_mla_sparse_fwd`` takes them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from anymla.bench.random_caches import random_rows
from anymla.bench.runner import Case, Clock, Subject, Values, Verdict, beside
from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._reference import attend
from anymla.ops.attention import (
    InverseRopeQuant,
    prefill_attention,
    sparse_attention_rows,
)
from anymla.ops.attention.composed import named_rows
from anymla.ops.kv_cache import dequant_gather_slots
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.step_indices import combine_topk_swa_indices
from anymla.testing.tolerance import relative_l2
from lab.peers.flash_mla import FlashMla, padded_heads

PART, LISTS = "attention during prefill", "flash_mla_sparse_fwd"
WINDOW = 128
_SEED = 1
_SAMPLES = 48
_PEER_GRAIN = 128  # width of the peer's lists is a multiple of this
_GROUP = 8  # heads per output group
# Targets of a pipeline and of listed rows, as multiples of the peer's speed.
_PIPELINE_LEAST, _LISTS_LEAST = 1.2, 1.05

# (q [T, H, 512], rows [N, 512], indices [T, K], lengths [T], sink [H]) -> out
Peer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Peers by what the names of their fields begin with.
Peers = Mapping[str, Peer]


def prefill_peers(builds: Sequence[FlashMla]) -> Peers:
    """Return the calls of builds of FlashMLA; recorded rows name its own fields ``peer``."""
    return {"peer" if each.name == "flash_mla" else each.name: each.rows for each in builds}


def _fields(peers: Peers) -> list[str]:
    return [f"{name}_us" for name in peers]


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """Shape of one measured call of prefill attention.

    Attributes:
        kind: "window", "selected", "scattered" (selected at random, unsorted) or "all".
        tokens: number of query tokens.
        heads: heads per query.
        context: tokens in the sequence, whose last ones are the queries.
        topk: entries that the indexer selects.
    """

    kind: str
    tokens: int
    heads: int
    context: int
    topk: int = 0

    @property
    def label(self) -> str:
        """Short description of the shape for people."""
        more = f" top {self.topk}" if self.topk else ""
        return f"{self.kind}{more} h{self.heads} T={self.tokens} of {self.context}"


SHAPES = (
    *(PrefillCase("window", 4096, heads, 32768) for heads in (64, 128, 16)),
    PrefillCase("window", 1024, 64, 8192),
    PrefillCase("window", 4096, 64, 4096),
    PrefillCase("selected", 4096, 64, 32768, 512),
    PrefillCase("selected", 1024, 64, 8192, 512),
    PrefillCase("selected", 4096, 16, 32768, 512),
    PrefillCase("selected", 4096, 128, 32768, 1024),
    PrefillCase("selected", 4096, 64, 4096, 512),
    PrefillCase("scattered", 4096, 64, 131072, 512),
    PrefillCase("selected", 4096, 64, 32768, 2048),
    PrefillCase("all", 4096, 64, 4096),
    PrefillCase("all", 4096, 64, 8192),
    PrefillCase("all", 4096, 64, 32768),
    PrefillCase("all", 4096, 128, 32768),
    PrefillCase("all", 4096, 16, 32768),
    PrefillCase("all", 1024, 64, 32768),
    PrefillCase("selected", 4096, 64, 262144, 512),
    PrefillCase("all", 4096, 64, 262144),
)
LONG_SHAPES = (
    PrefillCase("window", 32768, 64, 32768),
    PrefillCase("selected", 32768, 64, 32768, 512),
    PrefillCase("all", 32768, 64, 32768),
)
PIPELINES = tuple(
    PrefillCase(kind, 4096, 64, context, topk)
    for kind, topk in (("selected", 512), ("all", 0), ("window", 0))
    for context in (4096, 32768, 131072)
)


class Call:
    """Inputs of a case on a device, and calls on them."""

    def __init__(self, case: PrefillCase, device: torch.device) -> None:
        """Draw the inputs."""
        tokens, heads = case.tokens, case.heads
        ratio = {"window": 0, "all": 128}.get(case.kind, 4)
        position = torch.arange(case.context - tokens, case.context, device=device)
        start = max(case.context - tokens - WINDOW + 1, 0)
        visible = (position + 1) // ratio if ratio else torch.zeros_like(position)
        self.entries = case.context // ratio if ratio else 0
        first = (position - WINDOW + 1).clamp(min=0)
        self.lists: Tensor | None = None
        if case.topk:
            self.lists = _selected(visible, self.entries, case.topk, case.kind == "selected")
            visible = visible.clamp(max=case.topk)
        # Entries first, then the rows of the window.
        ranges = (first - start + self.entries, position + 1 - first, 0 * first, visible)
        self.ranges = torch.stack(ranges, 1).int()
        self.cache = random_rows(MAIN_FP8, self.entries + case.context - start, 64, device)
        self.slots = torch.arange(self.entries + case.context - start, device=device).int()
        self.rows = torch.empty((len(self.slots), 512), dtype=torch.bfloat16, device=device)
        self.decode()
        self.q = torch.randn((tokens, heads, 512), device=device).bfloat16()
        self.sink = torch.randn(heads, device=device)
        self.out = torch.full_like(self.q, torch.nan)
        self.positions = position
        angles = torch.rand((case.context, 32), device=device) * 6.28
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        self.case = case
        self.flops = 4 * heads * 512 * int(self.ranges[:, 1].sum() + self.ranges[:, 3].sum())

    def roofline_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the least time in us at a machine's rates, by bytes moved once or by flops."""
        moved = sum(x.nbytes for x in (self.q, self.rows, self.ranges, self.out))
        moved += 0 if self.lists is None else self.lists.nbytes
        return max(moved / bytes_per_s, self.flops / flops_per_s) * 1e6

    def decode(self) -> None:
        """Fill the workspace from the FP8 cache."""
        dequant_gather_slots(self.rows, self.cache, self.slots, layout=MAIN_FP8)

    def ours(self, backend: str) -> Tensor:
        """Run anymla's prefill attention."""
        out: Tensor = prefill_attention(
            self.q, self.rows, self.ranges, self.lists,
            window=WINDOW, entries=self.entries, sink=self.sink, out=self.out, backend=backend,
        )[0]  # fmt: skip
        return out

    def quantised(self, backend: str) -> tuple[Tensor, Tensor]:
        """Run anymla with the output rotated and quantised."""
        groups = max(self.case.heads // _GROUP, 1)
        return prefill_attention(
            self.q, self.rows, self.ranges, self.lists, window=WINDOW, entries=self.entries,
            sink=self.sink, epilogue=InverseRopeQuant(self.positions, self.table, groups),
            backend=backend,
        )  # fmt: skip

    def separate_pass(self) -> tuple[Tensor, Tensor]:
        """Rotate and quantise the finished output."""
        codes, scales = inverse_rope_fp8_quant(
            self.out, self.positions, self.table, n_groups=max(self.case.heads // _GROUP, 1)
        )
        return codes, scales

    def peer(self, peer: Peer) -> Callable[[], Tensor]:
        """Return a call of the peer on the same inputs.

        Heads are padded to a number that it takes, and lists are compacted and given lengths.
        """
        heads = self.case.heads
        q, sink = padded_heads(self.q, self.sink)
        assert sink is not None
        listed, _ = named_rows(self.ranges, self.lists, WINDOW, int(self.ranges[:, 3].max()))
        order = (listed < 0).to(torch.int8).sort(dim=1, stable=True).indices
        listed = listed.gather(1, order)
        lengths = (listed >= 0).sum(1).int()
        width = -(-int(lengths.max()) // _PEER_GRAIN) * _PEER_GRAIN
        listed = torch.nn.functional.pad(listed, (0, max(width - listed.shape[1], 0)), value=-1)
        listed = listed[:, :width].contiguous()
        return lambda: peer(q, self.rows, listed, lengths, sink)[:, :heads]

    def error(self, out: Tensor) -> float:
        """Return the relative L2 error of some tokens against float64."""
        tokens = self.case.tokens
        some = torch.linspace(0, tokens - 1, _SAMPLES).long().unique().tolist()
        wide = []
        lists = None if self.lists is None else self.lists.cpu()
        ranges = self.ranges.cpu().tolist()
        for token in some:
            start, count, base, visible = ranges[token]
            if lists is None:
                second = torch.arange(base, base + visible)
            else:
                second = lists[token, :visible].long() + base
            seen = torch.cat((torch.arange(start, start + count), second))
            rows = self.rows[seen.to(self.rows.device)].double()
            wide.append(attend(self.q[token].double(), rows, self.sink.double(), None, 512)[0])
        return relative_l2(out[some], torch.stack(wide))


def _selected(visible: Tensor, entries: int, topk: int, local: bool) -> Tensor:
    """Draw selected entries of each token, [T, topk].

    If ``local``, entries ascend, neighbouring tokens share most of them, and late entries are
    preferred, as in an indexer's choice. Otherwise they are random.
    """
    tokens, device = len(visible), visible.device
    out = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    taste = torch.rand(entries, device=device)
    place = torch.arange(entries, device=device)
    for first in range(0, tokens, 256):
        seen = visible[first : first + 256, None]
        score = torch.rand((len(seen), entries), device=device)
        if local:
            score = 0.1 * score + taste + place / seen.clamp(min=1)
        score = score.masked_fill(place >= seen, -1.0)
        best = score.topk(min(topk, entries), dim=1)
        chosen = torch.where(best.values >= 0, best.indices, entries)
        if local:
            chosen = chosen.sort(dim=1).values
        chosen = torch.where(chosen < entries, chosen, -1)
        out[first : first + 256, : chosen.shape[1]] = chosen.int()
    return out


def _least(case: PrefillCase) -> float:
    """Return the target of a case as a multiple of the peer's speed."""
    if case.kind == "window":
        return 1.4
    if case.kind == "all":
        return 1.15 if case.context <= 32768 else 1.0
    return 1.05


def cases(chosen: Iterable[PrefillCase], backend: str, peers: Peers) -> Iterator[Case]:
    """Yield cases of attention for a chunk of prefill.

    ``us`` and a peer's ``_us`` time attention, ``fp8_us`` attention that rotates and quantises its
    output, ``pass_us`` the separate pass that does the same to a finished output, and ``decode_us``
    the filling of the workspace. Queries and outputs exceed the caches, so that each call of a
    graph finds them in memory; the rows of a chunk stay cached, as they do from query to query.
    ``roofline_us`` uses the rates of copies and of large matrix products on the same device.
    """
    for case in chosen:
        yield Case(
            PART,
            case.label,
            functools.partial(_subjects, case, backend, peers),
            {"backend": backend},
            functools.partial(_row, case, _fields(peers)),
            _SEED,
        )


def _subjects(case: PrefillCase, backend: str, peers: Peers, clock: Clock) -> Iterator[Subject]:
    call = Call(case, clock.device)
    timed = functools.partial(Subject, repetitions=12)
    ours = functools.partial(call.ours, backend)
    yield timed(
        "us",
        [ours] * 2,
        before=lambda: {"error": call.error(ours())},
        after=lambda us: {
            "rows": len(call.rows),
            "teraflops": call.flops / us * 1e-6,
            "roofline_us": call.roofline_us(clock.copy_bandwidth(), clock.matmul_rate()),
        },
    )
    yield timed("decode_us", [call.decode] * 2)
    yield timed("fp8_us", [functools.partial(call.quantised, backend)] * 2)
    yield timed("pass_us", [call.separate_pass] * 2)
    for name, peer in peers.items():
        theirs = call.peer(peer)
        error = functools.partial(_error_of, call, f"{name}_error", theirs)
        yield timed(f"{name}_us", [theirs] * 2, before=error)


def _error_of(call: Call, field: str, theirs: Callable[[], Tensor]) -> Values:
    return {field: call.error(theirs())}


def _row(case: PrefillCase, fields: Sequence[str], values: Values) -> tuple[Values, Verdict]:
    times = [values[field] for field in fields if field in values]
    if times:
        values["fp8_ratio"] = (min(times) + values["pass_us"]) / values["fp8_us"]
    return beside("us", fields, _least(case), f"{_least(case)}x")(values)


class GatherThenAttend:
    """Pipeline from FP8 pages by lists of rows, the alternative to attending to ranges.

    Both pipelines decode the rows that the chunk sees into bfloat16 by the same kernel. Ours
    attends to ranges of them, and may store the heads rotated back and quantised. This one writes a
    list of rows for each query (``combine_topk_swa_indices``), passes it to the peer's kernel, and
    rotates and quantises in a separate pass. Work that a step does once for all layers is not timed
    in either.

    Args:
        call: inputs, whose workspace is filled by each run.
        peer: function for attention to listed rows.
    """

    def __init__(self, call: Call, peer: Peer) -> None:
        case, device = call.case, call.q.device
        self.call, self.peer = call, peer
        self.ratio = {"window": 1, "all": 128}.get(case.kind, 4)
        self.entries = call.entries
        numbers = ([0, case.tokens], [case.context], [len(call.rows) - call.entries])
        self.loc, self.length, self.gathered = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in numbers
        )
        if call.lists is not None:
            self.chosen = call.lists
        else:
            every = torch.arange(self.entries, dtype=torch.int32, device=device)
            self.chosen = every.expand(case.tokens, -1).contiguous()

    def lists(self) -> tuple[Tensor, Tensor]:
        """Write the rows of each query, and how many there are."""
        rows, count = combine_topk_swa_indices(
            self.chosen, self.loc, self.length, self.gathered,
            window_size=WINDOW, compress_ratio=self.ratio, topk=self.chosen.shape[1],
            M=len(self.call.rows), N=self.entries,
        )  # fmt: skip
        return rows, count

    def attend(self) -> Tensor:
        """Decode the rows and attend; return heads [T, H, 512]."""
        call = self.call
        call.decode()
        return self.peer(call.q, call.rows, *self.lists(), call.sink)

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Attend, then rotate the heads back and quantise; return codes and scales."""
        self.call.out = self.attend()
        return self.call.separate_pass()


def pipeline(call: Call, backend: str, end: str) -> Callable[[], object]:
    """Return a call of this package's pipeline that ends with "bf16" or "fp8" heads."""
    attend = call.ours if end == "bf16" else call.quantised

    def run() -> object:
        call.decode()
        return attend(backend)

    return run


def pipeline_cases(chosen: Iterable[PrefillCase], backend: str, peers: Peers) -> Iterator[Case]:
    """Yield cases of the pipelines from FP8 pages to bfloat16 and to FP8 heads."""
    for case in chosen:
        for end in ("bf16", "fp8"):
            yield Case(
                f"prefill from FP8 pages to {end} heads",
                case.label,
                functools.partial(_pipeline, case, backend, peers, end),
                {"backend": backend},
                beside("us", _fields(peers), _PIPELINE_LEAST, f"{_PIPELINE_LEAST}x"),
                _SEED,
            )


def _pipeline(
    case: PrefillCase, backend: str, peers: Peers, end: str, clock: Clock
) -> Iterator[Subject]:
    call = Call(case, clock.device)
    timed = functools.partial(Subject, repetitions=12)
    yield timed("us", [pipeline(call, backend, end)] * 2, before=lambda: {"rows": len(call.rows)})
    others = {name: GatherThenAttend(call, peer) for name, peer in peers.items()}
    for name, other in others.items():
        yield timed(f"{name}_us", [other.attend if end == "bf16" else other.quantised] * 2)
    yield timed("lists_us", [next(iter(others.values())).lists] * 2)


@dataclasses.dataclass(frozen=True)
class ListedRows:
    """Shape of queries with lists of one length into one tensor of random rows."""

    tokens: int
    heads: int
    width: int
    rows: int = 32768

    @property
    def label(self) -> str:
        """Short description of the shape for people."""
        return f"h{self.heads} T={self.tokens} K={self.width} of {self.rows} rows"


LISTED = tuple(
    ListedRows(4096, heads, width)
    for heads, width in ((64, 640), (64, 2048), (128, 1152), (128, 2048))
)
# A shape of each kind: nine layers, and three lists of random rows.
KINDS = tuple(
    case
    for case in SHAPES
    if (case.tokens, case.context) in ((4096, 32768), (4096, 131072))
    and (case.heads > 16 or case.kind == "selected")
)
LISTED_KINDS = tuple(rows for rows in LISTED if rows != ListedRows(4096, 64, 2048))


def listed_cases(chosen: Iterable[ListedRows], backend: str, peers: Peers) -> Iterator[Case]:
    """Yield cases of ``sparse_attention_rows`` called like ``flash_mla_sparse_fwd``."""
    for shape in chosen:
        yield Case(
            LISTS,
            shape.label,
            functools.partial(_listed, shape, backend, peers),
            {"backend": backend},
            beside("us", _fields(peers), _LISTS_LEAST, f"{_LISTS_LEAST}x"),
            _SEED,
        )


def _listed(shape: ListedRows, backend: str, peers: Peers, clock: Clock) -> Iterator[Subject]:
    device, tokens, heads, width = clock.device, shape.tokens, shape.heads, shape.width
    q = torch.randn((tokens, heads, 512), device=device).bfloat16()
    kv = torch.randn((shape.rows, 512), device=device).bfloat16()
    lists = torch.randint(0, shape.rows, (tokens, width), device=device).int()
    lengths = torch.full((tokens,), width, device=device, dtype=torch.int32)
    sink = torch.randn(heads, device=device)
    peaks = torch.empty((tokens, heads), device=device)
    ours = functools.partial(
        sparse_attention_rows, q, kv, lists, lengths,
        sink=sink, empty_lse=torch.inf, max_logits=peaks, backend=backend,
    )  # fmt: skip
    flops = 4 * tokens * heads * 512 * width
    yield Subject("us", [ours] * 2, 10, after=lambda us: {"teraflops": flops / us * 1e-6})
    for name, peer in peers.items():
        theirs = functools.partial(peer, q, kv, lists, lengths, sink)
        yield Subject(f"{name}_us", [theirs] * 2, 10)
