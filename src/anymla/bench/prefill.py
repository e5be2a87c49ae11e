"""Attention during prefill on a GPU: times and errors, beside a peer that takes lists of rows.

A case is the last ``tokens`` queries of a sequence of ``context`` tokens in a layer that sees its
window alone, the selected ones of its entries (ratio 4), or all of its entries (ratio 128). The
rows are decoded already, bfloat16, as the peer wants them; the time of decoding them is measured on
its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copy_bandwidth, matmul_rate, time_us
from anymla.bench.report import Result
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._reference import attend
from anymla.ops.kv_cache import dequant_gather_slots
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.prefill_attention import prefill_attention, prefill_attention_fp8_quant
from anymla.ops.prefill_attention.gathered import named_rows

WINDOW = 128
_SAMPLES = 48
_PEER_GRAIN = 128  # the peer's lists are a multiple of so many slots wide
_PEER_HEADS = 64
_GROUP = 8  # heads of an output group

# (q [T, H, 512], rows [N, 512], indices [T, K], lengths [T], sink [H]) -> out
Peer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """One measured call.

    Attributes:
        kind: "window", "selected", "scattered" (selected at random, unsorted) or "all".
        tokens: queries.
        heads: of a query.
        context: tokens of the sequence, the queries being its last.
        topk: entries that the indexer selects.
    """

    kind: str
    tokens: int
    heads: int
    context: int
    topk: int = 0

    @property
    def label(self) -> str:
        """For people."""
        more = f" top {self.topk}" if self.topk else ""
        return f"{self.kind}{more} h{self.heads} T={self.tokens} of {self.context}"


CASES = (
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
LONG_CASES = (
    PrefillCase("window", 32768, 64, 32768),
    PrefillCase("selected", 32768, 64, 32768, 512),
    PrefillCase("all", 32768, 64, 32768),
)


class Call:
    """Inputs of a case."""

    def __init__(self, case: PrefillCase, seed: int = 1, device: str = "cuda") -> None:
        torch.manual_seed(seed)
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
        runs = (first - start + self.entries, position + 1 - first, 0 * first, visible)
        self.runs = torch.stack(runs, 1).int()
        self.cache = _cache(self.entries + case.context - start, device)
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
        self.flops = 4 * heads * 512 * int(self.runs[:, 1].sum() + self.runs[:, 3].sum())

    def roofline_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Microseconds at a machine's rates, the slower counting: each byte moved once."""
        moved = sum(x.nbytes for x in (self.q, self.rows, self.runs, self.out))
        moved += 0 if self.lists is None else self.lists.nbytes
        return max(moved / bytes_per_s, self.flops / flops_per_s) * 1e6

    def decode(self) -> None:
        """Fill the workspace from the FP8 cache."""
        dequant_gather_slots(self.rows, self.cache, self.slots, layout=MAIN_FP8)

    def ours(self, backend: str) -> Tensor:
        """Run anymla."""
        out: Tensor = prefill_attention(
            self.q, self.rows, self.runs, self.lists,
            window=WINDOW, entries=self.entries, sink=self.sink, out=self.out, backend=backend,
        )[0]  # fmt: skip
        return out

    def quantised(self, backend: str) -> tuple[Tensor, Tensor]:
        """Run anymla with the output rotated and quantised."""
        codes, scales = prefill_attention_fp8_quant(
            self.q, self.rows, self.runs, self.lists, self.positions, self.table,
            n_groups=max(self.case.heads // _GROUP, 1), window=WINDOW, entries=self.entries,
            sink=self.sink, backend=backend,
        )  # fmt: skip
        return codes, scales

    def separate_pass(self) -> tuple[Tensor, Tensor]:
        """Rotate and quantise the finished output."""
        codes, scales = inverse_rope_fp8_quant(
            self.out, self.positions, self.table, n_groups=max(self.case.heads // _GROUP, 1)
        )
        return codes, scales

    def peer(self, peer: Peer) -> Callable[[], Tensor]:
        """The same call for the peer: heads padded to what it takes, compact lists, lengths."""
        heads = self.case.heads
        more = -heads % _PEER_HEADS
        q = torch.nn.functional.pad(self.q, (0, 0, 0, more))
        sink = torch.nn.functional.pad(self.sink, (0, more), value=-torch.inf)
        listed, _ = named_rows(self.runs, self.lists, WINDOW, int(self.runs[:, 3].max()))
        order = (listed < 0).to(torch.int8).sort(dim=1, stable=True).indices
        listed = listed.gather(1, order)
        lengths = (listed >= 0).sum(1).int()
        width = -(-int(lengths.max()) // _PEER_GRAIN) * _PEER_GRAIN
        listed = torch.nn.functional.pad(listed, (0, max(width - listed.shape[1], 0)), value=-1)
        listed = listed[:, :width].contiguous()
        return lambda: peer(q, self.rows, listed, lengths, sink)[:, :heads]

    def error(self, out: Tensor) -> float:
        """Relative L2 error of some tokens against float64."""
        tokens = self.case.tokens
        some = torch.linspace(0, tokens - 1, _SAMPLES).long().unique().tolist()
        wide = []
        lists = None if self.lists is None else self.lists.cpu()
        runs = self.runs.cpu().tolist()
        for token in some:
            start, count, base, visible = runs[token]
            if lists is None:
                second = torch.arange(base, base + visible)
            else:
                second = lists[token, :visible].long() + base
            seen = torch.cat((torch.arange(start, start + count), second))
            rows = self.rows[seen.to(self.rows.device)].double()
            wide.append(attend(self.q[token].double(), rows, self.sink.double(), None, 512)[0])
        want = torch.stack(wide)
        return float((out[some].double() - want).norm() / want.norm())


def _selected(visible: Tensor, entries: int, topk: int, local: bool) -> Tensor:
    """Entries of each token [T, topk]: neighbours share most of them and they ascend, or neither.

    As an indexer's choice does, the local one favours what came last.
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


def _cache(rows: int, device: str) -> Tensor:
    """An FP8 cache of random rows, pages of 64."""
    layout = get_layout(MAIN_FP8)
    cache = layout.allocate(-(-rows // 64), 64, device=device)
    for start in range(0, rows, 1 << 15):
        some = torch.arange(start, min(start + (1 << 15), rows), device=device)
        layout.write(cache, some, torch.randn((len(some), 512), device=device))
    return cache


def target(case: PrefillCase) -> float:
    """How many times the peer's speed is asked of a case."""
    if case.kind == "window":
        return 1.4
    if case.kind == "all":
        return 1.15 if case.context <= 32768 else 1.0
    return 1.05


@functools.cache
def _rates() -> tuple[float, float]:
    """Bytes and operations a second of the device."""
    return copy_bandwidth(), matmul_rate()


def measure(
    cases: Sequence[PrefillCase], backend: str, peer: Peer | None, *, repetitions: int = 12
) -> Iterator[Result]:
    """Time the cases; one result each.

    ``us`` and ``peer_us`` are attention, ``fp8_us`` is attention whose output leaves rotated and
    quantised, ``pass_us`` the separate pass that does the same to a finished output, ``decode_us``
    the filling of the workspace. Queries and outputs exceed the caches, so that each call of a
    graph finds them in memory; the rows of a chunk stay cached, as they do from query to query.
    ``roofline_us`` is at the rates of copies and of large matrix products on the same device.
    """
    for case in cases:
        call = Call(case)
        ours = functools.partial(call.ours, backend)
        row: dict[str, Any] = {"error": call.error(ours())}
        row["us"] = time_us([ours] * 2, repetitions)
        row["decode_us"] = time_us([call.decode] * 2, repetitions)
        row["fp8_us"] = time_us([functools.partial(call.quantised, backend)] * 2, repetitions)
        row["pass_us"] = time_us([call.separate_pass] * 2, repetitions)
        row["rows"] = len(call.rows)
        row["teraflops"] = call.flops / row["us"] * 1e-6
        row["roofline_us"] = call.roofline_us(*_rates())
        row["backend"] = backend
        asked, met = None, None
        if peer is not None:
            theirs = call.peer(peer)
            row["peer_error"] = call.error(theirs())
            row["peer_us"] = time_us([theirs] * 2, repetitions)
            row["ratio"] = row["peer_us"] / row["us"]
            row["fp8_ratio"] = (row["peer_us"] + row["pass_us"]) / row["fp8_us"]
            asked, met = f"{target(case)}x", row["ratio"] >= target(case)
        yield Result("attention during prefill", case.label, row, asked, met)
        del call, ours
        torch.cuda.empty_cache()


def flash_mla_peer(module: Any) -> Peer:
    """``flash_mla_sparse_fwd`` of a module with FlashMLA's functions."""

    def peer(q: Tensor, rows: Tensor, listed: Tensor, lengths: Tensor, sink: Tensor) -> Tensor:
        out: Tensor = module.flash_mla_sparse_fwd(
            q, rows.unsqueeze(1), listed.unsqueeze(1), 512**-0.5, 512, sink, lengths
        )[0]
        return out

    return peer
