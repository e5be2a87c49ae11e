"""The scalar unit: what the instructions that begin with ``s_`` do, but branches and barriers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from crossrun.amd import numbers
from crossrun.amd.errors import UnknownInstruction
from crossrun.amd.memory import HostMemory
from crossrun.amd.operands import KINDS, Operand, Read, modifiers, scalar_reader, split
from crossrun.amd.vector import COMPARISONS, TABLE, Execute
from crossrun.amd.waves import EXEC, Array, Waves

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64

# Waits, hints and caches: an instruction is finished here when the next one begins.
_NOTHING = re.compile(
    r"nop|wait_?\w*|waitcnt\w*|delay_alu|clause|setprio|sleep|barrier_signal|sendmsg|"
    r"(set_)?inst_prefetch\w*|prefetch_\w+|icache_inv|dcache_inv|sched_barrier|code_end|round_mode|denorm_mode"
)
_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b, "and_not1": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b,
    "or_not1": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
_LOGIC_NAMES = "|".join(_LOGIC)
_FLOATS = "add|sub|mul|max|min|max_num|min_num|trunc|floor|ceil|rndne"
_WORDS = {
    "dword": 1, "b32": 1, "dwordx2": 2, "b64": 2, "dwordx3": 3, "b96": 3, "dwordx4": 4, "b128": 4,
    "dwordx8": 8, "b256": 8, "dwordx16": 16, "b512": 16,
}  # fmt: skip


def _immediate16(operand: Operand) -> int:
    value = int(operand.constant("u32")) & 0xFFFF
    return value - (value >> 15 << 16)


def _shifted(name: str, x: Array, amount: Array, bits: int) -> Array:
    unsigned, signed = KINDS[f"u{bits}"], KINDS[f"i{bits}"]
    amount = np.asarray(amount & U32(bits - 1)).astype(unsigned)
    if name == "lshl":
        return x << amount
    if name == "lshr":
        return x >> amount
    return (np.asarray(x).view(signed) >> amount.astype(signed)).view(unsigned)


def _field(x: Array, control: Array, bits: int, signed: bool) -> Array:
    """Return a bit field: its offset is in the control's lowest bits, its width from bit 16 on."""
    unsigned, integer = KINDS[f"u{bits}"], KINDS[f"i{bits}"]
    offset = np.asarray(control & U32(bits - 1)).astype(I64)
    width = np.minimum(np.asarray((control >> U32(16)) & U32(127)).astype(I64), bits)
    # Shift the field to the top, then down: fields end at the register's end.
    top = np.minimum(offset + width, bits)
    kind = integer if signed else unsigned
    up = np.asarray(np.asarray(x, unsigned) << np.asarray(bits - top).astype(unsigned)).view(kind)
    down = np.minimum(bits - top + offset, bits - 1)
    value = (up >> np.asarray(down).astype(kind)).view(unsigned)
    return np.where((width == 0) | (offset >= top), unsigned(0), value)


