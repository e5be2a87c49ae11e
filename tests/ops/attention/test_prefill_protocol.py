"""The Hopper kernel of attention during prefill, its own source interleaved at random on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import pathlib
import re

import pytest
import torch
from prefill_cases import Prefill, prefill
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from anymla.formats.e4m3 import decode_e4m3
from anymla.ops.attention import gluon_sm90_prefill as prefill_module
from anymla.ops.attention import gluon_sm90_prefill_kv_producer as kv_producer
from anymla.ops.attention import sparse_attention_rows
from anymla.ops.attention.composed import named_rows
from anymla.ops.attention.gluon_sm90_prefill import prefill_kernel
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.testing.tolerance import relative_l2
from crossrun.hopper import Deadlock, Descriptor, Hazard
from crossrun.hopper import run as run_kernel

_LOG2E = 1.4426950408889634


def run(
    case: Prefill,
    *,
    grid: int,
    seed: int,
    kernel=prefill_kernel,
    changed: dict | None = None,
    positions: Tensor | None = None,
    table: Tensor | None = None,
    lazy: bool = False,
    peaks: Tensor | None = None,
    empty: float = -torch.inf,
):
    """Output and lse; with positions the codes, two at a time, and scales."""
    tokens, heads, dim = case.q.shape
    blocks = -(-heads // 64)
    lse = torch.full((tokens, heads), torch.nan)
    if positions is None or table is None:
        out, scales = torch.full_like(case.q, torch.nan), lse
        rope = (lse, lse, 0)
    else:
        out = torch.full((tokens, heads, dim // 2), -1, dtype=torch.int16)
        scales = torch.full((tokens, heads, dim // 128), torch.nan)
        rope = (positions, table.flatten(), len(table))
    listed = case.ranges if case.lists is None else case.lists
    sink = torch.zeros(heads) if case.sink is None else case.sink
    run_kernel(
        kernel,
        grid,
        case.q.flatten(),
        Descriptor(case.q.view(-1, dim), (64, dim // 2)),
        Descriptor(case.rows, (64, dim // 2)),
        Descriptor(out.view(tokens * heads, -1), (64, dim // 2)),
        *(x.flatten() for x in (case.rows, case.ranges, listed, sink)),
        out.view(-1),
        scales.view(-1),
        rope[0],
        rope[1],
        rope[2],
        lse.view(-1),
        (lse if peaks is None else peaks).view(-1),
        dim**-0.5 * _LOG2E,
        empty,
        listed.stride(0),
        case.window,
        case.entries if case.lists is None else listed.shape[1],
        len(case.rows),
        tokens * blocks,
        heads,
        seed=seed,
        replacements=changed,
        HEAD_BLOCKS=blocks,
        LISTED=case.lists is not None,
        LISTS_ONLY=case.ranges.dim() == 1,
        SINK=case.sink is not None,
        WHOLE=heads % 64 == 0,
        QUANTIZED=table is not None,
        ROPE_DIM=0 if table is None else table.shape[1],
        TMA_STORE=table is None and heads % 64 == 0,
        LAZY_RESCALE=lazy,
        MAX_LOGITS=peaks is not None,
        CONSUMER0_REGISTERS=0,
        CONSUMER1_REGISTERS=0,
    )
    return out, lse if table is None else scales


def check(case: Prefill, out, lse):
    want, want_lse = case.expected()
    # One rounding of the weights and one of the output, 2^-12 each in float16.
    assert relative_l2(out, want) < 5e-4
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("heads", [64, 20, 100])
def test_numbers(listed, heads):
    case = prefill(
        heads + listed, tokens=9, heads=heads, dtype=torch.float16, listed=listed, entries=300
    )
    for seed in range(3):
        check(case, *run(case, grid=2, seed=seed))


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_maxima_left_behind(listed):
    case = prefill(4, tokens=7, heads=64, dtype=torch.float16, listed=listed, entries=400)
    case.q *= torch.rand(7, 64, 1) * 8
    check(case, *run(case, grid=1, seed=1, lazy=True))


def test_lists_alone_and_largest_scores():
    case = prefill(4, tokens=7, heads=64, dtype=torch.float16, listed=True, entries=300, window=0)
    case.ranges[:, 2] = 0
    case.ranges[2, 3] = 0
    peaks = torch.full((7, 64), torch.nan)
    alone = dataclasses.replace(case, ranges=case.ranges[:, 3].contiguous())
    out, lse = run(alone, grid=1, seed=1, lazy=True, peaks=peaks, empty=torch.inf)
    assert bool((lse[2] == torch.inf).all())
    check(case, out, lse.masked_fill(lse == torch.inf, -torch.inf))
    want = torch.empty_like(peaks)
    indices, lengths = named_rows(case.ranges, case.lists, 0, 0)
    sparse_attention_rows(
        case.q.float(), case.rows.float(), indices, lengths, max_logits=want, backend="reference"
    )
    torch.testing.assert_close(peaks, want, atol=1e-4, rtol=1e-4)


def test_without_a_sink():
    case = prefill(
        1, tokens=5, heads=64, dtype=torch.float16, listed=False, entries=100, sink=False
    )
    check(case, *run(case, grid=1, seed=0))


@pytest.mark.parametrize("heads", [64, 24])
def test_quantised_output(heads):
    case = prefill(2, tokens=6, heads=heads, dtype=torch.float16, listed=True, entries=200)
    positions = torch.randint(0, 50, (6,))
    angles = torch.randn(50, 32)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    pairs, scales = run(case, grid=2, seed=1, positions=positions, table=table)
    codes = pairs.view(torch.uint8).view(6, heads, 4, 128)
    out = case.expected()[0]
    want_codes, want_scales = inverse_rope_fp8_quant(
        out.float(), positions, table, n_groups=1, backend="reference"
    )
    # Rounding of the weights may move a value over the edge of a code, or the largest of a run over
    # a power of two.
    same = scales.flatten(1) == want_scales.flatten(1)
    assert same.float().mean() > 0.99
    got = decode_e4m3(codes) * scales[..., None]
    want = decode_e4m3(want_codes.view(torch.uint8)).view(got.shape)
    want = want * want_scales.view(scales.shape)[..., None]
    assert (got - want).norm() < 2e-2 * want.norm()
    exact = decode_e4m3(codes) == decode_e4m3(want_codes.view(torch.uint8)).view(codes.shape)
    assert exact.float().mean() > 0.97


def test_nan_reaches_those_who_see_it_and_nobody_else():
    case = prefill(
        3, tokens=5, heads=64, dtype=torch.float16, listed=True, entries=90, hostile=False
    )
    want, _ = run(case, grid=1, seed=0)
    row = int(case.ranges[1, 0])
    case.ranges[1, 1] = 7
    seen = [
        row in range(start, start + min(count, case.window))
        or row - base in case.lists[token, : max(more, 0)].tolist()
        for token, (start, count, base, more) in enumerate(case.ranges.tolist())
    ]
    assert 0 < sum(seen) < 5
    case.rows[row] = torch.nan
    out, lse = run(case, grid=1, seed=0)
    for token, sees in enumerate(seen):
        assert bool(out[token].isnan().all()) is sees
        assert bool(lse[token].isnan().all()) is sees
        if not sees:
            assert torch.equal(out[token], want[token])


def of_block_counts(counts: list[int], *, listed: bool = False) -> Prefill:
    """Tokens whose block counts are these, two blocks of them in the window where there are two."""
    case = prefill(
        sum(counts),
        tokens=len(counts),
        heads=64,
        dtype=torch.float16,
        listed=listed,
        entries=32 * 64,
        rows=33 * 64,
        hostile=False,
    )
    for token, count in enumerate(counts):
        first = min(count, token % 3)
        ragged = torch.randint(0, 64, (2,)).tolist()
        case.ranges[token, 1] = max(first * 64 - ragged[0] * (token % 2), 0)
        case.ranges[token, 3] = max((count - first) * 64 - ragged[1] * (token % 5 == 0), 0)
        case.ranges[token, 2] = token % 64
    return case


@pytest.mark.parametrize("seed", range(2))
def test_every_block_count_after_any_other(seed):
    """Two buffers and phases of two: what has gone before matters modulo four."""
    counts = torch.randperm(35, generator=torch.Generator().manual_seed(seed)).tolist()
    case = of_block_counts(counts)
    check(case, *run(case, grid=1, seed=seed))


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_every_pair_of_small_block_counts(listed):
    pairs = list(itertools.product(range(6), repeat=2))
    case = of_block_counts([count for pair in pairs for count in pair], listed=listed)
    check(case, *run(case, grid=1, seed=7))


def altered(tmp_path, module, *changes: tuple[str, str]) -> dict:
    """A module's device functions with its source changed, by those that they stand for."""
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) >= 1
        source = source.replace(old, new)
    path = tmp_path / "altered_kernel.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("altered_kernel", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return {
        vars(module)[name]: value
        for name, value in vars(changed).items()
        if hasattr(value, "fn") and value is not vars(module)[name]
    }


