"""Selection within blocks of entries, as layers of DeepSeek-V4.1 select for one token."""

from __future__ import annotations

import functools

import torch

from anymla.bench.random_caches import random_rows
from anymla.bench.report import Result
from anymla.formats.page_layout import INDEX_MXFP4
from anymla.layers.selection import TwoLevels, select_entries
from anymla.testing.published import FLASH_41
from lab.timing import interleaved, milliseconds

PART = "selection within blocks, MXFP4 keys, one token"
CONTEXTS = (16_384, 65_536, 262_144)
_PAGE = 256


def selection(rounds: int) -> list[Result]:
    """Time contexts whose blocks hold all entries, a quarter and a sixteenth of them."""
    calls = {entries: _call(entries) for entries in CONTEXTS}
    times = interleaved({str(n): call for n, call in calls.items()}, rounds=rounds, block=1)
    return [
        Result(PART, f"{entries} entries", dict(milliseconds(times[str(entries)])))
        for entries in CONTEXTS
    ]


def _call(entries: int) -> functools.partial[torch.Tensor]:
    """Make a selection over random keys, within as many random blocks as the model keeps."""
    text = FLASH_41["text_config"]
    heads, width = text["index_n_heads"], text["index_topk"]
    size, kept = text["candidate_block_size"], text["candidate_topk_blocks"]
    pages = entries // _PAGE
    cache = random_rows(INDEX_MXFP4, entries, _PAGE)
    blocks = torch.randperm(entries // size)[:kept].sort().values
    blocks[-1] = entries // size - 1  # the newest is always kept
    return functools.partial(
        select_entries,
        torch.randint(0, 256, (1, heads, 64), dtype=torch.uint8),
        torch.full((1, heads, 4), 127, dtype=torch.uint8),
        torch.randn(1, heads),
        torch.tensor([entries], dtype=torch.int32),
        cache,
        torch.randperm(pages, dtype=torch.int32).unsqueeze(0),
        query_lens=(1,),
        num_decodes=1,
        max_context=entries,
        layout=INDEX_MXFP4,
        out=torch.empty(1, width, dtype=torch.int32),
        levels=TwoLevels(blocks.int().unsqueeze(0), size, keeps=False),
    )
