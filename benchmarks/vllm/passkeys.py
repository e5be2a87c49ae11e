"""Does the trained tiny checkpoint answer through vLLM? ``ANYMLA_VLLM=off|force passkeys.py ROWS``.

Passkeys are asked for cold, again from cached prefixes, and after the engine has slept
(``--sleep``); on several GPUs (``--gpus``, ``--pipeline``, ``--data-parallel``), with drafts
(``--drafts``), with an adapter (``--lora``). With a connector (``--connector``) they are asked for
again when the GPU's prefixes are forgotten, so that caches come from where it has put them; with
``--role`` they are asked for in one engine, and then in another that gets its caches. The text
itself is scored, beside anymla in float32 on the same checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from anymla import LLM
from anymla.bench.environment import environment
from anymla.engines.vllm.answers import CPU_TAKES, GPU_TAKES, missing_sizes
from anymla.engines.vllm.pinned import installed_version
from anymla.model.tokenizer import Tokenizer
from anymla.testing.graft import graft_dspark, graft_passing_layer
from anymla.testing.retrieval import ANSWER, Hidden, hide
from anymla.testing.widen import widen

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TEXT = TINY / "persuasion.txt"
DEPTHS = (0.1, 0.5, 0.9)
ON_GPU = torch.cuda.is_available()
MEETING = "PASSKEYS_MEETING"  # folder where ranks wait for each other


def fitted(out: Path, gpus: int, drafter: str, *, pipeline: bool = False) -> Path:
    """The checkpoint, padded to what vLLM takes and to what so many GPUs share out.

    DSpark's drafter is put on it: random stages, and the pairs of tokens of the text. Each of two
    ranks of a pipeline gets layers of ratio 4 and 128, and as many as the other, without which vLLM
    finds no caches for it. What is there already is taken.
    """
    if out.exists():
        return out
    config = json.loads((TINY / "checkpoint" / "config.json").read_text())
    sizes = missing_sizes(config, GPU_TAKES if ON_GPU else CPU_TAKES)
    if gpus > 1:  # FP8 layers are cut between blocks
        sizes["moe_intermediate_size"] = 128 * gpus
    widen(TINY / "checkpoint", out, sizes, plain=not ON_GPU)
    if pipeline:
        graft_passing_layer(out, config["compress_ratios"].index(128))
        graft_passing_layer(out, config["num_hidden_layers"])
    if drafter == "dspark":
        graft_dspark(out, Tokenizer.from_dir(out).encode(TEXT.read_text("utf-8")))
    return out


def captured(asked: argparse.Namespace) -> list[int]:
    """Tokens of steps that are graphs: 1, 2 or 4 requests, with drafts or without, and blocks."""
    if asked.capture:
        return sorted(asked.capture)
    widths = {1, 2, asked.drafts + 1} | ({asked.drafts} if asked.drafter == "dspark" else set())
    return sorted({width * requests for width in widths for requests in (1, 2, 4)} - {0})


def scored(checkpoint: Path, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens but the first, by anymla in float32 on the CPU."""
    asked, answer = (checkpoint / f"{name}{len(token_ids)}.json" for name in ("asked", "scored"))
    if answer.exists():
        return list(json.loads(answer.read_text())["logprobs"][1:])
    asked.write_text(json.dumps(list(token_ids)))
    command = [sys.executable, "-m", "anymla", "score", "--checkpoint", str(checkpoint)]
    command += ["--dtype", "fp32", "--token-ids", str(asked), "--json", str(answer)]
    subprocess.run(command, check=True)
    return list(json.loads(answer.read_text())["logprobs"][1:])


