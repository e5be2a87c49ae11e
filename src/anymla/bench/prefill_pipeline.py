"""A chunk of prefill from FP8 pages to the output projection, beside gather-then-attend.

Both decode what the chunk sees into bfloat16 rows, by the same kernel. Ours attends to runs of
them, and the heads may leave rotated back and quantised. The other way writes a list of rows for
each query (``combine_topk_swa_indices``), gives it to the peer's kernel, and rotates and quantises
in a pass of its own. What a step computes once for all layers is not timed on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import time_us
from anymla.bench.prefill import WINDOW, Call, Peer, PrefillCase
from anymla.bench.report import Result
from anymla.ops.selection import combine_topk_swa_indices

_ASKED = 1.2
CONTEXTS = (4096, 32768, 131072)
CASES = tuple(
    PrefillCase(kind, 4096, 64, context, topk)
    for kind, topk in (("selected", 512), ("all", 0), ("window", 0))
    for context in CONTEXTS
)


class GatherThenAttend:
    """The other pipeline on a call's inputs.

    Args:
        call: the inputs; its workspace is filled anew by each run.
        peer: attention to listed rows.
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
        """Rows of each query and how many there are."""
        rows, count = combine_topk_swa_indices(
            self.chosen, self.loc, self.length, self.gathered,
            window_size=WINDOW, compress_ratio=self.ratio, topk=self.chosen.shape[1],
            M=len(self.call.rows), N=self.entries,
        )  # fmt: skip
        return rows, count

    def attend(self) -> Tensor:
        """Heads [T, H, 512]."""
        call = self.call
        call.decode()
        return self.peer(call.q, call.rows, *self.lists(), call.sink)

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Heads rotated back, codes and scales."""
        self.call.out = self.attend()
        return self.call.separate_pass()


def ours(call: Call, backend: str, end: str) -> Callable[[], object]:
    """The pipeline of this package; ``end`` is "bf16" or "fp8"."""
    attend = call.ours if end == "bf16" else call.quantised

    def run() -> object:
        call.decode()
        return attend(backend)

    return run


def measure_pipelines(
    cases: Sequence[PrefillCase], backend: str, peer: Peer, *, repetitions: int = 12
) -> Iterator[Result]:
    """Time the cases, one result for each of both ends; 64 or 128 heads."""
    for case in cases:
        call = Call(case)
        other = GatherThenAttend(call, peer)
        lists_us = time_us([other.lists] * 2, repetitions)
        rivals = {"bf16": other.attend, "fp8": other.quantised}
        for end, rival in rivals.items():
            us = time_us([ours(call, backend, end)] * 2, repetitions)
            peer_us = time_us([rival] * 2, repetitions)
            ratio = peer_us / us
            values: dict[str, Any] = {"us": us, "peer_us": peer_us, "ratio": ratio}
            values |= {"lists_us": lists_us, "rows": len(call.rows), "backend": backend}
            part = f"prefill from FP8 pages to {end} heads"
            yield Result(part, case.label, values, f"{_ASKED}x", ratio >= _ASKED)
        del call, other, rivals, rival
        torch.cuda.empty_cache()
