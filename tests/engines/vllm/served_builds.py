"""What random traffic compiles after a rehearsal: ``served_builds.py ANSWER.json``.

On the model of ``host_calls.py``, by a machine that says it is an H200. Nothing is compiled: builds
are what Triton would be asked for. Steps are those that no graph replays: prefills, first chunks
and later ones, beside requests that decode, with drafts or without, and decodes of any number. With
``--apart`` prefills are not rehearsed behind decodes; with ``--two-ranks`` the model is the first
of two tensor parallel ranks, which exchange nothing.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import host_calls
import pretended
import torch

from anymla.ops.device import TARGETS
from anymla.testing import empty_kernels
from lab.launches import pretended_device

MOST_TOKENS, MOST_REQUESTS, LONGEST = 2048, 24, 16300
STEPS = 150
DRAFTS = 3  # most draft tokens of a request


def traffic(rng: random.Random) -> tuple[int, list[tuple[int, int]], int, int]:
    """A step, as arguments of ``host_calls.metadata``: the last is the number of draft tokens."""
    decodes = rng.choice([0, 0, 1, 2, 3, 4, 5, rng.randint(6, MOST_REQUESTS)])
    prompts = []
    drafts = rng.choice([0, decodes, DRAFTS * decodes, rng.randint(0, DRAFTS * decodes)])
    left = MOST_TOKENS - decodes - drafts
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5]) if decodes else rng.randint(1, 5)):
        count = min(left, rng.choice([2, 3, 17, 64, 100, 600, rng.randint(2, MOST_TOKENS)]))
        if count < 2 or decodes + len(prompts) == MOST_REQUESTS:
            break
        before = rng.choice([0, 0, 7, 1000, rng.randint(0, LONGEST - count)])
        prompts.append((count, count + before))
        left -= count
    context = rng.choice([1, 5, 130, 1023, 2047, 8192, rng.randint(1, LONGEST)])
    return decodes, prompts, context, drafts


def form(source: Any) -> str:
    """A build by its kernel, and the constants, types and hints that tell it from others."""
    names = source.fn.arg_names
    constants = {names[place[0]]: str(value) for place, value in source.constants.items()}
    hints = {names[place[0]]: str(value) for place, value in source.attrs.items()}
    return f"{source.fn.__name__} {constants} {source.signature} {hints}"


class TwoRanks:
    """Stand for vLLM's tensor parallel group of two, seen by the first."""

    world_size, rank, rank_in_group, local_rank = 2, 0, 0, 0
    ranks = (0, 1)
    device_group = cpu_group = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As many values, in new memory."""
        return torch.empty_like(x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Twice the values, in new memory."""
        shape = list(x.shape)
        shape[dim] *= self.world_size
        return x.new_empty(shape)


def join_two(config: Any, store: Path) -> None:
    """Join vLLM's groups of one rank, but for the tensor parallel one."""
    from vllm import _custom_ops
    from vllm.distributed import parallel_state

    join_alone(config, store)
    parallel_state._TP = TwoRanks()
    _custom_ops.vocab_parallel_embedding = lambda ids, weight, *_: weight.new_empty(
        (len(ids), weight.shape[1])
    )
    config.parallel_config.tensor_parallel_size = TwoRanks.world_size


def main(answer: Path, *, apart: bool) -> None:
    """Rehearse, serve, and write the builds of both."""
    from anymla.engines.vllm.warm_up import Rehearsal

    builds: list[str] = []

    class Noted(empty_kernels.EmptyKernel):
        def __init__(self, source: Any, launched: Any) -> None:
            builds.append(form(source))
            super().__init__(source, launched)

    empty_kernels.EmptyKernel = Noted  # type: ignore[misc]
    with (
        tempfile.TemporaryDirectory() as place,
        pretended_device(TARGETS["sm_90"]),
        host_calls.pretended_workspace(),
        empty_kernels.empty_kernels() as launches,
    ):
        step = host_calls.Step(Path(place))
        step.config.scheduler_config.max_num_seqs = MOST_REQUESTS
        step.config.scheduler_config.max_num_batched_tokens = MOST_TOKENS
        step.config.model_config.max_model_len = LONGEST
        step.config.speculative_config = types.SimpleNamespace(num_speculative_tokens=DRAFTS)
        rehearsal = Rehearsal(step.model, step.config)
        if apart:
            rehearsal.mixed_steps = lambda: None
        rehearsal.run()
        rehearsed = list(builds)
        builds.clear()
        launches.clear()
        rng = random.Random(0)
        compiled = []
        for _ in range(STEPS):
            served = traffic(rng)
            step.serve(*served)()
            compiled += [(*served, each) for each in builds]
            builds.clear()
    found = {"rehearsed": rehearsed, "compiled": compiled, "launches": sum(launches.values())}
    found["heads"] = step.layers[0].n_local_heads
    answer.write_text(json.dumps(found))


join_alone = pretended.join_alone
if __name__ == "__main__":
    torch.set_grad_enabled(False)
    pretended.pretend()
    if "--two-ranks" in sys.argv:
        pretended.join_alone = join_two
    main(Path(sys.argv[1]), apart="--apart" in sys.argv)
