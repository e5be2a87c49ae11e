"""Interpreter of inline PTX: the instructions that kernels write by hand, on all lanes at once.

A register is a torch tensor of the bits of all lanes. Lanes whose predicate is false, or that have
branched past an instruction, keep their values. Since layouts are not modelled, element i of the
flattened operands belongs to lane i % 32 of warp i // 32 (with ``pack`` elements a lane), and
scalars belong to all lanes of the partition.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossrun.hopper.errors import Hazard, NotModelled
from crossrun.hopper.kinds import FLOAT32, INT32, Kind, kind_of, pointer_to
from crossrun.hopper.shared_memory import Barrier
from crossrun.hopper.values import Value, as_value, saturated_e4m3

if TYPE_CHECKING:
    from crossrun.hopper.machine import Machine

_WARP = 32
# Instructions without an effect here: hints, those that order a warp's or a grid's threads, and
# delays.
_IGNORED = (
    "griddepcontrol.", "bar.warp.sync", "prefetch.", "prefetchu.", "nanosleep.", "createpolicy.",
    "cp.async.bulk.prefetch.", "membar.", "fence.", "discard.", "applypriority.",
)  # fmt: skip
_SPECIAL = re.compile(r"%(laneid|tid\.x|warpid)")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_BITWISE: dict[str, Callable[[Any, Any], Any]] = {
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Instruction:
    guard: str
    negated: bool
    parts: tuple[str, ...]  # the opcode, at its dots
    operands: tuple[str, ...]

    @property
    def text(self) -> str:
        return ".".join(self.parts)


@dataclasses.dataclass(frozen=True)
class _Program:
    instructions: tuple[_Instruction, ...]
    labels: dict[str, int]
    shared: dict[str, int]  # bytes of declared shared memory
    special: bool


@functools.cache
def _parse(text: str) -> _Program:
    """Parse instructions of a text; braces around them are scopes, those in operands vectors."""
    instructions: list[_Instruction] = []
    labels, shared = {}, {}
    text = re.sub(r"//.*|/\*.*?\*/", " ", text)
    for statement in re.split(r";", text):
        line = statement.strip()
        while True:
            line = re.sub(r"^[{}]\s*", "", line).strip()
            label = re.match(r"([A-Za-z_$][\w$]*):(?!:)\s*", line)
            if label is None:
                break
            labels[label[1]] = len(instructions)
            line = line[label.end() :]
        declared = re.match(r"\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+(\w+)\[(\d+)\]", line)
        if declared:
            shared[declared[1]] = int(declared[2])
        if not line or line.startswith("."):
            continue
        found = re.match(r"(?:@(!?)([\w$]+)\s+)?([\w.:]+)\s*(.*)$", line, re.DOTALL)
        if found is None:
            raise NotModelled(f"PTX: {line}")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", found[4])
        instructions.append(
            _Instruction(
                found[2] or "",
                bool(found[1]),
                tuple(found[3].replace("::", ":").split(".")),
                tuple(each.strip() for each in operands),
            )
        )
    return _Program(tuple(instructions), labels, shared, bool(_SPECIAL.search(text)))


@functools.cache
def _pairs_of_codes() -> Tensor:
    """Return two float16, packed in int32, for every pair of e4m3 codes."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return codes.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int32).clone()


def _bits(x: Tensor) -> Tensor:
    """Return the bits as integers of a register."""
    if x.dtype == torch.float32:
        return x.view(torch.int32)
    if x.dtype == torch.bool:
        return x.to(torch.int32)
    return x


def _float(x: Tensor) -> Tensor:
    return x.view(torch.float32) if x.dtype == torch.int32 else x


def _unsigned(x: Tensor) -> Tensor:
    """Convert a word to an unsigned number in int64."""
    return _bits(x).to(torch.int64) & 0xFFFFFFFF


