"""Does vLLM score and continue text with DeepSeek-V4.1 as anymla does?

``ANYMLA_VLLM=auto|force|off v41.py ROWS``. The checkpoint is a random one of eight layers that
share entries, whose indexer chooses 16 entries within 4 blocks of 8. Log-probabilities of prompts
and of the tokens decoded after them are compared with anymla's in float32 for the same text, and
so are anymla's own in bfloat16, which say how much this random model amplifies roundings. A prompt
is asked for at once, or in chunks (``--chunk``), and again from cached prefixes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.engines.vllm.pinned import installed_version
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing, default_shared_ratios

RATIOS = default_shared_ratios(8)
NEW_TOKENS = 24


def checkpoint(directory: Path) -> Path:
    """Write the checkpoint: FP4 experts and FP8 linear layers, as released."""
    sharing = dataclasses.replace(TinySharing.of(RATIOS), candidate_blocks=4)
    options = TinyOptions(ratios=RATIOS, hash_layers=0, mtp=0, index_topk=16, sharing=sharing)
    write_tiny_checkpoint(directory, options)
    return directory


def prompt_of(tokens: int) -> list[int]:
    """Return token ids that repeat nothing for long."""
    return [2 + (i * 7919 + i * i * 31) % 250 for i in range(tokens)]


def scored(checkpoint: Path, token_ids: Sequence[int], dtype: str) -> list[float]:
    """Return log-probabilities of all tokens but the first, by anymla with vLLM's cache rows."""
    text, answer = checkpoint / "text.json", checkpoint / "scores.json"
    text.write_text(json.dumps(list(token_ids)))
    command = [sys.executable, "-m", "anymla", "score", "--checkpoint", str(checkpoint)]
    command += ["--dtype", dtype, "--kv-cache", "fp8", "--token-ids", str(text)]
    subprocess.run([*command, "--json", str(answer)], check=True)
    return list(json.loads(answer.read_text())["logprobs"][1:])


def ask(llm: Any, lengths: Sequence[int]) -> list[tuple[list[int], list[float], int]]:
    """Return of each prompt the whole text, its log-probabilities, and the cached tokens."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in lengths]
    answers = []
    for length, output in zip(lengths, llm.generate(prompts, asked, use_tqdm=False), strict=True):
        text, made = prompt_of(length), output.outputs[0]
        found = [output.prompt_logprobs[i][text[i]].logprob for i in range(1, length)]
        decoded = list(made.token_ids)
        found += [each[token].logprob for each, token in zip(made.logprobs, decoded, strict=True)]
        answers.append((text + decoded, found, output.num_cached_tokens or 0))
    return answers


def ask_again(llm: Any, lengths: Sequence[int]) -> list[tuple[list[int], list[float], int]]:
    """Return the same without log-probabilities of the prompts, which are read from the cache.

    A prompt whose log-probabilities are asked for is computed anew.
    """
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in lengths]
    answers = []
    for length, output in zip(lengths, llm.generate(prompts, asked, use_tqdm=False), strict=True):
        made = output.outputs[0]
        decoded = list(made.token_ids)
        found = [each[token].logprob for each, token in zip(made.logprobs, decoded, strict=True)]
        answers.append((prompt_of(length) + decoded, found, output.num_cached_tokens or 0))
    return answers


def apart(
    directory: Path, answers: list[tuple[list[int], list[float], int]]
) -> dict[str, float | int]:
    """Return how far the log-probabilities are from float32, beside anymla's own in bfloat16."""
    theirs: list[float] = []
    ours: list[float] = []
    for text, found, _ in answers:
        exact = scored(directory, text, "fp32")[-len(found) :]
        theirs += [abs(x - y) for x, y in zip(found, exact, strict=True)]
        narrow = scored(directory, text, "bf16")[-len(found) :]
        ours += [abs(x - y) for x, y in zip(narrow, exact, strict=True)]
    return {
        "tokens": len(theirs),
        "cached_tokens": sum(cached for _, _, cached in answers),
        "median_nats": statistics.median(theirs),
        "mean_nats": statistics.mean(theirs),
        "median_nats_of_anymla_bf16": statistics.median(ours),
        "mean_nats_of_anymla_bf16": statistics.mean(ours),
    }


def main() -> None:
    """Append the rows, as they come."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[61, 300, 1500])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the device")
    asked = parser.parse_args()
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    command = f"ANYMLA_VLLM={mode} python benchmarks/vllm/v41.py ROWS " + " ".join(sys.argv[2:])
    options = {name: value for name, value in vars(asked).items() if name != "rows"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        directory = checkpoint(Path(place) / "v41")
        from vllm import LLM

        llm = LLM(
            str(directory),
            skip_tokenizer_init=True,
            max_model_len=max(asked.lengths) + 256,
            max_num_seqs=4,
            max_num_batched_tokens=asked.chunk,
            enable_prefix_caching=True,
            gpu_memory_utilization=asked.memory,
            kv_cache_memory_bytes=2 << 30,
            compilation_config={
                "cudagraph_mode": asked.graphs,
                "cudagraph_capture_sizes": [1, 2, 4],
            },
            kernel_config={"enable_jit_warmup": False},
            seed=0,
        )
        print(f"started in {time.perf_counter() - began:.0f} s", flush=True)
        common = {"backend": mode, "vllm": installed_version(), **options, **environment(command)}
        common |= device_facts() if torch.cuda.is_available() else {}

        def row(case: str, found: dict[str, Any]) -> None:
            print(case, json.dumps(found), flush=True)
            with asked.rows.open("a") as file:
                file.write(json.dumps({"part": "v41", "case": case} | found | common) + "\n")

        row("at once", apart(directory, ask(llm, asked.lengths)))
        row("from cached prefixes", apart(directory, ask_again(llm, asked.lengths)))


if __name__ == "__main__":
    main()
