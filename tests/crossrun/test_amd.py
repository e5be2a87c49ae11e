"""Classes of AMD's instructions beside torch and integers, and what their interpreter refuses."""

import ctypes
import fractions
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("numpy", "2.0")

from crossrun import amd
from crossrun.amd.machine import Machine, address_of
from crossrun.amd.memory import HostMemory
from crossrun.amd.program import Program
from crossrun.amd.waves import Waves
from crossrun.targets import backend_problem

F32 = np.float32
SPECIAL = [0.0, -0.0, 1.0, -1.5, 3.0e-39, 1e38, -3e38, math.inf, -math.inf, math.nan, 0.3, 1e-20]


def assembly(architecture, lines, *, lds=0, scratch=0):
    """The text of a kernel of these lines, whose argument is one address."""
    narrow = "" if architecture.startswith("gfx9") else "\t.amdhsa_wavefront_size32 1\n"
    return (
        f'\t.amdgcn_target "amdgcn-amd-amdhsa--{architecture}"\n\t.text\nkernel:\n'
        "\t.loc\t1 7 0 ; made.py:7:0\n"
        + "".join(line + "\n" if line.endswith(":") else f"\t{line}\n" for line in lines)
        + f"\ts_endpgm\n.amdhsa_kernel kernel\n\t.amdhsa_group_segment_fixed_size {lds}\n"
        f"\t.amdhsa_private_segment_fixed_size {scratch}\n\t.amdhsa_kernarg_size 8\n"
        f"\t.amdhsa_user_sgpr_count 2\n\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n{narrow}"
        "\t.amdhsa_system_sgpr_workgroup_id_x 1\n.end_amdhsa_kernel\n\t.amdgpu_metadata\n"
        "amdhsa.kernels:\n  - .args:\n      - .offset: 0\n        .size: 8\n"
        "        .value_kind: global_buffer\n    .name: kernel\n"
    )


def execute(architecture, lines, inputs, words, *, waves=1, groups=1, lds=0, scratch=0):
    """Run lines between loads of a thread's inputs and stores of its results.

    Args:
        architecture: "gfx942", ...
        lines: instructions; v10, v11, ... hold the thread's inputs, and results are v20, ...
        inputs: ``[inputs, threads]`` uint32.
        words: number of result registers.
        waves, groups: size of the launch.
        lds, scratch: bytes.

    Returns:
        ``[words, threads]`` uint32.
    """
    lanes = 64 if architecture.startswith("gfx9") else 32
    threads = lanes * waves
    inputs = np.ascontiguousarray(inputs, np.uint32).reshape(-1, threads * groups)
    memory = np.concatenate([inputs, np.full((words, threads * groups), 77, np.uint32)])
    row = 4 * threads * groups
    base = (
        f"s_mul_i32 s6, s2, {threads}"
        if architecture != "gfx1201"
        else f"s_mul_i32 s6, ttmp9, {threads}"
    )
    around = [
        "s_load_b64 s[4:5], s[0:1], 0x0", base, "v_add_u32_e32 v9, s6, v0",
        "v_lshlrev_b32_e32 v9, 2, v9",
    ]  # fmt: skip
    for place in range(len(inputs)):
        around += [
            f"v_add_u32_e32 v8, {row * place}, v9",
            f"global_load_b32 v{10 + place}, v8, s[4:5]",
        ]
    stores = []
    for place in range(words):
        stores += [
            f"v_add_u32_e32 v8, {row * (len(inputs) + place)}, v9",
            f"global_store_b32 v8, v{20 + place}, s[4:5]",
        ]
    program = Program(
        assembly(architecture, [*around, *lines, *stores], lds=lds, scratch=scratch), "kernel"
    )
    host = HostMemory()
    block = ctypes.create_string_buffer(600)
    at = address_of(block)
    ctypes.memmove(at, memory.ctypes.data.to_bytes(8, "little"), 8)
    host.allow([(at, at + 64), (memory.ctypes.data, memory.ctypes.data + memory.nbytes)])
    Machine(program, host).run(at, (groups, 1, 1), threads, lds)
    return memory[len(inputs) :]


def bits(values):
    return np.asarray(values, F32).view(np.uint32)


