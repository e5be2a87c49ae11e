"""Caches inside larger memory, so that tests see every byte an operation touches."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout
from anymla.ops import _host
from anymla.ops import device as device_facts
from anymla.ops.kv_cache.shapes import COMPRESSED_PAGE_SIZE, PAGE_SIZE

CANARY = 0xA5
MAIN_LAYOUTS = ("v4_main_fp8", "rows_bf16_512", "rows_fp32_512")
INDEX_LAYOUTS = ("v4_index_fp8", "v4_index_mxfp4", "rows_bf16_128", "rows_fp32_128")
V41_LAYOUTS = (
    "v41_main_fp8",
    "v41_main_fp8_split",
    "v41_compressed_nvfp4",
    "v41_compressed_nvfp4_split",
)
LAYOUTS = MAIN_LAYOUTS + V41_LAYOUTS + INDEX_LAYOUTS
PAGE_SIZES = (COMPRESSED_PAGE_SIZE, 4, 8, PAGE_SIZE, 256)
BACKENDS = ("reference", "torch", "torch without looking at values")
# Codes by integer bits, as on devices without FP8 instructions, and by the instructions.
TRITON = ("triton", "triton with native e4m3")
# What is chosen for Intel's GPUs, for tests of what is chosen differently there.
INTEL, ARC_A = "triton as on Intel", "triton as on Arc A"
_INTEL_TARGETS = {INTEL: "xpu_bmg", ARC_A: "xpu_dg2"}
ALL_BACKENDS = BACKENDS + TRITON


def use_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the backend; the third kind runs on the CPU what torch does on a device."""
    if name == "torch without looking at values":
        monkeypatch.setattr(_host, "on_host", lambda x: False)
        return "torch"
    if name in (*TRITON, *_INTEL_TARGETS):
        support = device_facts.triton_support(torch.empty(0))
        if not support:
            pytest.skip(support.reason)
        native = name == "triton with native e4m3"
        machine = a_device() if torch.cuda.is_available() else torch.device("cpu")
        real = device_facts.target_of(machine)
        if native and torch.cuda.is_available() and not real.native_e4m3:
            pytest.skip("this GPU has no e4m3 instructions")
        target = dataclasses.replace(real, native_e4m3=native, dot_e4m3=native)
        if name in _INTEL_TARGETS:
            if torch.cuda.is_available():
                pytest.skip("choices for Intel's GPUs are not meant for this one")
            target = device_facts.TARGETS[_INTEL_TARGETS[name]]
        monkeypatch.setattr(device_facts, "target_of", lambda device: target)
        return "triton"
    return name


def runnable(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the kinds above that can run here, for tests that choose among them."""
    without: tuple[str, ...] = (*TRITON, *_INTEL_TARGETS)
    if device_facts.triton_support(torch.empty(0)):
        without = tuple(_INTEL_TARGETS) if torch.cuda.is_available() else ()
    return tuple(name for name in names if name not in without)


def skip_float64(backend: str, *dtypes: torch.dtype) -> None:
    """Triton kernels refuse float64; that they do is a test of its own."""
    if backend == "triton" and torch.float64 in dtypes:
        pytest.skip("Triton kernels compute in float32")


DEVICE_BACKENDS = ("torch", "triton", "triton without native e4m3")


def use_device_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a backend on the device; the third kind is what older devices run."""
    if name == "torch":
        return name
    support = device_facts.triton_support(torch.empty(0, device=a_device()))
    if not support:
        pytest.skip(support.reason)
    if name != "triton":
        target = dataclasses.replace(device_facts.target_of(a_device()), native_e4m3=False)
        monkeypatch.setattr(device_facts, "target_of", lambda device: target)
    return "triton"


def a_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "xpu")


@contextlib.contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Make CUDA's synchronising calls errors; other devices have no such switch."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclasses.dataclass
class Cache:
    """A cache whose pages stand apart in a storage of canaries."""

    layout: PageLayout
    tensor: Tensor
    storage: Tensor
    start: int
    stride: int

    @property
    def slots(self) -> int:
        return self.tensor.shape[0] * self.tensor.shape[1]

    def entry_bytes(self, slot: int) -> Tensor:
        """Bytes of one entry, its values and then its scales, found by hand."""
        return torch.cat([self.storage[start : start + n] for start, n in self._parts(slot)])

    def _parts(self, slot: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where an entry's values and its scales start, and how many bytes they are."""
        entries, layout = self.tensor.shape[1], self.layout
        page, offset = self.start + slot // entries * self.stride, slot % entries
        if layout.interleaved:
            data = page + offset * (layout.data_bytes + layout.scale_bytes)
            return (data, layout.data_bytes), (data + layout.data_bytes, layout.scale_bytes)
        data = page + offset * layout.data_bytes
        scales = page + entries * layout.data_bytes + offset * layout.scale_bytes
        return (data, layout.data_bytes), (scales, layout.scale_bytes)

    def changed(self, before: Tensor) -> set[int]:
        """Slots whose bytes differ from an earlier copy of the storage; no other byte may."""
        differs = self.storage != before
        slots = set()
        for slot in range(self.slots):
            for begin, length in self._parts(slot):
                if differs[begin : begin + length].any():
                    slots.add(slot)
                    differs[begin : begin + length] = False
        assert not differs.any(), "bytes outside every entry were written"
        return slots


def make_cache(
    layout_id: str, pages: int, entries: int, *, gap: int = 0, start: int = 0, fill: int = 0xFF
) -> Cache:
    """Pages of ``fill`` bytes, ``gap`` bytes more apart than the layout asks, canaries between."""
    layout = get_layout(layout_id)
    stride = layout.page_stride_bytes(entries) + gap
    item = layout.dtype.itemsize
    assert stride % item == 0
    assert start % item == 0
    storage = torch.full((start + pages * stride + 64,), CANARY, dtype=torch.uint8)
    size = -(-storage.numel() // item) * item
    storage = torch.nn.functional.pad(storage, (0, size - storage.numel()), value=CANARY)
    for page in range(pages):
        begin = start + page * stride
        storage[begin : begin + entries * layout.entry_bytes] = fill
    tensor = storage.view(layout.dtype).as_strided(
        (pages, entries, layout.row_elements),
        (stride // item, layout.row_elements, 1),
        start // item,
    )
    return Cache(layout, tensor, storage, start, stride)
