from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest
import torch
from paged import ARC_A, BACKENDS, INTEL, use_backend
from prefill_cases import Prefill, prefill

from anymla.ops import device as device_facts
from anymla.ops.attention import prefill_attention_backward, prefill_backward_config
from anymla.ops.attention import triton_prefill_backward_launch as launch
from anymla.ops.attention.prefill_backward_config import choose_config, triton_backward_support
from anymla.ops.device import TARGETS, Support
from anymla.ops.registry import BackendUnavailable
from anymla.testing.oracle.gradients import attention_gradients
from anymla.testing.tolerance import assert_identical, relative_l2

INF = torch.inf
# Whole tiles of 16 rows: a BLAS on a CPU sums differently in another row of a product.
TOKENS, ROWS, WIDTH = 10, 64, 20


class Subject(NamedTuple):
    """A backend, the widest dtype that it takes, and its distance from float64 in that dtype."""

    name: str
    dtype: torch.dtype
    tolerance: float


@pytest.fixture(params=[*BACKENDS, "triton", INTEL, ARC_A])
def backend(request, monkeypatch):
    name = use_backend(request.param, monkeypatch)
    if request.param in (INTEL, ARC_A):
        monkeypatch.setattr(prefill_backward_config, "target_of", device_facts.target_of)
        prefill_attention_backward.forget()
    # float32 sums products of 32 channels and of as many rows or heads.
    yield Subject(name, *((torch.float32, 2e-6) if name == "triton" else (torch.float64, 1e-13)))
    if request.param in (INTEL, ARC_A):
        prefill_attention_backward.forget()


def named_by(case: Prefill) -> list[list[int]]:
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


def small(seed, dtype, *, heads=3, tokens=TOKENS, dim=32, **more):
    more = {"listed": True, "entries": WIDTH, "window": 14, "rows": ROWS} | more
    case = prefill(seed, tokens=tokens, heads=heads, dtype=dtype, dim=dim, **more)
    if dtype == torch.float64 and case.sink is not None:
        case.sink = case.sink.double()
    return case


@dataclasses.dataclass
class Call:
    """A call of the gradients, and what the oracle says of it."""

    case: Prefill
    dout: torch.Tensor
    dlse: torch.Tensor | None = None

    def want(self):
        case = self.case
        return attention_gradients(
            self.dout, case.q, case.rows, named_by(case), sink=case.sink, dlse=self.dlse
        )

    def run(self, backend, *, out=None, lse=None, **more):
        case, want = self.case, self.want()
        return prefill_attention_backward(
            self.dout, case.q, case.rows, case.ranges, case.lists,
            want.out.to(case.q.dtype) if out is None else out,
            want.lse.to(torch.promote_types(case.q.dtype, torch.float32)) if lse is None else lse,
            window=case.window, entries=case.entries, sink=case.sink, dlse=self.dlse,
            backend=backend and backend.name, **more,
        )  # fmt: skip


def call(seed, backend=None, dtype=None, *, dlse=True, values=None, **kwargs):
    dtype = dtype or (backend.dtype if backend else torch.float64)
    case = small(seed, dtype, **kwargs)
    wide = torch.promote_types(case.q.dtype, torch.float32)
    return Call(
        case,
        torch.randn_like(case.q)[..., :values],
        torch.randn(case.q.shape[:2], dtype=wide) if dlse else None,
    )


def assert_right(given, got, tolerance):
    want = given.want()
    for name, value in zip(("dq", "drows", "dsink"), got, strict=True):
        assert relative_l2(value, getattr(want, name)) < tolerance, name


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_float64_gradients_are_the_oracles(backend, listed, deterministic):
    given = call(3, backend, listed=listed)
    assert_right(given, given.run(backend, deterministic=deterministic), backend.tolerance)


@pytest.mark.parametrize("heads", [1, 8, 20, 64, 128])
def test_any_number_of_heads(backend, heads):
    given = call(4, backend, heads=heads, tokens=3)
    assert_right(given, given.run(backend), backend.tolerance)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "values"), [(32, 20), (576, 512), (576, 576), (520, 516)])
def test_values_may_be_a_part_of_the_row(backend, listed, deterministic, dim, values):
    given = call(21, backend, listed=listed, dim=dim, values=values, tokens=4)
    try:
        got = given.run(backend, deterministic=deterministic)
    except BackendUnavailable as refused:
        pytest.skip(str(refused))
    assert got[0].shape == given.case.q.shape
    assert got[1].shape == given.case.rows.shape
    assert_right(given, got, backend.tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # 16-bit out in delta, and one rounding of dq: docs/numerics.md
    [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 8e-3)],
)
def test_narrow_gradients_are_rounded_once(backend, dtype, tolerance):
    given = call(5, backend, dtype=dtype)
    got = given.run(backend)
    assert [one.dtype for one in got] == [dtype, torch.float32, torch.float32]
    assert_right(given, got, tolerance)


