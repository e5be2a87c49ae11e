from pathlib import Path

from servers import look_up, needs_vllm

from anymla.audit import CHECKS
from anymla.engines.vllm.pinned import CUDA_MODELS

pytestmark = needs_vllm


def test_products_are_judged_where_their_weights_can_be_read(tmp_path: Path) -> None:
    """As on a GPU, by the hooks of a layer that is called as vLLM calls it."""
    answer = look_up("audited_products.py", tmp_path, "off")
    assert answer["skipped"] == 0
    assert answer["judged_by"] == sorted(CHECKS)
    # What a draft model's graph calls is no part of the model's passes, and is not kept for them.
    assert answer["recorded"] == [CUDA_MODELS[0]]
    # A graph has one launch for the layer, attention and experts together, and one after the last.
    assert answer["launches"] == ["layers.0.attn", "head"]
    right = answer["right"]
    assert set(right) == {"linear", "experts", "router", "slots"}
    assert not any(alarms for _, alarms in right.values())
    assert right["linear"][0] >= 8
    assert right["experts"][0] >= 2
    assert {name for name, (_, alarms) in answer["experts exchanged"].items() if alarms} == {
        "experts"
    }
    assert {name for name, (_, alarms) in answer["scale byte wrong"].items() if alarms} == {
        "linear"
    }
    assert {name for name, (_, alarms) in answer["bias left out"].items() if alarms} == {"router"}


def test_a_product_with_an_adapter_is_not_judged_by_its_weight(tmp_path: Path) -> None:
    """Beside LoRA vLLM puts a layer around each; its weight is that of the layer inside."""
    answer = look_up("adapters.py", tmp_path, "off")
    assert answer == {"seen": [128, 256], "plain": True, "with an adapter": False}
