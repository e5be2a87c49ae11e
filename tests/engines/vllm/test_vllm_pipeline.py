"""The plugin where vLLM places a model on several GPUs: ranks of a pipeline, and idle ranks."""

from pathlib import Path
from typing import Any

import pytest
from servers import look_up, needs_vllm

pytestmark = needs_vllm
HIDDEN, STREAMS, TOKENS = 4096, 4, 40  # as in pipeline.py and pretended.py


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return look_up("pipeline.py", tmp_path_factory.mktemp("pipeline"), "force")


def test_each_rank_has_its_layers_of_anymlas(found: list[dict[str, Any]]) -> None:
    first, last = found
    assert first["attentions"] == [f"model.layers.{i}.attn" for i in range(4)]
    assert last["attentions"] == [f"model.layers.{i}.attn" for i in range(4, 8)]


def test_a_rank_hands_its_streams_over(found: list[dict[str, Any]]) -> None:
    first, last = found
    assert first["handed over"] == ["hidden_states"]
    assert first["shape"][0] == last["shape"][0] == TOKENS
    assert last["handed over"] is None
    assert last["shape"] == [TOKENS, HIDDEN]


def test_each_rank_is_audited_by_itself(found: list[dict[str, Any]]) -> None:
    """Nothing fails but to read rows of caches, for which the meta device has no values."""
    for rank in found:
        assert all("not on the expected device meta" in fault for fault in rank["faults"])
        assert rank["audited"] == rank["attentions"]
        assert set(rank["recorded"]) <= {*rank["attentions"], "head"}
        layers = [each for each in rank["recorded"] if each.startswith("model.layers.")]
        assert len(layers) == rank["ratios"]  # one layer of each ratio a step


def test_a_step_without_requests_is_none(tmp_path: Path) -> None:
    """Idle ranks run on beside others; what has finished is forgotten all the same."""
    found = look_up("idle.py", tmp_path, "off")
    assert found["results"] == ["ran"] * 4 + ["a step that fails"]
    assert found["active"] == [False, False, True, False, True]
    assert (found["steps"], found["audited"], found["active now"]) == (2, 2, False)
    assert found["forgotten"] == [["r0"], ["r0"], ["r3"], ["r0"], []]
