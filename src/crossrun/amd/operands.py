"""Operands and modifiers of an instruction's text, as functions that read and write registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from crossrun.amd.errors import UnknownInstruction
from crossrun.amd.waves import EXEC, M0, VCC, Array, Waves

Read = Callable[[Waves], Array]
Write = Callable[[Waves, Array], None]
Modifiers = dict[str, Any]

_REGISTER = re.compile(r"(v|s|a|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_NAMED = {
    "vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "exec": EXEC, "exec_lo": EXEC,
    "exec_hi": EXEC + 1, "m0": M0,
}  # fmt: skip
_TTMP, _ACCUMULATORS = 108, 256
# 1 / (2 pi), which the assembler prints in these ways.
_INVERSE_2PI = {"0.15915494", "0.15915494309189532", "0.15915494309189535"}
KINDS: dict[str, Any] = {
    f"{letter}{bits}": getattr(np, f"{name}{bits}")
    for letter, name in (("u", "uint"), ("i", "int"), ("f", "float"))
    for bits in (16, 32, 64)
}
# Bytes and halves of a register by SDWA's names: shift and width.
FIELDS = {
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
    "WORD_0": (0, 16), "WORD_1": (16, 16),
}  # fmt: skip


class Operand:
    """One operand of an instruction.

    Attributes:
        text: the operand without signs and bars.
        kind: "v" for vector registers, "s" for scalar ones, "null" or "constant".
        index: the first register's index, -1 without one.
        count: number of registers.
        negative, absolute, signed: its modifiers ``-x``, ``|x|`` and ``sext(x)``.
    """

    def __init__(self, text: str) -> None:
        """Read an operand's text."""
        self.signed = text.startswith("sext(")
        if self.signed:
            text = text[5:-1]
        self.negative = text.startswith("neg(") or bool(re.match(r"-[^\d.]", text))
        if self.negative:
            text = text[4:-1] if text.startswith("neg(") else text[1:]
        self.absolute = text.startswith("|")
        self.text = text = text.strip("|")
        self.index, self.count = -1, 1
        register = _REGISTER.fullmatch(text)
        if register:
            letter, one, first, last = register.groups()
            self.kind = "v" if letter in "va" else "s"
            self.index = int(one or first)
            self.count = int(last) - self.index + 1 if last else 1
            self.index += {"a": _ACCUMULATORS, "ttmp": _TTMP}.get(letter, 0)
        elif text in _NAMED:
            self.kind, self.index = "s", _NAMED[text]
        else:
            self.kind = "null" if text == "null" else "constant"

    def part(self, place: int) -> Operand:
        """Return the operand of the register ``place`` behind this one; constants have one."""
        other = Operand(self.text)
        if other.index >= 0:
            other.index += place
        return other

    def constant(self, kind: str) -> Array:
        """Return the value of a constant operand, as a NumPy scalar of that kind."""
        text = self.text
        if text.startswith("lit("):
            text = text[4:-1]
        bits = int(kind[1:])
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            number = int(text, 0) & (2**bits - 1)
        elif text in _INVERSE_2PI and bits == 32:
            number = 0x3E22F983
        elif re.fullmatch(r"-?\d*\.?\d+(e[+-]?\d+)?", text):
            # Where integers of 64 bits are meant, the assembler's constant is one of 32 bits.
            float_bits = 32 if bits == 64 and kind[0] != "f" else bits
            value = KINDS[f"f{float_bits}"](float(text))
            number = int(value.view(KINDS[f"u{float_bits}"]))
        else:
            raise UnknownInstruction(f"operand {text}")
        return KINDS[f"u{bits}"](number).view(KINDS[kind])


def split(text: str) -> list[str]:
    """Return the texts of an instruction's operands, without what follows them."""
    pieces, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            pieces.append(current.strip())
            current = ""
        else:
            current += letter
    if current.strip():
        pieces.append(re.split(r"\s+(?![^\[(]*[\])])", current.strip())[0])
    return pieces


def modifiers(text: str) -> Modifiers:
    """Return an instruction's modifiers: numbers, lists, or 1 for words."""
    found: Modifiers = {}
    for name, values in re.findall(r"\b(\w+):\[([\d,]+)\]", text):
        found[name] = [int(value) for value in values.split(",")]
    for name, value in re.findall(r"\b(\w+):(0x[0-9a-f]+|-?\d+)\b", text):
        found[name] = int(value, 0)
    for name, value in re.findall(r"\b(dst_sel|dst_unused|src0_sel|src1_sel):(\w+)", text):
        found[name] = value
    for word in ("row_mirror", "row_half_mirror", "clamp", "idxen", "lds", "glc", "sc0"):
        if re.search(rf"\s{word}\b(?!:)", text):
            found[word] = 1
    swizzle = re.search(r"swizzle\(([^)]*)\)", text)
    if swizzle:
        found["swizzle"] = [part.strip().strip('"') for part in swizzle[1].split(",")]
    return found