def _arithmetic(name: str, a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """Return a sum or difference of uint32, and the condition code behind it."""
    if name in ("add_i32", "add_co_i32", "sub_i32", "sub_co_i32", "addk_i32", "addk_co_i32"):
        a, b = (np.asarray(v, U32).view(I32).astype(I64) for v in (a, b))
        total = a + b if name.startswith("add") else a - b
        return (total & 0xFFFFFFFF).astype(U32), total != total.astype(I32)
    a, b = np.asarray(a, I64), np.asarray(b, I64)
    if name in ("addc_u32", "add_co_ci_u32", "subb_u32", "sub_co_ci_u32"):
        b = b + carry
    if name.startswith("lshl"):
        a = a << int(name[4])
    total = a - b if name.startswith("sub") else a + b
    return (total & 0xFFFFFFFF).astype(U32), (total < 0) | (total > 0xFFFFFFFF)


_ARITHMETIC = re.compile(
    r"add_(co_)?[ui]32|sub_(co_)?[ui]32|addc_u32|add_co_ci_u32|subb_u32|sub_co_ci_u32|"
    r"lshl[1234]_add_u32|addk_(co_)?i32"
)


def _count(name: str, x: Array, bits: int) -> tuple[Array, Array | None]:
    x = np.asarray(x, U64)
    if name.startswith("bcnt1"):
        counted = np.bitwise_count(x).astype(U32)
        return counted, counted != 0
    low, high = (x & U64(0xFFFFFFFF)).astype(U32), (x >> U64(32)).astype(U32)
    if name.startswith(("ff1", "ctz")):
        above = numbers.trailing_zeros(high) + U32(32)
        return np.where(low != 0, numbers.trailing_zeros(low), np.where(high != 0, above, -1)), None
    below = numbers.leading_zeros(low) + U32(bits - 32)
    return np.where(high != 0, numbers.leading_zeros(high), np.where(low != 0, below, -1)), None


def _reversed(x: Array, bits: int) -> Array:
    if bits == 32:
        return numbers.reversed_bits(x)
    low, high = (x & U64(0xFFFFFFFF)).astype(U32), (x >> U64(32)).astype(U32)
    low, high = numbers.reversed_bits(low), numbers.reversed_bits(high)
    return (low.astype(U64) << U64(32)) | high


class ScalarUnit:
    """Makes functions of a program's scalar instructions."""

    def __init__(self, memory: HostMemory) -> None:
        """Load from a memory."""
        self._memory = memory

    def decode(self, name: str, rest: str) -> Execute:
        """Return the function of an instruction ``s_name rest``.

        Raises:
            UnknownInstruction: the instruction or its form is not known.
        """
        if _NOTHING.fullmatch(name):
            return lambda w: None
        if name in ("setreg_imm32_b32", "setreg_b32"):
            return self._set_mode(rest)
        operands = [Operand(text) for text in split(rest)]
        if name.startswith("load_"):
            return self._load(name[5:], operands, modifiers(rest).get("offset", 0))
        for pattern, make in self._forms():
            found = re.fullmatch(pattern, name)
            if found:
                return make(operands, *found.groups())
        if _ARITHMETIC.fullmatch(name):
            return self._sum(name, operands)
        raise UnknownInstruction("scalar instruction")

    def _forms(self) -> tuple[tuple[str, Callable[..., Execute]], ...]:
        return (
            (rf"({_LOGIC_NAMES})_saveexec_b(32|64)", self._saveexec),
            (rf"({_LOGIC_NAMES})_b(32|64)", self._logic),
            (r"(mov|not|brev|cmov|wqm)_b(32|64)", self._move),
            (r"()cselect_b(32|64)", self._select),
            (r"(lshl|lshr|ashr)_[bui](32|64)", self._shift),
            (r"bfe_([ui])(32|64)", self._bfe),
            (r"cmp(k?)_(\w+?)_([iuf])(32|64)", self._compare),
            (r"bit(cmp|set)([01])_b(32|64)", self._bit),
            (r"(mul|add_nc|sub_nc)_u(64)", self._wide),
            (r"(mul|mul_hi)_([iu])32", self._product),
            (r"(min|max)_([iu])32", self._extreme),
            (r"(movk|mulk)_i32", self._constant),
            (r"(abs_i32|sext_i32_i16|sext_i32_i8)", self._signed),
            (r"pack_([lh])([lh])_b32_b16", self._pack),
            (r"(ff1_i32_b|ctz_i32_b|flbit_i32_b|clz_i32_u|bcnt1_i32_b)(32|64)", self._counted),
            (rf"({_FLOATS})_f32", self._float),
            (r"(fmac|fmaak|fmamk)_f32", self._fma),
            (r"(cvt_f32_u32|cvt_f32_i32|cvt_u32_f32|cvt_i32_f32)", self._convert),
        )

    def _set_mode(self, rest: str) -> Execute:
        found = re.fullmatch(r"hwreg\(HW_REG_MODE(?:, (\d+), (\d+))?\), (0x[0-9a-f]+|\d+)", rest)
        if not found or not found[1]:
            raise UnknownInstruction("this hardware register")
        first, width, value = int(found[1]), int(found[2]), int(found[3], 0)
        bits = range(first, first + width)
        # Bit 23 is fp16_ovfl. The others round, keep subnormals and trap; they stay as they were.
        if any(bit != 23 for bit in bits):
            raise UnknownInstruction("these bits of MODE")

        def execute(w: Waves) -> None:
            w.clamps_fp8[w.running] = bool(value & 1)

        return execute

    def _load(self, kind: str, operands: list[Operand], offset: int) -> Execute:
        into, base = operands[0].index, operands[1].index
        given = operands[2] if len(operands) > 2 else Operand("0")
        if given.kind == "constant":
            # Immediate offsets are signed.
            offset += int(given.constant("i32"))
            given = Operand("0")
        added = scalar_reader(given)
        small = {"u8": "u1", "i8": "i1", "u16": "u2", "i16": "i2"}.get(kind)
        words = 1 if small else _WORDS.get(kind, 0)
        if not words:
            raise UnknownInstruction("scalar load")
        size = int(small[1]) if small else 4 * words

        def execute(w: Waves) -> None:
            addresses = w.scalar64(base) + np.asarray(added(w), U64) + U64(offset % 2**64)
            if not small:
                addresses &= ~U64(3)
            loaded = self._memory.load(addresses[w.running], size)
            if small and small[0] == "i":
                sign = U32(1 << (8 * size - 1))
                loaded = (loaded ^ sign) - sign
            for place in range(words):
                w.scalar[into + place][w.running] = loaded[place]

        if into >= EXEC - 2:
            raise UnknownInstruction("this destination")
        return execute

    @staticmethod
    def _put(operand: Operand, bits: int = 32) -> Callable[[Waves, Array], None]:
        index = operand.index
        if operand.kind == "null":
            return lambda w, value: None
        if operand.kind != "s":
            raise UnknownInstruction("this destination")
        if bits == 64:
            return lambda w, value: w.set_scalar64(index, value)
        return lambda w, value: w.set_scalar(index, value)

    def _saveexec(self, operands: list[Operand], name: str, bits: str) -> Execute:
        kind, function = f"u{bits}", _LOGIC[name]
        put, get = self._put(operands[0], int(bits)), scalar_reader(operands[1], kind)
        into, old = self._put(Operand("exec"), int(bits)), scalar_reader(Operand("exec"), kind)

        def execute(w: Waves) -> None:
            before, given = np.array(old(w)), np.array(get(w))
            after = function(given, before)
            put(w, before)
            into(w, after)
            w.set_scc(after != 0)

        return execute

    def _logic(self, operands: list[Operand], name: str, bits: str) -> Execute:
        function, put = _LOGIC[name], self._put(operands[0], int(bits))
        a, b = (scalar_reader(each, f"u{bits}") for each in operands[1:3])

        def execute(w: Waves) -> None:
            value = function(a(w), b(w))
            put(w, value)
            w.set_scc(value != 0)

        return execute

    def _move(self, operands: list[Operand], name: str, bits: str) -> Execute:
        put, get = self._put(operands[0], int(bits)), scalar_reader(operands[1], f"u{bits}")
        if name == "mov":
            return lambda w: put(w, get(w))
        if name == "brev":
            return lambda w: put(w, _reversed(get(w), int(bits)))
        if name == "cmov":
            old = scalar_reader(operands[0], f"u{bits}")
            return lambda w: put(w, np.where(w.scc, get(w), old(w)))
        if name == "wqm":
            raise UnknownInstruction("scalar instruction")

        def execute(w: Waves) -> None:
            value = ~get(w)
            put(w, value)
            w.set_scc(value != 0)

        return execute

    def _select(self, operands: list[Operand], _: str, bits: str) -> Execute:
        put = self._put(operands[0], int(bits))
        a, b = (scalar_reader(each, f"u{bits}") for each in operands[1:3])
        return lambda w: put(w, np.where(w.scc, a(w), b(w)))

    def _shift(self, operands: list[Operand], name: str, bits: str) -> Execute:
        put, get = self._put(operands[0], int(bits)), scalar_reader(operands[1], f"u{bits}")
        amount = scalar_reader(operands[2])

        def execute(w: Waves) -> None:
            value = _shifted(name, get(w), amount(w), int(bits))
            put(w, value)
            w.set_scc(value != 0)

        return execute

    def _bfe(self, operands: list[Operand], letter: str, bits: str) -> Execute:
        put, get = self._put(operands[0], int(bits)), scalar_reader(operands[1], f"u{bits}")
        control = scalar_reader(operands[2])

        def execute(w: Waves) -> None:
            value = _field(get(w), control(w), int(bits), letter == "i")
            put(w, value)
            w.set_scc(value != 0)

        return execute

    def _compare(
        self, operands: list[Operand], short: str, name: str, letter: str, bits: str
    ) -> Execute:
        if short and letter == "f":
            raise UnknownInstruction("comparison")
        function, kind = COMPARISONS[name], letter + bits
        a, b = (scalar_reader(each, kind) for each in operands[:2])
        if short:
            value = _immediate16(operands[1])
            number = KINDS[kind](value if letter == "i" else value & 0xFFFF)
            b = lambda w: number  # noqa: E731
        return lambda w: w.set_scc(function(a(w), b(w)))

    def _bit(self, operands: list[Operand], name: str, value: str, bits: str) -> Execute:
        kind = KINDS[f"u{bits}"]
        get, place = scalar_reader(operands[0], f"u{bits}"), scalar_reader(operands[1])

        def bit(w: Waves) -> Array:
            return kind(1) << np.asarray(place(w) & U32(int(bits) - 1)).astype(kind)

        if name == "cmp":
            return lambda w: w.set_scc((get(w) & bit(w) != 0) == (value == "1"))
        put = self._put(operands[0], int(bits))
        if value == "1":
            return lambda w: put(w, get(w) | bit(w))
        return lambda w: put(w, get(w) & ~bit(w))

    def _wide(self, operands: list[Operand], name: str, bits: str) -> Execute:
        put = self._put(operands[0], 64)
        a, b = (scalar_reader(each, "u64") for each in operands[1:3])
        function: Any = {"mul": np.multiply, "add_nc": np.add, "sub_nc": np.subtract}[name]
        return lambda w: put(w, function(a(w), b(w)))

    def _product(self, operands: list[Operand], name: str, letter: str) -> Execute:
        put, kind = self._put(operands[0]), f"{letter}32"
        a, b = (scalar_reader(each, kind) for each in operands[1:3])
        wide = KINDS[f"{letter}64"]
        shift = wide(32 if name == "mul_hi" else 0)

        def execute(w: Waves) -> None:
            product = np.asarray(a(w), wide) * np.asarray(b(w), wide)
            put(w, (product >> shift).astype(U64).astype(U32))

        return execute

    def _extreme(self, operands: list[Operand], name: str, letter: str) -> Execute:
        put = self._put(operands[0])
        a, b = (scalar_reader(each, f"{letter}32") for each in operands[1:3])
        function: Any = np.minimum if name == "min" else np.maximum

        def execute(w: Waves) -> None:
            x, y = a(w), b(w)
            put(w, np.asarray(function(x, y)).view(U32))
            w.set_scc(x < y if name == "min" else x >= y)

        return execute

    def _constant(self, operands: list[Operand], name: str) -> Execute:
        put, value = self._put(operands[0]), U32(_immediate16(operands[1]) & 0xFFFFFFFF)
        if name == "movk":
            return lambda w: put(w, value)
        old = scalar_reader(operands[0])
        return lambda w: put(w, old(w) * value)

    def _signed(self, operands: list[Operand], name: str) -> Execute:
        put, get = self._put(operands[0]), scalar_reader(operands[1])
        if name == "abs_i32":

            def absolute(w: Waves) -> None:
                value = np.abs(np.asarray(get(w)).view(I32)).view(U32)
                put(w, value)
                w.set_scc(value != 0)

            return absolute
        narrow = KINDS["i16"] if name.endswith("16") else np.int8
        return lambda w: put(w, np.asarray(get(w)).astype(narrow).astype(I32).view(U32))

    def _pack(self, operands: list[Operand], low: str, high: str) -> Execute:
        put = self._put(operands[0])
        a, b = (scalar_reader(each) for each in operands[1:3])
        first, second = (U32(16 if half == "h" else 0) for half in (low, high))
        half = U32(0xFFFF)
        return lambda w: put(w, ((a(w) >> first) & half) | (((b(w) >> second) & half) << U32(16)))

    def _counted(self, operands: list[Operand], name: str, bits: str) -> Execute:
        put, get = self._put(operands[0]), scalar_reader(operands[1], f"u{bits}")

        def execute(w: Waves) -> None:
            value, condition = _count(name, get(w), int(bits))
            put(w, value.astype(I64).astype(U32))
            if condition is not None:
                w.set_scc(condition)

        return execute

    def _sum(self, name: str, operands: list[Operand]) -> Execute:
        put = self._put(operands[0])
        reads: list[Read]
        if name.startswith("addk"):
            value = U32(_immediate16(operands[1]) & 0xFFFFFFFF)
            reads = [scalar_reader(operands[0]), lambda w: value]
        else:
            reads = [scalar_reader(each) for each in operands[1:3]]

        def execute(w: Waves) -> None:
            value, condition = _arithmetic(name, reads[0](w), reads[1](w), w.scc)
            put(w, value)
            w.set_scc(condition)

        return execute

    def _float(self, operands: list[Operand], name: str) -> Execute:
        put, function = self._put(operands[0]), TABLE[f"{name}_f32"][2]
        reads = [scalar_reader(each, "f32") for each in operands[1:]]
        return lambda w: put(w, np.asarray(function(*(read(w) for read in reads))).view(U32))

    def _fma(self, operands: list[Operand], name: str) -> Execute:
        put = self._put(operands[0])
        given = [*operands[1:], operands[0]] if name == "fmac" else operands[1:]
        reads = [scalar_reader(each, "f32") for each in given]
        return lambda w: put(w, np.asarray(numbers.fma(*(read(w) for read in reads))).view(U32))

    def _convert(self, operands: list[Operand], name: str) -> Execute:
        _, (kind,), function = TABLE[name]
        put, get = self._put(operands[0]), scalar_reader(operands[1], kind)
        return lambda w: put(w, np.asarray(function(get(w))).view(U32))
