"""Answers of vLLM to prompts of token ids, with the plugin or without it.

vLLM runs in a process of its own, ``python -m anymla.engines.vllm.answers ASKED ANSWERED``: the
plugin's replacements are decided when vLLM starts, and it cannot start twice in one process.
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

# Sizes in ``config.json`` that kernels of vLLM 0.32 support. On a CPU only its router has limits;
# the plugin's layers support any size.
CPU_TAKES = {"num_experts_per_tok": (6, 8), "n_routed_experts": (64, 128, 256, 384)}
# Index scores run in DeepGEMM, the top-k in vLLM's kernel, and the FP8 ``wo_a`` is read in blocks
# of 128.
GPU_TAKES = CPU_TAKES | {
    "index_n_heads": (64,),
    "index_topk": (512, 1024, 2048),
    "o_lora_rank": (128, 256, 512, 1024),
}

_END_SECONDS = 20  # seconds for vLLM's processes to end by themselves
_ROOM = 1024  # room for tokens per request is a multiple of this
_LAST_WORDS = 2000  # characters of the log's end that are reported


class EngineFailed(RuntimeError):
    """VLLM did not start or stopped; the message ends with its log's last words."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """Continuation of one prompt.

    Attributes:
        token_ids: generated tokens, without the token that ended the text.
        logprobs: natural logarithms of the tokens' probabilities.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def missing_sizes(config: Mapping[str, Any], takes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes to which ``testing.widen`` must pad a checkpoint; {} if it fits.

    Args:
        config: configuration of the checkpoint, ``config.json``.
        takes: supported sizes by name, ascending, num_experts_per_tok before n_routed_experts.

    Raises:
        ValueError: no supported size is large enough.
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
    """Start vLLM, continue the prompts greedily one after the other, and end it.

    Args:
        checkpoint: directory that vLLM can serve.
        prompts: token ids of each prompt.
        mode: value of ANYMLA_VLLM, such as "off" or "auto".
        new_tokens: most tokens generated after each prompt.
        stop_ids: ids of tokens that end a text.

    Raises:
        EngineFailed: vLLM did not start, or stopped.
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
    """Return the environment: offline, and on a CPU one gigabyte of cache by default."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return defaults | os.environ | {VARIABLE: mode}


def _finish(command: list[str], env: dict[str, str], log: Path) -> int:
    """Run a command and its children to the end, and return its exit status."""
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
    """Return the replies; runs in vLLM's process."""
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