def pairs(lanes=64):
    """Floats in all combinations of special ones, and random ones."""
    a = np.array([x for x in SPECIAL for _ in SPECIAL] + [0.0] * 48, F32)[: 3 * lanes]
    b = np.array(SPECIAL * len(SPECIAL) + [0.0] * 48, F32)[: 3 * lanes]
    made = np.random.default_rng(0)
    a[144:], b[144:] = made.standard_normal((2, 48)).astype(F32) * 100
    return a, b


def same_floats(got, want):
    got, want = np.asarray(got).view(F32), np.asarray(want, F32)
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    assert (got.view(np.uint32)[~nan] == want.view(np.uint32)[~nan]).all(), (got, want)


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("v_add_f32_e32 v20, v10, v11", torch.add),
        ("v_sub_f32_e32 v20, v10, v11", torch.sub),
        ("v_mul_f32_e32 v20, v10, v11", torch.mul),
        ("v_max_f32_e32 v20, v10, v11", torch.fmax),
        ("v_min_f32_e32 v20, v10, v11", torch.fmin),
        ("v_add_f32_e64 v20, -v10, |v11|", lambda a, b: -a + b.abs()),
        ("v_mul_f32_e64 v20, v10, v11 clamp", lambda a, b: (a * b).nan_to_num(0).clamp(0, 1)),
        ("v_add_f32_e64 v20, v10, v11 mul:2", lambda a, b: (a + b) * 2),
        ("v_trunc_f32_e32 v20, v10", lambda a, b: a.trunc()),
        ("v_rndne_f32_e32 v20, v11", lambda a, b: b.round()),
    ],
)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1201"])
def test_floats(architecture, line, model):
    a, b = pairs()
    waves = 3 if architecture == "gfx942" else 6
    got = execute(architecture, [line], [bits(a), bits(b)], 1, waves=waves)[0]
    want = model(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    # fmax(-0, 0) may be either zero.
    if "max" in line or "min" in line or "clamp" in line:
        got = bits(got.view(F32) + F32(0))
        want = want + F32(0)
    same_floats(got, want)


def rounded(value):
    """A fraction as the nearest float32, ties to even."""
    if value == 0:
        return F32(0)
    exponent = math.floor(math.log2(abs(value)))
    step = fractions.Fraction(2) ** max(exponent - 23, -149)
    return F32(float(round(value / step) * step))


def test_fma_rounds_once():
    """Of products whose sum in float64 ends midway between two float32, and of random ones."""
    made = np.random.default_rng(1)
    a, b, c = made.standard_normal((3, 64)).astype(F32)
    a[:32] = 1 + made.integers(0, 2**12, 32).astype(F32) * F32(2.0**-12)
    b[:32] = 1 + made.integers(0, 2**12, 32).astype(F32) * F32(2.0**-12)
    c[:16] = F32(2.0**-60) * np.where(np.arange(16) % 2, 1, -1)
    a[16:24], b[16:24], c[16:24] = F32(2.0**-100), F32(1.5 * 2.0**-40), F32(2.0**-149)
    got = execute("gfx950", ["v_fma_f32 v20, v10, v11, v12"], bits([a, b, c]), 1)[0].view(F32)
    for one in range(64):
        x, y, z = (fractions.Fraction(float(v[one])) for v in (a, b, c))
        assert got[one] == rounded(x * y + z), one


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("v_add_u32_e32 v20, v10, v11", lambda a, b: a + b),
        ("v_subrev_u32_e32 v20, v10, v11", lambda a, b: b - a),
        ("v_mul_lo_u32 v20, v10, v11", lambda a, b: a * b),
        ("v_mul_hi_u32 v20, v10, v11", lambda a, b: a * b >> 32),
        ("v_lshlrev_b32_e32 v20, v11, v10", lambda a, b: a << (b & 31)),
        ("v_lshrrev_b32_e32 v20, v11, v10", lambda a, b: a >> (b & 31)),
        ("v_ashrrev_i32_e32 v20, v11, v10", lambda a, b: signed(a) >> (b & 31)),
        ("v_bfe_u32 v20, v10, v11, 9", lambda a, b: (a >> (b & 31)) & 511),
        ("v_bfe_i32 v20, v10, 5, 9", lambda a, b: signed((a >> 5 & 511) << 23) >> 23),
        ("v_max_i32_e32 v20, v10, v11", lambda a, b: max(signed(a), signed(b))),
        ("v_min_u32_e32 v20, v10, v11", min),
        ("v_bfrev_b32_e32 v20, v10", lambda a, b: int(f"{a:032b}"[::-1], 2)),
        ("v_bcnt_u32_b32 v20, v10, v11", lambda a, b: a.bit_count() + b),
        ("v_ffbh_u32_e32 v20, v10", lambda a, b: 32 - a.bit_length() if a else -1),
        ("v_ffbl_b32_e32 v20, v10", lambda a, b: (a & -a).bit_length() - 1),
        ("v_bitop3_b32 v20, v10, v11, 12 bitop3:0x96", lambda a, b: a ^ b ^ 12),
        ("v_perm_b32 v20, v10, v11, 0x0c0d0405",
         lambda a, b: (a & 255) << 8 | (a >> 8 & 255) | 0xFF << 16),
        ("v_alignbit_b32 v20, v10, v11, 7", lambda a, b: (a << 32 | b) >> 7),
        ("v_mad_u64_u32 v[20:21], vcc, v10, v11, v[10:11]", lambda a, b: a * b + a),
        ("v_add_u32_sdwa v20, v10, v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 "
         "src1_sel:WORD_1", lambda a, b: (a >> 8 & 255) + (b >> 16)),
        ("v_cvt_f32_u32_e32 v20, v10", lambda a, b: int(bits(F32(a)))),
        ("v_pk_add_u16 v20, v10, v11", lambda a, b: (a + b & 0xFFFF) | (a >> 16) + (b >> 16) << 16),
        ("v_sub_u32_e64 v20, v10, v11 clamp", lambda a, b: max(a - b, 0)),
    ],
)  # fmt: skip
def test_integers(line, model):
    made = np.random.default_rng(2)
    a, b = made.integers(0, 2**32, (2, 64), np.uint32)
    a[:4], b[:4] = [0, 1, 2**31, 2**32 - 1], [0, 2**32 - 1, 31, 32]
    got = execute("gfx950", [line], [a, b], 1)[0]
    for x, y, result in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        assert result == model(x, y) % 2**32, (hex(x), hex(y))


