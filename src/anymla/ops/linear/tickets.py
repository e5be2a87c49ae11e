"""Counters that kernels leave as they found them: zero.

Programs of one launch draw numbers from them, and the last one puts zero back. So a counter must
not be shared by kernels that run at the same time: every workspace and queue has its own, and
without a workspace every stream of the device.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from anymla.ops.workspace import Workspace, active_workspace, queue

# Of a launch, at most.
MOST = 1 << 14

_of_workspace: weakref.WeakKeyDictionary[Workspace, dict[int, Tensor]] = weakref.WeakKeyDictionary()
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


def tickets(device: torch.device) -> Tensor:
    """int32 zeros [MOST] for the next launch."""
    workspace = active_workspace()
    if workspace is not None and workspace.device == device:
        return _kept(_of_workspace.setdefault(workspace, {}), queue(), device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(_of_stream, (device, stream), device)


def _kept(known: dict[Any, Tensor], key: Any, device: torch.device) -> Tensor:
    found = known.get(key)
    if found is None:
        found = torch.zeros(MOST, dtype=torch.int32, device=device)
        # What a graph allocates is the graph's, which fills it whenever it is replayed.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            known[key] = found
    return found
