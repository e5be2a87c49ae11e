"""Launching a kernel before the one in front of it has ended (programmatic dependent launch).

What a launch costs then passes while the kernel before is still at work, and so does what a kernel
does before it waits. A launcher gives its kernel ``**early_launch(device)``, the kernel has a
constexpr EARLY and, after what it can do beforehand,

    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

Where ``EARLY`` is False, nothing of it is compiled. What has to hold for every such kernel:

- Every program waits before it ends, also one that has nothing to do. The end of a kernel then says
  that all kernels before it have ended, and waiting for one is waiting for all.
- Before it waits, a program writes nothing, and reads only its arguments and what stays as it is
  while kernels are being launched: weights, their scales, tables. If the kernel in front of it is
  of the same operation, and lets it start only after its own waiting, what was there for that one
  may be read too, past the first-level cache (experts: which weights w2's kernel asks for).
- It lets the next kernel begin after it has waited. That is a matter of speed: the other way round
  each kernel's start lets the next one start, many of them stand on the multiprocessors, and blocks
  meant for one multiprocessor each are put where there is room, several on one. Chains of
  hyper-connections on an H200, us a site: 5.5 against 5.0 for one token, 7.0 against 5.9 for 16.
  For the same reason kernels whose blocks have no room beside each other let the next one in late,
  or not at all (128 tokens: 14.0 at once, 10.5 late, 11.7 launched plainly).

A kernel that is launched without this may follow or go before: it begins when all before it has
ended, and what follows it begins when it has ended, unless it says otherwise itself.

With ANYMLA_EARLY_LAUNCH=0 in the environment when the package is imported, every kernel is launched
plainly: to look for a fault, or to see what it gains (2 to 16 % of a decode layer on an H200).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from anymla.ops._triton import Target, target_of

_CHOSEN = os.environ.get("ANYMLA_EARLY_LAUNCH") != "0"


def launches_early(target: Target) -> bool:
    """Whether kernels are launched early: where they have run that way."""
    return target.name == "sm_90"


def early_launch(device: torch.device, *read_first: Tensor | None) -> dict[str, Any]:
    """Arguments of a launch: ``EARLY`` and the option that goes with it; not to be changed.

    Args:
        device: where.
        read_first: what the kernel reads before it waits. A launcher makes such a tensor contiguous
            if it is not, by a kernel that then has to be waited for.
    """
    for tensor in read_first:
        if tensor is not None and not tensor.is_contiguous():
            return {"EARLY": False}
    return _early_launch(device)


def starts_early(device: torch.device) -> bool:
    """Whether kernels that can be are launched early on this device."""
    return bool(_early_launch(device)["EARLY"])


@functools.cache
def _early_launch(device: torch.device) -> dict[str, Any]:
    if _CHOSEN and launches_early(target_of(device)):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