def signed(value):
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


def test_carries_make_wide_integers():
    made = np.random.default_rng(3)
    words = made.integers(0, 2**32, (4, 64), np.uint32)
    lines = [
        "v_add_co_u32 v20, vcc, v10, v12", "v_addc_co_u32_e32 v21, vcc, v11, v13, vcc",
        "v_sub_co_u32 v22, s[8:9], v10, v12", "v_subb_co_u32_e64 v23, s[8:9], v11, v13, s[8:9]",
        "v_lshl_add_u64 v[24:25], v[10:11], 3, v[12:13]",
    ]  # fmt: skip
    got = execute("gfx942", lines, words, 6).astype(object)
    a, b = (words[i].astype(object) | words[i + 1].astype(object) << 32 for i in (0, 2))
    for first, want in ((0, a + b), (2, a - b), (4, (a << 3) + b)):
        assert ((got[first] | got[first + 1] << 32) == want % 2**64).all()


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("s_add_u32 s8, s6, s7", lambda a, b, s: (a + b, a + b >= 2**32)),
        ("s_addc_u32 s8, s6, s7", lambda a, b, s: (a + b + s, a + b + s >= 2**32)),
        ("s_sub_i32 s8, s6, s7",
         lambda a, b, s: (a - b, abs(2 * (signed(a) - signed(b)) + 1) > 2**32)),
        ("s_lshl2_add_u32 s8, s6, s7", lambda a, b, s: (4 * a + b, 4 * a + b >= 2**32)),
        ("s_andn2_b32 s8, s6, s7", lambda a, b, s: (a & ~b, a & ~b != 0)),
        ("s_bfe_u32 s8, s6, 0x50007", lambda a, b, s: (a >> 7 & 31, a >> 7 & 31 != 0)),
        ("s_bfe_i32 s8, s6, 0x5001d", lambda a, b, s: (signed(a) >> 29, signed(a) >> 29 != 0)),
        ("s_ashr_i32 s8, s6, 5", lambda a, b, s: (signed(a) >> 5, signed(a) >> 5 != 0)),
        ("s_min_i32 s8, s6, s7",
         lambda a, b, s: (min(signed(a), signed(b)), signed(a) < signed(b))),
        ("s_mul_hi_u32 s8, s6, s7", lambda a, b, s: (a * b >> 32, s)),
        ("s_mul_hi_i32 s8, s6, s7", lambda a, b, s: (signed(a) * signed(b) >> 32, s)),
        ("s_cselect_b32 s8, s6, s7", lambda a, b, s: (a if s else b, s)),
        ("s_brev_b32 s8, s6", lambda a, b, s: (int(f"{a:032b}"[::-1], 2), s)),
        ("s_bcnt1_i32_b32 s8, s6", lambda a, b, s: (a.bit_count(), a != 0)),
        ("s_abs_i32 s8, s6", lambda a, b, s: (abs(signed(a)), a != 0)),
        ("s_pack_lh_b32_b16 s8, s6, s7", lambda a, b, s: (a & 0xFFFF | b & 0xFFFF0000, s)),
        ("s_flbit_i32_b32 s8, s6", lambda a, b, s: (32 - a.bit_length() if a else -1, s)),
    ],
)  # fmt: skip
def test_scalars(line, model):
    """Sixteen waves at once, each with scalars of its own."""
    made = np.random.default_rng(4)
    a, b = np.repeat(made.integers(0, 2**32, (2, 16), np.uint32), 64, axis=1)
    a[:256], b[:128] = np.repeat([0, 1, 2**31, 2**32 - 1], 64), np.repeat([2**31, 2**32 - 1], 64)
    lines = [
        "v_readfirstlane_b32 s6, v10", "v_readfirstlane_b32 s7, v11", "s_cmp_lt_u32 s6, s7",
        line, "v_mov_b32_e32 v20, s8", "s_cselect_b32 s8, 1, 0", "v_mov_b32_e32 v21, s8",
    ]  # fmt: skip
    got, scc = execute("gfx942", lines, [a, b], 2, waves=16).tolist()
    for x, y, result, condition in zip(a.tolist(), b.tolist(), got, scc, strict=True):
        value, wanted = model(x, y, int(x < y))
        assert (result, condition) == (value % 2**32, int(wanted)), (hex(x), hex(y))


