"""Cases A1 .. A5, A7 .. A10 and I9: attention over listed rows, with the sink."""

from __future__ import annotations

import torch

from anymla.formats.page_layout import get_layout
from anymla.ops.attention import CacheRows
from anymla.testing.conformance.expected import attend
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import NotApplicable, case, expect
from anymla.testing.conformance.scene import Scene, scene, scope
from anymla.testing.generate import hostile_indices, scatter_hostile
from anymla.testing.tolerance import assert_close, assert_identical, ulps


def _check(ops: Ops, given: Scene, name: str) -> None:
    arguments, keywords = given.arguments()
    given.expected().check(ops.sparse_attention(*arguments, **keywords), name)


@case("A1", "the sink enters the softmax once, whatever else is empty", "sparse_attention")
def sink_once(ops: Ops) -> None:
    sinks = {
        "ordinary": torch.tensor([0.0, 3.0, -3.0, 1.0]),
        "huge": torch.tensor([1e4, -1e4, 3e38, -3e38]),
        "infinite": torch.tensor([torch.inf, -torch.inf, 0.0, torch.inf]),
    }
    lengths = {"full": [40, 40, 40], "ragged": [1, 0, 17], "empty": [0, 0, 0]}
    for sink_name, sink in sinks.items():
        for main_name, main in lengths.items():
            for extra_name, extra in lengths.items():
                given = Scene(
                    torch.randn(3, 4, 512).bfloat16(),
                    scope(3, 40, lengths=main),
                    scope(3, 40, lengths=extra, page=2),
                    sink,
                )
                _check(ops, given, f"{sink_name} sink, {main_name} window, {extra_name} entries")
    given.sink = None
    _check(ops, given, "no sink")


@case(
    "A2",
    "lse: natural log, sink excluded, -inf for a row without keys",
    "sparse_attention",
    quick=True,
)
def lse_convention(ops: Ops) -> None:
    given = scene(sink=True)
    given.main.lengths[1] = 0
    assert given.extra is not None
    given.extra.lengths[1] = 0
    arguments, keywords = given.arguments()
    out, lse = ops.sparse_attention(*arguments, **keywords)
    if lse is None:
        raise NotApplicable("returns no lse")
    given.expected().check((out, lse))
    expect(bool((lse[1] == -torch.inf).all()), "the lse of a row without keys must be -inf")
    expect(bool((out[1] == 0).all()), "the output of a row without keys must be exactly 0")
    keywords["sink"] = None
    _, without_sink = ops.sparse_attention(*arguments, **keywords)
    assert_identical(lse, without_sink, name="lse with and without a sink")


@case("A3", "any number of heads, without padding", "sparse_attention")
def heads(ops: Ops) -> None:
    for count in (1, 2, 3, 4, 8, 16, 20, 32, 64, 128):
        _check(ops, scene(tokens=2, heads=count, width=9, extra=5), f"{count} heads")


@case("A4", "any width of the index list", "sparse_attention")
def widths(ops: Ops) -> None:
    for width in (1, 63, 64, 128, 133, 192, 256, 640, 1000, 1152, 2048):
        given = scene(tokens=2, heads=2, width=width, extra=0)
        if width == 192:
            given.main.lengths[:] = 133
        _check(ops, given, f"width {width}")


@case(
    "A5",
    "no change where a kernel hands over to another (64 rows and more, decode to prefill)",
    "sparse_attention",
    bulk=True,
    also=("prefill_attention",),
)
def other_kernel(ops: Ops) -> None:
    given = scene(tokens=80, heads=2, width=20, extra=6)
    want = given.expected()
    whole = _call(ops, given, slice(0, 80))
    want.check(whole, "80 rows")
    for rows in (1, 63, 64, 65, 66):
        _same(_call(ops, given, slice(0, rows))[0], whole[0][:rows], want.weight[:rows])
    if ops.has("prefill_attention"):
        out, lse = _during_prefill(ops, given)
        want.check((out, lse), "during prefill")
        _same(out, whole[0], want.weight)


