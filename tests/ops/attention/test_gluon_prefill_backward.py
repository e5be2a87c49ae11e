"""The text of the Hopper gradients of prefill attention, run on a CPU against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from prefill_cases import prefill

from anymla.ops._triton_launch import PreparedLaunch
from anymla.ops.attention import gluon_sm90_prefill_backward_launch as launch
from anymla.ops.attention import prefill_attention_backward, prefill_backward_config
from anymla.ops.attention.gluon_sm90_prefill_backward import prefill_backward_kernel
from anymla.ops.attention.gluon_sm90_window_backward import window_backward_kernel
from anymla.ops.attention.prefill_backward_config import gluon_backward_support
from anymla.ops.device import Support
from anymla.testing.oracle.gradients import attention_gradients
from anymla.testing.tolerance import assert_identical, relative_l2
from crossrun.hopper import run

INF = torch.inf
# out of 16 bits in delta, p and ds of 16 bits, and one rounding of dq: docs/numerics.md
TOLERANCE = 8e-3
CTAS = 2  # fewer than work tiles


class Launch(PreparedLaunch):
    """Prepared launch whose Gluon kernels run on the CPU, and Triton's in the interpreter."""

    seed = 0

    def _launch(self, tensors):
        if self._kernel not in (prefill_backward_kernel, window_backward_kernel):
            return super()._launch(tensors)
        grid = self._grid
        if self._kernel is prefill_backward_kernel:
            grid = min(grid[0], CTAS)
        return run(self._kernel, grid, *tensors, *self._numbers, seed=self.seed, **self._options)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(launch, "PreparedLaunch", Launch)
    prepared = [each for each in vars(launch).values() if hasattr(each, "cache_clear")]
    for each in prepared:
        each.cache_clear()
    yield
    for each in prepared:
        each.cache_clear()


def named_by(case):
    """Rows that each token names, window first, read from the contract's words."""
    found = []
    for token, (a, n, b, m) in enumerate(case.ranges.tolist()):
        rows = [a + i for i in range(min(n, case.window))]
        if case.lists is None:
            rows += [b + i for i in range(min(m, case.entries))]
        else:
            columns = case.lists[token].tolist()[: max(m, 0)]
            rows += [b + one if one >= 0 else -1 for one in columns]
        found.append(rows)
    return found


@dataclasses.dataclass
class Call:
    """A call of the gradients, and what the oracle says of it."""

    case: object
    dout: torch.Tensor
    dlse: torch.Tensor | None = None

    def want(self):
        case = self.case
        return attention_gradients(
            self.dout, case.q, case.rows, named_by(case), sink=case.sink, dlse=self.dlse
        )

    def run(self, want=None, **more):
        case, want = self.case, want or self.want()
        return launch.prefill_attention_backward(
            self.dout, case.q, case.rows, case.ranges, case.lists, want.out.to(case.q.dtype),
            want.lse.float(), window=case.window, entries=case.entries, sink=case.sink,
            dlse=self.dlse, **more,
        )  # fmt: skip

    def check(self, **more):
        want, got = self.want(), self.run(**more)
        for name, value in zip(("dq", "drows", "dsink"), got, strict=True):
            assert relative_l2(value, getattr(want, name)) < TOLERANCE, name
        return got


def call(seed, *, tokens=2, heads=64, dtype=torch.bfloat16, dlse=False, **changes):
    sizes = {"listed": True, "entries": 80, "window": 70, "rows": 200} | changes
    case = prefill(seed, tokens=tokens, heads=heads, dtype=dtype, **sizes)
    return Call(case, torch.randn_like(case.q), torch.randn(tokens, heads) if dlse else None)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "tokens"), [(64, 3), (128, 2)])
def test_ragged_calls(listed, deterministic, heads, tokens):
    given = call(heads, heads=heads, tokens=tokens, listed=listed, dlse=True)
    given.check(deterministic=deterministic)


@pytest.mark.parametrize("seed", range(1, 4))
def test_any_interleaving(monkeypatch, seed):
    monkeypatch.setattr(Launch, "seed", seed)
    call(seed, tokens=3).check()


def test_packed_is_alone_bit_for_bit():
    """Sequences that begin in the middle of a tile, and at an odd token."""
    options = {"listed": False, "entries": 20, "window": 30, "rows": 72, "sink": False}
    alone = [call(seed, tokens=3, hostile=False, **options) for seed in (15, 16)]
    both = call(17, tokens=6, **options | {"rows": 144})
    for name in ("q", "rows", "ranges"):
        setattr(both.case, name, torch.cat([getattr(each.case, name) for each in alone]))
    both.case.ranges[3:, [0, 2]] += 72
    both.dout = torch.cat([each.dout for each in alone])
    _, rows, _ = both.run(deterministic=True)
    for place, each in enumerate(alone):
        assert_identical(rows.unflatten(0, (2, 72))[place], each.run(deterministic=True)[1])


