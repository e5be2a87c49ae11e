"""What the oracle must find in a recorded run, and what it must forgive."""

import pytest
import torch

from anymla.formats.page_layout import get_layout
from anymla.testing.oracle.attention import LayerRows, compress, pooled_error
from anymla.testing.oracle.judge import Judge
from anymla.testing.oracle.recording import Recording, StoredRows
from anymla.testing.oracle.selection import Selections, best

SCORES = torch.tensor([[5.0, 4.0, 3.0, 2.0, 9.0]], dtype=torch.float64)
VISIBLE = torch.tensor([[True, True, True, True, False]])


def judged(chosen: list[int], bound: float = 0.1, k: int = 2) -> Selections:
    selections = Selections()
    selections.judge(
        SCORES, VISIBLE, torch.tensor([chosen]), k, torch.tensor([bound]), "layer 0 topk"
    )
    return selections


@pytest.mark.parametrize(("ratio", "width"), [(4, 128), (16, 64)])
def test_errors_of_pooled_rows_are_what_small_errors_make(ratio: int, width: int) -> None:
    """Entries of many slightly wrong rows and gates, against the derivative."""
    kv, gate = torch.randn(2, 3 * ratio, width, dtype=torch.float64).unbind()
    ape, norm = torch.randn(ratio, width).double(), torch.rand(64).double() + 0.5
    rest = (ape, norm, torch.rand(8), 1e-6)
    exact, error = compress(kv, 3 * gate, *rest), pooled_error(kv, 3 * gate, *rest)
    total = torch.zeros_like(exact)
    for _ in range(400):
        off = [
            each
            + 1e-6 * torch.randn_like(each) * (each.abs() + each.square().mean(-1, True).sqrt())
            for each in (kv, 3 * gate)
        ]
        total += (compress(*off, *rest) - exact).square()
    share = (total / 400).sqrt() / (1e-6 * error)
    # A mean of 400 squares is off by 7 %; a pair's larger error counts for both of its channels.
    assert 0.9 < float(share[:, :-16].median()) < 1.1
    assert float(share.max()) < 1.3


@pytest.mark.parametrize("chosen", [[0, 1], [1, 0], [0, 1, -1, -1]])
def test_the_best_entries_in_any_order_are_right(chosen: list[int]) -> None:
    found = judged(chosen)
    assert not found.violations
    assert (found.checked, found.swapped) == (1, 0)


def test_nothing_chosen_of_nothing_is_right() -> None:
    selections = Selections()
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    selections.judge(nothing, nothing.bool(), torch.tensor([[-1]]), 2, torch.ones(1), "layer 0")
    assert (selections.checked, selections.swapped, selections.violations) == (1, 0, [])


def test_a_swap_is_forgiven_within_the_bound_only() -> None:
    near = judged([0, 2], bound=1.5)
    assert (near.violations, near.swapped) == ([], 1)
    assert near.worst == pytest.approx(1 / 1.5)
    assert judged([0, 2], bound=0.9).violations == ["layer 0 topk, row 0: a better entry left out"]


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ([0, -1], "count or order"),
        ([-1, 0, 1], "count or order"),
        ([0, -1, 1], "count or order"),
        ([0, 1, 2], "count or order"),
        ([0, 99], "count or order"),
        ([0, -7], "count or order"),
        ([0, 0], "chosen twice"),
        ([0, 4], "invisible entry"),
    ],
)
def test_wrong_selections_are_named(chosen: list[int], fault: str) -> None:
    (line,) = judged(chosen, bound=100.0).violations
    assert fault in line


