"""What the scripts here do inside each of vLLM's workers: ``worker_extension_cls`` names InWorker.

Importing it gives vLLM the loader of random weights, and has the connector for decode benchmarks
fill pages with random rows instead of zeros, which would all be selected alike.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import random_model
import torch
from kernel_parts import part_of

random_model.register_loader()


def _listened() -> list[str]:
    """Names of the kernels that Triton compiles from now on."""
    import triton

    names: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    triton.knobs.compilation.listener = note
    return names


class _Filler:
    """Fills pages with random rows, as they are quantised by the layout of the page."""

    _ROWS = 1 << 15

    def __init__(self) -> None:
        """Take the place of what vLLM's connector fills pages with."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

        self._drawn: dict[int, torch.Tensor] = {}
        self._numbers = random.Random(0)
        worker: Any = module.DecodeBenchConnectorWorker
        worker._fill_blocks = lambda this, group, blocks, tokens: self._fill(
            [this.kv_caches[name] for name in this.group_to_layers[group]], blocks
        )

    def _fill(self, caches: list[Any], blocks: list[int]) -> None:
        from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
        from anymla.ops.kv_cache import quantize_and_insert_k_cache

        layouts = {
            get_layout(name).data_bytes + get_layout(name).scale_bytes: name
            for name in (MAIN_FP8, INDEX_FP8)
        }
        for cache in caches if blocks else []:
            if cache.dtype != torch.uint8:
                cache[blocks] = 0.5
                continue
            cache = cache.flatten(1, -2)
            layout, size = layouts[cache.shape[-1]], cache.shape[1]
            rows = self._rows(get_layout(layout).channels, cache.device)
            starts = torch.tensor(blocks, device=cache.device) * size
            slots = (starts[:, None] + torch.arange(size, device=cache.device)).flatten()
            for some in slots.split(self._ROWS):
                first = self._numbers.randrange(self._ROWS)
                values = rows[first : first + len(some)]
                quantize_and_insert_k_cache(values, cache, some, layout=layout)

    def _rows(self, channels: int, device: Any) -> torch.Tensor:
        if channels not in self._drawn:
            generator = torch.Generator(device).manual_seed(channels)
            shape = 2 * self._ROWS, channels
            made = torch.randn(shape, device=device, generator=generator)
            self._drawn[channels] = made.bfloat16()
        return self._drawn[channels]


_COMPILED, _FILLER = _listened(), _Filler()


class InWorker:
    """Mixed into vLLM's worker; called by name (``collective_rpc``)."""

    model_runner: Any
    _profile: Any

    def bench_memory(self) -> int:
        """The most bytes that were allocated."""
        return torch.cuda.max_memory_allocated()

    def bench_compiled(self) -> list[str]:
        """Kernels that Triton has compiled since the last call."""
        names = list(_COMPILED)
        _COMPILED.clear()
        return names

    def bench_audited(self) -> dict[str, Any]:
        """What the audit of this worker's model has found, if it is audited."""
        hooks = getattr(self.model_runner.get_model(), "anymla_audit", None)
        if hooks is None:
            return {}
        auditor = hooks.auditor
        auditor.drain()
        return {
            "audited_steps": auditor.audited,
            "skipped": auditor.skipped,
            "cases": {name: tally.judged for name, tally in auditor.tallies.items()},
            "worst_of_bound": {name: tally.worst for name, tally in auditor.tallies.items()},
            "alarms": [f"{found.method} of {case.layer}: {found.what}"
                       for case, found in list(auditor.alarms)[:8]],
        }  # fmt: skip

    def bench_profile(self) -> None:
        """Begin to trace the device."""
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.__enter__()

    def bench_profiled(self, count: int) -> dict[str, Any]:
        """Device time of each of so many steps: in which it was busy, and by parts, in us."""
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        spans = [
            (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
            for e in self._profile.profiler.kineto_results.events()
            if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns() > 0
        ]
        busy, end = 0, 0
        parts: dict[str, float] = collections.Counter()
        names: collections.Counter[str] = collections.Counter()
        for first, last, name in sorted(spans):
            alone = max(0, last - max(first, end))
            end = max(end, last)
            busy += alone
            parts[part_of(name)] += alone / count / 1e3
            names[name[:80]] += (last - first) / count / 1e3
        return {
            "busy_us": busy / count / 1e3,
            "kernels": len(spans) / count,
            "parts_us": dict(parts),
            "names_us": dict(names.most_common(40)),
        }
