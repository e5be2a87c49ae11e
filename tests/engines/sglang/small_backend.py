"""Runs benchmarks/sglang/backend.py without a GPU: small, without graphs, on a clock that counts.

SGLang's FlashMLA, which no CPU has, is ``anymla.compat.flash_mla`` here; its scores and top-k are
its own formulas in torch.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import backend
import scene
import torch

from anymla.compat import flash_mla


class _Clock:
    def __init__(self, rounds: int) -> None:
        pass

    def medians(self, graphs: dict[str, Any]) -> dict[str, float]:
        for graph in graphs.values():
            graph.replay()
        return {"lists": 4.0, "us": 10.0, "sglang": 16.0}


def _eager(run: Callable[[], object], stream: None) -> Any:
    run()
    return types.SimpleNamespace(replay=run)


def _step(of: scene.Scene, layers: Callable[[], object], stream: None) -> Any:
    def run() -> None:
        of.backend.init_forward_metadata(of.batch)
        layers()

    return _eager(run, stream)


theirs: Any = sys.modules["flash_mla"]
theirs.flash_mla_with_kvcache = flash_mla.flash_mla_with_kvcache
theirs.flash_mla_sparse_fwd = flash_mla.flash_mla_sparse_fwd
theirs.__version__ = flash_mla.__version__
backend.Scene = functools.partial(scene.Scene, device="cpu", context=1024)  # type: ignore[misc]
backend.Clock, backend.recorded, scene.capture = _Clock, _eager, _step  # type: ignore[assignment,misc]
backend.topk_compiles = lambda: False
backend.scenes.select_as = functools.partial(  # type: ignore[assignment]
    lambda choose, **given: choose(scores=False, topk=False), scene.select_as
)
backend.MODELS = ((8, 512),)  # type: ignore[assignment]
backend.DECODES = ((3, 700),)  # type: ignore[assignment]
backend.SELECTIONS = ((2, 700),)  # type: ignore[assignment]
backend.PREFILLS = (scene.Load((300,), (12,)),)  # type: ignore[assignment]
backend.LAYERS = 2
torch.cuda.Stream = types.SimpleNamespace  # type: ignore[assignment,misc]
torch.cuda.empty_cache = lambda: None
backend.main()
