"""Matrix products of a wave: MFMA of CDNA, WMMA of RDNA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from crossrun.amd import numbers
from crossrun.amd.errors import Fault, UnknownInstruction
from crossrun.amd.operands import Modifiers, Operand
from crossrun.amd.program import Program
from crossrun.amd.waves import EXEC, Array, Waves

_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1, "bf8": 1, "i8": 1}
# Formats of A and B by the values of cbsz and blgp in f8f6f4 instructions.
_F8F6F4 = {0: "fp8", 1: "bf8"}


class MatrixUnit:
    """Makes functions of a program's matrix products.

    Products and sums are float64, rounded to float32 once: hardware rounds more often, in an order
    that is not published.
    """

    def __init__(self, program: Program) -> None:
        """Serve a program's architecture and lanes."""
        self._program, self._lanes = program, program.lanes
        fnuz = "fnuz" if program.architecture in ("gfx940", "gfx941", "gfx942") else ""
        self._fp8 = {"fp8": "e4m3" + fnuz, "bf8": "e5m2" + fnuz}

    def decode(
        self, name: str, operands: list[Operand], mods: Modifiers
    ) -> Callable[[Waves], None]:
        """Return the function of an instruction ``v_name``.

        Raises:
            UnknownInstruction: the instruction or its form is not known.
        """
        found = re.fullmatch(
            r"(mfma|wmma)_(f32|i32)_(\d+)x(\d+)x(\d+)_?(f32|xf32|f16|bf16|i8|iu8|f8f6f4|"
            r"(?:fp8|bf8)_(?:fp8|bf8))(_1k)?",
            name,
        )
        if not found or any(each.negative or each.absolute for each in operands):
            raise UnknownInstruction("matrix product")
        if any(any(mods.get(key, ())) for key in ("neg_lo", "neg_hi", "op_sel")):
            raise UnknownInstruction("matrix product with modifiers")
        unit, result, types = found[1], found[2], found[6]
        rows, columns, depth = (int(number) for number in found.groups()[2:5])
        first, second = self._kinds(types, mods)
        per_lane, row, group, outputs = self._layout(unit, rows, columns, depth)
        if not per_lane:
            raise UnknownInstruction("matrix product of several blocks")
        into, a, b, c = operands[:4]
        lane = np.arange(self._lanes)
        index = outputs, np.broadcast_to(lane % columns, outputs.shape)
        groups = int(group.max()) + 1
        accumulator = np.float32 if result == "f32" else np.int32
        constant = None if c.kind == "v" else c.constant("f32" if result == "f32" else "i32")
        members = [np.flatnonzero(group == each) for each in range(groups)]
        # RDNA 3 wants both halves of a wave to hold the same values.
        doubled = unit == "wmma" and groups == 1 and self._lanes == 32

        def matrix(w: Waves, operand: Operand, kind: str, height: int) -> Array:
            count = max(per_lane * _BYTES[kind] // 4, 1)
            words = w.vector[operand.index : operand.index + count].transpose(1, 2, 0)
            values = self._unpack(np.ascontiguousarray(words), kind)
            if doubled:
                same = (words[:, :16] == words[:, 16:]).all((1, 2))
                if not same[w.running].all():
                    raise Fault("a matrix product's operand differs between a wave's halves")
            whole = np.zeros((w.count, height, depth), values.dtype)
            for number, lanes in enumerate(members):
                part = slice(number * per_lane, (number + 1) * per_lane)
                whole[:, row[lanes], part] = values[:, lanes]
            return whole

        def multiply(w: Waves) -> None:
            if not w.lanes_of(EXEC)[w.running].all():
                raise Fault("a matrix product with lanes that are off")
            left, right = matrix(w, a, first, rows), matrix(w, b, second, columns)
            product = left @ right.transpose(0, 2, 1)
            total = product[:, index[0], index[1]].transpose(1, 0, 2)
            if constant is None:
                total = total + w.vector[c.index : c.index + len(outputs)].view(accumulator)
            else:
                total = total + constant
            words = total.astype(accumulator).view(np.uint32)
            for place in range(len(outputs)):
                w.set_vector(into.index + place, words[place])

        return multiply

    def _kinds(self, types: str, mods: Modifiers) -> tuple[str, str]:
        if types == "f8f6f4":
            kinds = [_F8F6F4.get(mods.get(key, 0), "") for key in ("cbsz", "blgp")]
        elif "_" in types:
            kinds = types.split("_")
        else:
            kinds = [types, types]
        signed = mods.get("neg_lo") is None
        kinds = ["i8" if kind == "iu8" and signed else kind for kind in kinds]
        if any(kind not in _BYTES for kind in kinds):
            raise UnknownInstruction("matrix product of these types")
        return kinds[0], kinds[1]

    def _layout(
        self, unit: str, rows: int, columns: int, depth: int
    ) -> tuple[int, Array, Array, Array]:
        """Return how matrices lie in lanes.

        Returns:
            The number of K that a lane holds, 0 for an unknown shape; each lane's row of A or
            column of B; the group of K it holds; and ``[registers, lanes]`` the result's rows.
        """
        lane = np.arange(self._lanes)
        if unit == "mfma":
            if (rows, columns) not in ((16, 16), (32, 32)):
                return 0, lane, lane, lane
            groups = self._lanes // rows
            register = np.arange(rows * columns // self._lanes)[:, None]
            # Four rows a group, then the next four.
            output = register // 4 * 4 * groups + 4 * (lane // rows) + register % 4
            return depth // groups, lane % rows, lane // rows, output
        if (rows, columns) != (16, 16) or self._lanes != 32:
            return 0, lane, lane, lane
        register = np.arange(8)[:, None]
        if self._program.gfx12:
            return depth // 2, lane % 16, lane // 16, 8 * (lane // 16) + register
        return depth, lane % 16, np.zeros(32, int), 2 * register + lane // 16

    def _unpack(self, words: Array, kind: str) -> Array:
        """Return the values ``[waves, lanes, K]`` of registers in float64, or of int8 in int64."""
        if kind == "f32":
            return words.view(np.float32).astype(np.float64)
        if kind == "f16":
            return words.view(np.float16).astype(np.float64)
        if kind == "bf16":
            wide = words.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).astype(np.float64)
        if kind == "i8":
            return words.view(np.int8).astype(np.int64)
        values: Any = numbers.fp8_values(self._fp8[kind])[words.view(np.uint8)]
        return values.astype(np.float64)
