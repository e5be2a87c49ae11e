"""Activations that travel quantised: whoever reads them is given those of its own input."""

import torch

from anymla.bench.layer_setup import LayerSetup
from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.layers import codes, linear

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "index_n_heads": 4,
    "index_topk": 16,
    "moe_intermediate_size": 128,
}


def test_products_are_given_the_codes_of_their_input(monkeypatch):
    given = []

    def watched(original):
        def product(x, *args, codes=None, code_scales=None, **named):
            if codes is not None:
                want = quantize_fp8_rows(x)
                assert torch.equal(codes[: len(x)], want[0])
                assert torch.equal(code_scales[: len(x)], want[1])
            given.append((original.name, x.shape[-1], codes is not None))
            return original(x, *args, **named)

        return product

    monkeypatch.setattr(linear, "fp8_block_linear", watched(linear.fp8_block_linear))
    setup = LayerSetup("flash", 4, torch.device("cpu"), experts=8, copies=1, changes=SMALL)
    batch = setup.batch(3, 300)
    results = []
    for travel in (False, True):
        monkeypatch.setattr(codes, "supports_prequantized", lambda _, travel=travel: travel)
        given.clear()
        results.append(batch.run(setup.layers[0]).flush())
        assert sorted(given) == [
            ("fp8_block_linear", 128, travel),  # both kinds of queries, and the shared expert
            ("fp8_block_linear", 128, travel),
            ("fp8_block_linear", 128, travel),
            ("fp8_block_linear", 256, False),  # of all groups of heads
            ("fp8_block_linear", 256, travel),
            ("fp8_block_linear", 256, travel),
        ]
    assert torch.equal(*results)
