"""Launching a kernel before the one in front of it has ended (programmatic dependent launch).

What a launch costs then passes while the kernel before is still at work, and so does what a kernel
does before it waits. A launcher gives its kernel ``**early_launch(device)``, the kernel has a
constexpr EARLY and begins

    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # as early as is useful
        tl.extra.cuda.gdc_wait()

Where ``EARLY`` is False, nothing of it is compiled. What has to hold for every such kernel:

- Every program waits before it ends, also one that has nothing to do. The end of a kernel then says
  that all kernels before it have ended, and waiting for one is waiting for all.
- Before it waits, a program writes nothing, and reads only its arguments and what stays as it is
  while kernels are being launched: weights, their scales, tables.
- ``gdc_launch_dependents`` promises nothing, so its place is free. The next kernel starts once all
  programs have come by it (or ended), takes the room that they leave, and waits there.

A kernel that is launched without this may follow or go before: it begins when all before it has
ended, and what follows it begins when it has ended, unless it says otherwise itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from anymla.ops._triton import Target, target_of


def launches_early(target: Target) -> bool:
    """Whether kernels are launched early: where they have run that way."""
    return target.name == "sm_90"


@functools.cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch, ``EARLY`` and the option that goes with it; not to be changed."""
    if launches_early(target_of(device)):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