@pytest.mark.parametrize(
    ("line", "sources"),
    [
        ("v_mov_b32_dpp v20, v10 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda i: i ^ 1),
        ("v_mov_b32_dpp v20, v10 row_shr:3 row_mask:0xf bank_mask:0xf",
         lambda i: i - 3 if i % 16 >= 3 else None),
        ("v_mov_b32_dpp v20, v10 row_shl:4 row_mask:0xf bank_mask:0x5",
         lambda i: i + 4 if i % 16 // 4 in (0, 2) else None),
        ("v_mov_b32_dpp v20, v10 row_bcast:15 row_mask:0xa bank_mask:0xf",
         lambda i: i // 16 * 16 - 1 if i // 16 % 2 else None),
        ("v_mov_b32_dpp v20, v10 row_ror:5 row_mask:0xf bank_mask:0xf",
         lambda i: i // 16 * 16 + (i - 5) % 16),
        ("v_mov_b32_dpp v20, v10 row_half_mirror row_mask:0xf bank_mask:0xf", lambda i: i ^ 7),
        ("ds_swizzle_b32 v20, v10 offset:swizzle(SWAP,16)", lambda i: i ^ 16),
        ('ds_swizzle_b32 v20, v10 offset:swizzle(BITMASK_PERM,"01pip")',
         lambda i: i // 32 * 32 + 8 + ((i & 7) ^ 2)),
        ("ds_bpermute_b32 v20, v11, v10", lambda i: (7 * i + 1) % 64),
    ],
)  # fmt: skip
def test_moves_between_lanes(line, sources):
    """On gfx9; lanes without a source keep what they had."""
    values = np.arange(64, dtype=np.uint32) + 1000
    where = (7 * np.arange(64) + 1) % 64 * 4
    got = execute("gfx942", ["v_mov_b32_e32 v20, 5", line], [values, where], 1)[0].tolist()
    assert got == [5 if sources(i) is None else 1000 + sources(i) for i in range(64)]


def test_permutations_of_narrow_waves():
    values = np.arange(32, dtype=np.uint32)
    lines = [
        "s_mov_b32 s6, 0x76543210", "s_mov_b32 s7, 0xfedcba98",
        "v_permlanex16_b32 v20, v10, s6, s7", "v_permlane16_b32 v21, v10, s7, s6",
    ]  # fmt: skip
    got = execute("gfx1201", lines, [values], 2)
    assert got[0].tolist() == [i ^ 16 for i in range(32)]
    assert got[1].tolist() == [i ^ 8 for i in range(32)]
    lines = [
        "v_mov_b32_e32 v20, v10",
        "v_add_u32_e32 v21, 64, v10",
        "v_permlane32_swap_b32_e32 v20, v21",
    ]
    got = execute("gfx950", lines, [np.arange(64)], 2)
    assert got[0].tolist() == [*range(32), *range(64, 96)]
    assert got[1].tolist() == [*range(32, 64), *range(96, 128)]


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)],
)
def test_fp8_conversions(architecture, kind):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(kind).float().numpy()
    for first in range(0, 256, 64):
        lines = [
            "v_cvt_pk_f32_fp8_e32 v[20:21], v10",
            "v_cvt_f32_fp8_sdwa v22, v10 src0_sel:BYTE_1",
        ]
        part = codes[first : first + 64].numpy().astype(np.uint32)
        got = execute(architecture, lines, [part << 8 | 0x38], 3)
        same_floats(got[1], want[first : first + 64])
        same_floats(got[2], want[first : first + 64])
    x = torch.linspace(-1.1, 1.1, 64) ** 3 * torch.finfo(kind).max * 0.74
    x[:4] = torch.tensor([torch.nan, 0.0, 1e-9, 0.0009765625])
    got = execute(architecture, ["v_cvt_pk_fp8_f32 v20, v10, v10"], [bits(x.numpy())], 1)[0]
    assert (got & 255 == x.to(kind).view(torch.uint8).numpy()).all()


def test_saturation_is_what_mode_says():
    x = np.full(64, 1e6, F32)
    convert = "v_cvt_pk_fp8_f32 v20, v10, v10"
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"
    assert (execute("gfx950", [convert], [bits(x)], 1)[0] & 255 == 0x7F).all()
    assert (execute("gfx950", [mode, convert], [bits(x)], 1)[0] & 255 == 0x7E).all()


def test_products_of_bfloat16_on_rdna():
    """Every pair of some values, and its neighbours below the least normal number."""
    values = torch.tensor([0.0, 1.0, -1.5, 2.0**-126, 2.0**-127, -3e38, 0.3, torch.inf, torch.nan])
    values = values.bfloat16()
    a, b = (each.flatten() for each in torch.meshgrid(values, values, indexing="ij"))
    for first in range(0, 64, 32):
        one, other = (each[first : first + 32] for each in (a, b))
        given = [each.view(torch.uint16).numpy().astype(np.uint32) for each in (one, other)]
        line = "v_dot2_bf16_bf16 v20, v10, v11, 0"
        got = execute("gfx1151", ["v_mov_b32_e32 v20, 0", line], given, 1)[0]
        want = (one.float() * other.float() + 0.0).bfloat16()
        assert (got >> 16 == 0).all()
        same_floats(got << 16, want.float().numpy())
    unit = execute("gfx1201", ["v_dot2_bf16_bf16 v20, v10, 0x7e80, 0"], [np.full(32, 0x40)], 1)[0]
    assert (unit & 0xFFFF == 0x3F00).all()  # 2^-127 by 2^126


@pytest.mark.parametrize(
    "line",
    [
        "v_dot2_bf16_bf16 v20, v10, v10, 0",
        "v_dot2_bf16_bf16 v20, v10, 1, v10",
        "v_dot2_bf16_bf16 v20, v10, 0, 0 op_sel:[0,0,0,1]",
    ],
)
def test_sums_of_products_of_bfloat16_are_refused(line):
    with pytest.raises(amd.UnknownInstruction):
        execute("gfx1151", [line], [np.full(32, 0x3F803F80)], 1)


def test_scaled_conversions():
    """Of a scale, only the exponent counts."""
    codes = torch.arange(64, dtype=torch.uint8)
    scale = bits(np.full(64, 0.75 * 2.0**-3))
    lines = [
        "v_cvt_scalef32_pk_f32_fp8 v[20:21], v10, v11",
        "v_cvt_scalef32_pk_fp8_f32 v22, v20, v21, v11",
    ]
    got = execute("gfx950", lines, [codes.numpy().astype(np.uint32) * 257, scale], 3)
    want = codes.view(torch.float8_e4m3fn).float().numpy() * F32(2.0**-4)
    same_floats(got[0], want)
    assert (got[2] & 0xFFFF == codes.numpy().astype(np.uint32) * 257).all()


def test_bfloat16_and_float16_conversions():
    a, b = (v[:64] for v in pairs())
    got = execute(
        "gfx950",
        ["v_cvt_pk_bf16_f32 v20, v10, v11", "v_cvt_pk_f16_f32 v21, v10, v11"],
        bits([a, b]),
        2,
    )
    for place, values in ((0, a), (1, b)):
        given = torch.from_numpy(values)
        for row, kind in ((0, torch.bfloat16), (1, torch.float16)):
            half = torch.from_numpy((got[row] >> (16 * place) & 0xFFFF).astype(np.uint16))
            torch.testing.assert_close(
                half.view(kind), given.to(kind), rtol=0, atol=0, equal_nan=True
            )


# Of each matrix instruction: rows, K, K of a lane, and the row of a lane's result register.
MATRICES = [
    ("gfx942", "v_mfma_f32_16x16x16_bf16 v[20:23], v[10:11], v[12:13], 0", torch.bfloat16, 16, 16,
     lambda i, lane: 4 * (lane // 16) + i),
    ("gfx950", "v_mfma_f32_32x32x16_f16 v[20:35], v[10:13], v[14:17], 0", torch.float16, 32, 16,
     lambda i, lane: 8 * (i // 4) + 4 * (lane // 32) + i % 4),
    ("gfx950", "v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[2:9], v[10:17], 0", torch.float8_e4m3fn, 16,
     128, lambda i, lane: 4 * (lane // 16) + i),
    ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8 v[20:23], v[10:11], v[12:13], 0", torch.float8_e4m3fnuz,
     16, 32, lambda i, lane: 4 * (lane // 16) + i),
    ("gfx1151", "v_wmma_f32_16x16x16_bf16 v[20:27], v[2:9], v[10:17], 0", torch.bfloat16, 16, 16,
     lambda i, lane: 2 * i + lane // 16),
    ("gfx1201", "v_wmma_f32_16x16x16_f16 v[20:27], v[10:13], v[14:17], 0", torch.float16, 16, 16,
     lambda i, lane: 8 * (lane // 16) + i),
    ("gfx1201", "v_wmma_f32_16x16x16_fp8_fp8 v[20:27], v[10:11], v[12:13], 0", torch.float8_e4m3fn,
     16, 16, lambda i, lane: 8 * (lane // 16) + i),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "line", "kind", "size", "depth", "row"),
    MATRICES,
    ids=[f"{case[0]}-{case[1].split()[0]}" for case in MATRICES],
)
def test_matrix_products(architecture, line, kind, size, depth, row):
    torch.manual_seed(0)
    lanes = 64 if architecture.startswith("gfx9") else 32
    a, b = (torch.randn(size, depth).to(kind) for _ in range(2))
    # Groups of lanes have a part of K each; gfx1151's lanes have all of it.
    held = depth if architecture == "gfx1151" else depth * size // lanes
    w = waves_of(architecture)
    for matrix, operand in ((a, 1), (b, 2)):
        first = int(line.split(", ")[operand].split(":")[0].strip("v["))
        for lane in range(lanes):
            start = lane // size * held % depth
            part = matrix[lane % size, start : start + held].contiguous()
            words = part.view(torch.uint8).view(torch.int32).numpy().view(np.uint32)
            w.vector[first : first + len(words), 0, lane] = words
    machine = Machine(Program(assembly(architecture, [line]), "kernel"), HostMemory())
    machine.decode(0)(w)
    want = (a.double() @ b.double().T).float().numpy()
    for i, lane in np.ndindex(size * size // lanes, lanes):
        got = w.vector[20 + i, 0, lane].view(F32)
        assert got == want[row(i, lane), lane % size]


def waves_of(architecture):
    """One wave whose registers a test fills."""
    return Waves(1, 64 if architecture.startswith("gfx9") else 32, 512, 0, np.zeros(1, int))


def test_lds_between_waves():
    """Two waves reverse their threads' values through LDS, with a barrier."""
    lines = [
        "v_lshlrev_b32_e32 v1, 2, v0", "ds_write_b32 v1, v10", "s_waitcnt lgkmcnt(0)", "s_barrier",
        "v_sub_u32_e32 v2, 0x1fc, v1", "ds_read_b32 v20, v2", "s_waitcnt lgkmcnt(0)",
    ]  # fmt: skip
    values = np.arange(512, dtype=np.uint32)
    got = execute("gfx942", lines, [values], 1, waves=2, groups=4, lds=512)[0].reshape(4, 128)
    assert (got == values.reshape(4, 128)[:, ::-1]).all()
    del lines[3]
    with pytest.raises(amd.Fault, match=r"made.py:7:0.*another wave wrote without a barrier"):
        execute("gfx942", lines, [values], 1, waves=2, groups=4, lds=512)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["v_lshlrev_b32_e32 v1, 2, v0", "ds_read_b32 v20, v1"], "nobody has written"),
        (["v_mov_b32_e32 v1, 0", "ds_write_b32 v1, v0"], "different values to one word"),
        (["v_lshlrev_b32_e32 v1, 2, v0", "ds_write_b32 v1, v0 offset:512"], "which has 512 bytes"),
        (["v_lshlrev_b32_e32 v1, 1, v0", "ds_write_b32 v1, v0"], "misaligned"),
        (["v_mov_b32_e32 v1, 2", "global_load_b32 v20, v1, s[4:5]"], "misaligned"),
        (["v_mov_b32_e32 v1, 0x7ffff0", "global_load_b32 v20, v1, s[4:5]"],
         "outside of every tensor"),
        (["v_mov_b32_e32 v1, 0x7ffff0", "global_store_b32 v1, v0, s[4:5]"],
         "outside of every tensor"),
        (["scratch_load_b32 v20, off, off offset:16"], "private memory at"),
        (["v_cmp_eq_u32_e32 vcc, 0, v0", "s_and_saveexec_b64 s[8:9], vcc",
          "v_mfma_f32_16x16x16_bf16 v[20:23], v[10:11], v[12:13], 0"], "lanes that are off"),
        (["v_readfirstlane_b32 s8, v0", "s_cmp_eq_u32 s8, 0", "s_cbranch_scc1 .L", "s_barrier",
          ".L:"],
         "waves end while others wait"),
    ],
)  # fmt: skip
def test_faults(lines, said):
    with pytest.raises(amd.Fault, match=said):
        execute("gfx942", lines, [np.zeros(128)], 1, waves=2, lds=512)


@pytest.mark.parametrize(
    "line", ["v_dot4_i32_i8 v20, v10, v11, v12", "s_getpc_b64 s[8:9]",
             "v_mov_b32_e32 v20, src_private_base",
             "v_mfma_f32_4x4x4_16b_f16 v[20:23], v[10:11], v[12:13], 0",
             "v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[2:9], v[10:17], 0 cbsz:4",
             "buffer_load_dword v20, v10, s[4:7], 0 idxen", "global_load_lds_dword v[2:3], off",
             "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1", "v_add_u32_e32 v20, v10"],
)  # fmt: skip
def test_what_is_not_known_is_refused(line):
    with pytest.raises(amd.UnknownInstruction, match=r"kernel, made.py:7:0"):
        execute("gfx942", [line], [np.zeros(64)], 1)


def test_waves_part_and_meet():
    """Each wave loops as often as its own number says, and lanes are masked."""
    lines = [
        "v_readfirstlane_b32 s6, v10", "s_mov_b32 s7, 0", ".LOOP:", "s_add_i32 s7, s7, 3",
        "s_add_i32 s6, s6, -1", "s_cmp_gt_i32 s6, 0", "s_cbranch_scc1 .LOOP",
        "v_mov_b32_e32 v20, s7", "v_cmp_gt_u32_e32 vcc_lo, 16, v0", "s_and_saveexec_b32 s8, vcc_lo",
        "s_cbranch_execz .END", "v_add_u32_e32 v20, 1000, v20", ".END:",
        "s_or_b32 exec_lo, exec_lo, s8",
    ]  # fmt: skip
    times = np.repeat([5, 1, 2, 9], 32)
    got = execute("gfx1151", lines, [times], 1, waves=4)[0]
    assert (got == 3 * times + 1000 * (np.arange(128) < 16)).all()


def test_buffers_end():
    """Loads beyond a buffer's bytes give zeros, and stores there do nothing."""
    lines = [
        "s_mov_b64 s[8:9], s[4:5]", "s_movk_i32 s10, 0x80", "s_mov_b32 s11, 0x27000",
        "v_lshlrev_b32_e32 v1, 2, v0", "buffer_load_dword v20, v1, s[8:11], 0 offen",
        "v_mov_b32_e32 v2, 9", "buffer_store_dword v2, v1, s[8:11], 0 offen offset:64",
        "v_or_b32_e32 v1, 0x80000000, v1", "buffer_load_dword v21, v1, s[8:11], 0 offen",
        "global_load_b32 v22, v9, s[4:5]", "v_lshlrev_b32_e32 v1, 2, v0",
        "v_add_u32_e32 v1, -64, v1",
        "buffer_load_dword v23, v1, s[8:11], 0 offen offset:64",
    ]  # fmt: skip
    got = execute("gfx942", lines, [np.arange(64) + 1], 4)
    assert got[0].tolist() == [*range(1, 33), *[0] * 32]
    assert not got[1].any()
    assert got[2].tolist() == [*range(1, 17), *[9] * 16, *range(33, 65)]
    # The sum of both offsets wraps.
    assert got[3].tolist() == [*range(1, 17), *[9] * 16, *[0] * 32]


def test_private_memory():
    lines = [
        "scratch_store_b64 off, v[10:11], off offset:8", "scratch_load_u16 v20, off, off offset:10",
        "v_mov_b32_e32 v1, 4", "scratch_load_b32 v21, v1, off offset:8",
    ]  # fmt: skip
    values = np.random.default_rng(5).integers(0, 2**32, (2, 64), np.uint32)
    got = execute("gfx942", lines, values, 2, scratch=16)
    assert (got[0] == values[0] >> 16).all()
    assert (got[1] == values[1]).all()


def test_atomics():
    lines = [
        "v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v2, 1", "global_atomic_add v1, v2, s[4:5]",
        "ds_write_b32 v1, v1", "ds_add_rtn_u32 v20, v1, v2", "ds_read_b32 v21, v1",
        "global_load_b32 v22, v1, s[4:5]",
    ]  # fmt: skip
    got = execute("gfx942", lines, [np.full(64, 7)], 3, lds=16)
    assert sorted(got[0].tolist()) == list(range(64))
    assert (got[1] == 64).all()
    assert (got[2] == 71).all()


def test_install_says_what_is_wrong(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="before they are compiled"):
        amd.install("gfx942")
    monkeypatch.setattr(amd, "missing", lambda: "")
    with pytest.raises(ValueError, match="gfx1201"):
        amd.install("gfx900")


def test_the_page_runs_compiled(tmp_path):
    if backend_problem("hip"):
        pytest.skip(backend_problem("hip"))
    page = pathlib.Path(__file__).parents[2] / "docs" / "crossrun" / "amd.md"
    blocks = re.findall(r"^```python( file=\S+)?\n(.*?)^```$", page.read_text(), re.M | re.S)
    (named, kernel), (_, program) = blocks
    (tmp_path / named.removeprefix(" file=")).write_text(kernel)
    (tmp_path / "program.py").write_text(program)
    # A process of its own, because a process has one target.
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "'s_endpgm': 64" in done.stdout  # 16 programs of 4 waves
