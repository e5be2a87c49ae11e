"""The vector unit: what the instructions that begin with ``v_`` do, but matrix products."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from crossrun.amd import numbers
from crossrun.amd.errors import UnknownInstruction
from crossrun.amd.operands import (
    FIELDS,
    KINDS,
    Modifiers,
    Operand,
    Read,
    modifiers,
    reader,
    scalar_reader,
    source,
    split,
    writer,
)
from crossrun.amd.program import Program
from crossrun.amd.waves import EXEC, VCC, Array, Waves

Execute = Callable[[Waves], None]
# An instruction as two halves: it computes, and the function it returns writes. The two halves of a
# dual instruction read before either writes.
Halves = Callable[[Waves], Callable[[], None]]
Function = Callable[..., Array]

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def _shift(x: Array, bits: int = 32) -> Array:
    return x & np.asarray(x).dtype.type(bits - 1)


def _wide_shift(x: Array, kind: Any) -> Array:
    return np.asarray(x & U32(63)).astype(kind)


def _low24(x: Array) -> Array:
    return x & U32(0xFFFFFF)


def _signed24(x: Array) -> Array:
    return (x << I32(8)) >> I32(8)


def _joined(a: Array, b: Array) -> Array:
    return (np.asarray(a, U64) << U64(32)) | np.asarray(b, U64)


def _codes16(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).view(np.uint16).astype(U32)


def _high_product(a: Array, b: Array, kind: Any, result: Any) -> Array:
    return ((np.asarray(a, kind) * np.asarray(b, kind)) >> kind(32)).astype(result)


def _upper_bf16(x: Array) -> Array:
    """Return the upper halves of words, which are bfloat16, in float32."""
    return np.asarray(x & U32(0xFFFF0000)).view(np.float32)


def _byte_as_float(place: int, x: Array) -> Array:
    return np.asarray((x >> U32(8 * place)) & U32(255)).astype(np.float32)


def _unordered_less(a: Array, b: Array) -> Array:
    return (a < b) | (a > b)


# Kinds of the result and of the sources, and the function.
_FLOAT: dict[str, tuple[int, Function]] = {
    "add": (2, lambda a, b: a + b), "sub": (2, lambda a, b: a - b),
    "subrev": (2, lambda a, b: b - a), "mul": (2, lambda a, b: a * b),
    "max": (2, np.fmax), "min": (2, np.fmin), "max_num": (2, np.fmax), "min_num": (2, np.fmin),
    "maximum": (2, np.maximum), "minimum": (2, np.minimum),
    "max3": (3, lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3": (3, lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "max3_num": (3, lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3_num": (3, lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "maximum3": (3, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "minimum3": (3, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3": (3, numbers.median_float), "med3_num": (3, numbers.median_float),
    "trunc": (1, np.trunc), "floor": (1, np.floor), "ceil": (1, np.ceil), "rndne": (1, np.rint),
    "fract": (1, lambda a: a - np.floor(a)),
    "exp": (1, numbers.transcendental(np.exp2)), "log": (1, numbers.transcendental(np.log2)),
    "sqrt": (1, numbers.transcendental(np.sqrt)),
    "rcp": (1, numbers.transcendental(np.reciprocal)),
    "rcp_iflag": (1, numbers.transcendental(np.reciprocal)),
    "rsq": (1, numbers.transcendental(lambda x: 1 / np.sqrt(x))),
}  # fmt: skip
_HALF_FLOAT = ("add", "sub", "subrev", "mul", "max", "min", "max_num", "min_num")
_BITS: dict[str, tuple[int, Function]] = {
    "and": (2, lambda a, b: a & b), "or": (2, lambda a, b: a | b), "xor": (2, lambda a, b: a ^ b),
    "xnor": (2, lambda a, b: ~(a ^ b)), "not": (1, lambda a: ~a), "mov": (1, lambda a: a),
    "lshlrev": (2, lambda a, b: b << _shift(a)), "lshrrev": (2, lambda a, b: b >> _shift(a)),
    "lshl_or": (3, lambda a, b, c: (a << _shift(b)) | c),
    "and_or": (3, lambda a, b, c: (a & b) | c),
    "or3": (3, lambda a, b, c: a | b | c), "xor3": (3, lambda a, b, c: a ^ b ^ c),
    "bfi": (3, lambda a, b, c: (a & b) | (~a & c)), "bfrev": (1, numbers.reversed_bits),
    "perm": (3, numbers.permuted_bytes),
    "alignbit": (3, lambda a, b, c: (_joined(a, b) >> _wide_shift(c & U32(31), U64)).astype(U32)),
    "alignbyte": (
        3, lambda a, b, c: (_joined(a, b) >> _wide_shift((c & U32(3)) * U32(8), U64)).astype(U32)
    ),
    "ffbl": (1, numbers.trailing_zeros),
    "accvgpr_read": (1, lambda a: a), "accvgpr_write": (1, lambda a: a),
    "accvgpr_mov": (1, lambda a: a),
}  # fmt: skip
_UNSIGNED: dict[str, tuple[int, Function]] = {
    "add": (2, lambda a, b: a + b), "add_nc": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b), "sub_nc": (2, lambda a, b: a - b),
    "subrev": (2, lambda a, b: b - a), "subrev_nc": (2, lambda a, b: b - a),
    "lshl_add": (3, lambda a, b, c: (a << _shift(b)) + c),
    "add_lshl": (3, lambda a, b, c: (a + b) << _shift(c)),
    "add3": (3, lambda a, b, c: a + b + c), "xad": (3, lambda a, b, c: (a ^ b) + c),
    "bfe": (3, numbers.bit_field), "mul_lo": (2, lambda a, b: a * b),
    "mul_hi": (2, lambda a, b: _high_product(a, b, U64, U32)),
    "mad_legacy": (3, lambda a, b, c: a * b + c),
}  # fmt: skip
_ORDERED: dict[str, tuple[int, Function]] = {
    "max": (2, np.maximum),
    "min": (2, np.minimum),
    "med3": (3, numbers.median),
    "max3": (3, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3": (3, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "minmax": (3, lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    "maxmin": (3, lambda a, b, c: np.minimum(np.maximum(a, b), c)),
}


def _table() -> dict[str, tuple[str, tuple[str, ...], Function]]:
    table: dict[str, tuple[str, tuple[str, ...], Function]] = {}

    def add(suffix: str, kind: str, functions: dict[str, tuple[int, Function]]) -> None:
        for name, (count, function) in functions.items():
            table[f"{name}_{suffix}"] = kind, (kind,) * count, function

    add("f32", "f32", _FLOAT)
    add("f16", "f16", {name: _FLOAT[name] for name in _HALF_FLOAT})
    add("b32", "u32", _BITS)
    add("b16", "u16", {name: _BITS[name] for name in ("and", "or", "xor", "not", "mov")})
    add("u32", "u32", _UNSIGNED)
    add("u16", "u16", {name: _UNSIGNED[name] for name in _UNSIGNED if "_hi" not in name})
    for kind in ("u32", "i32", "u16", "i16"):
        add(kind, kind, _ORDERED)
    # Wrapping additions are the same of signed integers.
    for name in ("add", "sub", "add_nc", "sub_nc"):
        table[f"{name}_i32"] = "u32", ("u32", "u32"), _UNSIGNED[name][1]
        table[f"{name}_i16"] = "u16", ("u16", "u16"), _UNSIGNED[name][1]
    f32, u32, i32 = "f32", "u32", "i32"
    table |= {
        "mov_b64": ("u64", ("u64",), lambda a: a),
        "fma_f32": (f32, (f32,) * 3, numbers.fma),
        "fmaak_f32": (f32, (f32,) * 3, numbers.fma),
        "fmamk_f32": (f32, (f32,) * 3, numbers.fma),
        "fma_f16": ("f16", ("f16",) * 3, numbers.round_odd_fma16),
        "ldexp_f32": (f32, (f32, i32), numbers.scaled_by_power),
        "div_fixup_f32": (f32, (f32,) * 3, numbers.division_fixup),
        "cvt_f32_u32": (f32, (u32,), lambda a: np.asarray(a).astype(np.float32)),
        "cvt_f32_i32": (f32, (i32,), lambda a: np.asarray(a).astype(np.float32)),
        "cvt_u32_f32": (u32, (f32,), numbers.saturated(0, 2**32 - 1, U32)),
        "cvt_i32_f32": (i32, (f32,), numbers.saturated(-(2**31), 2**31 - 1, I32)),
        "cvt_f16_f32": ("f16", (f32,), lambda a: np.asarray(a).astype(np.float16)),
        "cvt_f32_f16": (f32, ("f16",), lambda a: np.asarray(a).astype(np.float32)),
        "cvt_pk_bf16_f32": (
            u32, (f32, f32), lambda a, b: numbers.to_bf16(a) | (numbers.to_bf16(b) << U32(16))
        ),
        "cvt_pk_f16_f32": (u32, (f32, f32), lambda a, b: _codes16(a) | (_codes16(b) << U32(16))),
        "pack_b32_f16": (
            u32, ("u16", "u16"), lambda a, b: np.asarray(a, U32) | (np.asarray(b, U32) << U32(16))
        ),
        "ashrrev_i32": (i32, (u32, i32), lambda a, b: b >> _shift(a).astype(I32)),
        "lshlrev_b16": ("u16", ("u16",) * 2, lambda a, b: b << _shift(a, 16)),
        "lshrrev_b16": ("u16", ("u16",) * 2, lambda a, b: b >> _shift(a, 16)),
        "ashrrev_i16": ("i16", ("u16", "i16"), lambda a, b: b >> _shift(a, 16).astype(np.int16)),
        "lshlrev_b64": ("u64", (u32, "u64"), lambda a, b: b << _wide_shift(a, U64)),
        "lshrrev_b64": ("u64", (u32, "u64"), lambda a, b: b >> _wide_shift(a, U64)),
        "ashrrev_i64": ("i64", (u32, "i64"), lambda a, b: b >> _wide_shift(a, I64)),
        "lshl_add_u64": (
            "u64", ("u64", u32, "u64"), lambda a, b, c: (a << _wide_shift(b & U32(7), U64)) + c
        ),
        "bfe_i32": (i32, (u32,) * 3, numbers.signed_bit_field),
        "bcnt_u32_b32": (
            u32, (u32, u32), lambda a, b: np.bitwise_count(np.asarray(a)).astype(U32) + b
        ),
        "mul_hi_i32": (i32, (i32, i32), lambda a, b: _high_product(a, b, I64, I32)),
        "mul_u32_u24": (u32, (u32,) * 2, lambda a, b: _low24(a) * _low24(b)),
        "mul_hi_u32_u24": (
            u32, (u32,) * 2, lambda a, b: _high_product(_low24(a), _low24(b), U64, U32)
        ),
        "mul_i32_i24": (i32, (i32,) * 2, lambda a, b: _signed24(a) * _signed24(b)),
        "mad_u32_u24": (u32, (u32,) * 3, lambda a, b, c: _low24(a) * _low24(b) + c),
        "mad_i32_i24": (i32, (i32,) * 3, lambda a, b, c: _signed24(a) * _signed24(b) + c),
        "ffbh_u32": (u32, (u32,), numbers.leading_zeros),
        "clz_i32_u32": (u32, (u32,), numbers.leading_zeros),
        "ctz_i32_b32": (u32, (u32,), numbers.trailing_zeros),
    }  # fmt: skip
    for place in range(4):
        table[f"cvt_f32_ubyte{place}"] = f32, (u32,), functools.partial(_byte_as_float, place)
    return table


TABLE = _table()
COMPARISONS: dict[str, Function] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lg": _unordered_less,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~_unordered_less(a, b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
# v_cmp_class's bits, in order.
_CLASSES: tuple[Function, ...] = (
    lambda x, bits: np.isnan(x) & (bits & U32(0x400000) == 0),
    lambda x, bits: np.isnan(x) & (bits & U32(0x400000) != 0),
    lambda x, bits: x == -np.inf,
    lambda x, bits: np.isfinite(x) & (x <= -(2.0**-126)),
    lambda x, bits: (x < 0) & (x > -(2.0**-126)),
    lambda x, bits: (x == 0) & np.signbit(x),
    lambda x, bits: (x == 0) & ~np.signbit(x),
    lambda x, bits: (x > 0) & (x < 2.0**-126),
    lambda x, bits: np.isfinite(x) & (x >= 2.0**-126),
    lambda x, bits: x == np.inf,
)
_PACKED: dict[str, tuple[str, Function]] = {
    **{f"{name}_f16": ("f16", _FLOAT[name][1]) for name in _HALF_FLOAT},
    **{f"{name}_{kind}": (kind, _ORDERED[name][1])
       for name in ("max", "min") for kind in ("i16", "u16")},
    **{f"{name}_{kind}": ("u16", _UNSIGNED[name][1])
       for name in ("add", "sub") for kind in ("u16", "i16")},
    **{name: (TABLE[name][0], TABLE[name][2])
       for name in ("lshlrev_b16", "lshrrev_b16", "mul_lo_u16", "fma_f16")},
    "ashrrev_i16": ("i16", lambda a, b: b >> _shift(a, 16)),
    "mul_f32": ("f32", lambda a, b: a * b), "add_f32": ("f32", lambda a, b: a + b),
    "fma_f32": ("f32", numbers.fma), "mov_b32": ("u32", lambda a, b: a),
}  # fmt: skip
_CARRIES = re.compile(r"(add|sub|subrev|addc|subb|subbrev)_co(_ci)?_u32")


def _stored(halves: Halves) -> Execute:
    return lambda w: halves(w)()


class VectorUnit:
    """Makes functions of a program's vector instructions."""

    def __init__(self, program: Program) -> None:
        """Serve a program's architecture and lanes."""
        self._lanes, self._gfx9 = program.lanes, program.gfx9
        self._fp8 = "e4m3fnuz" if program.architecture in ("gfx940", "gfx941", "gfx942") else "e4m3"

    def decode(self, name: str, rest: str) -> Execute:
        """Return the function of an instruction ``v_name rest``.

        Raises:
            UnknownInstruction: the instruction or its form is not known.
        """
        full = name
        for suffix in ("_e32", "_e64_dpp", "_e64", "_dpp", "_sdwa"):
            name = name.removesuffix(suffix)
        special = getattr(self, f"_{name}", None)
        texts, mods = split_both(rest)
        operands = [Operand(text) for text in texts]
        if special is not None:
            return special(operands, mods)
        if name == "nop":
            return lambda w: None
        sdwa = full.endswith("_sdwa")
        if name.startswith(("cmp_", "cmpx_")):
            return self._compare(name, operands, mods, sdwa)
        if name.startswith("s_"):
            return self._pseudo_scalar(name[2:], operands)
        if name.startswith("fma_mix"):
            return self._mixed(name, operands, mods)
        if name.startswith("pk_"):
            return self._packed(name[3:], operands, mods)
        if name.startswith("cvt_") and "fp8" in name:
            return self._convert_fp8(name, operands, mods)
        if _CARRIES.fullmatch(name):
            return self._carry(name, operands, mods)
        if name.startswith("permlane"):
            return self._permute_lanes(name, operands)
        return _stored(self.halves(name, operands, mods, sdwa))

    def dual(self, first: tuple[str, str], second: tuple[str, str]) -> Execute:
        """Return the function of two instructions that read before either of them writes."""
        pair = []
        for name, rest in (first, second):
            texts, mods = split_both(rest)
            pair.append(self.halves(name, [Operand(text) for text in texts], mods, False))
        one, other = pair

        def both(w: Waves) -> None:
            write_one, write_other = one(w), other(w)
            write_one()
            write_other()

        return both

    def halves(self, name: str, operands: list[Operand], mods: Modifiers, sdwa: bool) -> Halves:
        """Return an instruction of ``TABLE``, or one like it, as two halves."""
        kind, kinds, function = self._entry(name, mods)
        if mods.get("clamp") and kind[0] == "u":
            function = _clamped(name)
            mods = {key: value for key, value in mods.items() if key != "clamp"}
        given = operands[1:]
        if name.startswith(("fmac", "mac")):
            given = [*given, operands[0]]
        if name == "cndmask_b32":
            chosen = operands[3].index if len(operands) > 3 else VCC
            given = given[:2]
        reads = [
            source(each, each_kind, mods, place, self._lanes, sdwa)
            for place, (each, each_kind) in enumerate(zip(given, kinds, strict=True))
        ]
        write = writer(operands[0], kind, mods, self._lanes, gfx9=self._gfx9, sdwa=sdwa)

        def execute(w: Waves) -> Callable[[], None]:
            if name == "cndmask_b32":
                values = np.where(w.lanes_of(chosen), reads[1](w), reads[0](w))
            else:
                values = function(*(read(w) for read in reads))
            return lambda: write(w, values)

        return execute

    def _entry(self, name: str, mods: Modifiers) -> tuple[str, tuple[str, ...], Function]:
        if name in ("fmac_f32", "mac_f32", "fmac_f16"):
            return TABLE["fma_" + name[-3:]]
        if name == "cndmask_b32":
            return "u32", ("u32", "u32"), np.where
        if name in ("bitop3_b32", "bitop3_b16"):
            kind = "u" + name[-2:]
            return kind, (kind,) * 3, _any_logic(mods.get("bitop3", 0))
        if name not in TABLE:
            raise UnknownInstruction("vector instruction")
        return TABLE[name]

    def _dot2_bf16_bf16(self, operands: list[Operand], mods: Modifiers) -> Execute:
        """Multiply two values of bfloat16; sums of two products may round twice, and are refused.

        Triton multiplies by this instruction on RDNA, with zeros for the other product and for what
        is added, and found the bits of a float32 product rounded to nearest even
        (triton-lang/triton#8444).
        """
        if any(mods.values()):
            raise UnknownInstruction("a modifier of this instruction")
        first, second, added = (reader(each, "u32") for each in operands[1:])
        write = writer(operands[0], "u16", mods, self._lanes, gfx9=self._gfx9)

        def execute(w: Waves) -> None:
            a, b, c = (np.asarray(read(w), U32) for read in (first, second, added))
            other = _upper_bf16(a) * _upper_bf16(b)
            if (w.mask & ((other != 0) | (c != 0))).any():
                raise UnknownInstruction("a sum of products of bfloat16")
            product = _upper_bf16(a << U32(16)) * _upper_bf16(b << U32(16)) + np.float32(0)
            write(w, numbers.to_bf16(product).astype(np.uint16))

        return execute

    def _compare(self, name: str, operands: list[Operand], mods: Modifiers, sdwa: bool) -> Execute:
        found = re.fullmatch(r"cmp(x?)_(\w+?)_([uif])(16|32|64)", name)
        if not found:
            raise UnknownInstruction("comparison")
        replaces, relation, letter, bits = found.groups()
        kind = letter + bits
        function = COMPARISONS.get(relation)
        kinds = kind, kind
        if relation == "class":
            kinds, function = (kind, "u32"), _class
        if function is None:
            raise UnknownInstruction("comparison")
        first, second = (
            source(each, each_kind, mods, place, self._lanes, sdwa)
            for place, (each, each_kind) in enumerate(zip(operands[-2:], kinds, strict=True))
        )
        # On gfx10 and later v_cmpx writes EXEC alone.
        into = EXEC if replaces and not self._gfx9 else operands[0].index

        def compare(w: Waves) -> None:
            lanes = function(first(w), second(w))
            w.set_lanes(into, lanes)
            if replaces and into != EXEC:
                w.set_lanes(EXEC, lanes)

        return compare

    def _pseudo_scalar(self, name: str, operands: list[Operand]) -> Execute:
        function, read, into = TABLE[name][2], scalar_reader(operands[1], "f32"), operands[0].index
        return lambda w: w.set_scalar(into, np.asarray(function(read(w))).view(U32))

    def _carry(self, name: str, operands: list[Operand], mods: Modifiers) -> Execute:
        subtracts, reverses = name.startswith("sub"), "rev" in name
        first = source(operands[2], "u32", mods, 0, self._lanes)
        second, into, carried = reader(operands[3], "u32"), operands[0].index, operands[1].index
        taken = operands[4].index if len(operands) > 4 else None

        def execute(w: Waves) -> None:
            a, b = np.asarray(first(w), I64), np.asarray(second(w), I64)
            carry = w.lanes_of(taken) if taken is not None else 0
            if reverses:
                a, b = b, a
            total = a - b - carry if subtracts else a + b + carry
            total = np.broadcast_to(total, w.mask.shape)
            w.set_vector(into, (total & 0xFFFFFFFF).astype(U32))
            if carried >= 0:
                w.set_lanes(carried, total < 0 if subtracts else total > 0xFFFFFFFF)

        return execute

    # Lanes and scalars.

    def _readfirstlane_b32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        read, into = reader(operands[1], "u32"), operands[0].index

        def execute(w: Waves) -> None:
            first = w.lanes_of(EXEC).argmax(1)  # lane 0 if all are off
            values = np.broadcast_to(read(w), w.mask.shape)
            w.set_scalar(into, values[np.arange(w.count), first])

        return execute

    def _readlane_b32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        read, into = reader(operands[1], "u32"), operands[0].index
        lane = scalar_reader(operands[2])

        def execute(w: Waves) -> None:
            chosen = np.broadcast_to(lane(w) & U32(self._lanes - 1), w.count)
            values = np.broadcast_to(read(w), w.mask.shape)
            w.set_scalar(into, values[np.arange(w.count), chosen])

        return execute

    def _writelane_b32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        value, lane, into = (
            scalar_reader(operands[1]),
            scalar_reader(operands[2]),
            operands[0].index,
        )

        def execute(w: Waves) -> None:
            waves = w.running
            chosen = np.broadcast_to(lane(w) & U32(self._lanes - 1), w.count)[waves]
            w.vector[into][waves, chosen] = np.broadcast_to(value(w), w.count)[waves]

        return execute

    def _mbcnt_lo_u32_b32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        return self._count_below(operands, mods, 0)

    def _mbcnt_hi_u32_b32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        return self._count_below(operands, mods, 32)

    def _count_below(self, operands: list[Operand], mods: Modifiers, first: int) -> Execute:
        read, add = reader(operands[1], "u32"), reader(operands[2], "u32")
        below = np.clip(np.arange(self._lanes) - first, 0, 32).astype(U64)
        mask = ((U64(1) << below) - U64(1)).astype(U32)
        write = writer(operands[0], "u32", mods, self._lanes, gfx9=self._gfx9)
        return lambda w: write(w, np.bitwise_count(read(w) & mask).astype(U32) + add(w))

    def _permute_lanes(self, name: str, operands: list[Operand]) -> Execute:
        into, lanes = operands[0].index, self._lanes
        lane = np.arange(lanes)
        if name in ("permlane16_swap_b32", "permlane32_swap_b32"):
            other, width = operands[1].index, int(name[8:10])
            upper = (lane & width) != 0

            # The upper rows of the first register and the lower ones of the second change places.
            def swap(w: Waves) -> None:
                a, b = w.vector[into].copy(), w.vector[other].copy()
                w.set_vector(into, np.where(upper, b[:, lane ^ width], a))
                w.set_vector(other, np.where(upper, b, a[:, lane ^ width]))

            return swap
        if name not in ("permlane16_b32", "permlanex16_b32"):
            raise UnknownInstruction("permutation of lanes")
        read, low, high = reader(operands[1], "u32"), *map(scalar_reader, operands[2:4])
        row = (lane & ~15) ^ (16 if "x" in name else 0)

        def permute(w: Waves) -> None:
            chosen = np.broadcast_to(_joined(high(w), low(w)), w.count)[:, None]
            pick = (chosen >> (U64(4) * (lane & 15).astype(U64))) & U64(15)
            values = np.broadcast_to(read(w), w.mask.shape)
            w.set_vector(into, np.take_along_axis(values, row + pick.astype(I64), 1))

        return permute

    # Wide integers and division.

    def _mad_u64_u32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        return self._wide_mad(operands, "u")

    def _mad_i64_i32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        return self._wide_mad(operands, "i")

    _mad_co_u64_u32, _mad_co_i64_i32 = _mad_u64_u32, _mad_i64_i32

    def _wide_mad(self, operands: list[Operand], letter: str) -> Execute:
        a, b = (reader(each, f"{letter}32") for each in operands[2:4])
        c, kind = reader(operands[4], f"{letter}64"), KINDS[f"{letter}64"]
        write = writer(operands[0], f"{letter}64", {}, self._lanes, gfx9=self._gfx9)
        # The carry goes nowhere that Triton reads.
        return lambda w: write(w, np.asarray(a(w), kind) * np.asarray(b(w), kind) + c(w))

    def _div_scale_f32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        reads, flag = [reader(each, "f32") for each in operands[2:5]], operands[1].index
        write = writer(operands[0], "f32", mods, self._lanes, gfx9=self._gfx9)

        def execute(w: Waves) -> None:
            value, condition = numbers.division_scale(*(read(w) for read in reads))
            write(w, value)
            w.set_lanes(flag, condition)

        return execute

    def _div_fmas_f32(self, operands: list[Operand], mods: Modifiers) -> Execute:
        a, b, c = (reader(each, "f32") for each in operands[1:4])
        write = writer(operands[0], "f32", mods, self._lanes, gfx9=self._gfx9)

        def execute(w: Waves) -> None:
            # It scales back what v_div_scale_f32 scaled, and rounds once.
            power = np.where(numbers.exponent_of(c(w)) > 127, 64, -64)
            write(w, numbers.fma(a(w), b(w), c(w), np.where(w.lanes_of(VCC), power, 0)))

        return execute

    # Packed values and conversions of FP8.

    def _packed(self, name: str, operands: list[Operand], mods: Modifiers) -> Execute:
        if name not in _PACKED:
            raise UnknownInstruction("packed instruction")
        kind, function = _PACKED[name]
        given, into = operands[1:], operands[0].index
        # Without a list, results' low halves come of low halves and high ones of high ones.
        parts = []
        for selected, negated, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
            chosen = mods.get(selected, [default] * len(given))
            signs = mods.get(negated, [0] * len(given))
            if name == "mov_b32":  # the second result comes of the second source
                place = default
                parts.append([_half(given[place], kind, mods.get("op_sel", [0, 0])[place], 0)] * 2)
                continue
            parts.append(
                [
                    _half(*each)
                    for each in zip(given, [kind] * len(given), chosen, signs, strict=True)
                ]
            )

        def execute(w: Waves) -> None:
            low, high = (function(*(read(w) for read in reads)) for reads in parts)
            if kind.endswith("32"):
                # Either may be the other's source.
                low, high = (np.array(each).view(U32) for each in (low, high))
                w.set_vector(into, low)
                w.set_vector(into + 1, high)
                return
            low, high = (np.asarray(each).view(np.uint16).astype(U32) for each in (low, high))
            w.set_vector(into, low | (high << U32(16)))

        return execute

    def _mixed(self, name: str, operands: list[Operand], mods: Modifiers) -> Execute:
        halves, is_half = mods.get("op_sel", [0] * 3), mods.get("op_sel_hi", [0] * 3)
        reads = [
            reader(each, "f16" if half else "f32", bool(half and upper))
            for each, half, upper in zip(operands[1:], is_half, halves, strict=True)
        ]
        kind = "f32" if name == "fma_mix_f32" else "f16"
        place = {"op_sel": [0, 0, 0, 1]} if name == "fma_mixhi_f16" else {}
        clamp = {"clamp": 1} if mods.get("clamp") else {}
        # The other half is kept, on gfx9 as well.
        write = writer(operands[0], kind, {**place, **clamp}, self._lanes, gfx9=False)

        def execute(w: Waves) -> None:
            write(w, numbers.fma(*(np.asarray(read(w), np.float32) for read in reads)))

        return execute

    def _convert_fp8(self, name: str, operands: list[Operand], mods: Modifiers) -> Execute:
        lanes, halves, into = self._lanes, mods.get("op_sel", [0] * 4), operands[0].index
        scaled = "scalef32" in name
        # Only the exponent of a scale counts.
        scale = reader(operands[-1], "f32") if scaled else None

        def power(w: Waves) -> Array:
            return 1.0 if scale is None else np.exp2(numbers.exponent_of(scale(w)) - 127.0)

        if name in ("cvt_pk_fp8_f32", "cvt_scalef32_pk_fp8_f32"):
            a, b = (reader(each, "f32") for each in operands[1:3])
            write = writer(
                operands[0], "u16", {"op_sel": [0, halves[-1]]}, lanes, gfx9=False
            )  # keeps the other half

            def to_fp8(w: Waves) -> None:
                factor = power(w)
                low, high = (
                    numbers.to_fp8(
                        np.asarray(read(w), np.float64) / factor, self._fp8, w.clamps_fp8[:, None]
                    )
                    for read in (a, b)
                )
                write(w, low | (high << U32(8)))

            return to_fp8
        if not re.fullmatch(r"cvt_(scalef32_)?(pk_)?(f32|f16)_fp8", name):
            raise UnknownInstruction("conversion")
        read, pair = reader(operands[1], "u32"), "_pk_" in name
        if "src0_sel" in mods:
            shift = FIELDS[mods["src0_sel"]][0]
        elif pair:
            shift = 16 * halves[0]
        else:
            shift = 16 * halves[1] + 8 * halves[0]
        if not pair and scaled:
            raise UnknownInstruction("conversion")

        def from_fp8(w: Waves) -> None:
            codes, factor = read(w) >> U32(shift), power(w)
            values = [
                numbers.fp8_values(self._fp8)[(codes >> U32(8 * place)) & U32(255)] * factor
                for place in range(1 + pair)
            ]
            if name.endswith("pk_f16_fp8"):
                w.set_vector(into, _codes16(values[0]) | (_codes16(values[1]) << U32(16)))
                return
            for place, each in enumerate(values):
                w.set_vector(into + place, np.asarray(each, np.float32).view(U32))

        return from_fp8


