"""The plugin's model on one rank of a pipeline of two: ``pipeline.py ANSWER.json``.

As ``host_calls.py``, on the meta device of a machine that says it is an H200. Each rank is built
with an audit, rehearsed, and runs a step: the first one with token ids, the last one with what the
first hands over.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import host_calls
import numpy as np
import pretended
import torch

from anymla.ops.device import TARGETS
from anymla.testing.empty_kernels import empty_kernels
from lab.launches import pretended_device

RANKS = 2


def group(rank: int) -> Any:
    """Stand for vLLM's group of a pipeline."""
    first, last = rank == 0, rank == RANKS - 1
    return types.SimpleNamespace(
        rank_in_group=rank, world_size=RANKS, is_first_rank=first, is_last_rank=last
    )


def join(rank: int) -> Any:
    """Return what joins a process to its group: vLLM's groups of one rank, but for the pipeline."""

    def joined(config: Any, store: Path) -> None:
        from vllm.distributed import parallel_state

        if rank == 0:
            join_alone(config, store)
        parallel_state._PP = group(rank)

    return joined


def run_rank(step: Any, rank: int, given: Any) -> tuple[dict[str, Any], Any]:
    """Audit, rehearse and run the model of a rank; return what it has, and what it hands over."""
    from vllm.forward_context import set_forward_context
    from vllm.sequence import IntermediateTensors

    from anymla.audit.auditor import Auditor
    from anymla.audit.settings import Settings
    from anymla.engines.vllm import audit
    from anymla.engines.vllm.warm_up import Rehearsal

    log = logging.getLogger("audit")
    faults: list[str] = []
    log.exception = lambda *words, **_: faults.append(f"{words} {sys.exc_info()[1]!r}")  # type: ignore[method-assign]
    auditor = Auditor(Settings(every=1), log, {}, [])
    hooks = audit.Hooks(step.model, auditor)
    step.config.parallel_config.pipeline_parallel_size = RANKS
    Rehearsal(step.model, step.config).run()
    step.config.parallel_config.pipeline_parallel_size = 1
    tokens = 40
    built, positions = host_calls.metadata(step.layers, 8, [(32, 32)])
    ids = None if rank else host_calls._empty((tokens,), torch.int32)
    padding = host_calls._empty((tokens,), torch.bool)
    hooks.runner_chooses = True
    everyone = np.arange(tokens)
    for audited in (False, True):  # the first step makes the recorder
        if audited:
            auditor.begin()
            owners = np.minimum(everyone, 8)
            hooks.begin(everyone, owners, [f"r{i}" for i in range(9)], everyone >= 0)
        with set_forward_context(built, step.config, num_tokens=tokens, is_padding=padding):
            out = step.model.model(ids, positions, given, None)
    sections = sorted(name for name, used in hooks.recorder._used.items() if used)
    auditor.end(tokens)
    handed = isinstance(out, IntermediateTensors)
    found = {
        "attentions": [attention.prefix for attention in step.layers],
        "audited": sorted(hooks._methods),
        "recorded": sections,
        "ratios": len({attention.compress_ratio for attention in step.layers}),
        "faults": faults,
        "handed over": sorted(out.tensors) if handed else None,
        "shape": list((out["hidden_states"] if handed else out).shape),
    }
    return found, out if handed else None


def main(answer: Path) -> None:
    """Build and run both ranks, one after the other."""
    found = []
    given = None
    with (
        tempfile.TemporaryDirectory() as place,
        pretended_device(TARGETS["sm_90"]),
        host_calls.pretended_workspace(),
        empty_kernels(),
    ):
        for rank in range(RANKS):
            (Path(place) / str(rank)).mkdir()
            pretended.join_alone = join(rank)
            answered, given = run_rank(host_calls.Step(Path(place) / str(rank)), rank, given)
            found.append(answered)
    answer.write_text(json.dumps(found))


join_alone = pretended.join_alone
if __name__ == "__main__":
    torch.set_grad_enabled(False)
    pretended.pretend()
    main(Path(sys.argv[1]))
