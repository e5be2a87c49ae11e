"""SPIR-V of Intel's Triton compiler as Intel's OpenCL runtime for CPUs takes it."""

from __future__ import annotations

import struct

_MAGIC = 0x07230203
_HEADER_WORDS = 5
# Numbers of the specification's instructions, and of the extension SPV_INTEL_kernel_attributes.
_EXTENSION, _EXECUTION_MODE, _CAPABILITY = 10, 16, 17
_KERNEL_ATTRIBUTES = 5892
_ATTRIBUTE_MODES = range(5893, 5897)
_EXTENSION_NAME = b"SPV_INTEL_kernel_attributes"


def without_kernel_attributes(module: bytes) -> bytes:
    """The module without what SPV_INTEL_kernel_attributes adds: hints that change no result.

    Raises:
        ValueError: it is no SPIR-V, or is cut short.
    """
    words = struct.unpack(f"<{len(module) // 4}I", module[: len(module) // 4 * 4])
    if len(module) % 4 or len(words) < _HEADER_WORDS or words[0] != _MAGIC:
        raise ValueError("not a SPIR-V module")
    kept = list(words[:_HEADER_WORDS])
    at = _HEADER_WORDS
    while at < len(words):
        count, kind = words[at] >> 16, words[at] & 0xFFFF
        instruction = words[at : at + count]
        if not count or len(instruction) < count:
            raise ValueError("a SPIR-V module that is cut short")
        at += count
        if kind == _CAPABILITY and instruction[1] == _KERNEL_ATTRIBUTES:
            continue
        if kind == _EXECUTION_MODE and instruction[2] in _ATTRIBUTE_MODES:
            continue
        if kind == _EXTENSION and _text(instruction[1:]) == _EXTENSION_NAME:
            continue
        kept += instruction
    return struct.pack(f"<{len(kept)}I", *kept)


def _text(words: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0")[0]
