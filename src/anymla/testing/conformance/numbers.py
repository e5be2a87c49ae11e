"""Cases Q1 .. Q7: number formats inside the caches."""

from __future__ import annotations

import torch

from anymla.formats.e4m3 import decode_e4m3, decode_e4m3fnuz, encode_e4m3, encode_e4m3fnuz
from anymla.formats.page_layout import MAIN_FP8, ROWS_BF16_512, ROWS_FP32_512, get_layout
from anymla.testing.conformance.expected import EPS, table
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.oracle import rounding
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import assert_close, assert_identical, assert_unbiased

_INSERT = "quantize_and_insert_k_cache"


@case("Q1", "all 256 bytes decode as OCP e4m3; FNUZ is another code", "dequant_gather_slots")
def all_codes(ops: Ops) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    cache = get_layout(MAIN_FP8).allocate(1, 1)
    page = cache[0].flatten()
    page[:256] = codes
    page[576:583] = torch.tensor([127, 128, 126, 105, 0, 127, 127], dtype=torch.uint8)
    out = torch.empty(1, 512)
    ops.dequant_gather_slots(out, cache, torch.zeros(1, dtype=torch.int32))
    want = rounding.decode_e4m3(codes).unflatten(0, (4, 64))
    want = want * torch.tensor([1.0, 2.0, 0.5, 2.0**-22], dtype=torch.float64).unsqueeze(1)
    got = out[0, :256].double()
    same = (got == want.flatten()) | (got.isnan() & want.flatten().isnan())
    expect(bool(same.all()), f"codes decode wrongly: {codes[~same].tolist()}")
    expect(got[0x80] == 0 and got[0x7F].isnan() and got[0xFF].isnan(), "0x80 is -0, 0x7F is NaN")

    assert_close(decode_e4m3(codes), codes.view(torch.float8_e4m3fn).double(), name="OCP codes")
    fnuz = decode_e4m3fnuz(codes)
    expect(bool(fnuz[0x80].isnan()), "FNUZ has its NaN at 0x80")
    expect(fnuz[0x7F] == 240 and fnuz[0x08] == decode_e4m3(codes)[0x08] / 2, "FNUZ is half of OCP")
    expect(int(encode_e4m3fnuz(torch.tensor(-1e-9))) == 0, "FNUZ flushes tiny negatives to +0")


@case("Q2", "window and entries may be kept in different formats", "sparse_attention")
def mixed_formats(ops: Ops) -> None:
    layouts = (MAIN_FP8, ROWS_BF16_512, ROWS_FP32_512)
    for main in layouts:
        for extra in layouts:
            given = Scene(
                torch.randn(2, 4, 512).bfloat16(),
                scope(2, 30, layout=main),
                scope(2, 12, page=2, layout=extra),
            )
            arguments, keywords = given.arguments()
            result = ops.sparse_attention(*arguments, **keywords)
            given.expected().check(result, f"{main} with {extra}")


@case("Q3", "scales are rounded up to 2^k first, then values are quantised", _INSERT)
def scale_first(ops: Ops) -> None:
    rows = (torch.randn(64, 512) * torch.exp2(6 * torch.rand(64, 1) - 3)).bfloat16()
    rows[0] = 0
    rows[1, :64] = 448
    cache = get_layout(MAIN_FP8).allocate(1, 64)
    slots = torch.randperm(64)
    ops.quantize_and_insert_k_cache(rows, cache, slots)
    row_format = ROW_FORMATS[MAIN_FP8]
    data, scales = read_entries(cache, slots, MAIN_FP8)
    stored, exact = row_format.decode(data, scales), rows.double()
    assert_identical(stored, row_format.round(exact), name="rows read back")
    explained = row_format.explains(data, scales, exact, exact)
    expect(bool(explained.all()), "a scale byte is not ceil(log2(amax / 448)) + 127")
    assert_unbiased(stored[2:, :448].abs(), exact[2:, :448].abs(), name="e4m3 magnitudes")
    error = (stored - exact)[:, :448].square().mean().sqrt() / exact[:, :448].square().mean().sqrt()
    # A step of e4m3 is at most 2^-3 of a value, uniform error 2^-3 / sqrt(12) of it.
    expect(error < 2**-3 / 12**0.5, f"relative error after the round trip: {float(error):.3g}")