@pytest.mark.parametrize(
    ("scores", "k", "chosen"),
    [
        ([1.0, 3.0, 3.0, 3.0, 2.0], 2, [1, 2]),
        ([0.0, -0.0, 0.0, -1.0, 0.0], 3, [0, 1, 2]),
        ([1.0, torch.inf, torch.nan, torch.inf, torch.nan], 3, [2, 4, 1]),
        ([-torch.inf, -torch.inf, 1.0, -torch.inf, -torch.inf], 3, [2, 0, 1]),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 7, [0, 1, 2, 3, 4, -1, -1]),
    ],
)
def test_the_best_follow_the_rule_of_ties(scores, k, chosen) -> None:
    """Padded with many equal scores that are not visible, which a sort may not let in."""
    row = torch.tensor([scores + [9.0] * 100], dtype=torch.float64)
    visible = torch.arange(105).unsqueeze(0) < 5
    assert best(row, visible, k).tolist() == [chosen]
    equal = torch.zeros(2, 1000, dtype=torch.float64)
    assert best(equal, equal == 0, 300)[1].tolist() == list(range(300))


def test_fewer_visible_than_wanted_means_all_of_them() -> None:
    assert not judged([3, 2, 1, 0, -1, -1], k=6).violations
    assert judged([3, 2, 1, -1, -1, -1], k=6).violations


def test_the_oracles_own_choice_is_right_and_padded() -> None:
    chosen = best(SCORES, VISIBLE, 6)
    assert chosen.tolist() == [[0, 1, 2, 3, -1, -1]]


def recorded(layout_id: str, rows: torch.Tensor) -> Recording:
    recording = Recording()
    data, scales = get_layout(layout_id).encode(rows)
    scales = data[:, :0] if scales is None else scales
    half = len(rows) // 2
    for part in (slice(half, None), slice(0, half)):
        numbers = torch.arange(len(rows))[part]
        recording.add_entries(0, "window", numbers, StoredRows(layout_id, data[part], scales[part]))
    return recording


@pytest.mark.parametrize("layout_id", ["v4_main_fp8", "rows_bf16_512", "rows_fp32_512"])
def test_rows_with_small_errors_pass_and_a_wrong_channel_is_found(layout_id: str) -> None:
    exact = torch.randn(20, 512, dtype=torch.float64)
    stored = (exact * (1 + 1e-6 * torch.randn(exact.shape))).float()
    judge = Judge(recorded(layout_id, stored), [2e-5])
    rows, rotated = judge.rows(0, LayerRows(exact))
    assert not rotated
    assert torch.equal(rows.window, judge.recording.rows(0, "window", 20).decode())
    found = judge.found["window"]
    assert (found.rows, found.unexplained, found.first) == (20, 0, "")

    stored[13, 470] += 0.1
    judge = Judge(recorded(layout_id, stored), [2e-5])
    judge.rows(0, LayerRows(exact))
    assert judge.found["window"].unexplained == 1
    assert "window row 13 channel 470" in judge.found["window"].first


def test_rows_never_recorded_are_an_error_and_rewritten_rows_count_once() -> None:
    recording = recorded("rows_fp32_512", torch.zeros(6, 512))
    with pytest.raises(LookupError, match="row 6 was not recorded \\(1 of 7 missing\\)"):
        recording.rows(0, "window", 7)
    with pytest.raises(LookupError, match="no index rows"):
        recording.rows(0, "index", 1)
    data, _ = get_layout("rows_fp32_512").encode(torch.ones(1, 512))
    recording.add_entries(
        0, "window", torch.tensor([2]), StoredRows("rows_fp32_512", data, data[:, :0])
    )
    assert recording.rows(0, "window", 6).decode()[:, 0].tolist() == [0, 0, 1, 0, 0, 0]


def test_hashed_experts_must_be_the_tables() -> None:
    table = torch.tensor([[3, 1], [0, 2]])
    recording = Recording()
    recording.add_decision(0, "experts", torch.arange(2), torch.tensor([[1, 3], [0, 1]]))
    judge = Judge(recording, [1e-5])
    judge.hashed_experts(0, table)
    (line,) = judge.selections["experts"].violations
    assert "row 1" in line