def _word(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64."""
    return x.to(torch.int32) if x.dtype == torch.int64 else x


def _halves(x: Tensor) -> Tensor:
    """Unpack a register of two float16 to [.., 2]."""
    return _bits(x).contiguous().view(torch.float16).unflatten(-1, (-1, 2))


def _brain_halves(x: Tensor) -> Tensor:
    """Unpack a register of two bfloat16 to [.., 2]."""
    return _bits(x).contiguous().view(torch.bfloat16).unflatten(-1, (-1, 2))


def _joined(x: Tensor) -> Tensor:
    return x.contiguous().flatten(-2).view(torch.int32)


class _Run:
    """One execution of a program."""

    def __init__(self, machine: Machine, program: _Program, lanes: int) -> None:
        self.machine = machine
        self.program = program
        self.lanes = lanes
        self.registers: dict[str, Tensor] = {}
        self.target = torch.zeros(lanes, dtype=torch.int64)  # instruction at which a lane resumes
        self.branched = False
        self.active: Tensor | None = None  # None if all lanes are active

    def run(self) -> None:
        for number, instruction in enumerate(self.program.instructions):
            active = None
            if self.branched:
                active = self.target <= number
                if not active.any():
                    continue
                if active.all():
                    active = None
            if instruction.guard:
                guard = self.registers[instruction.guard]
                if guard.dtype != torch.bool:
                    raise NotModelled(f"PTX: {instruction.guard} is no predicate")
                guard = ~guard if instruction.negated else guard
                guard = guard.expand(self.lanes)
                active = guard if active is None else active & guard
                if not active.any():
                    continue
                if active.all():
                    active = None
            self.active = active
            self.step(number, instruction)

    # Operands.

    def get(self, name: str) -> Tensor:
        if name in self.registers:
            return self.registers[name]
        if name.startswith("%"):
            lane = torch.arange(self.lanes, dtype=torch.int32)
            threads = _WARP * self.machine.cta.partition.warps
            if name == "%laneid":
                return lane % _WARP
            if name == "%tid.x":
                return lane % threads
            if name == "%warpid":
                return lane % threads // _WARP
        elif re.fullmatch(r"-?(0[xX][\da-fA-F]+|\d+)U?", name):
            number = int(name.rstrip("U"), 0) & 0xFFFFFFFF
            return torch.tensor(number - (1 << 32) * (number >> 31), dtype=torch.int32)
        elif re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", name):
            return torch.tensor(float(name))
        elif name in self.program.shared:
            place = self.machine.raw.reserve(name, self.program.shared[name])
            return torch.tensor(place, dtype=torch.int32)
        elif re.fullmatch(r"0[fF][\da-fA-F]{8}", name):
            return self.get("0x" + name[2:]).view(torch.float32)
        raise NotModelled(f"PTX: operand {name}")

    def put(self, name: str, x: Tensor) -> None:
        if name == "_":
            return
        x = x.expand(self.lanes) if x.ndim == 0 else x
        if self.active is not None:
            old = self.registers.get(name)
            if old is None:
                old = torch.zeros_like(x)
            elif old.dtype != x.dtype:
                old, x = _bits(old), _bits(x)
            x = torch.where(self.active, x, old)
        self.registers[name] = x

    def names(self, operand: str) -> list[str]:
        return [each.strip() for each in operand.strip("{} ").split(",")]

    def address(self, operand: str) -> Tensor:
        """Return the addresses of an operand [name] or [name + offset], one for each lane."""
        base, _, offset = operand.strip("[] ").partition("+")
        at = self.get(base.strip()).to(torch.int64)
        return (at + int(offset or 0)).expand(self.lanes)

    def chosen(self, x: Tensor) -> Tensor:
        """Return the elements of the lanes that are active."""
        x = x.expand(self.lanes)
        return x if self.active is None else x[self.active]

    # Instructions.

    def step(self, number: int, instruction: _Instruction) -> None:
        parts, operands = instruction.parts, instruction.operands
        if instruction.text.startswith(_IGNORED):
            if parts[0] == "createpolicy":
                self.put(operands[0], torch.zeros(self.lanes, dtype=torch.int64))
            return
        method = getattr(self, f"op_{parts[0]}", None)
        if method is not None:
            method(parts, operands)
        elif parts[0] == "bra":
            self.branch(number, operands[0])
        elif parts[0] in _BITWISE:
            a, b = (self.get(each) for each in operands[1:])
            self.put(operands[0], _BITWISE[parts[0]](_bits(a), _bits(b)))
        elif parts[0] in _BINARY:
            self.binary(parts, operands)
        else:
            raise NotModelled(f"PTX: {instruction.text}")

    def branch(self, number: int, label: str) -> None:
        goal = self.program.labels[label]
        if goal <= number:
            raise NotModelled("PTX: a branch backwards that is taken")
        self.branched = True
        here = torch.tensor(True) if self.active is None else self.active
        self.target = torch.where(here, goal, self.target)

    def binary(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        function, kind = _BINARY[parts[0]], parts[-1]
        a, b = (self.get(each) for each in operands[1:])
        if kind == "f32":
            result = function(_float(a), _float(b))
        elif kind == "f16x2":
            result = _joined(function(_halves(a), _halves(b)))
        elif kind == "bf16x2":
            # torch keeps subnormal numbers of bfloat16, as the instruction does.
            result = _joined(function(_brain_halves(a), _brain_halves(b)))
        elif kind == "u32" and parts[0] in ("min", "max"):
            result = _word(function(_unsigned(a), _unsigned(b)))
        elif kind in ("s32", "u32"):
            if "hi" in parts or "wide" in parts:
                raise NotModelled(f"PTX: {'.'.join(parts)}")
            result = function(_bits(a), _bits(b))
        elif kind in ("s64", "u64"):
            result = function(a.to(torch.int64), b.to(torch.int64))
        else:
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        self.put(operands[0], result)

    def op_mov(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        to, source = operands
        if to.startswith("{"):
            word = _bits(self.get(source))
            low, high = self.names(to)
            self.put(low, word & 0xFFFF)
            self.put(high, (word >> 16) & 0xFFFF)
        elif source.startswith("{"):
            lower, upper = (_bits(self.get(each)) for each in self.names(source))
            self.put(to, (lower & 0xFFFF) | (upper << 16))
        else:
            self.put(to, self.get(source))

    def op_shl(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        a, by = (_bits(self.get(each)) for each in operands[1:])
        self.put(operands[0], a << by)

    def op_shr(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        a, by = (_bits(self.get(each)) for each in operands[1:])
        self.put(operands[0], a >> by if parts[1] == "s32" else _word(_unsigned(a) >> by))

    def op_prmt(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        a, b, chosen = (_unsigned(self.get(each)) for each in operands[1:])
        if parts[1:] != ("b32",) or bool((chosen & 0x8888).any()):
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        both = a | (b << 32)
        result = sum(
            (both >> (8 * ((chosen >> (4 * place)) & 7)) & 0xFF) << (8 * place)
            for place in range(4)
        )
        self.put(operands[0], _word(torch.as_tensor(result)))

    def op_not(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        x = self.get(operands[1])
        self.put(operands[0], ~x)

    def op_neg(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        x = self.get(operands[1])
        self.put(operands[0], -_float(x) if parts[-1] == "f32" else -_bits(x))

    def op_mad(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        a, b, c = (_bits(self.get(each)) for each in operands[1:])
        self.put(operands[0], a * b + c)

    def op_fma(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        given = [self.get(each) for each in operands[1:]]
        if parts[-1] == "f32":
            a, b, c = (_float(each).double() for each in given)
            self.put(operands[0], (a * b + c).float())
        elif parts[-1] == "f16x2":
            a, b, c = (_halves(each).double() for each in given)
            self.put(operands[0], _joined((a * b + c).half()))
        else:
            raise NotModelled(f"PTX: {'.'.join(parts)}")

    def op_setp(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        kind = parts[-1]
        a, b = (self.get(each) for each in operands[1:3])
        if kind == "f32":
            a, b = _float(a), _float(b)
        elif kind.startswith("u"):
            a, b = _unsigned(a), _unsigned(b)
        else:
            a, b = _bits(a), _bits(b)
        result = _COMPARE[parts[1]](a, b)
        if len(operands) == 4:
            result = _BITWISE[parts[2]](result, self.get(operands[3]))
        self.put(operands[0], result)

    def op_selp(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        a, b, p = (self.get(each) for each in operands[1:])
        self.put(operands[0], torch.where(p, _bits(a), _bits(b)))

    def op_cvt(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        kinds = ".".join(each for each in parts[1:] if each not in ("rn", "satfinite", "rni"))
        given = [self.get(each) for each in operands[1:]]
        if kinds == "f16x2.f32":
            high, low = (_float(each).half() for each in given)
            result = _joined(torch.stack(torch.broadcast_tensors(low, high), -1))
        elif kinds == "f16x2.e4m3x2":
            result = _pairs_of_codes()[(_bits(given[0]) & 0xFFFF).long()]
        elif kinds == "e4m3x2.f32":
            high, low = (saturated_e4m3(_float(each)).view(torch.uint8).int() for each in given)
            result = low | (high << 8)
        elif kinds in ("u32.u16", "u16.u32"):
            result = _bits(given[0]) & 0xFFFF
        elif kinds == "f32.s32":
            result = _bits(given[0]).float()
        else:
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        self.put(operands[0], result)

    # Memory.

    def op_ld(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        to, at = self.names(operands[0]), self.address(operands[1])
        if not parts[-1].endswith("32"):
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        mask = None if self.active is None else Value(self.active, kind_of(torch.bool))
        for n, name in enumerate(to):
            if parts[1].startswith("shared"):
                there = self.chosen(at) + 4 * n
                x = torch.zeros(self.lanes, dtype=torch.int32)
                got = self.machine.raw.load(there)
                x = got if self.active is None else x.masked_scatter(self.active, got)
            else:
                pointer = Value(at + 4 * n, pointer_to(INT32))
                x = self.machine.memory.load(pointer, mask, as_value(0)).tensor
            self.put(name, x)

    def op_st(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        if parts[1] == "global" and parts[-1] == "f32":
            self.floats(operands, self.machine.memory.store)
            return
        if not parts[1].startswith("shared") or not parts[-1].endswith("32"):
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        at = self.chosen(self.address(operands[0]))
        for n, name in enumerate(self.names(operands[1])):
            self.machine.raw.store(at + 4 * n, self.chosen(_bits(self.get(name))))

    def op_red(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        if "global" in parts and "add" in parts and parts[-1] == "f32":
            self.machine.cta.pause()
            self.floats(operands, self.machine.memory.add)
        else:
            self.op_atom(parts, ("_", *operands))

    def floats(
        self, operands: tuple[str, ...], access: Callable[[Value, Value, Value | None], None]
    ) -> None:
        """Store or add neighbouring float32 of a vector to global memory."""
        at = self.address(operands[0])
        mask = None if self.active is None else Value(self.active, kind_of(torch.bool))
        for n, name in enumerate(self.names(operands[1])):
            x = Value(_float(self.get(name)).expand(self.lanes), FLOAT32)
            access(Value(at + 4 * n, pointer_to(FLOAT32)), x, mask)

    def op_atom(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        if not parts[1].startswith("shared") or "add" not in parts:
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        at = self.chosen(self.address(operands[1]))
        x = self.chosen(_bits(self.get(operands[2])))
        old = self.machine.raw.add(at, x, wanted=operands[0] != "_")
        if old is not None:
            whole = torch.zeros(self.lanes, dtype=torch.int32)
            self.put(
                operands[0], old if self.active is None else whole.masked_scatter(self.active, old)
            )

    def op_cp(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        if parts[1:4] != ("async", "bulk", "wait_group"):
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        self.machine.cta.wait_stores(int(operands[0]))

    # What a warp does together.

    def warps(self, x: Tensor) -> Tensor:
        x = _bits(x).expand(self.lanes)
        if self.lanes % _WARP:
            raise NotModelled(f"PTX: {self.lanes} lanes are not whole warps")
        return x.reshape(-1, _WARP)

    def op_redux(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        x = self.warps(self.get(operands[1]))
        if parts[2] == "add":
            result = x.sum(1, dtype=torch.int32)
        elif parts[2] in ("min", "max") and parts[-1] == "s32":
            result = x.amax(1) if parts[2] == "max" else x.amin(1)
        else:
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        self.put(operands[0], result.repeat_interleave(_WARP))

    def op_shfl(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        to, _, there = operands[0].partition("|")
        x = self.warps(self.get(operands[1]))
        by = self.get(operands[2])
        lane = torch.arange(_WARP)
        step = _bits(by).expand(self.lanes).reshape(-1, _WARP).long()
        sources = {"up": lane - step, "down": lane + step, "bfly": lane ^ step, "idx": step + 0}
        source = sources[parts[2]]
        inside = (source >= 0) & (source < _WARP)
        result = x.gather(1, torch.where(inside, source, lane))
        self.put(to, result.flatten())
        if there:
            self.put(there, inside.flatten())

    def op_vote(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        name = operands[1]
        x = self.get(name.lstrip("!"))
        x = (~x if name.startswith("!") else x).expand(self.lanes)
        # Fewer lanes than a warp are copies of each other.
        x = x.reshape(-1, _WARP) if self.lanes % _WARP == 0 else x.reshape(1, -1)
        together = {"all": x.all(1), "any": x.any(1)}.get(parts[2])
        if together is None:
            raise NotModelled(f"PTX: {'.'.join(parts)}")
        self.put(operands[0], together.repeat_interleave(x.shape[1]))

    # Barriers.

    def op_mbarrier(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
        cta, raw = self.machine.cta, self.machine.raw
        if parts[1] == "init":
            count = self.chosen(self.get(operands[1]))
            for at, number in zip(self.places(operands[0]), count.tolist(), strict=True):
                raw.barrier(at).init(number)
        elif parts[1] in ("try_wait", "test_wait"):
            parity = self.chosen(self.get(operands[2])).tolist()
            for at, which in sorted(set(zip(self.places(operands[1]), parity, strict=True))):
                cta.wait_barrier(raw.barrier(at), which)
            self.put(operands[0], torch.ones(self.lanes, dtype=torch.bool))
        elif parts[1] == "arrive" and "expect_tx" not in parts:
            for at in self.places(operands[1]):
                cta.arrive(raw.barrier(at))
        else:
            raise NotModelled(f"PTX: {'.'.join(parts)}")

    def places(self, operand: str) -> list[int]:
        return [int(each) for each in self.chosen(self.address(operand))]


class RawShared:
    """Shared memory that inline PTX declares, by address; at first it is garbage.

    Accesses to it are not checked for order, but its barriers order other accesses.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed or 0
        self._words = torch.zeros(0, dtype=torch.int32)
        self._places: dict[str, int] = {}
        self._barriers: dict[int, Barrier] = {}

    def reserve(self, name: str, size: int) -> int:
        """Return the address of a declared array, which is reserved at first use."""
        if name not in self._places:
            self._places[name] = 4 * len(self._words)
            count = -(-size // 1024) * 256
            random = torch.Generator().manual_seed(self._seed + len(self._words))
            more = torch.randint(-(2**31), 2**31 - 1, (count,), generator=random)
            self._words = torch.cat((self._words, more.int()))
        return self._places[name]

    def barrier(self, at: int) -> Barrier:
        """Return the mbarrier at an address."""
        self._checked(torch.tensor([at, at + 4]))
        return self._barriers.setdefault(at, Barrier(f"the mbarrier at {at:#x}"))

    def _checked(self, at: Tensor) -> Tensor:
        if at.numel() and ((at < 0) | (at >= 4 * len(self._words)) | (at % 4 != 0)).any():
            raise Hazard("an access outside of the declared shared memory, or not aligned")
        return at // 4

    def load(self, at: Tensor) -> Tensor:
        """Load words from addresses."""
        return self._words[self._checked(at)]

    def store(self, at: Tensor, x: Tensor) -> None:
        """Store words to addresses."""
        self._words[self._checked(at)] = x

    def add(self, at: Tensor, x: Tensor, *, wanted: bool) -> Tensor | None:
        """Add to words, one after the other; return their earlier values if ``wanted``."""
        place = self._checked(at)
        if not wanted:
            self._words.index_put_((place,), x, accumulate=True)
            return None
        old = torch.empty_like(x)
        for n, (each, more) in enumerate(zip(place.tolist(), x.tolist(), strict=True)):
            old[n] = self._words[each]
            self._words[each] += more
        return old


def execute(
    machine: Machine,
    text: str,
    constraints: str,
    arguments: Sequence[Any],
    dtype: Any,
    pack: int,
) -> Any:
    """Execute a call of ``gl.inline_asm_elementwise``."""
    program = _parse(text)
    several = isinstance(dtype, tuple | list)
    kinds = [kind_of(each) for each in (dtype if several else [dtype])]
    listed = [each.strip() for each in constraints.split(",")]
    tensors, shape, given_kinds = _together(arguments)
    whole = bool(shape)
    count = tensors[0].numel() if whole else 1
    if count % pack:
        pack = 1  # copies fill the rest of a lane
    lanes = count // pack
    if not whole and program.special:
        lanes = _WARP * machine.cta.partition.warps
    run = _Run(machine, program, lanes)
    outputs = [_registers(kind, pack) for kind in kinds]
    inputs = [_registers(kind, pack) for kind in given_kinds]
    if len(listed) != sum(outputs) + sum(inputs):
        raise Hazard(f"{len(listed)} constraints of {sum(outputs) + sum(inputs)} registers")
    number = sum(outputs)
    for tensor, kind, registers in zip(tensors, given_kinds, inputs, strict=True):
        for column in _columns(tensor, kind, pack, registers):
            run.registers[f"${number}"] = column.expand(lanes)
            number += 1
    run.run()
    results, number = [], 0
    for kind, registers in zip(kinds, outputs, strict=True):
        columns = [run.registers.get(f"${number + n}") for n in range(registers)]
        number += registers
        results.append(_result(columns, kind, pack, shape, lanes))
    return tuple(results) if several else results[0]


def _together(arguments: Sequence[Any]) -> tuple[list[Tensor], tuple[int, ...], list[Kind]]:
    values = [as_value(each) for each in arguments]
    tensors = [each.tensor for each in values]
    if tensors:
        shapes = {tuple(each.shape) for each in tensors}
        if len(shapes) > 1:
            tensors = list(torch.broadcast_tensors(*tensors))
    return tensors, tuple(tensors[0].shape) if tensors else (), [each.kind for each in values]


def _registers(kind: Kind, pack: int) -> int:
    """Return a lane's number of registers for a value: packed elements below 32 bits share one."""
    return max(pack * kind.bits // 32, 1) if kind.bits < 32 and pack > 1 else pack


def _columns(tensor: Tensor, kind: Kind, pack: int, registers: int) -> list[Tensor]:
    flat = tensor.to(kind.memory).reshape(-1)
    if registers != pack:
        words = flat.view(-1, pack).contiguous().view(torch.int32)
        return list(words.unbind(1))
    if kind.bits == 16:
        flat = flat.view(torch.int16).to(torch.int32) & 0xFFFF
    elif kind.bits < 16:
        flat = flat.to(torch.int32)
    return [flat] if pack == 1 else list(flat.view(-1, pack).unbind(1))


def _result(
    columns: Sequence[Tensor | None], kind: Kind, pack: int, shape: tuple[int, ...], lanes: int
) -> Value:
    each = [torch.zeros(lanes, dtype=torch.int32) if x is None else x for x in columns]
    if not shape:
        each = [x[:1] for x in each]
    data = each[0] if len(each) == 1 else torch.stack(each, 1)
    if len(columns) != pack:
        data = data.contiguous().view(kind.memory)
    elif kind.bits == 16:
        data = data.to(torch.int16).view(kind.memory)
    elif kind is FLOAT32:
        data = _float(data)
    elif kind.bits == 32:
        data = _bits(data)
    data = data.reshape(shape)
    if not shape and not kind.is_float:
        return as_value(int(data), kind)
    if kind.widened:
        data = data.to(kind.torch) & kind.mask
    return Value(data if data.dtype == kind.torch else data.to(kind.torch), kind)
