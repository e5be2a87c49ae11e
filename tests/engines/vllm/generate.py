"""One run of vLLM in a process of its own: ``generate.py REQUEST.json ANSWER.json``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Start vLLM, then generate from each prompt; see ``servers.Run`` for the request."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        request["checkpoint"],
        max_model_len=4096,
        max_num_seqs=4,
        tensor_parallel_size=request["ranks"],
        worker_extension_cls="probe.Probe",
        seed=0,
        **request["engine"],
    )
    answer: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    answer["classes"] = llm.collective_rpc("anymla_classes")
    if request["backend"] is not None:
        answer["modules"] = llm.collective_rpc("anymla_use_backend", args=(request["backend"],))
    answer["runs"], answer["broken"] = [], []
    if request["unwritten"] is not None:
        for prompt, (first, end) in zip(request["prompts"], request["unwritten"], strict=True):
            llm.collective_rpc("anymla_leave_unwritten", args=(first, end))
            sampling = SamplingParams(temperature=0, max_tokens=request["new_tokens"])
            output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
            answer["broken"].append(list(output.outputs[0].token_ids))
            llm.collective_rpc("anymla_mend")
            llm.reset_prefix_cache()
    for compared in [False] * request["plain"] + [True] * request["compare"]:
        if compared:
            llm.collective_rpc("anymla_compare")
            if request["record"] is not None:
                llm.collective_rpc("anymla_record")
        for prompt in request["prompts"]:
            scored = request["score"] and not compared
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["new_tokens"],
                ignore_eos=True,
                prompt_logprobs=0 if scored else None,
                logprobs=0 if scored else None,
            )
            begun = time.perf_counter()
            output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
            logprobs = [
                next(iter(entry.values())).logprob
                for entry in (output.prompt_logprobs or [])
                if entry
            ]
            answer["runs"].append(
                {
                    "compared": compared,
                    "prompt_tokens": len(prompt),
                    "tokens": list(output.outputs[0].token_ids),
                    "seconds": time.perf_counter() - begun,
                    "prompt_logprobs": logprobs,
                    "logprobs": [
                        entry[token].logprob
                        for token, entry in zip(
                            output.outputs[0].token_ids,
                            output.outputs[0].logprobs or [],
                            strict=scored,
                        )
                    ],
                }
            )
    if request["record"] is not None:
        answer["recorded"] = llm.collective_rpc("anymla_save", args=(request["record"],))
    answer["reports"] = llm.collective_rpc("anymla_report") if request["compare"] else []
    return answer


if __name__ == "__main__":
    answered = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answered))
