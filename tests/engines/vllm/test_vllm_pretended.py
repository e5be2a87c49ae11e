"""vLLM's CUDA model takes anymla's layers, on a machine that says it is an H200."""

from pathlib import Path
from typing import Any

import pytest
from servers import look_up, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("pretended")
    return look_up("pretended.py", directory, "force")


def test_every_layer_of_the_model_has_anymlas_experts_and_linears(found: dict[str, Any]) -> None:
    layers, indexers = 4, 2
    assert found["classes"] == {
        "Fp8Attention": layers,
        "AnymlaMoE": layers,
        "Mxfp4Experts": layers,
        "SharedExpert": layers,
        # wq_a with wkv, wq_b, wo_b and two of the shared expert; an indexer's wq_b
        "Fp8Linear": 5 * layers + indexers,
        "vLLM's Fp8": layers,  # wo_a, which runs as no linear layer
    }


@pytest.mark.parametrize("name", ["by table", "by score"])
def test_vllms_own_layers_give_its_formula(found: dict[str, Any], name: str) -> None:
    apart = found["mixtures"][name]
    assert apart["mean"] == pytest.approx(1.0, abs=0.1)  # standard deviations
    assert apart["largest"] < 6
    assert apart["largest of padding"] == 0.0