def scalar_reader(operand: Operand, kind: str = "u32") -> Read:
    """Read a scalar operand as ``[waves]`` of a kind; constants are NumPy scalars."""
    view, wide = KINDS[kind], kind.endswith("64")
    index = operand.index
    get: Read
    if operand.kind == "constant" and operand.text == "scc":
        return lambda w: w.scc.astype(view)
    if operand.kind == "null":
        return lambda w: view(0)
    if operand.kind == "constant":
        number = operand.constant(kind)
        get = lambda w: number  # noqa: E731
    elif operand.kind == "v":
        raise UnknownInstruction("a vector register as a scalar")
    elif wide:
        get = lambda w: w.scalar64(index).view(view)  # noqa: E731
    else:
        get = lambda w: w.scalar[index].view(view)  # noqa: E731
    return _signed(get, operand, kind)


def reader(operand: Operand, kind: str, high: bool = False) -> Read:
    """Read an operand as values that broadcast to ``[waves, lanes]``.

    Args:
        operand: registers or a constant.
        kind: "u", "i" or "f" with the bits: "u32", "f16", ...
        high: take the upper half of a register, for kinds of 16 bits.
    """
    view, bits, index = KINDS[kind], int(kind[1:]), operand.index
    if operand.kind != "v" and bits != 16:
        read = scalar_reader(operand, kind)
        if operand.kind == "constant" and operand.text != "scc":
            return read
        return lambda w: np.asarray(read(w))[..., None]
    get: Read
    if bits == 16:
        shift = np.uint32(16 if high else 0)
        if operand.kind == "constant":
            number = operand.constant(kind)
            # A constant has no upper half but a literal's.
            if high:
                number = (operand.constant("u32") >> shift).astype(np.uint16).view(view)
            get = lambda w: number  # noqa: E731
        else:
            whole = reader(operand.part(0), "u32")
            get = lambda w: (whole(w) >> shift).astype(np.uint16).view(view)  # noqa: E731
    elif bits == 64:
        get = lambda w: w.vector64(index).view(view)  # noqa: E731
    elif kind == "u32":
        get = lambda w: w.vector[index]  # noqa: E731
    else:
        get = lambda w: w.vector[index].view(view)  # noqa: E731
    return _signed(get, operand, kind)


def _signed(get: Read, operand: Operand, kind: str) -> Read:
    """Apply ``-x`` and ``|x|``, which of integers mean the sign's bit."""
    if not (operand.negative or operand.absolute):
        return get
    if kind[0] == "i":
        raise UnknownInstruction("a signed integer with a modifier")
    sign = KINDS["u" + kind[1:]](1 << (int(kind[1:]) - 1))

    def changed(w: Waves) -> Array:
        given = get(w)
        bits = np.asarray(given).view(sign.dtype)
        if operand.absolute:
            bits = bits & ~sign
        return (bits ^ sign if operand.negative else bits).view(np.asarray(given).dtype)

    return changed


# Cross-lane moves of the first source, DPP.
def _dpp_source(mods: Modifiers, lanes: int) -> tuple[Array, Array] | None:
    """Return each lane's source and whether it exists; None for an instruction without DPP."""
    lane = np.arange(lanes)
    row, place = lane & ~15, lane & 15
    exists = np.ones(lanes, bool)
    if "quad_perm" in mods:
        source = (lane & ~3) + np.array(mods["quad_perm"])[lane & 3]
    elif "dpp8" in mods:
        source = (lane & ~7) + np.array(mods["dpp8"])[lane & 7]
    elif "row_shl" in mods:
        source, exists = lane + mods["row_shl"], place + mods["row_shl"] < 16
    elif "row_shr" in mods:
        source, exists = lane - mods["row_shr"], place >= mods["row_shr"]
    elif "row_ror" in mods:
        source = row + ((place - mods["row_ror"]) & 15)
    elif "row_mirror" in mods:
        source = row + 15 - place
    elif "row_half_mirror" in mods:
        source = (lane & ~7) + 7 - (lane & 7)
    elif "row_share" in mods or "row_newbcast" in mods:
        source = row + mods["row_share" if "row_share" in mods else "row_newbcast"]
    elif "row_xmask" in mods:
        source = row + (place ^ mods["row_xmask"])
    elif mods.get("row_bcast") == 15:
        source, exists = row - 1, lane >= 16
    elif mods.get("row_bcast") == 31:
        source, exists = (lane & ~31) - 1, lane >= 32
    elif "wave_shl" in mods or "wave_rol" in mods:
        source, exists = (lane + 1) % lanes, (lane < lanes - 1) | ("wave_rol" in mods)
    elif "wave_shr" in mods or "wave_ror" in mods:
        source, exists = (lane - 1) % lanes, (lane > 0) | ("wave_ror" in mods)
    elif "row_bcast" in mods:
        raise UnknownInstruction("this form of DPP")
    else:
        return None
    return np.clip(source, 0, lanes - 1), exists


