"""Experts and linear layers of the plugin give what vLLM's formulas give, without vLLM."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

# Errors are compared with their standard deviation, which is derived from the roundings. The root
# of their mean square is 1 then. Of n errors, no more than n * 2e-9 are beyond 6.
NEAR_ONE = pytest.approx(1.0, abs=0.1)


def measured(device: str, directory: Path) -> dict[str, Any]:
    """The answer of ``layer_units.py``, whose stand-ins for vLLM's modules need a process."""
    answer = directory / "layers.json"
    command = [sys.executable, str(HERE / "layer_units.py"), str(answer), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measured(request.param, tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("name", ["by score", "by table", "tensor parallel", "expert parallel"])
def test_experts_are_vllms_but_for_quantised_activations(found: Any, name: str) -> None:
    apart = found["mixtures"][name]
    assert apart["mean"] == NEAR_ONE
    assert apart["largest"] < 6


def test_experts_in_another_order_are_noticed(found: Any) -> None:
    assert found["mixtures"]["experts in another order"]["mean"] > 10


@pytest.mark.parametrize("name", ["by score", "by table"])
def test_padding_has_no_experts_and_changes_no_token(found: Any, name: str) -> None:
    assert found["mixtures"][f"{name}, padding"]["is the shared expert's"]
    assert found["mixtures"][f"{name}, not padded"]["ulps"] <= 1  # sums in another order


def test_a_step_makes_masks_and_ids_once(found: Any) -> None:
    assert found["once"] == ["ids", "valid"]


def test_whoever_listens_to_vllms_router_gets_it(found: Any) -> None:
    assert found["recorded"] == ["vLLM's", "vLLM's"]


def test_experts_that_anymla_has_no_kernel_for_stay_vllms(found: Any) -> None:
    kept = dict(found["kept"])
    assert kept.pop("none") is None
    assert len(kept) == 14
    assert all(kept.values())


@pytest.mark.parametrize("name", ["ue8m0", "fp32", "attached"])
def test_a_product_is_that_of_the_quantised_rows(found: Any, name: str) -> None:
    assert found["products"][name]["ulps"] <= 1


def test_many_tokens_are_multiplied_by_vllm(found: Any) -> None:
    assert found["products"]["by vLLM"] == [65]


def test_a_weight_that_vllm_has_changed_stays_with_it(found: Any) -> None:
    assert found["products"]["repacked"]
    assert found["products"]["rescaled"]


def test_the_shared_expert_is_vllms(found: Any) -> None:
    assert found["shared"]["mean"] == NEAR_ONE
    assert found["shared"]["largest"] < 6


def test_wo_a_stays_in_fp8(found: Any) -> None:
    for name in ("ue8m0", "fp32", "many", "many by DeepGEMM"):
        apart = found["projections"][name]
        assert apart["quantised"]
        assert apart["bytes of a weight"] == 1
        assert apart["mean"] == NEAR_ONE
        assert apart["largest"] < 6


def test_deep_gemm_projects_many_tokens(found: Any) -> None:
    assert found["projections"]["by DeepGEMM"] == [65]


def test_wo_a_in_bf16_is_multiplied_as_it_is(found: Any) -> None:
    apart = found["projections"]["bf16"]
    assert not apart["quantised"]
    assert apart["mean"] < 1.1  # heads that are rotated back need not be rounded
    assert apart["largest"] < 6


def test_few_tokens_travel_quantised_to_who_reads_them_so(found: Any) -> None:
    rows = found["rows"]
    assert rows["few"].pop("key") is None
    assert set(rows["few"].values()) == {True}
    assert set(rows["many"].values()) == {None}
    assert set(rows["unread"].values()) == {None}
