"""Layouts of other engines and devices, which dumps may hold and which no operation reads."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.e4m3 import decode_e4m3fnuz
from anymla.formats.page_layout import INDEX_FP8, LAYOUT_IDS, MAIN_FP8, get_layout
from anymla.formats.pages import PageLayout
from anymla.formats.records import RowFp8Layout, SplitFp8Layout
from anymla.formats.ue8m0 import decode_ue8m0

MAIN_FP8_ROWS = "v4_main_fp8_rows"
MAIN_FP8_FNUZ = "v4_main_fp8_fnuz"
INDEX_FP8_FNUZ = "v4_index_fp8_fnuz"

_NEGATIVE_ZERO, _FNUZ_NAN = 0x80, 0x80


@dataclasses.dataclass(frozen=True)
class FnuzMainLayout(PageLayout):
    """The main record with AMD's e4m3fnuz codes, as gfx942 multiplies them.

    A code means half of what it means in OCP e4m3, and 0x80 is NaN. So OCP's values are kept by the
    same code (0 for -0) and a scale byte that is one more; a block's largest code is 224.
    """

    base: SplitFp8Layout

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels]."""
        data, scales = self.base.encode(rows)
        data = data.clone()
        data[:, : self.base.nope] = fnuz_codes(data[:, : self.base.nope])
        blocks = self.base.nope // self.base.block
        scales[:, :blocks] = (scales[:, :blocks].int() + 1).clamp(max=254).to(torch.uint8)
        return data, scales

    def to_base(self, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Convert values [.., data_bytes] and scales [.., scale_bytes] to the main record's bytes.

        The values are kept; a code of 240, which no main record can hold, becomes NaN.
        """
        nope, blocks = self.base.nope, self.base.nope // self.base.block
        data, scales = data.clone(), scales.clone()
        data[..., :nope] = ocp_codes(data[..., :nope])
        scales[..., :blocks] = scales[..., :blocks].clamp(min=1) - 1
        return data, scales

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]; every code counts, 240 and NaN included."""
        assert scales is not None
        base = self.base
        scale = decode_ue8m0(scales[:, : base.nope // base.block].contiguous(), torch.float32)
        values = decode_e4m3fnuz(data[:, : base.nope]).unflatten(1, (-1, base.block))
        nope = (values.double() * scale.double().unsqueeze(-1)).flatten(1).to(dtype)
        rope = data[:, base.nope :].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat((nope, rope), 1)


@dataclasses.dataclass(frozen=True)
class FnuzIndexLayout(PageLayout):
    """Index keys with e4m3fnuz codes; the float32 scale is twice that of OCP."""

    base: RowFp8Layout

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels]."""
        codes, scales = self.base.encode(rows)
        return fnuz_codes(codes), (scales.view(torch.float32) * 2).view(torch.uint8)

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]."""
        assert scales is not None
        scale = scales.contiguous().view(torch.float32).double()
        return (decode_e4m3fnuz(data, torch.float64) * scale).to(dtype)


def ocp_codes(codes: Tensor) -> Tensor:
    """Return uint8 codes of e4m3fnuz as OCP e4m3 codes of twice the value."""
    return torch.where(codes == _FNUZ_NAN, 0x7F, codes)


def fnuz_codes(codes: Tensor) -> Tensor:
    """Return uint8 codes of OCP e4m3 as e4m3fnuz codes of half the value."""
    nan = (codes & 0x7F) == 0x7F
    return torch.where(nan, _FNUZ_NAN, torch.where(codes == _NEGATIVE_ZERO, 0, codes)).to(
        torch.uint8
    )


def _others() -> dict[str, PageLayout]:
    main, index = get_layout(MAIN_FP8), get_layout(INDEX_FP8)
    assert isinstance(main, SplitFp8Layout)
    assert isinstance(index, RowFp8Layout)

    def facts(base: PageLayout, layout_id: str) -> dict[str, object]:
        names = [field.name for field in dataclasses.fields(PageLayout)]
        return {name: getattr(base, name) for name in names} | {"layout_id": layout_id}

    layouts = (
        dataclasses.replace(main, layout_id=MAIN_FP8_ROWS, alignment=16, interleaved=True),
        FnuzMainLayout(**facts(main, MAIN_FP8_FNUZ), base=main),  # type: ignore[arg-type]
        FnuzIndexLayout(**facts(index, INDEX_FP8_FNUZ), base=index),  # type: ignore[arg-type]
    )
    return {layout.layout_id: layout for layout in layouts}


_OTHERS = _others()
DUMP_LAYOUT_IDS = (*LAYOUT_IDS, *_OTHERS)


def dump_layout(layout_id: str) -> PageLayout:
    """Return the layout of a name, whether operations read it or not."""
    if layout_id in _OTHERS:
        return _OTHERS[layout_id]
    if layout_id in LAYOUT_IDS:
        return get_layout(layout_id)
    known = ", ".join(sorted(DUMP_LAYOUT_IDS))
    raise ValueError(f"unknown cache layout {layout_id!r}; known: {known}")
