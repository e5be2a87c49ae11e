"""Does the trained tiny checkpoint answer through vLLM? ``ANYMLA_VLLM=off|force passkeys.py ROWS``.

Passkeys are asked for cold, again from cached prefixes, and after the engine has slept
(``--sleep``); on several GPUs (``--gpus``), and with drafts (``--drafts``). The text itself is
scored, beside anymla in float32 on the same checkpoint.
"""

from __future__ import annotations

import argparse
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

from anymla import LLM
from anymla.bench.environment import environment
from anymla.engines.vllm.answers import CPU_TAKES, GPU_TAKES, missing_sizes
from anymla.engines.vllm.pinned import installed_version
from anymla.model.tokenizer import Tokenizer
from anymla.testing.graft import graft_dspark
from anymla.testing.retrieval import ANSWER, Hidden, hide
from anymla.testing.widen import widen

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TEXT = TINY / "persuasion.txt"
DEPTHS = (0.1, 0.5, 0.9)
ON_GPU = torch.cuda.is_available()


def fitted(out: Path, gpus: int, drafter: str) -> Path:
    """The checkpoint, padded to what vLLM takes and to what so many GPUs share out.

    DSpark's drafter is put on it: random stages, and the pairs of tokens of the text.
    """
    config = json.loads((TINY / "checkpoint" / "config.json").read_text())
    sizes = missing_sizes(config, GPU_TAKES if ON_GPU else CPU_TAKES)
    if gpus > 1:  # FP8 layers are cut between blocks
        sizes["moe_intermediate_size"] = 128 * gpus
    widen(TINY / "checkpoint", out, sizes, plain=not ON_GPU)
    if drafter == "dspark":
        graft_dspark(out, Tokenizer.from_dir(out).encode(TEXT.read_text("utf-8")))
    return out


def captured(asked: argparse.Namespace) -> list[int]:
    """Tokens of steps that are graphs: 1, 2 or 4 requests, with drafts or without, and blocks."""
    widths = {1, 2, asked.drafts + 1} | ({asked.drafts} if asked.drafter == "dspark" else set())
    return sorted({width * requests for width in widths for requests in (1, 2, 4)} - {0})


