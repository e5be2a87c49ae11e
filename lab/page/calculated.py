"""What follows from page layouts and needs no measurement."""

from __future__ import annotations

from anymla.model.config import ModelConfig
from anymla.runtime.cache_size import cache_sizes
from anymla.testing.published import FLASH, PRO
from lab.page.figure import Figure, Point, Series

_CONTEXTS = [1024 << i for i in range(11)]
_MODELS = {"V4-Flash": FLASH, "V4-Pro": PRO}


def cache_by_context(made: str) -> Figure:
    """Cache of one request of the published models, to a million tokens.

    Args:
        made: date and commit of the calculation.
    """
    series = []
    for name, published in _MODELS.items():
        config = ModelConfig.from_dict(dict(published))
        for kv_cache, rows in (("fp8", "FP8"), ("bf16", "bfloat16")):
            groups = cache_sizes(config, kv_cache, _CONTEXTS)
            points = []
            for context in _CONTEXTS:
                held = sum(group.held_bytes[context] for group in groups)
                label = f"{name}, {rows} rows, {context} tokens: {held / 1e6:,.0f} MB"
                points.append(Point(context, held / 1e6, f"{label}, {held / context:,.0f} a token"))
            series.append(Series(f"{name}, {rows}", tuple(points)))
    return Figure(
        key="cache",
        title="Cache of one request of the published models",
        x_label="tokens of context",
        source=f"Calculated from the layouts of pages, not measured; {made}",
        note="Window and compressor state are held whatever the context; entries of ratio 4 and "
        "128 and the indexer's keys grow with it. `anymla inspect --checkpoint DIR` has the "
        "groups one by one.",
        y_label="MB, all layers",
        series=tuple(series),
    )
