"""The text of one kernel as LLVM's AMDGPU back end prints it: instructions, labels, arguments."""

from __future__ import annotations

import re
from typing import NamedTuple

_LABEL = re.compile(r"^(\.?[\w$.]+):")
_LOCATION = re.compile(r"^\.loc\s.*;\s*(\S+:\d+)")
# Arrangements of user registers at a wave's start, in order, with their number of registers.
_USER_REGISTERS = {
    "private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2, "kernarg_segment_ptr": 2,
    "dispatch_id": 2, "flat_scratch_init": 2, "private_segment_size": 1,
}  # fmt: skip


class Argument(NamedTuple):
    """One entry of the kernel's argument block.

    Attributes:
        offset: distance from the block's beginning, in bytes.
        size: number of bytes.
        kind: LLVM's ``value_kind``: "global_buffer", "by_value", "hidden_block_count_x", ...
    """

    offset: int
    size: int
    kind: str


class Program:
    """A kernel's instructions and what its launch must provide.

    Attributes:
        name: the kernel's name.
        architecture: the target's name, "gfx942" or "gfx1201" for example.
        lanes: number of lanes of a wave, 64 or 32.
        lines: instructions, without comments.
        sources: for each instruction the line of source it comes from, or "".
        labels: index of the instruction behind each label.
        arguments: entries of the argument block, in order.
        argument_bytes: size of that block.
        scratch_bytes: private memory of a lane.
        lds_bytes: LDS that the program asks for by itself, beside what a launch adds.
        registers: vector registers, those of accumulators from ``accumulators`` on.
    """

    def __init__(self, text: str, name: str) -> None:
        """Read the text of an assembly file.

        Args:
            text: ``compiled.asm["amdgcn"]`` of a Triton kernel.
            name: the kernel's name in it.
        """
        self.name = name
        self.architecture = re.search(r"\.amdgcn_target \"amdgcn-amd-amdhsa--(gfx\w+)", text)[1]  # type: ignore[index]
        self._text = text
        self._directives = dict(re.findall(r"\.amdhsa_(\w+)\s+(\S+)", text))
        self.lanes = 32 if self._directives.get("wavefront_size32") == "1" else 64
        self.gfx9 = self.architecture.startswith("gfx9")
        self.gfx12 = self.architecture.startswith("gfx12")
        self.lds_bytes = self.number("group_segment_fixed_size")
        self.scratch_bytes = self.number("private_segment_fixed_size")
        # Accumulators are registers of their own numbers, which begin at 256 here.
        self.registers = 512 if self.gfx9 else 256
        self._read_arguments(text)
        self._read_instructions(text)

    def number(self, directive: str) -> int:
        """Return the value of a directive ``.amdhsa_...``; 0 if it is not there."""
        given = self._directives.get(directive, "0")
        if not re.fullmatch(r"\d+", given):
            found = re.search(rf"^\s*\.set {re.escape(given)}, (\d+)$", self._text, re.M)
            assert found, (directive, given)
            given = found[1]
        return int(given)

    @property
    def argument_register(self) -> int:
        """The first of two scalar registers with the argument block's address."""
        at = 0
        for name, count in _USER_REGISTERS.items():
            if self.number("user_sgpr_" + name):
                if name == "kernarg_segment_ptr":
                    return at
                at += count
        raise AssertionError("no arguments")

    @property
    def work_group_registers(self) -> tuple[int | None, ...]:
        """The scalar registers with x, y and z of the work-group; None if it is not asked for."""
        at, places = self.number("user_sgpr_count"), []
        for axis in "xyz":
            wanted = bool(self.number(f"system_sgpr_workgroup_id_{axis}"))
            places.append(at if wanted else None)
            at += wanted
        return tuple(places)

    def _read_arguments(self, text: str) -> None:
        described = text[text.index(".amdgpu_metadata") :]
        block = described[described.index(".args:") :]
        block = re.split(r"\n    \.", block)[0]
        self.arguments = []
        for piece in re.split(r"\n\s+- ", block)[1:]:
            fields = dict(re.findall(r"\.(\w+):\s+(\S+)", piece))
            self.arguments.append(
                Argument(int(fields["offset"]), int(fields["size"]), fields["value_kind"])
            )
        needed = max((each.offset + each.size for each in self.arguments), default=0)
        self.argument_bytes = max(self.number("kernarg_size"), needed, 8)

    def _read_instructions(self, text: str) -> None:
        body = text[text.index(f"\n{self.name}:") :]
        body = body[: body.index(".amdhsa_kernel")]
        self.lines: list[str] = []
        self.sources: list[str] = []
        self.labels: dict[str, int] = {}
        source = ""
        for raw in body.splitlines():
            located = _LOCATION.match(raw.strip())
            if located:
                source = located[1]
            line = raw.split(";")[0].strip()
            label = _LABEL.match(line)
            if label:
                self.labels[label[1]] = len(self.lines)
            elif line and not line.startswith((".", "//")):
                self.lines.append(line)
                self.sources.append(source)