def source(
    operand: Operand, kind: str, mods: Modifiers, place: int, lanes: int, sdwa: bool = False
) -> Read:
    """Read the source of a vector instruction at a place, with op_sel, SDWA and DPP."""
    if sdwa and mods.get(f"src{place}_sel", "DWORD") != "DWORD":
        return _sdwa_source(operand, kind, FIELDS[mods[f"src{place}_sel"]])
    halves = mods.get("op_sel", [])
    high = kind.endswith("16") and place < len(halves) and bool(halves[place])
    get = reader(operand, kind, high)
    moved = _dpp_source(mods, lanes) if place == 0 else None
    if moved is None:
        return get
    lane, exists = moved

    def dpp(w: Waves) -> Array:
        values = np.broadcast_to(get(w), (w.count, lanes))[:, lane]
        on = exists if mods.get("fi") else exists & w.lanes_of(EXEC)[:, lane]
        return np.where(on, values, values.dtype.type(0))

    return dpp


def _sdwa_source(operand: Operand, kind: str, field: tuple[int, int]) -> Read:
    plain = Operand(operand.text)
    get, (shift, width) = reader(plain, "u32"), field
    sign = np.uint32(1 << (width - 1))

    def selected(w: Waves) -> Array:
        values = (get(w) >> np.uint32(shift)) & np.uint32(2**width - 1)
        if operand.signed:
            values = (values ^ sign) - sign
        return (values.astype(np.uint16) if kind.endswith("16") else values).view(KINDS[kind])

    return _signed(selected, operand, kind)


def writer(
    operand: Operand, kind: str, mods: Modifiers, lanes: int, *, gfx9: bool, sdwa: bool = False
) -> Write:
    """Write a vector instruction's result, with clamp, omod, op_sel, SDWA and DPP's masks.

    A result of 16 bits keeps the register's other half, but on gfx9, where it is cleared.
    """
    if operand.kind != "v":
        raise UnknownInstruction("this destination")
    index, bits = operand.index, int(kind[1:])
    unsigned = KINDS[f"u{bits}"]
    multiple = mods["mul"] if "mul" in mods else 1 / mods.get("div", 1)
    halves = mods.get("op_sel", [])
    high = kind.endswith("16") and len(halves) > 1 and bool(halves[-1])
    selected = FIELDS.get(mods.get("dst_sel", "DWORD")) if sdwa else None
    if selected and mods.get("dst_unused") == "UNUSED_SEXT":
        raise UnknownInstruction("dst_unused:UNUSED_SEXT")
    if mods.get("clamp") and kind[0] != "f":
        raise UnknownInstruction("clamp of an integer")
    keeps = mods.get("dst_unused") == "UNUSED_PRESERVE"
    enabled = _dpp_destination(mods, lanes)

    def write(w: Waves, values: Array) -> None:
        if multiple != 1:
            values = values * KINDS[kind](multiple)
        if mods.get("clamp"):
            values = np.where(np.isnan(values), 0, np.clip(values, 0, 1))
        words = np.asarray(values).astype(KINDS[kind], copy=False).view(unsigned)
        mask = w.mask if enabled is None else w.mask & enabled(w)
        if bits == 64:
            w.set_vector(index, (words & np.uint64(0xFFFFFFFF)).astype(np.uint32), mask)
            w.set_vector(index + 1, (words >> np.uint64(32)).astype(np.uint32), mask)
            return
        words = words.astype(np.uint32, copy=False)
        if selected:
            shift, width = selected
            field = np.uint32((2**width - 1) << shift)
            words = (words << np.uint32(shift)) & field
            if keeps:
                words = words | (w.vector[index] & ~field)
        elif high:
            words = (words << np.uint32(16)) | (w.vector[index] & np.uint32(0xFFFF))
        elif bits == 16 and not gfx9:
            words = words | (w.vector[index] & np.uint32(0xFFFF0000))
        w.set_vector(index, words, mask)

    return write


def _dpp_destination(mods: Modifiers, lanes: int) -> Read | None:
    """Return which lanes DPP writes: those of its rows and banks that have a source."""
    moved = _dpp_source(mods, lanes)
    if moved is None:
        return None
    lane, exists = moved
    place = np.arange(lanes)
    chosen = (mods.get("row_mask", 15) >> (place // 16) & 1).astype(bool)
    chosen &= (mods.get("bank_mask", 15) >> (place % 16 // 4) & 1).astype(bool)
    if mods.get("bound_ctrl"):
        return lambda w: chosen
    if mods.get("fi"):
        return lambda w: chosen & exists
    return lambda w: chosen & exists & w.lanes_of(EXEC)[:, lane]
