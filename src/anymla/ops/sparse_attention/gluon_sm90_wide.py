"""Attention over DeepSeek-V3.2's rows for tiles of 64 heads on Hopper.

The kernel of ``gluon_sm90_tiles`` with WIDE, for keys of 576 channels, of which 512 are the value:
a third part of keys and queries (the tail, 64 channels) that only the scores read, and one buffer
of P instead of two, for which there is no room. One list of one cache.
"""

from collections.abc import Iterator

from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.sparse_attention.gluon_sm90_lists import ARGUMENT_TYPES, BUILT
from anymla.ops.sparse_attention.gluon_sm90_tiles import copies, tiles_kernel

_LAYOUT = get_layout(V32_FP8)
_SPILLS = 700


def build(label: str, **constants: object) -> Build:
    """One specialisation, with pages of 64 rows unless ``constants`` says otherwise."""
    own = {
        "TILES": 2, "TWO": False, "LENGTH1": False, "RIGHT_REGISTERS": 160,
        "PRODUCER_REGISTERS": 72, "STEP0": _LAYOUT.page_stride_bytes(64),
        "Q_HEAD": _LAYOUT.channels // 2, "WIDE": True,
    }  # fmt: skip
    types, missing = copies(WIDE=True, **constants)
    return Build(
        label,
        tiles_kernel,
        ARGUMENT_TYPES | types,
        BUILT | own | missing | constants,
        divisible=("q_token", "out_token"),
        matrix=True,
        spills=_SPILLS,
    )


def builds(target: Target) -> Iterator[Build]:
    """Every way of handing out pieces."""
    if target.name != "sm_90":
        return
    yield build("whole")
    yield build("aligned", SPLIT=True)
    yield build("stream", SPLIT=True, STREAM=True, SIZE=256)
    yield build("no lengths, pages of 61", LENGTH0=False, SINK=False, PAGE0=61, STEP0=40688)
