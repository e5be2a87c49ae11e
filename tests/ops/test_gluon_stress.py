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

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops.sparse_attention.schedule import Schedule, Stream, blocks_of, tile_heads
from anymla.testing.stress import Repeated, repeat

BLOCKS = int(float(os.environ.get("ANYMLA_STRESS_BLOCKS", "1e6")))
SECONDS = float(os.environ.get("ANYMLA_STRESS_SECONDS", "120"))
PROGRAMS = 132
# Heads, tokens, columns of both lists, how the work is shared out.
CASES = [
    (64, 200, 128, 512, "whole"),
    (64, 140, 128, 512, "mixed"),
    (64, 30, 128, 1024, "aligned"),
    (128, 74, 128, 1024, "stream"),
    (128, 74, 128, 2048, "planned"),
    (16, 200, 128, 512, "whole"),
    (16, 30, 128, 1024, "aligned"),
    (32, 150, 128, 512, "mixed"),
    (8, 90, 128, 2048, "stream"),
    (128, 66, 2048, None, "whole"),
    (64, 74, 2048, None, "stream"),
    (64, 20, 2048, None, "aligned"),
    (128, 90, 128, 1024, "ordered"),
    (16, 200, 128, 512, "ordered"),
    (64, 10, 128, 512, "single"),
    (16, 10, 128, 512, "single"),
    (64, 20, 128, 1024, "widths"),
    (32, 150, 128, 512, "half mixed"),
    (32, 30, 128, 512, "half widths"),
    (32, 10, 128, 512, "half single"),
]


def shared_out(heads, tokens, widths, way):
    tile = 64 if way.startswith("half ") else tile_heads(heads)
    way = way.removeprefix("half ")
    tiles = -(-heads // tile)
    if way in ("whole", "ordered"):
        stream = Stream.ORDERED if way == "ordered" else Stream.NO
        return Schedule(tile, tiles, min(tokens * tiles, PROGRAMS), stream=stream)
    if way in ("aligned", "widths"):
        stream = Stream.WIDTHS if way == "widths" else Stream.NO
        return Schedule(tile, tiles, min(tokens * tiles * 4, PROGRAMS), 4, stream)
    if way == "single":
        splits = blocks_of(widths)
        return Schedule(tile, tiles, min(tokens * tiles * splits, PROGRAMS), splits, Stream.SINGLE)
    if way == "mixed":
        return Schedule(tile, tiles, min(PROGRAMS, tokens * tiles - 1), 3, Stream.MIXED)
    stream = Stream.YES if way == "stream" else Stream.PLANNED
    return Schedule(tile, tiles, PROGRAMS, stream=stream)


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
    from anymla.ops.sparse_attention import gluon_sm90_attention as launcher
    from anymla.ops.sparse_attention import sparse_attention
    from anymla.ops.sparse_attention.gluon_sm90_plan import make_plan

    kind = V32_FP8 if extra is None else MAIN_FP8
    scopes = []
    for columns, page in ((width, 64), (extra, 2)):
        if columns is None:
            continue
        indices = torch.randint(-50, 1 << 14, (tokens, columns), dtype=torch.int32, device="cuda")
        lengths = torch.randint(0, columns + 1, (tokens,), dtype=torch.int32, device="cuda")
        lengths[::9] = 0
        scopes.append((cache(kind, 1 << 14, page), indices, lengths))
    q = torch.randn(tokens, heads, get_layout(kind).channels, device="cuda").bfloat16()
    sink = torch.randn(heads, device="cuda")
    widths = tuple(each[1].shape[1] for each in scopes)
    schedule = shared_out(heads, tokens, widths, way)
    plan = None
    if way == "planned":
        plan = make_plan(schedule, tokens, *(each[2] for each in scopes), widths)
    taken = [launcher.Scope.of(*each) for each in scopes]
    out = torch.empty(tokens, heads, 512, dtype=q.dtype, device="cuda")
    lse = torch.empty(tokens, heads, device="cuda")

    def run():
        launcher.attend(
            q, taken, sink, q.shape[2] ** -0.5, float("-inf"), schedule, out, lse, plan=plan
        )

    more = {"layout": kind, "value_dim": 512, "sink": sink, "backend": "triton"}
    if extra is not None:
        names = ("extra_cache", "extra_indices", "extra_lengths")
        more |= dict(zip(names, scopes[1], strict=True))
    expected = sparse_attention(q, *scopes[0], **more)
    blocks = sum((each[2] + 63) // 64 for each in scopes).clamp(min=1).sum() * schedule.tiles
    label = f"{kind}, {heads} heads, {tokens} tokens, {way}"
    return Repeated(label, run, (out, lse), int(blocks)), expected


@pytest.fixture
def hopper(monkeypatch):
    from anymla.ops.sparse_attention import gluon_sm90_attention as launcher

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    monkeypatch.setattr(launcher, "scratch", poisoned)
    return launcher


@pytest.mark.gpu
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


READS_EARLY = "            mbarrier.wait(p_ready.index(s), (handed // P) & 1)\n"
# Names of kernels that are wrong, and what makes them so in gluon_sm90_parts. None waits longer, or
# arrives less often, than the one that is right.
MUTANTS = {
    "right reads what main hands over before it has waited": [
        (READS_EARLY + "            fence", "            early = decay_s.index(s).load(R)\n"
         + READS_EARLY + "            fence"),
        ("gl.expand_dims(decay_s.index(s).load(R), 1)", "gl.expand_dims(early, 1)"),
    ],
}  # fmt: skip


def changed(module, replacements, folder):
    """A module of the family with its text changed."""
    real = importlib.import_module(f"anymla.ops.sparse_attention.gluon_sm90_{module}")
    text = Path(real.__file__).read_text()
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"changed_{module}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


def mutant(name, folder):
    """The kernel of tiles with a warpgroup's text changed."""
    changed("parts", MUTANTS[name], folder)
    imported = "from anymla.ops.sparse_attention.gluon_sm90_parts import"
    tiles = changed("tiles", [(imported, "from changed_parts import")], folder)
    return tiles.tiles_kernel


@pytest.mark.parametrize("name", MUTANTS)
def test_the_texts_are_there_to_be_changed(name, tmp_path):
    pytest.importorskip("triton")
    assert mutant(name, tmp_path).fn.__module__ == "changed_tiles"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wait_that_is_missing_is_noticed(name, hopper, monkeypatch, tmp_path):
    """What makes the test above worth something."""
    forms = importlib.import_module("anymla.ops.sparse_attention.gluon_sm90_forms")
    monkeypatch.setattr(forms, "tiles_kernel", mutant(name, tmp_path))
    call, _ = repeated(*CASES[0])
    found = repeat([call], 10**7, limit=10)
    print(f"{found.different} of {found.calls}")
    assert found.different
