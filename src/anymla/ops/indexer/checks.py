"""Checks that the indexer's contracts share."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.ops._check import FLOATS, check, require

CODED_Q = (*FLOATS, torch.float8_e4m3fn, torch.uint8)


def check_queries(name: str, q: Tensor, q_scales: Tensor | None, width: int) -> None:
    """Queries [.., H, _] must have ``width`` channels, and packed ones their scale bytes.

    Raises:
        TypeError, ValueError: they do not.
    """
    packed = q.dtype == torch.uint8
    require(
        q.shape[-1] == (width // 2 if packed else width),
        name,
        "q",
        f"of {width} channels" + (" (two to a byte)" if packed else ""),
        list(q.shape),
    )
    if packed:
        require(q_scales is not None, name, "q_scales", "given for a packed q", None)
        spec = "M H S" if q.ndim == 3 else "R J H S"
        sizes = {"S": width // MXFP4_BLOCK, **dict(zip(spec.split(), q.shape[:-1], strict=False))}
        check(name, dims=sizes, q_scales=(q_scales, spec, torch.uint8))
