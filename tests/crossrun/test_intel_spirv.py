"""How SPIR-V modules are changed for Intel's OpenCL runtime for CPUs."""

import struct

import pytest

from crossrun.intel.spirv import for_cpu

HEAD = (0x07230203, 0x00010400, 0, 9, 0)


def instruction(kind, *words):
    return ((len(words) + 1) << 16 | kind, *words)


def text(words):
    data = words.encode() + b"\0"
    return struct.unpack(f"<{-(-len(data) // 4)}I", data.ljust(-(-len(data) // 4) * 4, b"\0"))


def module(*instructions):
    words = [*HEAD, *(word for each in instructions for word in each)]
    return struct.pack(f"<{len(words)}I", *words)


KEPT = (
    instruction(17, 4),  # a capability
    instruction(10, *text("SPV_INTEL_subgroups")),
    instruction(16, 1, 35, 16),  # an execution mode
    instruction(43, 5892, 5893, 7),  # a constant that looks like one
)


def test_hints_for_gpus_are_left_out_and_nothing_else():
    hints = (
        instruction(17, 5892),
        instruction(10, *text("SPV_INTEL_kernel_attributes")),
        *(instruction(16, 1, mode, 3) for mode in range(5893, 5897)),
    )
    mixed = [each for pair in zip(hints, (*KEPT, KEPT[0], KEPT[1]), strict=True) for each in pair]
    assert for_cpu(module(*mixed)) == module(*KEPT, KEPT[0], KEPT[1])
    assert for_cpu(module(*KEPT)) == module(*KEPT)


def test_loads_become_volatile():
    given = (
        instruction(61, 7, 8, 9),
        instruction(61, 7, 8, 9, 1),  # volatile
        instruction(61, 7, 8, 9, 2, 16),  # aligned to 16 bytes
        instruction(62, 8, 9, 2, 16),  # a store
    )
    volatile = (
        instruction(61, 7, 8, 9, 1),
        instruction(61, 7, 8, 9, 1),
        instruction(61, 7, 8, 9, 3, 16),
        instruction(62, 8, 9, 2, 16),
    )
    assert for_cpu(module(*given)) == module(*volatile)


@pytest.mark.parametrize("wrong", [b"", b"abc", struct.pack("<5I", 1, 2, 3, 4, 5)])
def test_other_bytes_are_refused(wrong):
    with pytest.raises(ValueError, match="not a SPIR-V module"):
        for_cpu(wrong)


def test_a_module_that_is_cut_short_is_refused():
    with pytest.raises(ValueError, match="cut short"):
        for_cpu(module(*KEPT)[:-4])
    with pytest.raises(ValueError, match="cut short"):
        for_cpu(module((0,)))
