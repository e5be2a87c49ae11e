"""Machine code for Intel GPUs and its requirements, from SPIR-V by Intel's compiler.

Triton's compiler for XPU ends with SPIR-V, and Intel's driver compiles that to machine code when a
kernel is loaded. The driver's compiler also exists as a program, ``ocloc``, which needs no device.
Its path is ANYMLA_OCLOC, or else it is looked up in PATH.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
import subprocess
import tempfile
from pathlib import Path

from anymla.bench.xpu_code import ocloc
from anymla.ops.device import Target

# Registers per thread. A driver compiles for 128, and again for 256 if that spills.
GRF_SIZES = (128, 256)
_INSTRUCTION = re.compile(
    r"^\s*(?:\([^)]*\)\s+)?([a-z]\w*(?:\.\w+)*)\s+\(\d+\|M\d+\)(.*)$", re.MULTILINE
)
_LABEL = re.compile(r"^(L\d+):")
_JUMP = re.compile(r"\b(?:goto|jmpi|while)\b.*")
_OPERAND_TYPE = re.compile(r"[\w>]:(\w+)")
_SPILL_BYTES = re.compile(r"^\s+spill_size:\s+(\d+)", re.MULTILINE)
_PRIVATE_BYTES = re.compile(r"^\s+private_size:\s+(\d+)", re.MULTILINE)
_SIMD = re.compile(r"^\s+simd_size:\s+(\d+)", re.MULTILINE)
_SPILLED = re.compile(r"spilled around (\d+)")


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """Result of Intel's offline compiler for one kernel.

    Attributes:
        registers: number of registers of a thread, 64 bytes each (32 on Arc A).
        lanes: number of lanes of a thread.
        spills: number of registers that are kept in a thread's memory, or that the compiler reports
            as spilled if those are more; for some kernels it reports nothing.
        spill_bytes: bytes of a thread's memory for spilled registers.
        private_bytes: memory of a thread for arrays that are no registers.
        code_bytes: size of the kernel's instructions.
        instructions: names of all instructions, in order, those of matrix products with the type
            of their last operand ("dpas.8x8:bf").
        loop_instructions: instructions of the longest loop, inner loops included; 0 without loops.
    """

    registers: int
    lanes: int
    spills: int
    spill_bytes: int
    private_bytes: int
    code_bytes: int
    instructions: list[str]
    loop_instructions: int


def _run(*words: str) -> str:
    command = [str(ocloc()), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"ocloc {words[0]}: {said[-400:]}")
    return said


def _device(target: Target) -> str:
    """Return ocloc's name of the target."""
    return target.name.removeprefix("xpu_")


@functools.cache
def compiler_version() -> str:
    """Return the version of ocloc, such as "26.27.039122"."""
    return _run("--version").split()[0]


def machine_code(spirv: bytes, target: Target) -> MachineCode:
    """Compile as a driver does: for 128 registers, and for 256 if that spills.

    Raises:
        RuntimeError: ocloc refuses the code.
    """
    for registers in GRF_SIZES:
        found = _machine_code(spirv, target, registers)
        if not found.spill_bytes:
            break
    return found


def _machine_code(spirv: bytes, target: Target, registers: int) -> MachineCode:
    device = _device(target)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        (place / "kernel.spv").write_bytes(spirv)
        said = _run(
            "compile", "-file", str(place / "kernel.spv"), "-spirv_input", "-device", device,
            "-options", f"-cl-intel-{registers}-GRF-per-thread",
            "-output", "kernel", "-output_no_suffix", "-out_dir", folder,
        )  # fmt: skip
        binary = place / "kernel.bin"
        _run("disasm", "-file", str(binary), "-device", device, "-dump", f"{folder}/parts")
        facts = (place / "parts/.ze_info").read_text(encoding="utf-8")
        listings = [each.read_text("utf-8") for each in sorted(place.glob("parts/.text.*.asm"))]
        code_bytes = _code_bytes(binary.read_bytes())
    spill_bytes = _number(_SPILL_BYTES, facts)
    return MachineCode(
        registers,
        _number(_SIMD, facts),
        max(_number(_SPILLED, said), -(-spill_bytes // (32 if target.arc_a else 64))),
        spill_bytes,
        _number(_PRIVATE_BYTES, facts),
        code_bytes,
        [
            _title(name, operands)
            for text in listings
            for name, operands in _INSTRUCTION.findall(text)
        ],
        max((_longest_loop(text) for text in listings), default=0),
    )


def _title(name: str, operands: str) -> str:
    types = _OPERAND_TYPE.findall(operands) if name.startswith("dpas") else []
    return f"{name}:{types[-1]}" if types else name


def _longest_loop(listing: str) -> int:
    """Count the instructions of the longest loop, from a label to the last jump back to it."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = count
        elif _INSTRUCTION.match(line):
            count += 1
        if jump := _JUMP.search(line):
            back = (labels[name] for name in re.findall(r"L\d+", jump[0]) if name in labels)
            longest = max(longest, count - min(back, default=count))
    return longest


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0


def _code_bytes(elf: bytes) -> int:
    """Return the size of the sections of instructions in a file of the 64-bit ELF format."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    sections = [struct.unpack_from("<2I4Q", elf, headers + size * n) for n in range(count)]
    title = sections[names][4]
    return sum(section[5] for section in sections if elf.startswith(b".text.", title + section[0]))
