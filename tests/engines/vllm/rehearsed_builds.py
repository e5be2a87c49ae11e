"""What a rehearsal compiles before it runs, and while: ``rehearsed_builds.py ANSWER.json``.

On the model of ``host_calls.py``, by a machine that says it is an H200. Nothing is compiled: builds
are what Triton would be asked for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import host_calls
import pretended
import torch

from anymla.ops.device import TARGETS
from anymla.testing import empty_kernels
from lab.launches import pretended_device

MOST_TOKENS, MOST_REQUESTS, LONGEST = 2048, 24, 16384


def main(answer: Path) -> None:
    """Rehearse; write builds and launches of each pass."""
    from anymla.engines.vllm.warm_up import Rehearsal

    builds: list[str] = []

    class Noted(empty_kernels.EmptyKernel):
        def __init__(self, source: Any, launched: Any) -> None:
            builds.append(source.fn.__name__)
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
        rehearsal, passes = Rehearsal(step.model, step.config), []
        inner, run = step.model.model, rehearsal.steps

        def steps() -> None:
            builds.clear()
            launches.clear()
            run()
            launched = sum(launches.values())
            layers = len(inner.layers)
            passes.append({"builds": list(builds), "launches": launched, "layers": layers})

        rehearsal.steps = steps
        rehearsal.run()
        layers = inner.start_layer, inner.end_layer, len(inner.layers)
    answer.write_text(json.dumps({"passes": passes, "layers": layers}))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    pretended.pretend()
    main(Path(sys.argv[1]))
