"""Decode attention as Intel's compilers build it, beside vLLM's path for XPU built the same way.

One token of 16 heads over a window of 128 rows and 512 entries, FP8 rows. Nothing runs: a row says
what the machine code of a kernel needs and how many instructions it has a key. vLLM's path is two
kernels, of which the first writes listed rows as bfloat16 that the second reads; both belong to a
key. Its result leaves the attention sink out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anymla.bench.report import Result
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.device import Target
from lab import xpu_code
from lab.build import Build
from lab.cases.sparse_attention import Decode, DecodeInputs
from lab.compiled import compiled
from lab.launches import recorded_launches
from lab.page.intel import PEER_PART
from lab.peers.vllm import VllmXpu

SHAPE = Decode(1, 1, 16, 512)
_PAGES, _PAGE = 64, 64


def inputs() -> DecodeInputs:
    """Make the shape's tensors on the meta device."""
    layout = get_layout(MAIN_FP8)

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    cache, extra_cache = (layout.allocate(_PAGES, _PAGE, "meta") for _ in range(2))
    lists: list[tuple[torch.Tensor, torch.Tensor | None]]
    lists = [(empty(1, 1, SHAPE.width), empty(1, 1, SHAPE.extra))]
    q = empty(1, 1, SHAPE.heads, SHAPE.model.dim, dtype=torch.bfloat16)
    sink = empty(SHAPE.heads, dtype=torch.float32)
    return DecodeInputs(SHAPE, q, sink, cache, extra_cache, empty(1), empty(1), lists)


def builds(target: Target, peer: VllmXpu) -> dict[str, list[Build]]:
    """Return the builds that each library launches for one key, by the library's name."""
    given = inputs()
    with recorded_launches(target) as ours:
        given.ours(backend="triton")[0]()
    calls = peer.decode(given)
    with recorded_launches(target) as theirs:
        calls[0]()
    # Partials are combined once a call.
    own = [build for build in ours.builds.values() if build.name == "decode_kernel"]
    return {"anymla": own, peer.name: list(theirs.builds.values())}


def measure(target: Target, peer: VllmXpu) -> Iterator[Result]:
    """Yield one result per kernel."""
    for library, found in builds(target, peer).items():
        rows = [_values(build, target) for build in found]
        whole = sum(row["instructions_per_key"] for row in rows)
        for build, row in zip(found, rows, strict=True):
            case = f"{target.name}: {library}, {build.name}"
            of = {
                "target_name": target.name,
                "library": library,
                "kernel": build.name,
                "sink": library == "anymla",
                "library_instructions_per_key": whole,
            }
            yield Result(PEER_PART, case, of | row)


def _values(build: Build, target: Target) -> dict[str, Any]:
    code = compiled(build, target)
    found = xpu_code.machine_code(code.asm["spv"], target)
    constants = build.constants
    keys = constants.get("BN") or constants.get("BLOCK_N") or 1
    # A kernel without a loop over keys processes one key per program.
    step = found.loop_instructions if keys > 1 else len(found.instructions)
    return {
        "spills": found.spills,
        "spill_bytes": found.spill_bytes,
        "code_bytes": found.code_bytes,
        "shared_bytes": code.metadata.shared,
        "registers": found.registers,
        "lanes": found.lanes,
        "warps": build.num_warps,
        "products": sum(name.startswith("dpas") for name in found.instructions),
        "keys_a_step": keys,
        "step_instructions": step,
        "instructions_per_key": round(step * build.num_warps / keys),
        "ocloc": xpu_code.compiler_version(),
    }
