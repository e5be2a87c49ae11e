"""Hopper's decode kernels repeated beside each other: the same bits, however busy the device is.

``ANYMLA_STRESS_BLOCKS`` says how many blocks of 64 rows are read; 1.3e9 are a million launches of
132 programs with ten blocks each.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from stress import Repeated, repeat

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops.attention.decode_config import Cut, Schedule, blocks_of, tile_heads

BLOCKS = int(float(os.environ.get("ANYMLA_STRESS_BLOCKS", "1e6")))
SECONDS = float(os.environ.get("ANYMLA_STRESS_SECONDS", "120"))
CTAS = 132
# Heads, tokens, columns of both lists, how the work is cut.
CASES = [
    (64, 200, 128, 512, "whole"),
    (64, 140, 128, 512, "tail"),
    (64, 30, 128, 1024, "every"),
    (128, 74, 128, 1024, "stream-K"),
    (128, 74, 128, 2048, "planned"),
    (16, 200, 128, 512, "whole"),
    (16, 30, 128, 1024, "every"),
    (32, 150, 128, 512, "tail"),
    (8, 90, 128, 2048, "stream-K"),
    (128, 66, 2048, None, "whole"),
    (64, 74, 2048, None, "stream-K"),
    (64, 20, 2048, None, "every"),
    (128, 90, 128, 1024, "longest first"),
    (16, 200, 128, 512, "longest first"),
    (64, 10, 128, 512, "one block"),
    (16, 10, 128, 512, "one block"),
    (64, 20, 128, 1024, "by width"),
    (32, 150, 128, 512, "half tail"),
    (32, 30, 128, 512, "half by width"),
    (32, 10, 128, 512, "half one block"),
]

# Of those, what is repeated with a kernel that is wrong; and for how long.
MUTATED, MUTANT_SECONDS = CASES[:4], 3


def schedule_of(heads, tokens, widths, way):
    tile = 64 if way.startswith("half ") else tile_heads(heads)
    way = way.removeprefix("half ")
    tiles = -(-heads // tile)
    if way in ("whole", "longest first"):
        ctas = min(tokens * tiles, CTAS)
        return Schedule(tile, tiles, ctas, longest_first=way == "longest first")
    if way in ("every", "by width"):
        ctas = min(tokens * tiles * 4, CTAS)
        return Schedule(tile, tiles, ctas, 4, Cut.EVERY, by_width=way == "by width")
    if way == "one block":
        splits = blocks_of(widths)
        ctas = min(tokens * tiles * splits, CTAS)
        return Schedule(tile, tiles, ctas, splits, Cut.EVERY, by_width=True, one_block=True)
    if way == "tail":
        return Schedule(tile, tiles, min(CTAS, tokens * tiles - 1), 3, Cut.TAIL)
    return Schedule(tile, tiles, CTAS, cut=Cut.STREAM_K, planned=way == "planned")


def cache(kind, slots, page):
    layout = get_layout(kind)
    made = layout.allocate(slots // page, page, device="cuda")
    rows = torch.randn(slots, layout.channels, device="cuda")
    layout.write(made, torch.arange(slots, device="cuda"), rows)
    return made


def poisoned(shape, dtype, device):
    """Scratch memory in which what was not written is noticed."""
    made = torch.empty(shape, dtype=dtype, device=device)
    made.view(torch.uint8).fill_(0xFF)
    return made


def repeated(heads, tokens, width, extra, way):
    """A call, its blocks, and the same by another backend."""
    from anymla.ops.attention import CacheRows, sparse_attention
    from anymla.ops.attention import gluon_sm90_decode_launch as launcher

    kind = V32_FP8 if extra is None else MAIN_FP8
    rows = []
    for columns, page in ((width, 64), (extra, 2)):
        if columns is None:
            continue
        indices = torch.randint(-50, 1 << 14, (tokens, columns), dtype=torch.int32, device="cuda")
        lengths = torch.randint(0, columns + 1, (tokens,), dtype=torch.int32, device="cuda")
        lengths[::9] = 0
        rows.append(CacheRows(cache(kind, 1 << 14, page), kind, indices, lengths))
    q = torch.randn(tokens, heads, get_layout(kind).channels, device="cuda").bfloat16()
    sink = torch.randn(heads, device="cuda")
    widths = tuple(each.width for each in rows)
    schedule = schedule_of(heads, tokens, widths, way)
    plan = None
    if way == "planned":
        plan = launcher.make_plan(schedule, tokens, *(each.lengths for each in rows), widths)
    call = launcher.Call(q, rows, sink, q.shape[2] ** -0.5, schedule, plan)
    out = torch.empty(tokens, heads, 512, dtype=q.dtype, device="cuda")
    lse = torch.empty(tokens, heads, device="cuda")

    def run():
        launcher.attend(call, launcher.AttentionOut(out, lse))

    expected = sparse_attention(q, rows, value_dim=512, sink=sink, backend="triton")
    blocks = sum((each.lengths + 63) // 64 for each in rows).clamp(min=1).sum()
    blocks *= schedule.head_tiles
    label = f"{kind}, {heads} heads, {tokens} tokens, {way}"
    return Repeated(label, run, (out, lse), int(blocks)), expected


@pytest.fixture
def hopper(monkeypatch):
    from anymla.ops.attention import gluon_sm90_decode_launch as launcher

    torch.manual_seed(0)
    monkeypatch.setattr(launcher, "scratch", poisoned)
    return launcher


@pytest.mark.gpu("sm_90")
def test_the_same_bits_every_time(hopper):
    calls = []
    for case in CASES:
        call, (out, lse) = repeated(*case)
        call.run()
        got, got_lse = call.results
        assert (got.float() - out.float()).norm() < 4e-3 * out.float().norm(), call.label
        torch.testing.assert_close(got_lse, lse, atol=1e-3, rtol=1e-5)
        calls.append(call)
    found = repeat(calls, BLOCKS, limit=SECONDS)
    print(f"{found.calls} calls, {found.blocks} blocks, {found.seconds:.1f} s")
    assert found.calls == found.launched > 0
    assert not found.different


READS_EARLY = "            mbarrier.wait(barriers.p_ready.index(s), (p_count // P) & 1)\n"
HANDS_OVER = "            shared.decay.index(s).store(decay)\n"
# Consumer 0 comes so late with what it hands over that whoever does not wait reads what was before.
LATE = (
    HANDS_OVER,
    """            decay = gl.inline_asm_elementwise(
                "nanosleep.u32 2000; mov.b32 $0, $1;", "=f,f", [decay], dtype=gl.float32,
                is_pure=False, pack=1,
            )
