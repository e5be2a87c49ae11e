"""Decode over DeepSeek-V3.2's rows on a Hopper GPU beside FlashMLA, in one process, same bytes.

FlashMLA's configuration for V3.2 from its public benchmark program: keys of 576 channels, values of
512, 128 heads, two queries a request, 2,048 listed rows. Graph replay over rotating lists, medians;
both merges are counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for, time_us
from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops.sparse_attention import sparse_attention
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries

_SLOTS, _PAGE, _VALUES = 1 << 17, 64, 512  # 86 MB of rows: more than an L2 cache


@dataclasses.dataclass(frozen=True)
class DecodeV32:
    """One call.

    Attributes:
        batch: requests.
        rows: queries of a request, FlashMLA's s_q.
        heads: query heads.
        width: listed rows of a query.
    """

    batch: int
    rows: int = 2
    heads: int = 128
    width: int = 2048

    @property
    def label(self) -> str:
        """For people."""
        return f"V3.2 h{self.heads} b{self.batch} s_q{self.rows} {self.width}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        channels = get_layout(V32_FP8).channels + _VALUES
        return 2 * self.batch * self.rows * self.heads * self.width * channels


def production() -> Iterator[DecodeV32]:
    """FlashMLA's batches."""
    for batch in (2, 64, 74, 128):
        yield DecodeV32(batch)


@functools.cache
def cache() -> Tensor:
    """A cache [P, B, 1, 656] of random rows, as FlashMLA takes it."""
    layout = get_layout(V32_FP8)
    made = layout.allocate(_SLOTS // _PAGE, _PAGE, device="cuda")
    for start in range(0, _SLOTS, 1 << 14):
        some = torch.arange(start, start + (1 << 14), device="cuda")
        layout.write(made, some, torch.randn(len(some), layout.channels, device="cuda"))
    return made.unsqueeze(2).view(torch.float8_e4m3fn)


def compare(
    shape: DecodeV32, module: Any | None, backend: str | None = None, repetitions: int = 20
) -> dict[str, Any]:
    """One row: microseconds and errors of both.

    Args:
        shape: of the call.
        module: FlashMLA, or None to leave it out.
        backend: of this package, or None for what it chooses.
        repetitions: replays that are timed.
    """
    channels = get_layout(V32_FP8).channels
    shape_of_q = (shape.batch, shape.rows, shape.heads, channels)
    q = torch.randn(shape_of_q, device="cuda").bfloat16()
    listed = (shape.batch, shape.rows, shape.width)
    moved = shape.batch * shape.rows * shape.width * get_layout(V32_FP8).entry_bytes
    lists = [
        torch.randint(0, _SLOTS, listed, dtype=torch.int32, device="cuda")
        for _ in range(min(16, copies_for(moved)))
    ]
    row: dict[str, Any] = {"label": shape.label, **dataclasses.asdict(shape), "backend": backend}
    calls = ours(q, lists, backend)
    row["error"] = error(calls[0](), q, lists[0])
    row["microseconds"] = time_us(calls, repetitions)
    row["teraflops"] = shape.flops / row["microseconds"] * 1e-6
    if module is not None:
        peers = peer(module, q, lists)
        row["flash_mla_error"] = error(peers[0](), q, lists[0])
        row["flash_mla_microseconds"] = time_us(peers, repetitions)
        row["ratio"] = row["flash_mla_microseconds"] / row["microseconds"]
    return row


def ours(q: Tensor, lists: list[Tensor], backend: str | None) -> list[Callable[[], Tensor]]:
    """Calls of this package's operation, one for each set of lists."""
    flat = q.flatten(0, 1)
    rows = cache().view(torch.uint8)
    out = torch.empty(*flat.shape[:2], _VALUES, dtype=q.dtype, device=q.device)

    def call(listed: Tensor) -> Tensor:
        result: Tensor = sparse_attention(
            flat, rows, listed, layout=V32_FP8, value_dim=_VALUES, out=out, backend=backend
        )[0]
        return result.view(*q.shape[:3], _VALUES)

    return [functools.partial(call, listed.flatten(0, 1)) for listed in lists]


def peer(module: Any, q: Tensor, lists: list[Tensor]) -> list[Callable[[], Tensor]]:
    """Calls of FlashMLA's function, its schedule made once."""
    schedule, _ = module.get_mla_metadata()

    def call(listed: Tensor) -> Tensor:
        out: Tensor = module.flash_mla_with_kvcache(
            q, cache(), None, None, _VALUES, schedule, None, None, False, True, listed
        )[0]
        return out

    return [functools.partial(call, listed) for listed in lists]


def error(out: Tensor, q: Tensor, listed: Tensor) -> float:
    """Relative L2 error of some rows against float64 on the same bytes."""
    wrong = right = 0.0
    for b in {0, len(q) // 2, len(q) - 1}:
        data, scales = read_entries(cache().view(torch.uint8), listed[b, 0].long(), V32_FP8)
        keys = ROW_FORMATS[V32_FP8].decode(data.cpu(), scales.cpu()).double()
        share = (q[b, 0].cpu().double() @ keys.T * q.shape[-1] ** -0.5).softmax(1)
        want = share @ keys[:, :_VALUES]
        wrong += (out[b, 0].cpu().double() - want).norm().item() ** 2
        right += want.norm().item() ** 2
    return (wrong / right) ** 0.5
