"""Judge layers, and how chaotic the model is: ``ANYMLA_VLLM=off|force check_layers.py ROWS``."""

from __future__ import annotations

import collections
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from random_model import engine, model_of, prompt

from anymla.audit.checks import Finding
from anymla.audit.packet import Packed
from anymla.audit.process import Answer
from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.formats.fp8_block import dequantize_fp8_weight

LENGTHS = (40, 700, 2600)  # window and sink; every entry chosen; the indexer chooses
NOISE = (2**-9, 0.01, 0.03)


class Run:
    """An engine, and the log-probabilities of prompts' tokens under changes to its layers."""

    def __init__(self) -> None:
        """Build the engine."""
        self.llm = engine(enforce_eager=True, max_model_len=4096)
        self.model = model_of(self.llm)
        self.layers = [m for m in self.model.modules() if hasattr(m, "swa_cache_layer")]

    def scores(self) -> dict[int, list[float]]:
        """By prompt length."""
        from vllm import SamplingParams

        asked = SamplingParams(
            temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, prompt_logprobs=0
        )
        found = {}
        for length in LENGTHS:
            given = prompt(length, 77)
            output = self.llm.generate([given], asked, use_tqdm=False)[0]
            tokens = given["prompt_token_ids"]
            found[length] = [output.prompt_logprobs[i][tokens[i]].logprob for i in range(1, length)]
        return found

    def noisy(self, size: float) -> dict[int, list[float]]:
        """With every attention layer's output changed by a share of each value."""
        for layer in self.layers:
            project = layer._o_proj

            def changed(o: Any, positions: Any, project: Any = project) -> Any:
                y = project(o, positions)
                return y * (1 + size * torch.randn_like(y))

            vars(layer)["_o_proj"] = changed
        try:
            return self.scores()
        finally:
            for layer in self.layers:
                del vars(layer)["_o_proj"]

    def in_float32(self) -> dict[int, list[float]]:
        """With FP8 linear layers in float32, their inputs not quantised; for good."""
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if getattr(weight, "dtype", None) != torch.float8_e4m3fn or not weight.numel():
                continue
            if getattr(module, "is_bmm", False):
                continue
            dense = _dense(module).bfloat16()  # exact: codes times powers of two

            def apply(layer: Any, x: Any, bias: Any = None, dense: Any = dense) -> Any:
                return (x.float() @ dense.float().T).to(torch.bfloat16)

            module.quant_method.apply = apply
        for layer in self.layers:
            if layer.wo_a.weight.numel():
                self._project_in_bf16(layer)
        return self.scores()

    def _project_in_bf16(self, layer: Any) -> None:
        from anymla.ops.linear import grouped_output_projection

        weight = _dense(layer.wo_a).view(layer.n_local_groups, layer.o_lora_rank, -1).bfloat16()
        table = layer.rotary_emb.cos_sin_cache.float()

        def project(o: Any, positions: Any) -> Any:
            return layer.wo_b(grouped_output_projection(o, positions, table, weight))

        vars(layer)["_o_proj"] = project


def _dense(module: Any) -> torch.Tensor:
    scale = module.weight_scale_inv
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    codes = module.weight.view(torch.uint8).flatten(0, -2)
    return dequantize_fp8_weight(codes, scale.flatten(0, -2), torch.float32)


def audited(run: Run) -> list[dict[str, Any]]:
    """Every method of every layer at every step: cases, alarms, worst and mean error."""
    os.environ["ANYMLA_AUDIT"] = "every=1,requests=16,layers=8"
    from anymla.audit.auditor import Auditor
    from anymla.engines.vllm.audit import runners

    seen: dict[str, list[Finding]] = collections.defaultdict(list)

    class Keeping(Auditor):
        def _note(self, packed: Packed, index: int, answer: Answer) -> None:
            if isinstance(answer, Finding):
                seen[packed.planned[index].method].append(answer)
            super()._note(packed, index, answer)

    runners.Auditor = Keeping  # type: ignore[misc]
    auditor = runners.start(run.model).auditor
    run.scores()
    auditor.drain()
    return [
        {
            "part": f"audit of {method}",
            "cases": len(found),
            "alarms": sum(not each.ok for each in found),
            "worst_of_bound": max(each.worst for each in found),
            "rms_of_bound": max(each.mean for each in found),
        }
        for method, found in sorted(seen.items())
    ]


def main(path: Path) -> None:
    """Append the rows."""
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    run = Run()
    base = run.scores()
    changes = {"again": run.scores()}
    changes |= {f"noise of {size:.2g} in attention": run.noisy(size) for size in NOISE}
    rows = audited(run)
    changes["linear layers in float32"] = run.in_float32()
    for name, scores in changes.items():
        row: dict[str, Any] = {"part": "log-probabilities", "case": name}
        for length, values in scores.items():
            apart = [abs(x - y) for x, y in zip(values, base[length], strict=True)]
            row[f"median_nats_{length}"] = statistics.median(apart)
        rows.append(row)
    command = f"ANYMLA_VLLM={mode} python benchmarks/vllm/check_layers.py"
    with path.open("a") as file:
        for row in rows:
            row = row | {"backend": mode} | environment(command) | device_facts()
            print(row)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
