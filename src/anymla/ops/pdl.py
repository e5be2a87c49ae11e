"""Programmatic dependent launch (PDL): a kernel starts before its predecessor has ended.

A kernel's launch latency, and its work before it waits, then overlap with the predecessor's work. A
launcher passes ``**pdl_launch(device)`` to its kernel, and the kernel has a constexpr PDL and,
after its prologue,

    if PDL:
        gdc_wait()
        gdc_launch_dependents()

With ``PDL`` False, none of this is compiled. Every such kernel must obey these rules:

- Every CTA waits before it ends, even one without work. A kernel's end then implies that all
  kernels before it have ended, so waiting for one kernel waits for all.
- Before it waits, a CTA writes nothing, and reads only its arguments and memory that no kernel
  writes: weights, their scales, tables. If its predecessor is of the same operation and triggers
  only after its own wait, the CTA may also read what that predecessor could read after waiting,
  bypassing the L1 cache (experts: the list of weights to fetch for w2's kernel).
- It triggers the next kernel after it has waited. This rule is for speed: in the other order, each
  kernel's start lets the next one start, many kernels become resident, and CTAs meant for one SM
  each are placed several to an SM. Chains of hyper-connections on an H200 take 5.0 us a site for
  one token and 5.9 us for 16 in this order, 5.5 and 7.0 in the other. For the same reason, kernels
  whose CTAs do not fit beside each other trigger late or never (128 tokens: 14.0 us triggering at
  once, 10.5 late, 11.7 without PDL).

A kernel launched without PDL may stand before or after one with it: it starts when all kernels
before it have ended, and its successor starts when it has ended.

If ANYMLA_PDL=0 is in the environment when the package is imported, PDL is off: to look for a fault,
or to measure its gain (2 to 16 % of a decode layer on an H200).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor
from triton.language.extra import cuda

from anymla.ops.device import Target, target_of

# Triton 3.3 lacks these functions, but resolves their names even in dead code.
gdc_wait: Any = getattr(cuda, "gdc_wait", None)
gdc_launch_dependents: Any = getattr(cuda, "gdc_launch_dependents", None)

_CHOSEN = os.environ.get("ANYMLA_PDL") != "0"


def target_has_pdl(target: Target) -> bool:
    """Return True for architectures on which kernels were run with PDL."""
    return target.name == "sm_90"


def pdl_launch(device: torch.device, *read_first: Tensor | None) -> dict[str, Any]:
    """Return the launch's PDL arguments: the constexpr ``PDL`` and the launch option.

    Callers share the returned dictionary and must not change it.

    Args:
        device: device that the kernel runs on.
        read_first: tensors that the kernel reads before it waits. PDL is off if one is not
            contiguous, because the launcher then copies it by a kernel that has to be waited for.
    """
    for tensor in read_first:
        if tensor is not None and not tensor.is_contiguous():
            return {"PDL": False}
    return _pdl_launch(device)


def pdl_enabled(device: torch.device) -> bool:
    """Return True if kernels that support PDL use it on this device."""
    return bool(_pdl_launch(device)["PDL"])


@functools.cache
def _pdl_launch(device: torch.device) -> dict[str, Any]:
    if _CHOSEN and target_has_pdl(target_of(device)):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