@case(
    "Q4", "scale bytes are exact powers of two, and floats are not taken for them", "mxfp4_linear"
)
def scales_are_bytes(ops: Ops) -> None:
    packed = torch.zeros(32, 32, dtype=torch.uint8)
    for scale in (torch.full((32, 2), 0.75), torch.full((32, 2), 1, dtype=torch.int32)):
        try:
            ops.mxfp4_linear(torch.zeros(1, 64), packed, scale, quantize_activations=False)
        except TypeError as error:
            expect("scale" in str(error), f"the message must name the scale: {error}")
        else:
            raise AssertionError(f"a scale of {scale.dtype} was accepted as ue8m0")


@case("Q5", "software e4m3 rounds to nearest even and saturates")
def software_e4m3(ops: Ops) -> None:
    del ops
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    codes = encode_e4m3(finite)
    native = finite.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert_identical(codes, native, name="codes of all finite bfloat16 values")
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf])
    expect(encode_e4m3(specials).tolist() == [0x7F, 0x7E, 0xFE], "NaN stays, infinities saturate")
    values = rounding.e4m3_values()
    ties = ((values[1:] + values[:-1]) / 2).float()
    expect(bool((encode_e4m3(ties) % 2 == 0).all()), "ties go to the even code")
    above, below = torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)
    steps = torch.arange(126, dtype=torch.uint8)
    assert_identical(encode_e4m3(below), steps, name="just below ties")
    assert_identical(encode_e4m3(above), steps + 1, name="just above ties")


@case("Q6", "a NaN score never loses a candidate", "topk_per_row")
def nan_scores(ops: Ops) -> None:
    logits = torch.randn(5, 40)
    logits[1, 7] = torch.nan
    logits[2] = torch.nan
    logits[3, :20] = -torch.inf
    logits[4, 3], logits[4, 4] = torch.inf, torch.nan
    zeros = torch.zeros(5, dtype=torch.int32)
    for k in (1, 8, 40, 64):
        chosen = ops.topk_per_row(logits, zeros, zeros + 40, k)
        for row in range(5):
            valid = chosen[row, : min(k, 40)]
            expect(len(valid.unique()) == min(k, 40), f"k={k}, row {row}: repeated or missing")
            expect(bool(((valid >= 0) & (valid < 40)).all()), f"k={k}, row {row}: out of range")
            expect(bool((chosen[row, 40:] == -1).all()), f"k={k}, row {row}: -1 after the last")
        expect(7 in chosen[1], f"k={k}: the NaN candidate was dropped")


@case(
    "Q7",
    "the cache dtype changes the rounding and nothing else",
    "qnorm_rope_kv_insert",
    quick=True,
)
def dtype_changes_rounding_only(ops: Ops) -> None:
    q, kv = torch.randn(6, 2, 512).bfloat16(), torch.randn(6, 512).bfloat16()
    positions = torch.arange(100, 106)
    queries = []
    for layout in (MAIN_FP8, ROWS_BF16_512, ROWS_FP32_512):
        cache = get_layout(layout).allocate(1, 8)
        queries.append(
            ops.qnorm_rope_kv_insert(
                q,
                kv,
                cache,
                torch.arange(6),
                positions,
                table(128, compressed=True),
                EPS,
                layout=layout,
            )
        )
        stored = ROW_FORMATS[layout].decode(*read_entries(cache, torch.arange(6), layout))
        if layout == MAIN_FP8:
            packed = stored
            continue
        rope = stored[:, 448:].bfloat16()
        assert_identical(packed[:, 448:].bfloat16(), rope, name=f"rope channels in {layout}")
        want = ROW_FORMATS[MAIN_FP8].round(stored)
        assert_identical(packed[:, :448], want[:, :448], name=f"other channels in {layout}")
    for other in queries[1:]:
        assert_identical(other, queries[0], name="queries")