"""
    + HANDS_OVER,
)
# Names of kernels that are wrong, and what makes them so in gluon_sm90_decode_m64.
MUTANTS = {
    "consumer 1 reads what consumer 0 hands over before it has waited": [
        LATE,
        (READS_EARLY + "            fence", "            early = shared.decay.index(s).load(R)\n"
         + READS_EARLY + "            fence"),
        ("gl.expand_dims(shared.decay.index(s).load(R), 1)", "gl.expand_dims(early, 1)"),
    ],
}  # fmt: skip


def changed(changes, folder):
    """The kernel of m64 with its text changed."""
    real = importlib.import_module("anymla.ops.attention.gluon_sm90_decode_m64")
    text = Path(real.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "changed_m64.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem].decode_m64_kernel


@pytest.mark.parametrize("name", MUTANTS)
def test_the_texts_are_there_to_be_changed(name, tmp_path):
    pytest.importorskip("triton")
    assert changed(MUTANTS[name], tmp_path).fn.__module__ == "changed_m64"


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("name", ["nothing", *MUTANTS])
def test_a_wait_that_is_missing_is_noticed(name, hopper, monkeypatch, tmp_path):
    """What makes the test above worth something; a kernel that is late and waits stays right."""
    kernel = changed(MUTANTS.get(name, [LATE]), tmp_path)
    monkeypatch.setattr(hopper, "decode_m64_kernel", kernel)
    calls, wrong = [], []
    for call, (out, _) in (repeated(*case) for case in MUTATED):
        call.run()
        if not (call.results[0].float() - out.float()).norm() < 4e-3 * out.float().norm():
            wrong.append(call.label)
        calls.append(call)
    found = repeat(calls, sys.maxsize, limit=MUTANT_SECONDS)
    print(f"wrong {wrong}; {found.different} of {found.calls} in {found.seconds:.1f} s")
    assert bool(wrong or found.different) == (name in MUTANTS)
