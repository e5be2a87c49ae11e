"""Cases T1 .. T6: gradients of attention over ranges and lists of rows, with the sink."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.oracle.gradients import AttentionGradients, attention_gradients
from anymla.testing.tolerance import assert_identical, relative_l2, ulps

_DIM, _WINDOW, _WIDTH, _ROWS, _TILED_ROWS = 512, 6, 10, 40, 64
# P, dS, the output in delta and the result are rounded to bfloat16, each by half a unit.
_TOLERANCE = ulps(torch.bfloat16, 2)


@dataclasses.dataclass
class Given:
    """One call: what tokens name, and the gradients that come from behind."""

    q: Tensor
    rows: Tensor
    ranges: Tensor
    lists: Tensor | None
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor | None = None

    @property
    def named(self) -> list[list[int]]:
        """Rows that each token names, in order; -1 for none."""
        found = []
        for token, (start, count, base, more) in enumerate(self.ranges.tolist()):
            rows = [start + one for one in range(min(count, _WINDOW))]
            if self.lists is None:
                rows += [base + one for one in range(min(more, _WIDTH))]
            else:
                listed = self.lists[token, : max(more, 0)].tolist()
                rows += [base + one if one >= 0 else -1 for one in listed]
            found.append(rows)
        return found

    def part(self, tokens: slice) -> Given:
        """Return the call of some of the tokens."""
        names = ("q", "ranges", "lists", "dout", "dlse")
        found = {name: getattr(self, name) for name in names}
        cut: dict[str, Any] = {
            name: one if one is None else one[tokens] for name, one in found.items()
        }
        return dataclasses.replace(self, **cut)

    def want(self) -> AttentionGradients:
        """Return the oracle's gradients."""
        return attention_gradients(
            self.dout, self.q, self.rows, self.named, sink=self.sink, dlse=self.dlse
        )

    def run(self, ops: Ops, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the subject, from the oracle's output and lse."""
        want = self.want()
        result: tuple[Tensor, Tensor, Tensor] = ops.prefill_attention_backward(
            self.dout, self.q, self.rows, self.ranges, self.lists, want.out.to(self.q.dtype),
            want.lse.float(), window=_WINDOW, entries=_WIDTH, sink=self.sink, dlse=self.dlse,
            **more,
        )  # fmt: skip
        return result

    def check(self, ops: Ops, name: str, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compare all gradients with the oracle's, and return them."""
        want, got = self.want(), self.run(ops, **more)
        for what, value in zip(("dq", "drows", "dsink"), got, strict=True):
            off = relative_l2(value, getattr(want, what))
            expect(off < _TOLERANCE, f"{name}: {what} is off by {off:.1e} of its length")
        return got


def _given(tokens: int = 6, heads: int = 4, *, listed: bool = True, dlse: bool = False) -> Given:
    """Tokens that name a full window and as many entries, some of them twice."""
    start = torch.randint(0, _ROWS - _WINDOW, (tokens,))
    base = torch.randint(0, _ROWS // 2, (tokens,))
    full = torch.full_like(start, _WIDTH)
    return Given(
        torch.randn(tokens, heads, _DIM).bfloat16(),
        torch.randn(_ROWS, _DIM).bfloat16(),
        torch.stack((start, full, base, full), 1).int(),
        torch.randint(0, _ROWS // 2, (tokens, _WIDTH)).int() if listed else None,
        torch.randn(heads),
        torch.randn(tokens, heads, _DIM).bfloat16(),
        torch.randn(tokens, heads) if dlse else None,
    )


@case(
    "T1",
    "gradients: the sink is in delta and in the probabilities, lse is without it",
    "prefill_attention_backward",
    quick=True,
)
def sink_in_gradients(ops: Ops) -> None:
    given = _given()
    for name, sink in (
        ("ordinary", torch.randn(4)),
        ("large", torch.full((4,), 3.0)),
        ("no", None),
    ):
        given.sink = sink
        given.check(ops, f"{name} sink")


@case(
    "T2",
    "gradients: a row counts as often as it is named; others get exactly 0, whatever they hold",
    "prefill_attention_backward",
)
def multiplicity(ops: Ops) -> None:
    given = _given()
    assert given.lists is not None
    given.lists[1] = 3
    given.lists[2, ::3] = -1
    given.lists[3] = torch.tensor([-(2**31), 2**31 - 1, _ROWS, -2, 5] * 2)
    given.ranges[4, 0] = -3
    given.ranges[5, 0] = _ROWS - 2
    named = {row for rows in given.named for row in rows if 0 <= row < _ROWS}
    others = [row for row in range(_ROWS) if row not in named]
    expect(others, "some rows are named by nobody")
    given.rows[others] = torch.nan
    _, drows, _ = given.check(ops, "repeated and invalid rows")
    expect(not drows[others].any(), "rows that nobody names must have gradient 0")


@case(
    "T3",
    "gradients: tokens without rows and sinks that saturate give 0, never NaN",
    "prefill_attention_backward",
)
def nothing_to_attend(ops: Ops) -> None:
    given = _given()
    assert given.lists is not None
    given.ranges[1] = 0
    given.ranges[2, 1], given.lists[2] = 0, -1
    dq, _, _ = given.check(ops, "tokens without rows")
    expect(not dq[1:3].any(), "the queries of tokens without rows must have gradient 0")
    for value in (torch.inf, -torch.inf, 2.4e38, -2.4e38):
        given.sink = torch.full((4,), value)
        _, _, dsink = given.check(ops, f"sinks of {value}")
        expect(not dsink.any(), f"a sink of {value} must have gradient 0")


@case(
    "T4",
    "gradients: that of lse reaches queries and rows, not the sink",
    "prefill_attention_backward",
)
def gradient_of_lse(ops: Ops) -> None:
    given = _given(dlse=True)
    given.check(ops, "both gradients")
    given.dout = torch.zeros_like(given.dout)
    _, _, dsink = given.check(ops, "that of lse alone")
    expect(not dsink.any(), "lse does not depend on the sink")


@case(
    "T5",
    "gradients: deterministic ones have the same bits twice, and in a batch as alone",
    "prefill_attention_backward",
)
def same_bits(ops: Ops) -> None:
    given = _given()
    whole = given.run(ops, deterministic=True)
    for before, again in zip(whole, given.run(ops, deterministic=True), strict=True):
        assert_identical(before, again, name="a second run")
    # Rows in whole tiles: a BLAS, with which interpreted kernels multiply, sums by their places.
    other = dataclasses.replace(_given(), sink=given.sink)
    one_lists, other_lists = given.lists, other.lists
    assert one_lists is not None
    assert other_lists is not None
    first = dataclasses.replace(given, rows=_filled(given.rows))
    second = dataclasses.replace(other, rows=_filled(other.rows))
    apart = len(first.rows)
    together = Given(
        torch.cat((first.q, second.q)),
        torch.cat((first.rows, second.rows)),
        torch.cat((first.ranges, second.ranges + torch.tensor([apart, 0, apart, 0]).int())),
        torch.cat((one_lists, other_lists)),
        given.sink,
        torch.cat((first.dout, second.dout)),
    )
    dq, drows, _ = together.run(ops, deterministic=True)
    for number, one in enumerate([first, second]):
        alone = one.run(ops, deterministic=True)
        tokens, rows = len(one.q), len(one.rows)
        assert_identical(alone[0], dq[number * tokens :][:tokens], name="queries in a batch")
        assert_identical(alone[1], drows[number * rows :][:rows], name="rows in a batch")


def _filled(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(_TILED_ROWS - len(rows), rows.shape[1])))


@case(
    "T6",
    "gradients over ranges; the indexer's teacher has window and sink in its denominator",
    "prefill_attention_backward",
)
def ranges_and_teacher(ops: Ops) -> None:
    for listed in (False, True):
        given = _given(listed=listed)
        given.ranges[0, 3], given.ranges[1, 1] = 3, 1
        mass = torch.full((6, _WIDTH), torch.nan)
        given.check(ops, "lists" if listed else "ranges", mass=mass)
        want = given.want().mass
        for token, rows in enumerate(given.named):
            window = min(int(given.ranges[token, 1]), _WINDOW)
            seen = rows[window:] + [-1] * (_WIDTH - len(rows[window:]))
            right = torch.stack(
                [want[token, row] if row >= 0 else want.new_zeros(()) for row in seen]
            )
            off = float((mass[token].double() - right).abs().max())
            expect(off < _TOLERANCE * 4, f"mass of token {token} is off by {off:.1e}")
