"""The oracle against transformers, which shares nothing with it."""

import pathlib
from typing import Any

import pytest
import torch

from anymla.testing.oracle import OracleModel
from anymla.testing.tolerance import relative_error

# transformers computes norms, rope and gates in float32 whatever the dtype.
FLOAT32_NETWORK = 1e-5

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ratios 0 4 128 4": {},
    "ratio 128 first, more heads, no yarn": {
        "compress_ratios": [128, 4, 0, 4, 0],
        "num_attention_heads": 6,
        "o_groups": 3,
        "rope_scaling": None,
        "index_topk": 40,
    },
    "two streams, tight clamp, other yarn": {
        "hc_mult": 2,
        "swiglu_limit": 0.5,
        "num_hash_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 256,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    },
}


def transformers_run(directory: pathlib.Path, ids: list[int]) -> tuple[torch.Tensor, list[Any]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    layers: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _module, _inputs, out: layers.append(out[0] if isinstance(out, tuple) else out)
        )
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits, [layer.squeeze(0) for layer in layers]


@pytest.mark.parametrize("changes", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_logits_and_streams_equal_transformers(random_checkpoint, changes) -> None:
    directory = random_checkpoint(**changes)
    ids = torch.randint(96, (300,)).tolist()
    result = OracleModel(directory).run(ids, keep_layers=True)
    logits, layers = transformers_run(directory, ids)
    for index, (got, want) in enumerate(zip(layers, result.layers, strict=True)):
        error = relative_error(got, want)
        print(f"layer {index}: {error:.2e}")
        assert error <= FLOAT32_NETWORK
    error = relative_error(logits, result.logits)
    print(f"logits: {error:.2e}")
    assert error <= FLOAT32_NETWORK


def test_coarser_cache_rows_move_the_logits_further(random_checkpoint) -> None:
    oracle = OracleModel(random_checkpoint())
    ids = torch.randint(96, (200,)).tolist()
    exact = oracle.run(ids).logits
    errors = [
        relative_error(oracle.run(ids, kv=kv).logits, exact) for kv in ("exact", "fp32", "bf16")
    ]
    assert errors[0] == 0
    assert 0 < errors[1] < 1e-6 < errors[2]
    for kv in ("fp8", "fp8-mxfp4-index", "fp8-nvfp4"):
        assert errors[2] < relative_error(oracle.run(ids, kv=kv).logits, exact) < 0.5


def test_the_future_does_not_reach_the_past(random_checkpoint) -> None:
    oracle = OracleModel(random_checkpoint())
    ids = torch.randint(96, (140,)).tolist()
    whole, part = oracle.run(ids).logits[:131], oracle.run(ids[:131]).logits
    assert relative_error(part, whole) < 1e-12
