"""Adaptation of SPIR-V from Intel's Triton compiler to Intel's OpenCL runtime for CPUs.

The runtime's compiler (2026.2) hoists loads whose address is the same for a whole work-group out of
their branch to the kernel's start, if a loop with a barrier follows in that branch. If the branch
is not taken, the address may be invalid. Volatile loads are not moved, so all loads become
volatile; programs then take three times as long to compile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAGIC = 0x07230203
_HEADER_WORDS = 5
# Numbers of the specification's instructions, and of the extension SPV_INTEL_kernel_attributes.
_EXTENSION, _EXECUTION_MODE, _CAPABILITY, _LOAD = 10, 16, 17, 61
_KERNEL_ATTRIBUTES = 5892
_ATTRIBUTE_MODES = range(5893, 5897)
_EXTENSION_NAME = b"SPV_INTEL_kernel_attributes"
# Words of a load: its type, result and pointer, and then, if present, a mask of memory operands.
_LOAD_WORDS, _MEMORY_OPERANDS, _VOLATILE = 4, 4, 1


def for_cpu(module: bytes) -> bytes:
    """Make all loads volatile, and remove the hints that SPV_INTEL_kernel_attributes adds.

    Raises:
        ValueError: it is no SPIR-V, or is cut short.
    """
    words = struct.unpack(f"<{len(module) // 4}I", module[: len(module) // 4 * 4])
    if len(module) % 4 or len(words) < _HEADER_WORDS or words[0] != _MAGIC:
        raise ValueError("not a SPIR-V module")
    kept = list(words[:_HEADER_WORDS])
    for instruction in _instructions(words):
        kind = instruction[0] & 0xFFFF
        if kind == _LOAD:
            kept += _volatile(instruction)
        elif not _is_kernel_attribute(kind, instruction):
            kept += instruction
    return struct.pack(f"<{len(kept)}I", *kept)


def _instructions(words: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    at = _HEADER_WORDS
    while at < len(words):
        count = words[at] >> 16
        if not count or at + count > len(words):
            raise ValueError("a SPIR-V module that is cut short")
        yield words[at : at + count]
        at += count


def _volatile(load: tuple[int, ...]) -> tuple[int, ...]:
    if len(load) == _LOAD_WORDS:
        return (_LOAD_WORDS + 1) << 16 | _LOAD, *load[1:], _VOLATILE
    before, operands, behind = load[:_MEMORY_OPERANDS], load[_MEMORY_OPERANDS], load[5:]
    return *before, operands | _VOLATILE, *behind


def _is_kernel_attribute(kind: int, instruction: tuple[int, ...]) -> bool:
    if kind == _CAPABILITY:
        return instruction[1] == _KERNEL_ATTRIBUTES
    if kind == _EXECUTION_MODE:
        return instruction[2] in _ATTRIBUTE_MODES
    return kind == _EXTENSION and _text(instruction[1:]) == _EXTENSION_NAME


def _text(words: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0")[0]
