"""What a selection runs and how much of it at a time, by sizes alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymla.ops.indexer import score_forms
from anymla.ops.indexer.selection_plan import SelectionPlan, plan_selection, prefill_parts

LEAST = 1 << 24


@given(
    rows=st.integers(1, 20_000),
    entries=st.integers(0, 1 << 20),
    k=st.integers(1, 2048),
    multiprocessors=st.integers(1, 200),
    scratch=st.integers(LEAST, 1 << 34),
    histograms=st.booleans(),
)
def test_plans_stay_within_their_scratch(rows, entries, k, multiprocessors, scratch, histograms):
    plan = plan_selection(
        rows,
        entries,
        k,
        multiprocessors=multiprocessors,
        scratch_bytes=scratch,
        histograms=histograms,
    )
    assert 1 <= plan.rows <= rows
    assert plan.rows * plan.row_bytes(entries) <= scratch
    assert plan.kept >= k
    if plan.form == "all":
        assert entries <= k
    elif plan.form == "whole":
        assert entries <= plan.elements <= 16_384
    elif plan.form == "groups":
        # What a program of the group selector keeps in registers.
        assert plan.groups * 16 >= entries
        assert plan.groups <= 16_384
        assert plan.kept <= 1024
    else:
        assert plan.capacity > k
    if plan.rows < rows and plan.rows >= 2 * multiprocessors:
        assert plan.rows % (2 * multiprocessors) == 0


@pytest.mark.parametrize(
    ("rows", "entries", "k", "form", "parts", "by_histograms"),
    [
        (128, 512, 512, "all", 1, "all"),
        (128, 8192, 512, "whole", 1, "whole"),
        (2048, 4096, 512, "whole", 1, "whole"),
        (128, 32_768, 512, "groups", 1, "groups"),
        (1, 32_768, 1024, "groups", 1, "groups"),
        (1, 262_144, 512, "samples", 32, "groups"),
        (8, 262_144, 512, "groups", 1, "groups"),
        (2048, 8192, 512, "samples", 1, "whole"),
        (2048, 65_536, 512, "groups", 1, "groups"),
        (128, 32_768, 2048, "samples", 1, "samples"),
        (64, 1_000_000, 512, "samples", 1, "samples"),
    ],
)
def test_shapes_take_the_form_that_was_measured(rows, entries, k, form, parts, by_histograms):
    limits = {"multiprocessors": 132, "scratch_bytes": 1 << 30}
    plan = plan_selection(rows, entries, k, **limits)
    assert (plan.form, plan.parts) == (form, parts)
    assert plan_selection(rows, entries, k, histograms=True, **limits).form == by_histograms


@pytest.mark.parametrize(
    ("items", "tiles", "shared", "form"),
    [
        (32, 32, False, score_forms.FEW_SINGLE),
        (128, 32, False, score_forms.SINGLE),
        (32, 128, True, score_forms.FEW_PAIRS),
        (128, 128, True, score_forms.AHEAD),
        (1024, 128, True, score_forms.AHEAD),
    ],
)
def test_scores_take_the_form_that_was_measured(items, tiles, shared, form):
    assert score_forms.form_of(items, tiles, shared, 132) == form


def test_a_million_tokens_go_in_whole_waves():
    plan = plan_selection(16_384, 262_144, 512, multiprocessors=132, scratch_bytes=512 << 20)
    assert isinstance(plan, SelectionPlan)
    assert plan.rows == 264
    with pytest.raises(ValueError, match="scratch_bytes must be >= "):
        plan_selection(1, 1 << 24, 512, multiprocessors=132, scratch_bytes=LEAST)


@pytest.mark.parametrize(
    ("pairs", "tiles", "waves"), [(132, 4096, 132), (120, 4096, 121), (1, 4096, 128), (1, 3, 3)]
)
def test_prefill_programs_fill_their_waves(pairs, tiles, waves):
    # Of 132 multiprocessors at least so many have work at a time.
    parts = prefill_parts(pairs, tiles, 132)
    programs = pairs * parts
    assert programs / -(-programs // 132) >= min(waves, 132)
