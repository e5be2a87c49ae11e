"""V4.1's adapters in chunks, with padding and with images' tokens, beside formulas and layers."""

from typing import Any

import pytest
from servers import look_up, needs_vllm

pytestmark = needs_vllm

E4M3_ROUNDING = 2.0**-4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look_up("v41_units.py", tmp_path_factory.mktemp("units"), "auto")


def test_entries_that_close_in_a_later_chunk_are_those_of_the_whole_text(
    found: dict[str, Any],
) -> None:
    assert found["entries"]["latent"] < 1e-5  # float32 beside float64
    assert found["entries"]["rows"] <= E4M3_ROUNDING


def test_rows_behind_the_slots_of_a_step_are_not_written(found: dict[str, Any]) -> None:
    assert found["padded rows"] == [3, 9]


def test_n_grams_reach_into_earlier_steps(found: dict[str, Any]) -> None:
    """By what vLLM tells of the prompt and by what was kept, or by what vLLM tells alone."""
    kept, told = found["n-grams"]["kept"], found["n-grams"]["told"]
    assert kept["same"]
    assert told["same"]
    assert 0 < kept["told"] < told["told"]


def test_sites_are_anymlas(found: dict[str, Any]) -> None:
    assert len(found["sites"]) == 5
    assert all(found["sites"].values()), found["sites"]


def test_a_grouped_weight_in_blocks_of_32_is_decoded_exactly(found: dict[str, Any]) -> None:
    assert found["grouped weight"]
