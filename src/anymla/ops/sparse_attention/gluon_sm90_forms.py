"""Which of Hopper's kernels a schedule is for, and what it takes besides tensors and numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.sparse_attention.gluon_sm90_columns import columns_kernel
from anymla.ops.sparse_attention.gluon_sm90_tiles import tiles_kernel
from anymla.ops.sparse_attention.schedule import Schedule

# Registers of a thread; the main warpgroup gets the rest of 512 (tiles) or 512 / 2 (columns).
RIGHT_REGISTERS = 160
TILE_PRODUCER_REGISTERS = 72
COLUMN_PRODUCER_REGISTERS = 136
# Blocks of rows in shared memory: three where 32 heads leave the room.
COLUMN_BUFFERS = {16: 3, 32: 2}

_TILE = 64
_CHANNELS = get_layout(MAIN_FP8).channels  # of values, in V3.2's rows as well
# Half a row of a tile, and what of it lies side by side in shared memory.
_HALF, _CHUNK = _CHANNELS // 2, 64


def form_of(
    schedule: Schedule, q: Tensor, out: Tensor | None, part: Tensor
) -> tuple[Any, dict[str, Any]]:
    """The kernel and its constants; of tiles the descriptors as well.

    Args:
        schedule: of the call.
        q: queries.
        out: where the kernel writes heads, if it does.
        part: where pieces of a schedule that cuts go.
    """
    if schedule.heads == _TILE:
        wide = q.shape[2] != _CHANNELS
        # Where some tasks are cut, two tiles take 8 % longer if the copy engine brings queries.
        threads = wide or (schedule.mixed and schedule.tiles > 1)
        return tiles_kernel, {
            "TILES": schedule.tiles,
            "RIGHT_REGISTERS": RIGHT_REGISTERS,
            "PRODUCER_REGISTERS": TILE_PRODUCER_REGISTERS,
            "WIDE": wide,
            "q_copy": None if threads else _boxes(q, q.shape[1]),
            "out_copy": None if out is None else _boxes(out, q.shape[1]),
            "part_copy": _boxes(part, q.shape[1]) if schedule.cut else None,
        }
    return columns_kernel, {
        "HEADS": schedule.heads,
        "TILES": schedule.tiles,
        "BUFFERS": COLUMN_BUFFERS[schedule.heads],
        "PRODUCER_REGISTERS": COLUMN_PRODUCER_REGISTERS,
    }


def _boxes(rows: Tensor, heads: int) -> TensorDescriptor | None:
    """Rows of 512 channels for the copy engine; None where threads have to move them.

    That is where they do not lie side by side, or a tile has heads of another token. Parts have
    room for a tile each.
    """
    box = heads if heads == _TILE // 2 else _TILE
    if rows.shape[1] % box or not rows.is_contiguous():
        return None
    width = _HALF if box == _TILE else _CHUNK
    layout = NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor.from_tensor(rows.view(-1, _CHANNELS), [box, width], layout)
