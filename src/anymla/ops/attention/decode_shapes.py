"""Named shapes of sparse attention, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from anymla.formats.page_layout import (
    MAIN_FP8,
    V32_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One call of sparse attention.

    Attributes:
        tokens: query rows T.
        heads: query heads H.
        window: slots of the first scope per token.
        entries: slots of the second scope per token.
        dim: head dim D.
        values: leading channels of a row that are the value; None for all.
    """

    tokens: int
    heads: int
    window: int
    entries: int
    dim: int = 512
    values: int | None = None

    @property
    def slots(self) -> int:
        """Slots per token over both scopes."""
        return self.window + self.entries

    @property
    def out_dim(self) -> int:
        """Channels of the output."""
        return self.dim if self.values is None else self.values

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products."""
        return 2 * self.tokens * self.heads * self.slots * (self.dim + self.out_dim)


FLASH_DECODE = AttentionShape(tokens=4, heads=64, window=128, entries=512)
PRO_DECODE = AttentionShape(tokens=4, heads=128, window=128, entries=1024)
WINDOW_DECODE = AttentionShape(tokens=4, heads=64, window=128, entries=0)
V32_DECODE = AttentionShape(tokens=4, heads=128, window=2048, entries=0, dim=576, values=512)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """A call of decode attention: its shape and everything else that selects its kernels.

    Attributes:
        shape: sizes of the call, whose ``tokens`` are requests times queries.
        page: rows per page of the first cache.
        extra_page: rows per page of the second cache.
        lengths: True if the lists have lengths.
        sink: True if heads have sinks.
        layout: name of the page layout of both caches.
        extra_layout: name of the second cache's page layout if it differs, or empty.
        quantized: True if the output is written as FP8.
        planned: True to pass a plan wherever one gains anything.
        batch_invariant: argument of ``sparse_attention`` by this name.
    """

    shape: AttentionShape
    page: int = 64
    extra_page: int = 64
    lengths: bool = True
    sink: bool = True
    layout: str = MAIN_FP8
    quantized: bool = False
    planned: bool = False
    batch_invariant: bool = False
    extra_layout: str = ""

    def __str__(self) -> str:
        shape = self.shape
        slots = f"{shape.window} + {shape.entries}" if shape.entries else str(shape.window)
        words = [f"{shape.tokens} tokens, {shape.heads} heads, {slots} slots"]
        words += [self.layout] * (self.layout != MAIN_FP8)
        words += [f"entries in {self.extra_layout}"] * bool(self.extra_layout)
        words += [f"pages of {self.page}"] * (self.page != 64)
        words += [f"pages of {self.extra_page}"] * (self.extra_page != 64)
        names = {"full lists": not self.lengths, "no sink": not self.sink}
        names |= {"quantised": self.quantized, "planned": self.planned}
        names |= {"batch-invariant": self.batch_invariant}
        return ", ".join([*words, *(name for name, is_so in names.items() if is_so)])


def _calls() -> Iterator[AttentionCall]:
    """Yield calls of V4-Flash's layers (64 heads), V4-Pro's (128), shares of both, and V3.2's."""
    # Ratio 4 with selected entries, for one request, a few, half a wave of an H200's SMs, and a
    # wave and more.
    for heads, entries in ((8, 512), (16, 512), (32, 512), (64, 512), (128, 1024)):
        for tokens in (1, 32, 160) if heads == 32 else (1, 32, 64, 128, 160, 256):
            yield AttentionCall(AttentionShape(tokens, heads, 128, entries))
    for tokens in (1, 12, 32, 128, 160, 192):
        yield AttentionCall(AttentionShape(tokens, 64, 128, 512), quantized=True)
    for tokens in (12, 192):
        yield AttentionCall(AttentionShape(tokens, 64, 128, 512))
    for tokens, heads, entries in ((1, 128, 1024), (1, 16, 512), (128, 16, 512)):
        yield AttentionCall(AttentionShape(tokens, heads, 128, entries), quantized=True)
    # Windows alone.
    for heads in (16, 64):
        yield AttentionCall(AttentionShape(2, heads, 128, 0))
    yield AttentionCall(AttentionShape(2, 64, 128, 0), quantized=True)
    # Ratio 128 with all entries, in pages of 2 as in vLLM's cache.
    yield AttentionCall(AttentionShape(8, 128, 128, 1024), extra_page=2)
    for heads, tokens, page in ((16, 64, 64), (64, 64, 64), (128, 64, 2), (128, 768, 2)):
        long = AttentionCall(AttentionShape(tokens, heads, 128, 8192), extra_page=page)
        yield long
        yield dataclasses.replace(long, planned=True)
    for heads in (16, 64):
        yield AttentionCall(AttentionShape(64, heads, 128, 8192), quantized=True)
    # Heads that do not fill their last tile, and splits by blocks, planned or not.
    for heads, tokens in ((40, 20), (40, 160), (96, 20), (96, 66), (96, 160)):
        some = AttentionCall(AttentionShape(tokens, heads, 128, 2048))
        yield some
        yield dataclasses.replace(some, planned=True)
    # An order planned once for a step, and lists that are full.
    yield AttentionCall(AttentionShape(256, 64, 128, 512), planned=True)
    yield AttentionCall(AttentionShape(160, 64, 128, 512), lengths=False)
    yield AttentionCall(AttentionShape(160, 128, 128, 1024), lengths=False)
    for heads in (16, 32, 64, 128):
        yield AttentionCall(AttentionShape(4, heads, 128, 512), batch_invariant=True)
    short = AttentionCall(AttentionShape(4, 32, 128, 128), batch_invariant=True)
    yield short
    yield dataclasses.replace(short, quantized=True)
    for tokens in (1, 8, 32, 2112):
        shape = dataclasses.replace(V32_DECODE, tokens=tokens)
        yield AttentionCall(shape, layout=V32_FP8)


