"""Chunked prompts and prefix caching on any CPU."""

from __future__ import annotations

import functools
from typing import Any


def allow() -> None:
    """Leave both as they were asked for, in this process.

    Without AMX vLLM 0.32 turns them off on a CPU, for kernels of its own that the plugin replaces.
    The engine's core has to run in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    @functools.wraps(check)
    def update(vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        caching = cache.enable_prefix_caching
        check(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
        cache.enable_prefix_caching = caching

    CpuPlatform.check_and_update_config = staticmethod(update)  # type: ignore[method-assign]