@pytest.mark.parametrize("value", [-INF, INF, 2.4e38, -2.4e38, None])
def test_sinks_that_are_not_finite(backend, value):
    given = call(6, backend)
    given.case.sink = None if value is None else torch.full_like(given.case.sink, value)
    got = given.run(backend)
    assert all(one.isfinite().all() for one in got)
    assert not got[2].any()
    assert_right(given, (*got[:2], given.want().dsink), backend.tolerance)
    if value in (INF, 2.4e38):
        without = dataclasses.replace(given, dlse=None).run(backend)
        assert not any(one.any() for one in without)


def test_tokens_without_rows_add_nothing(backend):
    given = call(7, backend, tokens=5)
    given.case.ranges[1] = torch.tensor([0, 0, 0, 0])
    given.case.ranges[2] = torch.tensor([-50, 9, 3, 0])
    given.case.ranges[3, 1], given.case.lists[3] = -4, -1
    assert (given.want().lse[1:4] == -INF).all()
    got = given.run(backend)
    assert not got[0][1:4].any()
    assert_right(given, got, backend.tolerance)


def test_nothing_at_all(backend):
    for changes in ({"tokens": 0}, {"rows": 1, "window": 1}, {"entries": 0, "window": 0}):
        given = call(8, backend, **changes)
        given.case.rows = given.case.rows[:0]
        got = given.run(backend)
        assert not any(one.any() for one in got)
        assert [one.shape for one in got] == [given.case.q.shape, (0, 32), (3,)]


def test_a_row_counts_as_often_as_it_is_named(backend):
    given = call(9, backend)
    given.case.ranges[:, 2:] = torch.tensor([30, WIDTH])
    given.case.lists[:] = torch.tensor([5, -1, 5, 7, -9] * 4)
    given.case.ranges[:, :2] = torch.tensor([33, 6])  # rows 35 and 37 stand in the window too
    assert_right(given, given.run(backend), backend.tolerance)


def test_rows_that_nobody_names_have_no_gradient(backend):
    given = call(10, backend, tokens=3, rows=300)
    named = {row for rows in named_by(given.case) for row in rows if 0 <= row < 300}
    others = torch.tensor([row for row in range(300) if row not in named])
    assert len(others) > 100
    want = given.run(backend)
    given.case.rows[others] = torch.nan
    got = given.run(backend)
    assert not got[1][others].any()
    for one, other in zip(got, want, strict=True):
        assert_identical(one, other)


def test_very_negative_scores_of_skipped_columns_do_not_overflow(backend):
    given = call(11, backend, dtype=torch.float32, hostile=False)
    given.case.q = -given.case.q.abs() * 300
    given.case.rows = given.case.rows.abs()
    given.case.sink = torch.full_like(given.case.sink, -INF)
    assert given.want().lse.amax() < -200
    got = given.run(backend)
    assert all(one.isfinite().all() for one in got)


@pytest.mark.parametrize("gradients", ["queries", "rows"])
def test_what_is_not_wanted_is_left_out(backend, gradients):
    given = call(12, backend)
    dq, drows, dsink = given.run(backend)
    some = given.run(backend, gradients=gradients)
    kept = gradients == "queries"
    assert_identical(some[0], dq if kept else dq[:0])
    assert_identical(some[1], drows[:0] if kept else drows)
    assert_identical(some[2], dsink)


def test_delta_may_be_given(backend):
    given = call(13, backend)
    delta = (given.dout * given.want().out).sum(2).to(backend.dtype)
    assert_right(
        given,
        given.run(backend, out=torch.full_like(given.dout, torch.nan), delta=delta),
        backend.tolerance,
    )


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_drows_are_added_to_and_mass_is_written(backend, listed):
    given = call(14, backend, listed=listed)
    begin = torch.randn(given.case.rows.shape, dtype=backend.dtype)
    drows, mass = begin.clone(), torch.full((TOKENS, WIDTH), torch.nan, dtype=backend.dtype)
    got = given.run(backend, drows=drows, mass=mass)
    assert got[1] is drows
    assert_right(given, (got[0], drows - begin, got[2]), backend.tolerance)
    want = given.want().mass
    for token, rows in enumerate(named_by(given.case)):
        window = max(min(int(given.case.ranges[token, 1]), given.case.window), 0)
        columns = rows[window:] + [-1] * (WIDTH - len(rows[window:]))
        expected = [want[token, row] if 0 <= row < ROWS else 0.0 for row in columns]
        torch.testing.assert_close(mass[token], torch.tensor(expected, dtype=backend.dtype))


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_packed_is_alone_bit_for_bit(backend, monkeypatch, listed):
    """Two batches side by side, deterministically."""
    if backend.name == "torch":
        monkeypatch.undo()  # on a device the widths of products depend on the batch
    alone = [call(seed, listed=listed, hostile=False, dtype=torch.float32) for seed in (15, 16)]
    alone[1].case.sink = alone[0].case.sink
    both = call(17, tokens=2 * TOKENS, rows=2 * ROWS, listed=listed, dtype=torch.float32)
    both.case.sink = alone[0].case.sink
    for name in ("q", "rows", "ranges", *(["lists"] if listed else [])):
        setattr(both.case, name, torch.cat([getattr(each.case, name) for each in alone]))
    both.case.ranges[TOKENS:, [0, 2]] += ROWS
    both.dout, both.dlse = (
        torch.cat([getattr(each, name) for each in alone]) for name in ("dout", "dlse")
    )
    out, lse = ([getattr(each.want(), name).float() for each in alone] for name in ("out", "lse"))
    packed = both.run(backend, deterministic=True, out=torch.cat(out), lse=torch.cat(lse))
    for place, each in enumerate(alone):
        dq, drows, _ = each.run(backend, deterministic=True, out=out[place], lse=lse[place])
        assert_identical(packed[0].unflatten(0, (2, TOKENS))[place], dq)
        assert_identical(packed[1].unflatten(0, (2, ROWS))[place], drows)


