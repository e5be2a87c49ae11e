"""A worker's prefills beside decodes: prompts of 2,600, 2,000, 700 and 40 tokens at once."""

from typing import Any

import pytest
from servers import look_up, needs_worker

pytestmark = needs_worker


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look_up("mixed_worker.py", tmp_path_factory.mktemp("mixed"), "auto")


def test_steps_mix_decodes_with_several_prefills(found: dict[str, Any]) -> None:
    assert found["tokens"] == [4] * 4
    by_ratio: dict[int, list[Any]] = {ratio: [] for ratio in (1, 4, 128)}
    for ratio, decodes, prefills, chunks in found["steps"]:
        assert chunks >= 1
        by_ratio[ratio].append((decodes, prefills))
    assert by_ratio[1] == by_ratio[4] == by_ratio[128]
    assert any(decodes and len(prefills) > 1 for decodes, prefills in by_ratio[4]), by_ratio


def test_each_layer_agrees_with_vllms_own_kernel(found: dict[str, Any]) -> None:
    rows = {(row["part"], row["ratio"], row["phase"]): row for row in found["parts"]}
    for ratio in (1, 4, 128):
        assert rows["attention", ratio, "prefill"]["ulps"] <= 2
    assert rows["selection", 4, "prefill"]["missed"] < 1e-5
