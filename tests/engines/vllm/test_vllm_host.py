"""What the plugin asks of the host in a step without a graph: launches, and calls of torch.

Both are counted, not timed. ``host_calls.py --times 60`` times the operations.
"""

from typing import Any

import pytest
from servers import look_up, needs_vllm

pytestmark = needs_vllm
PREFILL, MIXED = "prefill of 1,024", "8 decodes and 1,024"
LAYERS, INDEXERS, COMPRESSORS = 8, 3, 9


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look_up("host_calls.py", tmp_path_factory.mktemp("host"), "force")


def test_launches_of_a_prefill(found: dict[str, Any]) -> None:
    launches = found[PREFILL]["launches"]
    sites = 2 * LAYERS + 1  # of hyper-connections: two a layer, and the head
    expected = dict.fromkeys(("split_kernel", "many_kernel", "collapse_kernel"), sites)
    expected |= dict.fromkeys(("save_partial_states_kernel", "compress_kernel"), COMPRESSORS)
    assert {name: launches[name] for name in expected} == expected
    # W4A8's experts: each product's input is quantised by a launch of its own.
    experts = {"quantize_pairs_kernel": 2 * LAYERS, "w4a8_gemm_kernel": 2 * LAYERS}
    assert {name: launches[name] for name in experts} == experts
    of_a_layer = sum(count for name, count in launches.items() if name not in expected)
    assert of_a_layer <= 17.5 * LAYERS
    assert sum(launches.values()) <= 26 * LAYERS


@pytest.mark.parametrize("step", [PREFILL, MIXED])
def test_metadata_are_made_once_for_each_ratio(found: dict[str, Any], step: str) -> None:
    """Not for each layer, of which three groups of pages and three ratios make eight kinds."""
    torch = found[step]["torch"]
    for name in ("stack", "maximum", "index"):
        assert torch[name] == 3, name
    assert torch["_local_scalar_dense"] <= 6


def test_a_selection_of_everything_is_written_once(found: dict[str, Any]) -> None:
    assert found[PREFILL]["torch"]["arange"] == 1


def test_memory_is_asked_for_by_results_and_scratch_alone(found: dict[str, Any]) -> None:
    """Of 41 a layer, W4A8's experts ask for eight: two quantised inputs, scales, bounds, groups."""
    assert found[PREFILL]["torch"]["empty"] <= 41 * LAYERS


def test_operations_of_a_prefill(found: dict[str, Any]) -> None:
    called = found[PREFILL]["operations"]
    assert called["hc_post_pre_norm"] == 2 * LAYERS - 1
    assert called["prefill_attention"] == called["experts"] == LAYERS
    assert "select_topk" not in called
    assert sum(called.values()) <= 12.5 * LAYERS
    assert found[MIXED]["operations"]["select_topk"] == 2 * INDEXERS