def test_arguments_are_checked():
    given = call(18)
    with pytest.raises(TypeError, match="lse must be float64"):
        given.run(None, lse=torch.zeros(TOKENS, 3))
    with pytest.raises(ValueError, match="gradients must be all, queries or rows"):
        given.run(None, gradients="none")
    with pytest.raises(ValueError, match="drows must be contiguous"):
        given.run(None, drows=torch.zeros(32, ROWS, dtype=torch.float64).T)
    with pytest.raises(ValueError, match=r"mass must be float64 \[T=10, K=20\]"):
        given.run(None, mass=torch.zeros(TOKENS, WIDTH + 1, dtype=torch.float64))
    case, dout = given.case, torch.zeros(TOKENS, 3, 33, dtype=torch.float64)
    with pytest.raises(ValueError, match="dout must be of at most D=32 channels, got 33"):
        prefill_attention_backward(
            dout, case.q, case.rows, case.ranges, case.lists, dout, given.dlse, window=14
        )
    given.dout = given.dout.float()
    with pytest.raises(ValueError, match="dout must be of q's dtype"):
        given.run(None)


def test_calls_that_triton_leaves_to_torch(monkeypatch):
    def answer(**changes):
        case = small(19, torch.bfloat16, **changes)
        return triton_backward_support(case.q, case.q, case.rows)

    monkeypatch.setattr(prefill_backward_config, "float32_support", lambda *_: Support(True))
    monkeypatch.setattr(prefill_backward_config, "target_of", lambda _: TARGETS["sm_90"])
    assert answer() == answer(dim=576) == Support(True)
    assert "at most 576 channels" in answer(dim=577).reason
    case = small(19, torch.float32)
    assert triton_backward_support(case.q, case.q, case.rows) == Support(True, automatic=False)
    monkeypatch.setattr(prefill_backward_config, "target_of", lambda _: TARGETS["gfx942"])
    assert answer(dim=576) == Support(True, automatic=False)
    monkeypatch.setattr(prefill_backward_config, "target_of", lambda _: TARGETS["sm_89"])
    assert answer(dim=576) == Support(True)
    case = small(19, torch.float32, dim=576)
    refused = triton_backward_support(case.q, case.q, case.rows)
    assert "at most 512 channels of float32" in refused.reason
    assert "of one dtype" in triton_backward_support(case.q, case.q, case.rows.bfloat16()).reason
    monkeypatch.setattr(prefill_backward_config, "target_of", lambda _: TARGETS["xpu_bmg"])
    assert answer() == Support(True)
    assert "at most 512 values where warps divide" in answer(dim=576).reason
    case = small(19, torch.bfloat16, dim=576)
    assert triton_backward_support(case.q[..., :512], case.q, case.rows) == Support(True)
    monkeypatch.setattr(prefill_backward_config, "target_of", lambda _: TARGETS["xpu_dg2"])
    refused = triton_backward_support(case.q[..., :512], case.q, case.rows)
    assert "at most 512 channels on Arc A" in refused.reason


@pytest.mark.parametrize(("parts", "stages"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("more", [{}, {"deterministic": True}, {"gradients": "queries"}])
def test_channels_in_parts_and_rows_in_stages(monkeypatch, parts, stages, more):
    chosen = prefill_backward_config.choose_config(3, torch.float32, TARGETS["sm_90"])
    tile = dataclasses.replace(chosen, parts=parts, num_stages=stages)
    monkeypatch.setattr(launch, "choose_config", lambda *_: tile)
    subject = Subject(use_backend("triton", monkeypatch), torch.float32, 2e-6)
    monkeypatch.setattr(launch, "_LEAST_CHANNELS", 16)
    given = call(20, subject, dim=64)
    got = given.run(subject, **more)
    if not more.get("gradients"):
        assert_right(given, got, subject.tolerance)
    whole = given.run(subject)
    torch.testing.assert_close(got[0], whole[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_hold_the_heads(target, dtype):
    for heads, channels in itertools.product((1, 16, 20, 64, 128), (512, 576)):
        config = choose_config(heads, dtype, target, channels)
        assert config.heads >= min(heads, 8 if target.intel else 16)
        assert config.heads <= max(16, 2 * heads)
