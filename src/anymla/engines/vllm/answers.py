"""What vLLM answers to prompts of token ids, with the plugin or without it.

vLLM runs in a process of its own, ``python -m anymla.engines.vllm.answers ASKED ANSWERED``: what
the plugin replaces is decided when vLLM starts, and a second start in one process is not possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anymla.child_process import python_command
from anymla.engines.vllm.report import VARIABLE

# What kernels of vLLM 0.32 take of ``config.json``. On a CPU it is its router that is particular;
# the plugin's layers take any size.
CPU_TAKES = {"num_experts_per_tok": (6, 8), "n_routed_experts": (64, 128, 256, 384)}
# Index scores are DeepGEMM's, the top-k vLLM's own, and the FP8 ``wo_a`` is read in blocks of 128.
GPU_TAKES = CPU_TAKES | {
    "index_n_heads": (64,),
    "index_topk": (512, 1024, 2048),
    "o_lora_rank": (128, 256, 512, 1024),
}

_END_SECONDS = 20  # for vLLM's processes to end by themselves
_ROOM = 1024  # of whose multiples a request has room for tokens
_LAST_WORDS = 2000  # characters of the log


class EngineFailed(RuntimeError):
    """VLLM did not start or stopped; the message ends with its log's last words."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """What follows one prompt.

    Attributes:
        token_ids: generated, without the token that ended the text.
        logprobs: natural logarithms of their probabilities.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def missing_sizes(config: Mapping[str, Any], takes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes to which ``testing.widen`` has to pad a checkpoint; none if it fits.

    Args:
        config: the checkpoint's.
        takes: sizes that are taken, by name, ascending, num_experts_per_tok before
            n_routed_experts.

    Raises:
        ValueError: none is large enough.
    """
    sizes: dict[str, int] = {}
    for name, allowed in takes.items():
        had = config[name]
        least, unit = had, 1
        if name == "num_experts_per_tok":
            unit = had
        elif name == "n_routed_experts":
            chosen = config["num_experts_per_tok"]
            least = had * sizes.get("num_experts_per_tok", chosen) // chosen
        fits = [size for size in allowed if size >= least and size % unit == 0]
        if not fits:
            raise ValueError(f"{name} {least} cannot be padded to one of {allowed}")
        if fits[0] != had:
            sizes[name] = fits[0]
    return sizes


def answers(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    *,
    mode: str,
    new_tokens: int,
    stop_ids: Sequence[int],
) -> list[Reply]:
    """Start vLLM, continue each prompt greedily, one after the other, and end it.

    Args:
        checkpoint: a directory that vLLM can serve.
        prompts: token ids.
        mode: ANYMLA_VLLM, such as "off" or "auto".
        new_tokens: generated after each prompt, at most.
        stop_ids: tokens that end a text.

    Raises:
        EngineFailed: see there.
    """
    asked = {
        "checkpoint": str(checkpoint.resolve()),
        "prompts": [list(prompt) for prompt in prompts],
        "new_tokens": new_tokens,
        "stop_ids": list(stop_ids),
    }
    with tempfile.TemporaryDirectory() as name:
        request, answer, log = (Path(name) / each for each in ("asked", "answered", "log"))
        request.write_text(json.dumps(asked))
        command = python_command("-m", __spec__.name, str(request), str(answer))
        status = _finish(command, _environment(mode), log)
        if status or not answer.exists():
            words = log.read_text(errors="replace")[-_LAST_WORDS:]
            raise EngineFailed(f"vLLM ended with {status}: ...{words}")
        replies = json.loads(answer.read_text())
    return [Reply(tuple(each["token_ids"]), tuple(each["logprobs"])) for each in replies]


def _environment(mode: str) -> dict[str, str]:
    """Nothing is fetched; on a CPU a gigabyte of cache, unless told otherwise."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return defaults | os.environ | {VARIABLE: mode}


def _finish(command: list[str], env: dict[str, str], log: Path) -> int:
    """Run a command to its end; whatever it started ends with it. Its exit status."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait()
        finally:
            for number in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)


def _answer(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """In vLLM's process: the replies."""
    from vllm import LLM, SamplingParams

    new, longest = asked["new_tokens"], max(map(len, asked["prompts"]))
    room = -(-(longest + new) // _ROOM) * _ROOM
    llm = LLM(asked["checkpoint"], max_model_len=room, max_num_seqs=4, seed=0)
    sampling = SamplingParams(
        temperature=0, max_tokens=new, stop_token_ids=asked["stop_ids"], logprobs=0
    )
    replies = []
    for prompt in asked["prompts"]:
        done = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        pairs = [
            (token, found[token].logprob)
            for token, found in zip(done.token_ids, done.logprobs or (), strict=True)
            if token not in asked["stop_ids"]
        ]
        tokens, logprobs = zip(*pairs, strict=True) if pairs else ((), ())
        replies.append({"token_ids": tokens, "logprobs": logprobs})
    return replies


if __name__ == "__main__":
    answered = _answer(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answered))
