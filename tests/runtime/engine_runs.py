"""Parts of runs that tests of the engine share."""

import torch

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions


def small_engine(model, **changes):
    defaults = {"kv_cache": "fp32", "max_requests": 3, "max_seq_len": 420}
    return Engine(model, EngineOptions(**(defaults | changes)))


def poison(engine):
    """Poison every page that no request holds, the null page included."""
    for group in engine.store.groups:
        table = engine.store.tables[group.name]
        held = {
            page for row in range(engine.options.max_requests) for page in table.held(row).values()
        }
        free = torch.tensor([page for page in range(table.pool.num_pages) if page not in held])
        for cache in engine.store.tensors(group):
            cache.index_fill_(0, free, 255 if cache.dtype is torch.uint8 else torch.nan)
