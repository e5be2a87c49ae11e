"""Programmatic dependent launch (PDL): a kernel starts before the one in front of it has ended.

What a launch costs then passes while the kernel before is still at work, and so does what a kernel
does before it waits. A launcher gives its kernel ``**pdl_launch(device)``, the kernel has a
constexpr PDL and, after what it can do beforehand,

    if PDL:
        gdc_wait()
        gdc_launch_dependents()

Where ``PDL`` is False, nothing of it is compiled. What has to hold for every such kernel:

- Every CTA waits before it ends, also one that has nothing to do. The end of a kernel then says
  that all kernels before it have ended, and waiting for one is waiting for all.
- Before it waits, a CTA writes nothing, and reads only its arguments and what stays as it is
  while kernels are being launched: weights, their scales, tables. If the kernel in front of it is
  of the same operation, and lets it start only after its own waiting, what was there for that one
  may be read too, past the first-level cache (experts: which weights w2's kernel asks for).
- It lets the next kernel begin after it has waited. That is a matter of speed: the other way round
  each kernel's start lets the next one start, many of them stand on the SMs, and blocks
  meant for one SM each are put where there is room, several on one. Chains of
  hyper-connections on an H200, us a site: 5.5 against 5.0 for one token, 7.0 against 5.9 for 16.
  For the same reason kernels whose blocks have no room beside each other let the next one in late,
  or not at all (128 tokens: 14.0 at once, 10.5 late, 11.7 launched plainly).

A kernel that is launched without this may follow or go before: it begins when all before it has
ended, and what follows it begins when it has ended, unless it says otherwise itself.

With ANYMLA_PDL=0 in the environment when the package is imported, every kernel is launched
plainly: to look for a fault, or to see what it gains (2 to 16 % of a decode layer on an H200).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor
from triton.language.extra import cuda

from anymla.ops.device import Target, target_of

# Triton 3.3 looks names up even where they are dead, and has no such functions.
gdc_wait: Any = getattr(cuda, "gdc_wait", None)
gdc_launch_dependents: Any = getattr(cuda, "gdc_launch_dependents", None)

_CHOSEN = os.environ.get("ANYMLA_PDL") != "0"


def target_has_pdl(target: Target) -> bool:
    """Whether kernels are launched early: where they have run that way."""
    return target.name == "sm_90"


def pdl_launch(device: torch.device, *read_first: Tensor | None) -> dict[str, Any]:
    """Arguments of a launch: ``PDL`` and the option that goes with it; not to be changed.

    Args:
        device: where.
        read_first: what the kernel reads before it waits. A launcher makes such a tensor contiguous
            if it is not, by a kernel that then has to be waited for.
    """
    for tensor in read_first:
        if tensor is not None and not tensor.is_contiguous():
            return {"PDL": False}
    return _pdl_launch(device)


def pdl_enabled(device: torch.device) -> bool:
    """Whether kernels that can be are launched early on this device."""
    return bool(_pdl_launch(device)["PDL"])


@functools.cache
def _pdl_launch(device: torch.device) -> dict[str, Any]:
    if _CHOSEN and target_has_pdl(target_of(device)):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
