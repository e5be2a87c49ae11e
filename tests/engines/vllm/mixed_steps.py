"""Steps that mix decodes and prefills, in the plugin's layers, without vLLM:
``mixed_steps.py ANSWER.json [DEVICE]``.

The layers attend to decoded workspaces, all prefills in one or few in each, and by slots. vLLM's
modules are stand-ins here, its workspace is full of NaNs and locked after the profile run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import stand_ins
import torch
from torch import Tensor

stand_ins.install()

from measures import ulps  # noqa: E402
from mixed_batch import RATIOS, SPANS, Step  # noqa: E402

from anymla.engines.vllm import prefill  # noqa: E402
from anymla.ops.attention import plan  # noqa: E402


class Manager:
    """vLLM's workspace: grows until it is locked."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.locked, self.num_bytes = device, False, 0

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        (((num_bytes,), dtype),) = wanted
        assert dtype == torch.uint8
        assert not self.locked or num_bytes <= self.num_bytes
        self.num_bytes = max(self.num_bytes, num_bytes)
        return [torch.full((num_bytes,), 0xFF, dtype=dtype, device=self.device)]


def compared(device: torch.device) -> dict[str, Any]:
    """Outputs of all tokens, by workspaces and by slots; and what memory they took."""
    step = Step(device)
    found: dict[str, Any] = {"apart": [], "padding": 0.0, "chunks": [], "overflows": 0}
    spaces: list[Any] = []
    over = prefill.Workspace.over

    def watched(buffer: Tensor) -> Any:
        spaces.append(over(buffer))
        return spaces[-1]

    for ratio in RATIOS:
        for requests_a_chunk in (len(SPANS), 2):
            manager = stand_ins.workspace.manager = Manager(device)
            layer = step.layer(ratio, requests_a_chunk)
            outputs = []
            for has_workspaces in (True, False):
                metadata = step.metadata(requests_a_chunk)
                outputs.append(torch.full_like(step.q, torch.nan))
                with (
                    mock.patch.object(plan, "runs_on", return_value=has_workspaces),
                    mock.patch.object(prefill.Workspace, "over", watched),
                ):
                    stand_ins.context.attn_metadata = None
                    layer.forward_mqa(step.q, None, step.positions, outputs[-1])
                    assert not outputs[-1].any()
                    manager.locked = True
                    outputs[-1].fill_(torch.nan)
                    stand_ins.context.attn_metadata = metadata
                    layer.forward_mqa(step.q, None, step.positions, outputs[-1])
                if has_workspaces:
                    _, plans = stand_ins.context.additional_kwargs["anymla"]["plans"]
                    found["chunks"].append(len(plans._chunks[ratio]))
            real = slice(0, step.tokens)
            decoded, by_slots = (out.flatten(1) for out in outputs)
            found["apart"].append(ulps(decoded[real].cpu(), by_slots[real].cpu()))
            found["padding"] = max(found["padding"], float(decoded[step.tokens :].abs().max()))
    found["overflows"] = sum(space.overflows for space in spaces)
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        place = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
        Path(sys.argv[1]).write_text(json.dumps(compared(place)))
