from pathlib import Path
from typing import Any

import pytest
from servers import look_up, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look_up("names.py", tmp_path_factory.mktemp("names"), "auto")


def test_vllm_still_has_every_name_that_the_plugin_relies_on(found: dict[str, Any]) -> None:
    assert found["missing"] == []
    assert found["overrides"] == []
    assert found["kernels"] == []


def test_the_look_up_misses_what_is_not_there(found: dict[str, Any]) -> None:
    assert found["canary"] == ["vllm.models.deepseek_v4.attention:NoSuchAttention"]


def test_registering_twice_replaces_the_model_by_name_and_starts_no_device(
    found: dict[str, Any],
) -> None:
    assert "vllm.models.deepseek_v4" in found["in_tree"]
    assert "anymla.engines.vllm.model" in found["registered"]
    assert not found["cuda_initialised"]


def test_off_leaves_vllm_alone(tmp_path: Path) -> None:
    found = look_up("names.py", tmp_path, "off")
    assert found["registered"] == found["in_tree"]
