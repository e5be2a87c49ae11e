"""Prompts that a worker prefills beside others' decodes, from workspaces: ``mixed_worker.py
ANSWER.json``.

Each layer runs beside vLLM's own CPU kernel. The answer has the worst of each part, and of every
step with prefills how many requests decode, how long the prefills are, and in how many chunks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from inputs import bf16_twin, prompt_of

from anymla.testing.tiny_checkpoint import TinyOptions

PROMPTS = (2600, 2000, 700, 40)
NEW_TOKENS, MOST_TOKENS = 4, 4096


class Worker:
    """Methods that vLLM adds to its worker."""

    def use_workspaces(self) -> None:
        """From now on prefills attend to workspaces, and each layer computes both ways."""
        import compare

        from anymla.engines.vllm import prefill
        from anymla.ops.attention import plan

        mock.patch.object(plan, "runs_on", return_value=True).start()
        self.steps: list[Any] = []
        chunks_of = prefill._chunks

        def noted(window: Any, positions: Any, ratio: int, requests_a_chunk: int) -> Any:
            chunks = chunks_of(window, positions, ratio, requests_a_chunk)
            if chunks:
                tokens = window.query_start_loc_cpu.diff()[window.num_decodes :].tolist()
                self.steps.append([ratio, window.num_decodes, tokens, len(chunks)])
            return chunks

        mock.patch.object(prefill, "_chunks", noted).start()
        compare.compare(self.model_runner.get_model())

    def found(self) -> dict[str, Any]:
        """What has been seen since."""
        import compare

        return {"parts": compare.report(), "steps": self.steps}


def run(checkpoint: Path) -> dict[str, Any]:
    """All prompts at once; more than a step takes."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        max_model_len=MOST_TOKENS,
        max_num_batched_tokens=MOST_TOKENS,
        max_num_seqs=4,
        worker_extension_cls="mixed_worker.Worker",
        seed=0,
    )
    llm.collective_rpc("use_workspaces")
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    (found,) = llm.collective_rpc("found")
    return found | {"tokens": [len(output.outputs[0].token_ids) for output in outputs]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        answer = run(bf16_twin(Path(directory), TinyOptions()))
    Path(sys.argv[1]).write_text(json.dumps(answer))
