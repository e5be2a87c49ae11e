"""Cases I11 .. I14 and I17: the selection straight from the index cache."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, ROWS_FP32_128
from anymla.testing.allocation import LargestAllocation
from anymla.testing.conformance.expected import index_scores
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.generate import GuardedCache, guarded_cache, hostile_indices, scattered_pages


def _integers(*shape: int) -> Tensor:
    """Draw values whose scores are exact in any order of summation, with many ties."""
    return torch.randint(-2, 3, shape).float()


def _best(scores: Tensor, k: int) -> list[int]:
    """Return the entries that the rule chooses, ascending.

    Higher scores come first, NaN highest, and of equal scores the lower entry.
    """
    order = torch.sort(scores, descending=True, stable=True).indices[:k]
    return sorted(order.tolist())


def _check(chosen: Tensor, row: int, want: list[int], name: str) -> None:
    width = chosen.shape[1]
    expect(
        chosen[row].tolist() == want + [-1] * (width - len(want)),
        f"{name}: got {chosen[row].tolist()[:12]} .., expected {want[:12]} ..",
    )


def _check_token(
    chosen: Tensor, slots: Tensor, counts: Tensor, token: int, want: list[int], places: list[int]
) -> None:
    """Check a token's entries, their number and their slots."""
    _check(chosen, token, want, f"token {token}")
    expect(int(counts[token]) == len(want), f"token {token}: count {int(counts[token])}")
    _check(slots, token, places, f"token {token}: slots")