@pytest.mark.parametrize("value", [-INF, INF, 2.4e38, None])
def test_sinks_that_are_not_finite(value):
    given = call(6)
    given.case.sink = None if value is None else torch.full_like(given.case.sink, value)
    got = given.run()
    assert all(one.isfinite().all() for one in got)
    assert not got[2].any()
    want = given.want()
    assert max(relative_l2(got[0], want.dq), relative_l2(got[1], want.drows)) < TOLERANCE


def test_float16():
    call(7, dtype=torch.float16).check()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_counts_as_often_as_it_is_named(deterministic):
    given = call(8)
    given.case.ranges[:] = torch.tensor([33, 6, 30, 80])  # rows 35 and 37 stand in both
    given.case.lists[:] = torch.tensor([5, -1, 5, 7, -9] * 16)
    given.check(deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_without_rows_add_nothing(deterministic):
    given = call(9, tokens=4)
    given.case.ranges[0] = torch.tensor([0, 0, 0, 0])
    given.case.ranges[1] = torch.tensor([-50, 9, 3, 0])
    given.case.ranges[2], given.case.lists[2] = torch.tensor([8, -4, 0, 80]), -1
    want = given.run(deterministic=deterministic)
    given.dout[0] = torch.nan
    got = given.run(deterministic=deterministic)
    assert not got[0][:3].any()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_that_nobody_names_are_not_read():
    given = call(10, rows=300)
    named = {row for rows in named_by(given.case) for row in rows}
    others = torch.tensor([row for row in range(300) if row not in named])
    assert len(others) > 100
    given.case.rows[others] = torch.nan
    got = given.run()
    assert not got[1][others].any()
    assert got[0].isfinite().all()


@pytest.mark.parametrize("kind", ["queries", "rows"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_not_wanted_is_left_out(kind, deterministic):
    given = call(11)
    dq, drows, dsink = given.run(deterministic=deterministic)
    some = given.run(gradients=kind, deterministic=deterministic)
    assert_identical(some[0], dq if kind == "queries" else dq[:0])
    torch.testing.assert_close(some[1], drows[:0] if kind == "queries" else drows)
    assert_identical(some[2], dsink)


def test_drows_are_added_to_and_delta_may_be_given():
    given = call(12)
    want = given.want()
    begin = torch.randn(given.case.rows.shape)
    drows = begin.clone()
    got = given.run(drows=drows, delta=(given.dout * want.out).sum(2).float())
    assert got[1] is drows
    assert relative_l2(drows - begin, want.drows) < TOLERANCE
    assert relative_l2(got[0], want.dq) < TOLERANCE


def test_nothing_at_all():
    for changes in ({"tokens": 0}, {"rows": 1, "window": 1}, {"entries": 0, "window": 0}):
        given = call(13, **changes)
        given.case.rows = given.case.rows[:0]
        got = given.run()
        assert not any(one.any() for one in got)
        assert [one.shape for one in got] == [given.case.q.shape, (0, 512), (64,)]


def test_calls_that_are_taken(monkeypatch):
    monkeypatch.setattr(prefill_backward_config, "runs_on", lambda device: Support(True))

    def answer(*, dtype=torch.bfloat16, rows=torch.bfloat16, heads=64, dim=512, **more):
        q = torch.empty(2, heads, dim, dtype=dtype)
        return gluon_backward_support(q, q, torch.empty(8, dim, dtype=rows), **more)

    assert answer()
    assert answer(heads=128)
    assert "a multiple of 64 heads" in answer(heads=20).reason
    assert "512 channels" in answer(dim=576).reason
    assert "bfloat16" in answer(rows=torch.float16).reason
    assert "mass" in answer(mass=torch.empty(2, 4)).reason


def test_it_is_chosen_where_it_runs(monkeypatch):
    monkeypatch.setattr(prefill_backward_config, "runs_on", lambda device: Support(True))
    given = call(14)
    case = given.case
    arguments = (given.dout, case.q, case.rows, case.ranges, case.lists, given.dout)
    lse = torch.zeros(case.q.shape[:2])
    chosen, _ = prefill_attention_backward.explain(
        *arguments, lse, window=case.window, entries=case.entries
    )
    assert chosen == "gluon_sm90"