STALE_COUNT = (
    "        blocks = get(shared.blocks.index(number % 2))\n        for i in range(blocks):",
    "        if number == 0:\n            blocks = get(shared.blocks.index(0))\n"
    "        for i in range(blocks):",
)
WAITS = [
    (
        kv_producer,
        "                wait(shared.mbarriers, EMPTY_L + b, phase)\n                put(",
    ),
    (
        kv_producer,
        "                wait(shared.mbarriers, EMPTY_R + b, phase)\n"
        "                mbarrier.expect",
    ),
    (kv_producer, "    wait(shared.mbarriers, Q_EMPTY, phase)\n"),
    (kv_producer, "    wait(shared.mbarriers, Q_EMPTY + 1, phase)\n"),
    (prefill_module, "        mbarrier.wait(shared.q_full.index(0), number & 1)\n"),
    (prefill_module, "        mbarrier.wait(shared.q_full.index(1), number & 1)\n"),
    (prefill_module, "            wait(shared.mbarriers, P_FULL + b, phase)\n"),
    (
        prefill_module,
        "                tma.store_wait(0)\n                arrive(shared.mbarriers, EMPTY_L",
    ),
    (prefill_module, "            tma.store_wait(0)\n            arrive(shared.mbarriers, EMPTY_R"),
]


def test_a_stale_block_count_is_a_deadlock(tmp_path):
    """What Triton 3.6 makes of a count that is carried from task to task for a bound alone."""
    changed = altered(tmp_path, prefill_module, STALE_COUNT)
    same = of_block_counts([3, 3, 3])
    check(same, *run(same, grid=1, seed=0, changed=changed))
    with pytest.raises((Deadlock, Hazard)):
        run(of_block_counts([2, 3] * 4), grid=1, seed=0, changed=changed)


@pytest.mark.parametrize(
    ("module", "wait"),
    WAITS,
    ids=["left", "right", "q left", "q right", "q there", "all there", "p", "o left", "o right"],
)
def test_no_wait_can_be_left_out(tmp_path, module, wait):
    bare = re.sub(r"(mbarrier\.wait|tma\.store_wait|\bwait)\(.*\)", "pass", wait)
    changed = altered(tmp_path, module, (wait, bare))
    with pytest.raises((Deadlock, Hazard, AssertionError)):
        some_runs(changed)


def some_runs(changed):
    for seed in range(40):
        case = of_block_counts([2, 4, 3, 5, 2, 2, 6])
        check(case, *run(case, grid=1, seed=seed, changed=changed))
