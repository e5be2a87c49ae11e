"""How products of MXFP4 experts stream on Hopper, and which calls do."""

from __future__ import annotations

import dataclasses

import torch

from anymla.ops.device import TARGETS, runs_gluon
from anymla.ops.moe.triton_stack import Call

# Whether calls that can be streamed are.
AUTOMATIC = True
# Pairs of an expert, on average, up to which blocks of so many nearly always hold all of them.
_SHARES = ((3, 8), (9, 16), (26, 32))
_SHARED = TARGETS["sm_90"].shared_bytes
_SHARED_TOGETHER = _SHARED + 1024
_RESERVED = 1024  # of a program


@dataclasses.dataclass(frozen=True)
class Form:
    """How a product streams.

    Attributes:
        columns: pairs of a block.
        rows: of a tile, 16 a warp.
        channels: of a stage.
        stages: that are asked for ahead.
        programs: of a multiprocessor.
        later: products under way while those before are added up.
        batch: of w2's input, runs that are quantised at once.
    """

    columns: int
    rows: int
    channels: int
    stages: int
    programs: int
    later: int
    batch: int = 1


_FORMS = {
    8: ((Form(8, 64, 512, 2, 3, 4), Form(8, 64, 512, 4, 2, 4)), (Form(8, 64, 512, 3, 3, 4, 8),)),
    # V4-Pro's 16 columns fit with one program of 128 rows only. By themselves they are 3 % slower
    # than not streamed, a layer is 3 to 6 % faster: what does not stream is not launched early.
    16: (
        (Form(16, 64, 512, 2, 2, 4), Form(16, 128, 512, 4, 1, 4)),
        (Form(16, 64, 512, 3, 2, 4, 4), Form(16, 128, 512, 3, 1, 4, 4)),
    ),
    32: ((Form(32, 128, 512, 2, 1, 0),), (Form(32, 128, 512, 3, 1, 0, 2),)),
}


def _fitted(forms: tuple[Form, ...], width: int) -> Form | None:
    """The first of which shared memory holds two stages or more, with as many as it holds."""
    for form in forms:
        for channels in (512, 256):
            rows = form.columns * width + form.columns * (width // 128) * 4
            factors = form.rows * (channels // 32) * 4
            stage = form.rows * (channels // 2 + channels // 32)
            room = min(_SHARED, _SHARED_TOGETHER // form.programs - _RESERVED)
            stages = min(
                (room - rows - factors) // stage,
                form.stages * form.channels // channels,
                width // channels - 1,
            )
            if width % channels == 0 and stages >= 2:
                return dataclasses.replace(form, channels=channels, stages=stages)
    return None


def forms(pairs: int, sizes: tuple[int, int, int]) -> tuple[Form, Form] | None:
    """For w1 and w3, and for w2; None if there is none.

    Args:
        pairs: how many.
        sizes: experts, their inner size, hidden size.
    """
    experts, inner, d = sizes
    for share, columns in _SHARES:
        if pairs <= share * experts:
            up, down = (
                _fitted(choice, width)
                for choice, width in zip(_FORMS[columns], (d, inner), strict=True)
            )
            if up is None or down is None or 2 * inner % up.rows or d % down.rows:
                return None
            if inner // 128 % down.batch:
                return None
            return up, down
    return None


def streamed(call: Call) -> tuple[Form, Form] | None:
    """How a call streams, or None if it does not."""
    known = call.weight_format == "mxfp4" and call.coded and call.x.dtype is torch.bfloat16
    if not (AUTOMATIC and known and runs_gluon(call.x.device)):
        return None
    return forms(call.pairs, call.sizes)