def scored(checkpoint: Path, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens but the first, by anymla in float32 on the CPU."""
    asked, answer = checkpoint / "asked.json", checkpoint / "scored.json"
    asked.write_text(json.dumps(list(token_ids)))
    command = [sys.executable, "-m", "anymla", "score", "--checkpoint", str(checkpoint)]
    command += ["--dtype", "fp32", "--token-ids", str(asked), "--json", str(answer)]
    subprocess.run(command, check=True)
    return list(json.loads(answer.read_text())["logprobs"][1:])


class Served:
    """The checkpoint in vLLM.

    Attributes:
        llm: vLLM's.
        model: anymla's, for its tokenizer.
        text: that passkeys are hidden in.
        token_ids: the beginning of it.
        exact: log-probabilities of these but the first, by anymla in float32.
    """

    def __init__(self, asked: argparse.Namespace, checkpoint: Path) -> None:
        """Start it."""
        from vllm import LLM as Engine

        options: dict[str, Any] = {}
        if asked.drafts:
            drafts = {"method": asked.drafter, "num_speculative_tokens": asked.drafts}
            options["speculative_config"] = drafts
        if ON_GPU:
            graphs = {"cudagraph_mode": asked.graphs, "cudagraph_capture_sizes": captured(asked)}
            options["compilation_config"] = graphs
            options["kernel_config"] = {"enable_jit_warmup": asked.rehearse}
            options["enable_sleep_mode"] = asked.sleep
        self.llm = Engine(
            str(checkpoint),
            max_model_len=max(asked.lengths) + 1024,
            max_num_seqs=4,
            max_num_batched_tokens=asked.chunk,
            tensor_parallel_size=asked.gpus,
            enable_expert_parallel=asked.expert_parallel,
            enable_prefix_caching=True,
            gpu_memory_utilization=asked.memory,
            kv_cache_memory_bytes=asked.cache_gib << 30 if ON_GPU else None,
            disable_log_stats=False,
            worker_extension_cls="in_worker.InWorker",
            seed=0,
            **options,
        )
        self.model = LLM(checkpoint, dtype="fp32", device="cpu")
        self.text = TEXT.read_text("utf-8")
        self.token_ids = self.model.tokenizer.encode(self.text)[: min(asked.lengths)]
        self.exact = scored(checkpoint, self.token_ids)

    def ask(self, hidden: Sequence[Hidden]) -> dict[str, Any]:
        """Ask for all passkeys at once."""
        from vllm import SamplingParams

        stops = list(self.model.config.eos_token_ids)
        asked = SamplingParams(temperature=0, max_tokens=ANSWER, stop_token_ids=stops)
        prompts = [{"prompt_token_ids": list(each.token_ids)} for each in hidden]
        outputs = self.llm.generate(prompts, asked, use_tqdm=False)
        said = [self.model.tokenizer.decode(list(out.outputs[0].token_ids)) for out in outputs]
        return {
            "found": sum(each.digits in text for each, text in zip(hidden, said, strict=True)),
            "of": len(hidden),
            "cached_tokens": sum(out.num_cached_tokens or 0 for out in outputs),
            "said": said,
        }

    def score(self) -> dict[str, Any]:
        """Log-probabilities of the text beside anymla's in float32."""
        token_ids = self.token_ids
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompt = {"prompt_token_ids": list(token_ids)}
        self.llm.reset_prefix_cache()
        found = self.llm.generate([prompt], asked, use_tqdm=False)[0].prompt_logprobs
        theirs = [found[i][token_ids[i]].logprob for i in range(1, len(token_ids))]
        ours = self.exact
        apart = sorted(abs(x - y) for x, y in zip(theirs, ours, strict=True))
        return {
            "tokens": len(token_ids),
            "median_nats": statistics.median(apart),
            "p99_nats": apart[int(0.99 * len(apart))],
            "mean": statistics.mean(theirs),
            "mean_in_float32": statistics.mean(ours),
        }

    def accepted(self) -> dict[str, float]:
        """Drafts so far, and how many were right."""
        names = {f"vllm:spec_decode_num_{what}_tokens": what for what in ("draft", "accepted")}
        return {names[m.name]: m.value for m in self.llm.get_metrics() if m.name in names}


def main() -> None:
    """Append the rows, as they come."""
    # That there is a GPU was asked above; a process that is forked after that has none.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallel")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--drafts", type=int, default=0, help="tokens")
    parser.add_argument("--drafter", choices=("mtp", "dspark"), default="mtp")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the device")
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="compile kernels at the start")
    asked = parser.parse_args()
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        served = Served(asked, fitted(Path(place) / "padded", asked.gpus, asked.drafter))
    started = round(time.perf_counter() - began)
    print(f"started in {started} s", flush=True)
    hidden = [
        hide(served.model, served.text, length, depth, seed=round(100 * depth) + length)
        for length in asked.lengths
        for depth in DEPTHS
    ]
    command = f"ANYMLA_VLLM={mode} python benchmarks/vllm/passkeys.py ROWS " + " ".join(
        sys.argv[2:]
    )
    options = {name: value for name, value in vars(asked).items() if name != "rows"}
    common = {"backend": mode, "vllm": installed_version(), "started_s": started}
    common |= options | environment(command)
    if ON_GPU:
        from anymla.bench.gpu import device_facts

        common |= device_facts()

    def row(case: str, found: dict[str, Any]) -> None:
        print(case, json.dumps(found), flush=True)
        with asked.rows.open("a") as file:
            file.write(json.dumps({"part": "passkeys", "case": case} | found | common) + "\n")

    row("cold", served.ask(hidden))
    row("from cached prefixes", served.ask(hidden))
    if asked.sleep:
        served.llm.sleep(level=1)
        row("asleep", {"device_gib": torch.cuda.mem_get_info()[0] / 2**30})
        served.llm.wake_up()
        row("after sleep", served.ask(hidden))
    row("text", served.score())
    if asked.drafts:
        row("drafts", served.accepted())
    for rank, found in enumerate(served.llm.collective_rpc("bench_audited")):
        if found:
            row(f"audit of rank {rank}", found)


if __name__ == "__main__":
    main()