def _during_prefill(ops: Ops, given: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the same rows in a decoded workspace, which is NaN wherever the caches are NaN."""
    assert given.extra is not None
    workspace: list[torch.Tensor] = []
    lists: list[torch.Tensor] = []
    for part in (given.main, given.extra):
        slots = part.cache.shape[0] * part.cache.shape[1]
        behind = torch.arange(part.indices.shape[1]) >= part.lengths.unsqueeze(1)
        outside = behind | (part.indices < 0) | (part.indices >= slots)
        first = sum(len(rows) for rows in workspace)
        lists.append(torch.where(outside, -1, part.indices.clamp(max=slots) + first))
        layout = get_layout(part.layout)
        workspace.append(layout.read(part.cache, torch.arange(slots), torch.bfloat16))
    listed = torch.cat(lists, 1)
    ranges = torch.tensor([[0, 0, 0, listed.shape[1]]], dtype=torch.int32).repeat(len(given.q), 1)
    result: tuple[torch.Tensor, torch.Tensor] = ops.prefill_attention(
        given.q, torch.cat(workspace), ranges, listed, window=0, entries=listed.shape[1]
    )
    return result


def _same(got: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> None:
    """Require equality up to two roundings of one value, after sums in any order."""
    assert_close(got, other, atol=ulps(torch.bfloat16, 2), scale=scale, name="same rows")


def _call(
    ops: Ops, given: Scene, rows: slice, **more: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    (q, listed), keywords = given.arguments()
    result: tuple[torch.Tensor, torch.Tensor | None] = ops.sparse_attention(
        q[rows], [each.part(rows) for each in listed], **keywords, **more
    )
    return result


@case("A7", "a row alone equals the row in a batch of 32", "sparse_attention")
def batch_invariance(ops: Ops) -> None:
    given = scene(tokens=32, heads=4, width=40, extra=8, sink=True)
    whole, lse = _call(ops, given, slice(0, 32), batch_invariant=True)
    given.expected().check((whole, lse))
    for row in (0, 13, 31):
        alone, its_lse = _call(ops, given, slice(row, row + 1), batch_invariant=True)
        assert_identical(alone[0], whole[row], name=f"output of row {row}")
        if lse is not None and its_lse is not None:
            assert_identical(its_lse[0], lse[row], name=f"lse of row {row}")
    plain, _ = _call(ops, given, slice(0, 32))
    _same(plain, whole, given.expected().weight)


@case("A8", "more than 65,535 tokens", "sparse_attention", bulk=True)
def grid_limits(ops: Ops) -> None:
    tokens, distinct = 70_000, 16
    given = scope(distinct, 1)
    q = torch.randn(distinct, 1, 512).bfloat16()
    which = torch.arange(tokens) % distinct
    listed = CacheRows(given.cache, given.layout, given.indices[which])
    out, lse = ops.sparse_attention(q[which], [listed])
    expect(out.shape[0] == tokens, "one output row a token")
    want = attend(q, [given.rows(token) for token in range(distinct)])
    for rows in (slice(0, distinct), slice(tokens - distinct, tokens)):
        order = which[rows].argsort()
        some = None if lse is None else lse[rows][order]
        want.check((out[rows][order], some), f"tokens {rows.start} to {rows.stop}")


@case("A9", "a chunk's mask is aligned with its end, not with its start", "window_rows", quick=True)
def bottom_right(ops: Ops) -> None:
    table = torch.tensor([[3, 1, 7, 2, 5]], dtype=torch.int32)
    positions = torch.arange(300, 305)
    slots, lens = ops.window_rows(
        positions, torch.zeros(5, dtype=torch.int32), table, block_size=64, window=128
    )
    for row, position in enumerate(positions.tolist()):
        seen = torch.arange(position - 127, position + 1)
        want = table[0, seen // 64].long() * 64 + seen % 64
        expect(int(lens[row]) == 128, f"position {position} must see 128 rows, got {lens[row]}")
        assert_identical(slots[row].long(), want, name=f"window of position {position}")


@case(
    "A10",
    "FlashMLA's rules: lengths keep the leftmost columns, any index outside is invalid",
    "sparse_attention",
    "sparse_attention_rows",
    quick=True,
)
def flash_mla_rules(ops: Ops) -> None:
    given = scene(tokens=4, width=40, extra=0)
    given.main.lengths[:] = torch.tensor([40, 7, 1, 0], dtype=torch.int32)
    _check(ops, given, "leftmost columns")
    given.main.lengths[:] = torch.tensor([3, 30, 0, 40], dtype=torch.int32)
    _check(ops, given, "the same tensors with other lengths")
    limit = given.main.cache.shape[0] * given.main.cache.shape[1]
    given.main.indices = scatter_hostile(given.main.indices, 9, limit)
    given.main.lengths[:] = 49
    _check(ops, given, "invalid indices in between")

    kv = torch.randn(50, 1, 512).bfloat16()
    indices = torch.stack([torch.randperm(50)[:20] for _ in range(4)]).int()
    indices = scatter_hostile(indices, 6, 50)
    indices[2] = hostile_indices(50, 26)
    lengths = torch.tensor([26, 10, 26, 0], dtype=torch.int32)
    sink = torch.tensor([0.5, torch.inf, -torch.inf, -2.0])
    rows = []
    for token, count in enumerate(lengths.tolist()):
        kept = indices[token, :count]
        rows.append(kv[kept[(kept >= 0) & (kept < 50)].long(), 0].double())
    out, lse = ops.sparse_attention_rows(given.q, kv, indices.unsqueeze(1), lengths, sink=sink)
    attend(given.q, rows, sink).check((out, lse), "rows")
    expect(bool((out[:, 1] == 0).all()), "a sink of +inf must give exactly 0")


@case("I9", "order and padding of the index list do not change attention", "sparse_attention")
def order_and_padding(ops: Ops) -> None:
    given = scope(2, 33)
    q = torch.randn(2, 4, 512).bfloat16()
    want = attend(q, [given.rows(0), given.rows(1)])
    limit = given.cache.shape[0] * given.cache.shape[1]
    shuffled = given.indices[:, torch.randperm(33)]
    padded = torch.cat((shuffled, hostile_indices(limit, 2, 31)), 1)
    lists = {
        "as given": given.indices,
        "shuffled": shuffled,
        "padded": padded,
        "padded in between": scatter_hostile(given.indices, 95, limit),
        "padded in front": torch.cat((hostile_indices(limit, 2, 256), given.indices), 1),
    }
    for name, indices in lists.items():
        listed = CacheRows(given.cache, given.layout, indices)
        want.check(ops.sparse_attention(q, [listed]), name)
