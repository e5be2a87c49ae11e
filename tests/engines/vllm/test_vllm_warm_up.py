"""A worker's rehearsed steps: they run every operation, and leave nothing behind."""

import collections
from typing import Any

import pytest
from servers import look_up, needs_worker

pytestmark = needs_worker
MOST_TOKENS, DECODES = 130, 6  # as in rehearsed.py


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look_up("rehearsed.py", tmp_path_factory.mktemp("rehearsed"), "force")


def test_caches_stay_as_they_are(found: dict[str, Any]) -> None:
    assert found["caches_are_as_they_were"]
    assert found["before"] == found["after"]


def test_operations_run_with_every_number_of_tokens(found: dict[str, Any]) -> None:
    tokens: dict[str, set[int]] = collections.defaultdict(set)
    for name, count in found["calls"]:
        tokens[name].add(count)
    # Decodes of any number, and prefills by slots, which 1,024 entries are up to 7 tokens.
    assert tokens["sparse_attention"] == set(range(1, DECODES + 1))
    # Everything else at powers of two, and one more.
    few = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, MOST_TOKENS}
    for name in (
        "prefill_attention", "qnorm_rope_kv_insert", "fused_q_kv_rmsnorm",
        "save_partial_states", "indexer_q_rope_quant", "select_topk", "grouped_output_projection",
        "hc_pre", "hc_post",
    ):  # fmt: skip
        assert tokens[name] >= few, (name, sorted(few - tokens[name]))
    assert tokens["compress_norm_rope_insert"]
    assert tokens["dequantize_and_gather_k_cache"]


def test_what_describes_a_step_is_no_larger_than_vllms_own_buffer(found: dict[str, Any]) -> None:
    """int32 slots of 8,192 tokens x 8,192 entries of ratio 128, and little more."""
    assert found["bytes"] < 1.2 * 8192 * 8192 * 4


def test_a_server_starts_without_its_rehearsal(found: dict[str, Any]) -> None:
    """It is what saves time; kernels are compiled without it, too."""
    (said,) = found["said"]
    assert "not rehearsed" in said


def test_an_engine_that_others_wait_for_stops_with_its_rehearsal(found: dict[str, Any]) -> None:
    """Data parallel ranks are engines of one worker each, and wait in the experts' exchange."""
    assert found["stops_beside_others"]


def test_products_that_vllm_is_not_to_warm_up_are_zero(found: dict[str, Any]) -> None:
    assert found["left_out"] == [0, 0]


def test_kernels_of_vllms_metadata_are_compiled_at_the_start(found: dict[str, Any]) -> None:
    """One runs for every power of two of prefills; vLLM's attention would have registered it."""
    assert found["registered"] == ["_Warmup", "ComputePrefillMetadataKernel", 1]