def _requests(entries: list[int]) -> tuple[GuardedCache, Tensor, list[Tensor]]:
    """Fill a cache with keys of several requests, and return their block table and the keys."""
    table, pages = scattered_pages(entries, 16)
    guarded = guarded_cache(INDEX_FP8, pages, 16)
    keys = []
    for request, count in enumerate(entries):
        numbers = torch.arange(count)
        keys.append(_integers(count, 128))
        guarded.write(table[request].long()[numbers // 16] * 16 + numbers % 16, keys[-1])
    return guarded, table, keys


@case(
    "I11",
    "the selection from the cache is the best of the scores, ties and NaN by the rule",
    "select_topk",
)
def best_of_the_scores(ops: Ops) -> None:
    entries, heads = 150, 4
    table, pages = scattered_pages([entries], 64)
    guarded = guarded_cache(INDEX_FP8, pages, 64)
    numbers = torch.arange(entries)
    keys = _integers(entries, 128)
    guarded.write(table[0].long()[numbers // 64] * 64 + numbers % 64, keys)
    q, weights = _integers(3, heads, 128), _integers(3, heads)
    q[2] = 0  # every score 0, as relu often makes them
    scores = index_scores(q, keys.double(), weights)
    lens = torch.tensor([entries, entries - 1, entries], dtype=torch.int32)
    chosen = ops.select_topk(q, guarded.cache, weights, lens, table, 20)
    for row, length in enumerate(lens.tolist()):
        _check(chosen, row, _best(scores[row, :length], 20), f"row {row}")

    # Since relu(x) - relu(-x) = x, any score can be made, also NaN and infinities.
    values = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0]).repeat(4)
    plain = guarded_cache(ROWS_FP32_128, 2, 16)
    rows = torch.zeros(28, 128)
    rows[:, 0] = values
    plain.write(torch.arange(28), rows)
    q = torch.zeros(1, 2, 128)
    q[0, 0, 0], q[0, 1, 0] = 1.0, -1.0
    for k in (2, 9, 17, 25):
        chosen = ops.select_topk(
            q,
            plain.cache,
            torch.tensor([[1.0, -1.0]]),
            torch.tensor([28], dtype=torch.int32),
            torch.tensor([[0, 1]], dtype=torch.int32),
            k,
            layout=ROWS_FP32_128,
        )
        _check(chosen, 0, _best(values, k), f"any scores, top {k}")


@case(
    "I12",
    "tokens of several requests, of every length around k, select locally",
    "select_topk",
    quick=True,
)
def ragged_requests(ops: Ops) -> None:
    entries = [90, 40, 75]
    guarded, table, keys = _requests(entries)
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, -1, 3], dtype=torch.int32)
    lens = torch.tensor([24, 25, 26, 90, 40, 24, 75, 60, 30, 9, 9], dtype=torch.int32)
    q, weights = _integers(11, 3, 128), _integers(11, 3)
    slots, counts = torch.full((11, 25), 77, dtype=torch.int32), torch.full((11,), 77).int()
    pages_of_rows = torch.arange(18, dtype=torch.int32).view(3, 6) + 5
    out = torch.full((11, 25), 77, dtype=torch.int32)  # used before
    chosen = ops.select_topk(
        q,
        guarded.cache,
        weights,
        lens,
        table,
        25,
        token_to_req=owner,
        out=out,
        slot_table=pages_of_rows,
        slot_page_size=16,
        slots=slots,
        counts=counts,
    )
    expect(chosen.data_ptr() == out.data_ptr(), "the result must be the caller's buffer")
    for token, request in enumerate(owner.tolist()):
        want: list[int] = []
        if 0 <= request < 3:
            part = keys[request][: int(lens[token])].double()
            scores = index_scores(q[token : token + 1], part, weights[token : token + 1])
            want = _best(scores[0], 25)
        places = [int(pages_of_rows[request, n // 16]) * 16 + n % 16 for n in want]
        _check_token(chosen, slots, counts, token, want, places)


@case("I13", "rows of length zero and short rows read nothing", "select_topk")
def nothing_read(ops: Ops) -> None:
    guarded = guarded_cache(INDEX_FP8, 2, 16)
    q, weights = torch.full((6, 2, 128), torch.nan), torch.full((6, 2), torch.nan)
    lens = torch.tensor([0, -3, 7, 0, 5, 1], dtype=torch.int32)
    chosen = ops.select_topk(q, guarded.cache, weights, lens, hostile_indices(2, 3, 4), 7)
    for row, length in enumerate(lens.tolist()):
        _check(chosen, row, list(range(max(length, 0))), f"row {row}")


@case("I14", "scratch of a selection stays within its budget", "select_topk", bulk=True)
def bounded_selection(ops: Ops) -> None:
    tokens, entries, budget = 96, 65_536, 1 << 24
    table, pages = scattered_pages([entries], 64)
    guarded = guarded_cache(INDEX_FP8, pages, 64)
    guarded.cache.fill_(0x38)
    numbers = torch.arange(0, entries, 97)
    keys = _integers(len(numbers), 128)
    guarded.write(table[0].long()[numbers // 64] * 64 + numbers % 64, keys)
    q, weights = torch.zeros(tokens, 2, 128), torch.ones(tokens, 2)
    q[:, :, 0] = 1.0
    lens = torch.full((tokens,), entries, dtype=torch.int32)
    arguments = (guarded.cache, weights, lens, table)
    with LargestAllocation() as largest:
        chosen = ops.select_topk(q, *arguments, 512, scratch_bytes=budget)
    # All scores at once would take 24 MiB.
    expect(largest.num_bytes <= budget, f"one tensor takes {largest.num_bytes / 2**20:.1f} MiB")
    alone = ops.select_topk(q[:1], guarded.cache, weights[:1], lens[:1], table, 512)
    expect(bool((chosen == alone).all()), "equal tokens select alike, in any round")


@case(
    "I17",
    "a selection within blocks is the best of their entries alone, each in its own request",
    "select_topk",
)
def within_blocks(ops: Ops) -> None:
    entries, size, k = [90, 40], 4, 9
    guarded, table, keys = _requests(entries)
    owner = torch.tensor([0, 0, 1, 1, 0, -1], dtype=torch.int32)
    lens = torch.tensor([90, 86, 40, 7, 33, 90], dtype=torch.int32)
    # The last block of the first two ends early; of the fifth's, two begin behind what it sees.
    blocks = torch.tensor(
        [[0, 3, 8, 21, 22], [2, 4, 5, 20, 21], [1, 6, 9, -1, -1], [0, 1, -1, -1, -1],
         [7, 8, 9, 12, -1], [0, 1, 2, 3, 4]], dtype=torch.int32,
    )  # fmt: skip
    q, weights = _integers(6, 3, 128), _integers(6, 3)
    slots, counts = torch.full((6, k), 77, dtype=torch.int32), torch.full((6,), 77).int()
    chosen = ops.select_topk(
        q,
        guarded.cache,
        weights,
        lens,
        table,
        k,
        token_to_req=owner,
        slot_table=table,
        slot_page_size=16,
        slots=slots,
        counts=counts,
        blocks=blocks,
        block_size=size,
    )
    for token, request in enumerate(owner.tolist()):
        want: list[int] = []
        if request >= 0:
            listed = set(blocks[token].tolist())
            seen = [n for n in range(int(lens[token])) if n // size in listed]
            part = keys[request][seen].double()
            scores = index_scores(q[token : token + 1], part, weights[token : token + 1])
            want = [seen[place] for place in _best(scores[0], k)]
        places = [int(table[request, n // 16]) * 16 + n % 16 for n in want]
        _check_token(chosen, slots, counts, token, want, places)
