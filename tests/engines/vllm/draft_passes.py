"""What drafts ask of the plugin, by stand-ins for vLLM: ``draft_passes.py ANSWER.json``."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import stand_ins
import torch

stand_ins.install()

from anymla.engines.vllm import drafts, prefill  # noqa: E402
from anymla.engines.vllm.attention import AnymlaAttention  # noqa: E402
from anymla.engines.vllm.metadata import CompressedBuilder, IndexBuilder, WindowBuilder  # noqa: E402
from anymla.formats.page_layout import MAIN_FP8, get_layout  # noqa: E402
from anymla.layers import plans  # noqa: E402
from anymla.layers.rows import Rows  # noqa: E402
from anymla.ops.norm_rope import qnorm_rope_kv_insert  # noqa: E402


def planned() -> list[list[int]]:
    """The lengths that each of two passes of a draft model plans by.

    Between them vLLM makes the request longer, in the metadata that both have.
    """
    lengths = torch.tensor([63, 7], dtype=torch.int32)
    rows = Rows(torch.zeros(2, 128, dtype=torch.int32), lengths)
    window = types.SimpleNamespace(tile_sched_swaonly=prefill.StepPlans())
    metadata = {"window": window}

    def plan(lengths: Any, *_: Any, **__: Any) -> list[int]:
        return [int(length) for length in lengths]

    found = []
    for _ in range(2):
        stand_ins.context.additional_kwargs = {}  # vLLM's, of each pass
        with mock.patch.object(plans, "sparse_attention_plan", plan):
            for _layer in range(2):
                shared = prefill.plans_of_step(metadata, window)
                found.append(shared.of("window", 64, rows, None))
        lengths += 1
    return found


def inserted() -> dict[str, bool]:
    """Rows of a context: the bytes that a layer's own kernel writes; other layers are vLLM's."""
    layout, tokens = get_layout(MAIN_FP8), 5
    table = torch.randn(64, 64)
    layer: Any = AnymlaAttention.__new__(AnymlaAttention)
    torch.nn.Module.__init__(layer)
    layer.rotary_emb = types.SimpleNamespace(cos_sin_cache=table)
    layer.swa_cache_layer = types.SimpleNamespace(kv_cache=layout.allocate(pages=2, entries=64))
    kv = torch.randn(tokens, 512).bfloat16()
    positions, slots = torch.arange(3, 3 + tokens), torch.tensor([70, 3, -1, 9, 127])
    called: list[Any] = []
    insert = drafts.inserting(lambda *given: called.append(given[0]))
    insert(layer, kv, positions, slots)
    expected = layout.allocate(pages=2, entries=64)
    q = torch.zeros(tokens, 1, 512).bfloat16()
    qnorm_rope_kv_insert(q, kv, expected, slots, positions, table, 1e-6)
    written = torch.tensor([3, 9, 70, 127])
    planes = zip(
        layout.planes(layer.swa_cache_layer.kv_cache), layout.planes(expected), strict=True
    )
    same = all(torch.equal(a.flatten(0, 1)[written], b.flatten(0, 1)[written]) for a, b in planes)
    other = object()
    insert(other, kv, positions, slots)
    return {"same bytes": same, "others are theirs": called == [other]}


if __name__ == "__main__":
    torch.manual_seed(0)
    config = types.SimpleNamespace(num_speculative_tokens=5)
    builders = CompressedBuilder, IndexBuilder, WindowBuilder
    answer = {
        "planned": planned(),
        "inserted": inserted(),
        "bounds": [kind.get_varlen_cudagraph_max_query_len(config, None) for kind in builders],
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))
