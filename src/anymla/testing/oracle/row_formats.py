"""Formats of cache entries, and the test if bytes can be the rounding of a value.

A stored row was computed with some error, so it cannot be compared with the oracle's row bit for
bit: a value near a rounding boundary may fall on either side. But rounding is monotone. If the true
value is in [low, high], the stored value is between the roundings of low and of high, and that is
checked exactly (``explains``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.testing.oracle import rounding
from anymla.testing.oracle.rounding import E2M1_MAX, E4M3_MAX


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """A cache entry: blocks of scaled codes, or plain values, or codes followed by plain values.

    Attributes:
        channels: width of a decoded row.
        data_bytes: bytes of an entry's values.
        scale_bytes: bytes of an entry's scales, 0 if they are among the values.
        coded: number of leading channels stored as scaled codes; the others are plain.
        block: number of coded channels that share a scale.
        codes: format of the codes, "e4m3" or "e2m1".
        scale: format of the scales: "ue8m0" or "fp32", powers of two rounded up; or "e4m3", the
            nearest.
        plain: format of the plain channels, "bf16" or "fp32".
        inline: True if scales are between codes and plain channels, not in a plane of their own.
        interleaved: True if an entry's scales follow its values; False if a page has all values
            first.
    """

    channels: int
    data_bytes: int
    scale_bytes: int
    coded: int = 0
    block: int = 1
    codes: str = "e4m3"
    scale: str = "ue8m0"
    plain: str = "bf16"
    inline: bool = False
    interleaved: bool = False

    def decode(self, data: Tensor, scales: Tensor) -> Tensor:
        """Decode uint8 [n, data_bytes] and [n, scale_bytes] to float64 [n, channels]."""
        parts = []
        if self.coded:
            values = self._code_values(data) * self._scale_values(data, scales).unsqueeze(-1)
            parts.append(values.flatten(1))
        if self.coded < self.channels:
            parts.append(self._plain_values(data))
        return torch.cat(parts, 1)

    def round(self, rows: Tensor) -> Tensor:
        """Return float64 rows [n, channels] as read back after being stored."""
        parts = []
        if self.coded:
            blocks = self._blocks(rounding.to_bfloat16(rows))
            scale = self._scale_of(self._amax(blocks)).unsqueeze(-1)
            parts.append((rounding.round_to(blocks / scale, self._values) * scale).flatten(1))
        if self.coded < self.channels:
            parts.append(self._round_plain(rows[:, self.coded :]))
        return torch.cat(parts, 1)

    def explains(self, data: Tensor, scales: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Test if each channel's bytes are the rounding of some row between low and high.

        A block whose scale belongs to no row in between is wrong in all its channels.

        Args:
            data: uint8 [n, data_bytes], bytes of the values.
            scales: uint8 [n, scale_bytes], bytes of the scales.
            low: float64 [n, channels], lower bounds of the rows.
            high: float64 [n, channels], upper bounds of the rows.

        Returns:
            bool [n, channels], True for possible roundings.
        """
        parts = []
        if self.coded:
            low_blocks = self._blocks(rounding.to_bfloat16(low))
            high_blocks = self._blocks(rounding.to_bfloat16(high))
            smallest = torch.minimum(low_blocks.abs(), high_blocks.abs())
            smallest = torch.where((low_blocks <= 0) & (high_blocks >= 0), 0.0, smallest)
            largest = torch.maximum(low_blocks.abs(), high_blocks.abs())
            scale = self._scale_values(data, scales)
            good = scale >= self._scale_of(self._amax(smallest))
            good &= scale <= self._scale_of(self._amax(largest))
            scale = scale.unsqueeze(-1)
            stored = self._code_values(data)
            between = stored >= rounding.round_to(low_blocks / scale, self._values)
            between &= stored <= rounding.round_to(high_blocks / scale, self._values)
            parts.append((between & good.unsqueeze(-1)).flatten(1))
        if self.coded < self.channels:
            plain = self._plain_values(data)
            below, above = low[:, self.coded :], high[:, self.coded :]
            parts.append((plain >= self._round_plain(below)) & (plain <= self._round_plain(above)))
        return torch.cat(parts, 1)

    @property
    def _values(self) -> Tensor:
        return rounding.e4m3_values() if self.codes == "e4m3" else rounding.e2m1_values()

    def _blocks(self, rows: Tensor) -> Tensor:
        return rows[:, : self.coded].unflatten(1, (-1, self.block))

    def _amax(self, blocks: Tensor) -> Tensor:
        smallest = 2.0**-9 if self.scale == "e4m3" else 2.0**-126
        floor = 1e-4 if self.codes == "e4m3" else E2M1_MAX * smallest
        return blocks.abs().amax(-1).clamp(min=floor)

    def _scale_of(self, amax: Tensor) -> Tensor:
        largest = E4M3_MAX if self.codes == "e4m3" else E2M1_MAX
        if self.scale == "e4m3":
            return rounding.round_to(amax / largest, rounding.e4m3_values())
        return torch.exp2(rounding.scale_exponent(amax, largest).clamp(-127, 127).double())

    def _code_values(self, data: Tensor) -> Tensor:
        if self.codes == "e4m3":
            values = rounding.decode_e4m3(data[:, : self.coded])
        else:
            values = rounding.decode_e2m1_pairs(data[:, : self.coded // 2])
        return values.unflatten(1, (-1, self.block))

    def _scale_values(self, data: Tensor, scales: Tensor) -> Tensor:
        if self.inline:
            scales = data[:, self.coded : self._plain_start]
        if self.scale == "fp32":
            return scales.contiguous().view(torch.float32).double()
        if self.scale == "e4m3":
            return rounding.decode_e4m3(scales)
        return rounding.decode_ue8m0(scales[:, : self.coded // self.block])

    def _plain_values(self, data: Tensor) -> Tensor:
        dtype = torch.bfloat16 if self.plain == "bf16" else torch.float32
        return data[:, self._plain_start :].contiguous().view(dtype).double()

    @property
    def _plain_start(self) -> int:
        """Return the offset of the plain channels in an entry of the first plane."""
        start = self.coded if self.codes == "e4m3" else self.coded // 2
        return start + self.coded // self.block * 4 if self.inline else start

    def _round_plain(self, rows: Tensor) -> Tensor:
        to_plain: Callable[[Tensor], Tensor] = (
            rounding.to_bfloat16 if self.plain == "bf16" else rounding.to_float32
        )
        return to_plain(rows)


def _plain(channels: int, kind: str) -> RowFormat:
    return RowFormat(channels, channels * (2 if kind == "bf16" else 4), 0, plain=kind)


_V41_MAIN = RowFormat(512, 512, 16, coded=512, block=32)
_V41_COMPRESSED = RowFormat(512, 256, 32, coded=512, block=16, codes="e2m1", scale="e4m3")

ROW_FORMATS = {
    "v4_main_fp8": RowFormat(512, 448 + 128, 8, coded=448, block=64),
    "v32_main_fp8": RowFormat(
        576, 512 + 16 + 128, 0, coded=512, block=128, scale="fp32", inline=True
    ),
    "v41_main_fp8": dataclasses.replace(_V41_MAIN, interleaved=True),
    "v41_main_fp8_split": _V41_MAIN,
    "v41_compressed_nvfp4": dataclasses.replace(_V41_COMPRESSED, interleaved=True),
    "v41_compressed_nvfp4_split": _V41_COMPRESSED,
    "v4_index_fp8": RowFormat(128, 128, 4, coded=128, block=128, scale="fp32"),
    "v4_index_mxfp4": RowFormat(128, 64, 4, coded=128, block=32, codes="e2m1"),
    "rows_bf16_512": _plain(512, "bf16"),
    "rows_fp32_512": _plain(512, "fp32"),
    "rows_bf16_128": _plain(128, "bf16"),
    "rows_fp32_128": _plain(128, "fp32"),
}


def read_entries(cache: Tensor, slots: Tensor, layout_id: str) -> tuple[Tensor, Tensor]:
    """Copy the bytes of cache entries from a cache.

    Args:
        cache: cache [P, B, row] or [P, B, 1, row], with pages ``cache.stride(0)`` elements apart.
        slots: int [n] slots, every one inside the cache.
        layout_id: layout id of the pages.

    Returns:
        Values uint8 [n, data_bytes] and scales uint8 [n, scale_bytes].
    """
    row_format = ROW_FORMATS[layout_id]
    item, entries = cache.element_size(), int(cache.shape[1])
    storage = cache.untyped_storage()
    memory = torch.tensor([], dtype=torch.uint8, device=cache.device).set_(storage)
    page, offset = slots.long() // entries, slots.long() % entries
    start = (page * cache.stride(0) + int(cache.storage_offset())) * item
    data_bytes, scale_bytes = row_format.data_bytes, row_format.scale_bytes
    if row_format.interleaved:
        whole = _entries(memory, start, offset, data_bytes + scale_bytes).cpu()
        return whole[:, :data_bytes], whole[:, data_bytes:]
    values = _entries(memory, start, offset, data_bytes)
    scale_start = start + entries * data_bytes
    return values.cpu(), _entries(memory, scale_start, offset, scale_bytes).cpu()


def _entries(memory: Tensor, start: Tensor, offset: Tensor, size: int) -> Tensor:
    """Return the ``size`` bytes from ``start + offset * size`` on: [n, size]."""
    places = (start + offset * size).unsqueeze(1) + torch.arange(size, device=memory.device)
    return memory[places]
