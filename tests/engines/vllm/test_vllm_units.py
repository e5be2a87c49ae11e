from typing import Any

import pytest
from servers import look_up, needs_vllm

pytestmark = needs_vllm

BF16_ROUNDING = 2.0**-8


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look_up("units.py", tmp_path_factory.mktemp("units"), "auto")


def test_functions_for_cuda_agree_with_vllms_in_plain_torch(found: dict[str, Any]) -> None:
    assert len(found["streams"]) == 4
    for name, apart in found["streams"].items():
        assert apart <= 2 * BF16_ROUNDING, name


def test_the_grouped_weight_is_decoded_exactly_in_each_format(found: dict[str, Any]) -> None:
    assert found["weights"] == {"bf16": True, "ue8m0": True, "fp32": True, "refused": True}


def test_models_of_other_platforms_are_built_with_anymlas_attention(found: dict[str, Any]) -> None:
    assert len(found["seams"]) == 5
    assert all(found["seams"].values()), found["seams"]


def test_each_part_is_replaced_by_itself_inside_a_layer(found: dict[str, Any]) -> None:
    """The main compressor; the indexer, its cache and its compressor."""
    assert found["inside"] == {
        "attention": [False, False, False, False],
        "indexer": [False, True, True, False],
        "compressor": [True, False, False, True],
        "indexer+compressor": [True, True, True, True],
    }


def test_a_compressor_does_not_write_into_a_cache_of_other_rows(found: dict[str, Any]) -> None:
    assert "ANYMLA_VLLM asks for compressor" in found["other rows"]
    assert "bfloat16" in found["other rows"]
