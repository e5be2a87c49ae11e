"""Plans of attention that layers of the plugin share, without vLLM: ``shared_plans.py ANSWER.json
[DEVICE]``.

vLLM's modules are stand-ins here, and a step's metadata are made up: requests that decode, one that
is prefilled, rows of padding. On a GPU the layers are captured as one CUDA graph, which is replayed
for a step with other lengths.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import stand_ins
import torch
from torch import Tensor

stand_ins.install()

from kept_layer import bare  # noqa: E402
from measures import ulps  # noqa: E402

from anymla.engines.vllm import attention  # noqa: E402
from anymla.engines.vllm.metadata import WindowBuilder  # noqa: E402
from anymla.formats.page_layout import MAIN_FP8, get_layout  # noqa: E402
from anymla.layers import plans  # noqa: E402
from anymla.ops.device import runs_gluon  # noqa: E402

PAGES, PAGE, WINDOW = 64, 64, 128
RATIOS = (0, 4, 128, 0, 4, 128)


class Steps:
    """Layers and the metadata of their steps, which keep their addresses from step to step."""

    def __init__(self, device: torch.device, decodes: int, prefills: int, heads: int, width: int):
        self.device, self.decodes, self.tokens = device, decodes, decodes + prefills
        self.width = width
        self.q = torch.randn(self.tokens + 1, heads, 512, device=device, dtype=torch.bfloat16)
        layout = get_layout(MAIN_FP8)
        self.caches = [layout.allocate(PAGES, PAGE, device) for _ in range(2)]
        for cache in self.caches:
            slots = torch.arange(PAGES * PAGE, device=device)
            layout.write(cache, slots, torch.randn(len(slots), 512, device=device))
        self.chosen = self._listed(width)
        self.window, self.entries = self._listed(WINDOW).unsqueeze(1), self._listed(width)
        self.lengths = {name: self._ints() for name in ("window", "entries")}
        self.valid = torch.ones(self.tokens, dtype=torch.bool, device=device)
        self.layers = [self._layer(ratio, heads) for ratio in RATIOS]

    def _ints(self) -> Tensor:
        return torch.zeros(self.tokens, dtype=torch.int32, device=self.device)

    def _listed(self, width: int) -> Tensor:
        shape = self.tokens, width
        return torch.randint(PAGES * PAGE, shape, dtype=torch.int32, device=self.device)

    def _layer(self, ratio: int, heads: int) -> Any:
        return bare(
            attention.AnymlaAttention,
            prefix=f"main{ratio}",
            compress_ratio=ratio,
            scale=512**-0.5,
            PREFILL_CHUNK_SIZE=4,
            attn_sink=torch.zeros(heads, device=self.device),
            swa_cache_layer=types.SimpleNamespace(prefix="window", kv_cache=self.caches[0]),
            kv_cache=self.caches[1],
            indexer="some" if ratio == 4 else None,
            topk_indices_buffer=self.chosen,
        )

    def refill(self, padding: int) -> None:
        """The next step's lengths; its last tokens are padding."""
        for name, most in (("window", WINDOW), ("entries", self.width)):
            lengths = torch.randint(most + 1, (self.tokens,), dtype=torch.int32)
            lengths[self.decodes - padding : self.decodes] = 0
            self.lengths[name].copy_(lengths)
        self.valid.fill_(True)
        self.valid[self.decodes - padding : self.decodes] = False
        places = torch.arange(self.width, device=self.device)
        beyond = places >= self.lengths["entries"][:, None]
        self.chosen.copy_(torch.where(beyond, -1, self._listed(self.width) % (PAGE * 4)))
        self.entries.copy_(torch.where(beyond, -1, self._listed(self.width)))

    def metadata(self) -> dict[str, Any]:
        """As the builders make them for a step."""
        held, split = WindowBuilder.build_tile_scheduler(None, self.decodes), self.decodes
        window = types.SimpleNamespace(
            num_decode_tokens=split,
            num_prefill_tokens=self.tokens - split,
            decode_swa_indices=self.window[:split],
            decode_swa_lens=self.lengths["window"][:split],
            prefill_swa_indices=self.window[split:],
            prefill_swa_lens=self.lengths["window"][split:],
            is_valid_token=self.valid,
            **{f"tile_sched_{name}": plan for name, plan in held.items()},
        )
        table = torch.arange(PAGES, dtype=torch.int32, device=self.device)
        main = types.SimpleNamespace(
            c128a_global_decode_topk_indices=self.entries,
            c128a_decode_topk_lens=self.lengths["entries"],
            req_id_per_token=self._ints(),
            block_table=table[None],
            block_size=PAGE * 4,
        )
        return {"window": window, "main4": main, "main128": main}

    def run(self, backend: str | None = None) -> Tensor:
        """All layers once; the outputs of each."""
        stand_ins.context.attn_metadata = self.metadata()
        outputs = []
        for layer in self.layers:
            layer.backend = backend
            outputs.append(torch.full_like(self.q, torch.nan))
            layer.forward_mqa(self.q, None, None, outputs[-1])
        return torch.stack(outputs)


def followed(device: torch.device) -> dict[str, Any]:
    """Which plan each call of two steps was given, and how many were made."""
    steps, made, given = Steps(device, 3, 2, 4, 16), [], []
    real = attention.sparse_attention

    def make(lengths: Tensor, extra_lengths: Tensor | None, **sizes: int) -> Tensor:
        made.append([len(lengths), sizes["width"], sizes["extra_width"]])
        return torch.full((1,), len(made) - 1, dtype=torch.int32)

    def attend(*args: Any, plan: Tensor | None, **named: Any) -> Any:
        given.append(None if plan is None else int(plan))
        return real(*args, plan=plan, **named)

    with (
        mock.patch.object(plans, "sparse_attention_plan", make),
        mock.patch.object(attention, "sparse_attention", attend),
    ):
        for _ in range(2):
            steps.refill(1)
            steps.run()
    return {"made": made, "given": given}


def on_a_gpu(device: torch.device) -> dict[str, Any]:
    """Plans of each step; results of its replay against those of the step by itself."""
    found: dict[str, Any] = {"made": [], "values_that_differ": 0, "ulps": 0.0}
    found["hopper"] = runs_gluon(device)
    real = plans.sparse_attention_plan

    def make(*args: Any, **sizes: int) -> Tensor | None:
        plan = real(*args, **sizes)
        found["made"][-1] += plan is not None
        return plan

    for decodes, width in ((300, 512), (96, 2560)):
        steps = Steps(device, decodes, 0, 64, width)
        steps.refill(5)
        found["made"].append(0)
        with mock.patch.object(plans, "sparse_attention_plan", make):
            steps.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = steps.run()
        for padding in (5, 40, 0):
            steps.refill(padding)
            graph.replay()
            direct, other = steps.run(), steps.run("triton")
            found["values_that_differ"] += int((replayed != direct).sum())
            rows = slice(0, decodes)
            apart = ulps(direct[:, rows].flatten(0, 2).cpu(), other[:, rows].flatten(0, 2).cpu())
            found["ulps"] = max(found["ulps"], apart)
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    place = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    with torch.no_grad():
        answer = followed(place) if place.type == "cpu" else on_a_gpu(place)
    Path(sys.argv[1]).write_text(json.dumps(answer))