def adapter(out: Path, checkpoint: Path, rank: int = 8) -> Path:
    """A random adapter of the queries of every attention layer."""
    from safetensors.torch import save_file

    config = json.loads((checkpoint / "config.json").read_text())
    numbers = torch.Generator().manual_seed(0)
    sizes = {"wq_b": (config["q_lora_rank"], config["num_attention_heads"] * config["head_dim"])}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            where = f"base_model.model.layers.{layer}.attn.{name}"
            down = torch.randn((rank, inputs), generator=numbers) / inputs**0.5
            up = torch.randn((outputs, rank), generator=numbers) * 0.05
            tensors |= {f"{where}.lora_A.weight": down, f"{where}.lora_B.weight": up}
    out.mkdir(exist_ok=True)
    kept = {name: each.bfloat16() for name, each in tensors.items()}
    save_file(kept, out / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings |= {"target_modules": list(sizes), "task_type": "CAUSAL_LM"}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    return out


def wait_for(*marks: Path, seconds: float = 300) -> None:
    """Wait until other processes have written all of these files."""
    end = time.monotonic() + seconds
    while not all(each.exists() for each in marks):
        if time.monotonic() > end:
            raise TimeoutError(f"no {' or '.join(each.name for each in marks)} in {seconds} s")
        time.sleep(0.2)


def settled(directory: Path, seconds: float = 60) -> int:
    """Wait until no file is added for two seconds; return how many there are."""
    end, before, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() < end:
        files = sum(each.suffix == ".bin" for each in directory.rglob("*"))
        if files != before:
            before, since = files, time.monotonic()
        elif files and time.monotonic() - since > 2:
            break
        time.sleep(0.2)
    return before


class Served:
    """The checkpoint in vLLM.

    Attributes:
        llm: vLLM's.
        model: anymla's, for its tokenizer.
        text: that passkeys are hidden in.
        token_ids: the beginning of it.
        exact: log-probabilities of these but the first, by anymla in float32.
        logprobs: file for vLLM's of the same tokens, or None.
        transfers: what a connector said of each prompt that was asked last.
        external: tokens so far whose caches came from a connector.
        lora: request for the adapter, or None.
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
        if asked.connector:
            options["kv_transfer_config"] = json.loads(asked.connector)
        self.lora: Any = None
        if asked.lora is not None:
            from vllm.lora.request import LoRARequest

            options |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
            options["lora_target_modules"] = asked.lora or None
            place = adapter(checkpoint.with_name(f"adapter-{os.getpid()}"), checkpoint)
            self.lora = LoRARequest("adapter", 1, str(place))
        self.llm = Engine(
            str(checkpoint),
            max_model_len=max(asked.lengths) + 1024,
            max_num_seqs=4,
            max_num_batched_tokens=asked.chunk,
            tensor_parallel_size=asked.gpus,
            pipeline_parallel_size=asked.pipeline,
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
        self.logprobs: Path | None = asked.logprobs
        self.transfers: list[Any] = []
        self.external = 0

    def ask(
        self, hidden: Sequence[Hidden], transfers: Sequence[Any] = (), new_tokens: int = ANSWER
    ) -> dict[str, Any]:
        """Ask for all passkeys at once; ``transfers`` are what a connector is told of each."""
        from vllm import SamplingParams

        stops = list(self.model.config.eos_token_ids)
        asked = [
            SamplingParams(
                temperature=0,
                max_tokens=new_tokens,
                stop_token_ids=stops,
                extra_args={"kv_transfer_params": transfer} if transfer else None,
            )
            for transfer in transfers or [None] * len(hidden)
        ]
        prompts = [{"prompt_token_ids": list(each.token_ids)} for each in hidden]
        outputs = self.llm.generate(prompts, asked, use_tqdm=False, lora_request=self.lora)
        self.transfers = [out.kv_transfer_params for out in outputs]
        said = [self.model.tokenizer.decode(list(out.outputs[0].token_ids)) for out in outputs]
        before, self.external = self.external, self.from_connectors()
        return {
            "found": sum(each.digits in text for each, text in zip(hidden, said, strict=True)),
            "of": len(hidden),
            "cached_tokens": sum(out.num_cached_tokens or 0 for out in outputs),
            "tokens_of_connectors": self.external - before,
            "said": said,
        }

    def from_connectors(self) -> int:
        """Tokens so far whose caches came from a connector."""
        name = "vllm:external_prefix_cache_hits"
        return round(sum(m.value for m in self.llm.get_metrics() if m.name == name))

    def score(self) -> dict[str, Any]:
        """Log-probabilities of the text beside anymla's in float32."""
        token_ids = self.token_ids
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompt = {"prompt_token_ids": list(token_ids)}
        self.llm.reset_prefix_cache()
        (output,) = self.llm.generate([prompt], asked, use_tqdm=False, lora_request=self.lora)
        found: Any = output.prompt_logprobs
        theirs = [found[i][token_ids[i]].logprob for i in range(1, len(token_ids))]
        ours = self.exact
        if self.logprobs:
            self.logprobs.write_text(json.dumps(theirs))
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


def data_parallel(ranks: int, place: Path) -> int:
    """Run this script once for each rank; return the worst exit code.

    Where one has stopped the others would wait for it, and are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"VLLM_DP_SIZE": ranks, "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
    children = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ
            | {name: str(value) for name, value in common.items()}
            | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), MEETING: str(place)},
        )
        for rank in range(ranks)
    ]
    while None in (codes := [each.poll() for each in children]) and not any(codes):
        time.sleep(0.2)
    for each in children:
        if each.poll() is None:
            each.terminate()
    return max(abs(each.wait()) for each in children)


def main() -> None:
    """Append the rows, as they come."""
    # That there is a GPU was asked above; a process that is forked after that has none.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallel")
    parser.add_argument("--pipeline", type=int, default=1, help="GPUs of a pipeline")
    parser.add_argument("--data-parallel", type=int, default=1, help="GPUs with whole engines")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--connector", default="", help="vLLM's kv_transfer_config, JSON")
    parser.add_argument("--role", choices=("prefill", "decode"), help="of two engines")
    parser.add_argument("--meet", type=Path, help="folder where the two engines meet")
    parser.add_argument("--lora", nargs="*", help="an adapter; names of layers, or none for all")
    parser.add_argument("--checkpoint", type=Path, help="keep the padded checkpoint, or take it")
    parser.add_argument("--logprobs", type=Path, help="file for the text's log-probabilities")
    parser.add_argument("--drafts", type=int, default=0, help="tokens")
    parser.add_argument("--drafter", choices=("mtp", "dspark"), default="mtp")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode")
    parser.add_argument("--capture", type=int, nargs="*", help="tokens of steps that are graphs")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the device")
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="compile kernels at the start")
    asked = parser.parse_args()
    ranks, rank = asked.data_parallel, int(os.environ.get("VLLM_DP_RANK", "0"))
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shared = max(asked.gpus, asked.pipeline, ranks)
        checkpoint = asked.checkpoint or place / "padded"
        fitted(checkpoint, shared, asked.drafter, pipeline=asked.pipeline > 1)
        if ranks > 1 and MEETING not in os.environ:
            sys.argv += [] if asked.checkpoint else ["--checkpoint", str(checkpoint)]
            sys.exit(data_parallel(ranks, place))
        if ranks > 1 and asked.logprobs:
            asked.logprobs = asked.logprobs.with_suffix(f".{rank}.json")
        served = Served(asked, checkpoint)
        started = round(time.perf_counter() - began)
        print(f"started in {started} s", flush=True)
        run(served, asked, {"backend": mode, "started_s": started, "rank": rank})
    if ranks > 1:  # an engine that has nothing to do runs on beside the others
        meeting = Path(os.environ[MEETING])
        (meeting / str(rank)).touch()
        wait_for(*(meeting / str(each) for each in range(ranks)))


def run(served: Served, asked: argparse.Namespace, about: dict[str, Any]) -> None:
    """Ask and score, and append the rows, as they come."""
    hidden = [
        hide(served.model, served.text, length, depth, seed=round(100 * depth) + length)
        for length in asked.lengths
        for depth in DEPTHS
    ]
    command = f"ANYMLA_VLLM={about['backend']} python benchmarks/vllm/passkeys.py ROWS " + " ".join(
        sys.argv[2:]
    )
    paths = {"rows", "meet", "checkpoint", "logprobs"}
    options = {name: value for name, value in vars(asked).items() if name not in paths}
    common = about | {"vllm": installed_version()} | options | environment(command)
    if ON_GPU:
        from anymla.bench.gpu import device_facts

        common |= device_facts()

    def row(case: str, found: dict[str, Any]) -> None:
        print(case, json.dumps(found), flush=True)
        with asked.rows.open("a") as file:
            file.write(json.dumps({"part": "passkeys", "case": case} | found | common) + "\n")

    if asked.role:
        hand_over(served, asked, hidden, row)
    else:
        row("cold", served.ask(hidden[about["rank"] :]))  # ranks have different things to do
        row("from cached prefixes", served.ask(hidden))
    if asked.connector and not asked.role:
        time.sleep(2)  # what is saved behind a step
        forgotten = served.llm.reset_prefix_cache()
        row("from the connector", {"forgotten": forgotten} | served.ask(hidden))
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


def hand_over(
    served: Served,
    asked: argparse.Namespace,
    hidden: Sequence[Hidden],
    row: Callable[[str, dict[str, Any]], None],
) -> None:
    """Compute caches in one engine and answer from them in the other; they meet in a folder."""
    settings, done, read = json.loads(asked.connector), asked.meet / "done", asked.meet / "read"
    directly = settings["kv_connector"].startswith("Nixl")  # memory to memory, without files
    if asked.role == "prefill":
        told = {"do_remote_decode": True, "do_remote_prefill": False} if directly else None
        row("prefill", served.ask(hidden, [told] * len(hidden), new_tokens=1))
        if not directly:  # what a step has made is saved behind the next one
            row("from cached prefixes", served.ask(hidden))
            row("saved", {"files": settled(asked.meet)})
        part = done.with_suffix(".part")
        part.write_text(json.dumps(served.transfers if directly else []))
        part.rename(done)
        wait_for(read)
    else:
        wait_for(done)
        with contextlib.ExitStack() as stack:
            stack.callback(read.touch)
            row("handed over", served.ask(hidden, json.loads(done.read_text())))


if __name__ == "__main__":
    main()