def split_both(rest: str) -> tuple[list[str], Modifiers]:
    """Return the operands' texts and the modifiers of what follows an instruction's name."""
    return split(rest), modifiers(rest)


def _half(operand: Operand, kind: str, upper: int, negated: int) -> Read:
    """Read the lower or the upper half of a packed operand, or of a pair of registers."""
    if kind.endswith("32"):
        # A constant is both halves; a pair's halves are its registers.
        read = reader(operand.part(upper if operand.kind != "constant" else 0), kind)
    else:
        read = reader(operand, kind, bool(upper))
    return (lambda w: -read(w)) if negated else read


def _class(x: Array, classes: Array) -> Array:
    bits, found = np.asarray(x).view(U32), np.bool_(False)
    for place, holds in enumerate(_CLASSES):
        found = found | (holds(x, bits) & ((classes >> U32(place)) & U32(1) != 0))
    return found


def _any_logic(truth: int) -> Function:
    """Return the function of three bits whose values are the eight bits of ``truth``."""

    def function(a: Array, b: Array, c: Array) -> Array:
        result = (a & ~a) | (b & ~b) | (c & ~c)  # zeros, as wide as all of them
        for case in range(8):
            if truth >> case & 1:
                x, y, z = (v if case & bit else ~v for v, bit in ((a, 4), (b, 2), (c, 1)))
                result = result | (x & y & z)
        return result

    return function


def _clamped(name: str) -> Function:
    """Return the addition or subtraction of unsigned integers that saturates."""
    found = re.fullmatch(r"(add|sub|subrev)(_nc)?_u(16|32)", name)
    if not found:
        raise UnknownInstruction("clamp of this instruction")
    operation, bits = found[1], int(found[3])

    def function(a: Array, b: Array) -> Array:
        a, b = np.asarray(a, I64), np.asarray(b, I64)
        total = {"add": a + b, "sub": a - b, "subrev": b - a}[operation]
        return np.clip(total, 0, 2**bits - 1).astype(KINDS[f"u{bits}"])

    return function
