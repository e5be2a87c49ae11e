"""Deliberate faults outside operations: formats, configurations, layers, steps and drafts.

The first argument of each is the function that it replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import ROWS_BF16_512
from anymla.formats.pages import PageLayout
from anymla.layers.compressor import LatentCompressor
from anymla.layers.dspark import MarkovHead, Taps
from anymla.layers.engram import Engram, NgramHash, decoded
from anymla.layers.indexer import Indexer
from anymla.layers.rows import Rows
from anymla.layers.spec import CONTEXT_ROWS
from anymla.layers.step import Step
from anymla.model.config_engram import EngramConfig
from anymla.runtime import dspark_drafts, dspark_step, fixed_step, step_plan
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import Batch
from anymla.runtime.ngrams import NgramReader
from anymla.runtime.span import Span
from anymla.testing.conformance import cache, numbers, rope
from anymla.testing.conformance.faults.fault import GOOD, fault_in
from anymla.testing.conformance.faults.v41 import gated

_Good = Callable[..., Any]


@fault_in("get_layout", cache, cases=("L7",))
def plain_rows_where_no_layout_is_named(good: _Good, layout_id: str) -> PageLayout:
    layout: PageLayout = good(ROWS_BF16_512 if layout_id == "auto" else layout_id)
    return layout


@fault_in("encode_e4m3", numbers, cases=("Q5",))
def codes_rounded_towards_zero(good: _Good, x: Tensor) -> Tensor:
    return (x.float() * (1 - 2**-6)).to(torch.float8_e4m3fn).view(torch.uint8)


@fault_in("encode_e4m3", numbers, cases=("Q5",))
def codes_that_do_not_saturate(good: _Good, x: Tensor) -> Tensor:
    return torch.where(x.abs() > 448, 0x7F, good(x)).to(torch.uint8)


@fault_in("inv_freq", rope, cases=("R1", "R5"))
def bases_of_the_tables_swapped(good: _Good, dim: int, theta: float, yarn: Any = None) -> Tensor:
    frequencies: Tensor = good(dim, 170000.0 - theta, yarn)
    return frequencies


def _seen_late(step: Step, groups: Sequence[CacheGroup]) -> Step:
    lens = dict(step.index_lens)
    for group in groups:
        if group.name in lens:
            lens[group.name] = step.positions.div(group.ratio, rounding_mode="floor").int()
    return dataclasses.replace(step, index_lens=lens)


@fault_in("host_step", step_plan, cases=("C11",))
def entry_selectable_a_token_late_on_the_host(
    good: _Good, store: CacheStore, *args: Any, **rest: Any
) -> Step:
    return _seen_late(good(store, *args, **rest), store.groups)


@fault_in("device_step", step_plan, fixed_step, cases=("C11",))
def entry_selectable_a_token_late_on_the_device(
    good: _Good, batch: Batch, groups: Sequence[CacheGroup], *args: Any, **rest: Any
) -> Step:
    return _seen_late(good(batch, groups, *args, **rest), groups)


@fault_in("LatentCompressor.insert", LatentCompressor, cases=("C11",))
def entries_rotated_at_their_last_token(
    good: _Good, self: LatentCompressor, rows: Tensor, step: Step, *rest: Any
) -> None:
    late = step.positions + (self.ape.shape[0] - 1)
    good(self, rows, dataclasses.replace(step, positions=late), *rest)


@fault_in("Indexer.write_latent_keys", Indexer, cases=("C11",))
def keys_made_of_rotated_entries(
    good: _Good,
    self: Indexer,
    latent: Tensor,
    compressor: LatentCompressor,
    step: Step,
    *rest: Any,
) -> None:
    first = step.positions + (1 - compressor.ape.shape[0])
    cos_sin = compressor.rope.table_for(step.max_seq_len)
    rotated = GOOD.rope(latent.unsqueeze(1), first, cos_sin).squeeze(1)
    good(self, rotated, compressor, step, *rest)


@fault_in("NgramReader.found", NgramReader, cases=("C11",))
def ngrams_of_the_chunk_alone(good: _Good, self: NgramReader, spans: Sequence[Span]) -> Any:
    nothing: Any = SimpleNamespace(tokens=[])
    return good(self, [dataclasses.replace(span, state=nothing) for span in spans])


@fault_in("EngramConfig.primes", EngramConfig, cases=("M5",))
def layers_have_the_same_primes(good: _Good, self: EngramConfig) -> dict[int, tuple[int, ...]]:
    first = good(self)[self.layer_ids[0]]
    return dict.fromkeys(self.layer_ids, first)


@fault_in("EngramConfig.primes", EngramConfig, cases=("M5",))
def the_last_modulus_is_no_prime(good: _Good, self: EngramConfig) -> dict[int, tuple[int, ...]]:
    return {layer: (*primes[:-1], primes[-1] - 1) for layer, primes in good(self).items()}


@fault_in("EngramConfig.multipliers", EngramConfig, cases=("M5",))
def factors_of_the_nearest_token_last(
    good: _Good, self: EngramConfig, layer: int
) -> tuple[int, ...]:
    return tuple(reversed(good(self, layer)))


@fault_in("NgramHash.__call__", NgramHash, cases=("M5",))
def a_gap_hides_nothing(
    good: _Good, self: NgramHash, token_ids: Tensor, previous: Tensor
) -> Tensor:
    rows: Tensor = good(self, token_ids, torch.where(previous < 0, 2, previous))
    return rows


@fault_in("Engram.forward", Engram, cases=("M5",))
def no_least_size_of_what_agrees(good: _Good, self: Engram, h: Tensor, step: Step) -> Tensor:
    rows = decoded(step.ngrams[self.layer], h.dtype)
    return gated(h, self.wkv(rows), self.weight, self.eps, 0.0)


@fault_in("Taps.entering", Taps, cases=("C12",))
def taps_behind_their_layers_as_in_v4(good: _Good, self: Taps, layer: int) -> Any:
    return good(self, layer - 1)


@fault_in("block_step", dspark_step, cases=("C12",))
def rows_of_a_block_see_those_before_them(good: _Good, *args: Any, size: int, **rest: Any) -> Step:
    step: Step = good(*args, size=size, **rest)
    before = torch.arange(len(step.positions), dtype=torch.int32) % size + 1
    window = dataclasses.replace(step.window, lengths=before.to(step.window.lengths.device))
    return dataclasses.replace(step, window=window)


@fault_in("block_step", dspark_step, cases=("C12",))
def the_window_hangs_on_the_row(
    good: _Good, *args: Any, size: int, window: int, **rest: Any
) -> Step:
    step: Step = good(*args, size=size, window=window, **rest)
    seen = step.dense[CONTEXT_ROWS]
    indices, lengths = seen.indices.clone(), seen.lengths.clone()
    for row, length in enumerate(lengths.tolist()):
        gone = max(0, length + row % size + 1 - window)
        indices[row, : length - gone] = indices[row, gone:length].clone()
        lengths[row] -= gone
    return dataclasses.replace(step, dense={CONTEXT_ROWS: Rows(indices, lengths)})


@fault_in("block_step", dspark_step, cases=("C12",))
def a_block_stands_at_the_last_position(good: _Good, *args: Any, **rest: Any) -> Step:
    step: Step = good(*args, **rest)
    return dataclasses.replace(step, positions=step.positions - 1)


@fault_in("MarkovHead.guess", MarkovHead, cases=("C12",))
def every_guess_follows_the_anchor(
    good: _Good, self: MarkovHead, anchors: Tensor, count: int, choose: Any
) -> tuple[Tensor, list[Tensor]]:
    tokens = []

    def forgetting(row: Tensor, i: int) -> Tensor:
        tokens.append(choose(row, i))
        return anchors

    rows: list[Tensor] = good(self, anchors, count, forgetting)[1]
    return torch.stack(tokens, 1), rows


@fault_in("MarkovHead.survival", MarkovHead, cases=("C12",))
def confidence_from_the_normed_state(good: _Good, self: MarkovHead, h: Tensor, rows: Any) -> Tensor:
    normed = h * h.square().mean(-1, keepdim=True).rsqrt()
    sure: Tensor = good(self, normed, rows)
    return sure


@fault_in("final_tokens", dspark_drafts, cases=("C12",))
def the_newest_final_position_alone_is_kept(good: _Good, *args: Any) -> Span | None:
    span: Span | None = good(*args)
    if span is None:
        return None
    skipped = len(span.token_ids) - 1
    return dataclasses.replace(span, start=span.start + skipped, token_ids=span.token_ids[skipped:])