CALLS = tuple(_calls())


def _v41_calls() -> Iterator[AttentionCall]:
    """Yield calls of V4.1's layers with entries of either record, and V4's with 4-bit entries."""
    shape = AttentionShape(32, 64, 128, 512)
    for tokens, heads in ((1, 16), (32, 64), (128, 64), (192, 64), (128, 128), (512, 32)):
        mixed = AttentionCall(
            dataclasses.replace(shape, tokens=tokens, heads=heads), page=32,
            layout=V41_MAIN_FP8, extra_layout=V41_COMPRESSED_NVFP4,
        )  # fmt: skip
        yield mixed
        if heads < 128:
            yield dataclasses.replace(mixed, quantized=True)
    fp8 = AttentionCall(shape, page=32, extra_page=128, layout=V41_MAIN_FP8)
    for tokens in (32, 128, 192):
        yield dataclasses.replace(fp8, shape=dataclasses.replace(shape, tokens=tokens))
    yield dataclasses.replace(fp8, shape=dataclasses.replace(shape, tokens=512, heads=32))
    yield AttentionCall(dataclasses.replace(shape, entries=0), page=32, layout=V41_MAIN_FP8)
    yield AttentionCall(
        shape, layout=V41_MAIN_FP8_SPLIT, extra_layout=V41_COMPRESSED_NVFP4_SPLIT, page=32
    )
    yield AttentionCall(shape, extra_layout=V41_COMPRESSED_NVFP4)


# Only Triton's kernels take the last call: Hopper's do not read V4's rows beside V4.1's.
V41_CALLS = tuple(_v41_calls())
# Full lists without lengths or sinks in pages of odd size, as a captured graph calls attention.
CAPTURED_CALLS = (
    AttentionCall(AttentionShape(256, 64, 128, 0), 53, lengths=False, sink=False),
    AttentionCall(
        dataclasses.replace(V32_DECODE, tokens=66), 61, lengths=False, sink=False, layout=V32_FP8
    ),
)
