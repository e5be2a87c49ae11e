"""Cases C1 .. C4, C8 and C9: compressed entries and the states that they are pooled from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.testing.conformance.expected import EPS, index_scale, index_scores, table, v4_config
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.scene import coded
from anymla.testing.generate import guarded_cache, scattered_pages, slots_of
from anymla.testing.oracle.attention import compress
from anymla.testing.oracle.rope import frequencies
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.oracle.selection import Selections
from anymla.testing.tolerance import accumulation, assert_close, assert_identical

_OPS = ("save_partial_states", "compress_norm_rope_insert")


@dataclasses.dataclass
class Compressor:
    """Tokens of a request before compression.

    Attributes:
        kv: float32 [T, W], values of the tokens.
        gate: float32 [T, W], pooling logits of the tokens.
        ape: float32 [ratio, W], bias of the gate.
        norm: float32 [D], weight of the RMSNorm.
    """

    kv: Tensor
    gate: Tensor
    ape: Tensor
    norm: Tensor

    @classmethod
    def random(cls, tokens: int, ratio: int, dim: int) -> Compressor:
        """Draw unit-size values, and gates that prefer some rows without ignoring the others."""
        width = dim * (2 if ratio == 4 else 1)
        kv, gate = torch.randn(tokens, 2 * width).split(width, 1)  # strided, as in a model
        return cls(kv, gate, torch.randn(ratio, width), 1 + 0.1 * torch.randn(dim))

    def expected(self) -> Tensor:
        """Compute the float64 entries [T // ratio, D]."""
        inv_freq = frequencies(v4_config(), compressed=True)
        kv, gate = self.kv.double(), self.gate.double()
        return compress(kv, gate, self.ape.double(), self.norm.double(), inv_freq, EPS)

    def run(
        self, ops: Ops, splits: Sequence[int], *, padding: int = 0, stale: float = torch.nan
    ) -> Tensor:
        """Return entries [T // ratio, D] as stored, in float64.

        Args:
            ops: operations under test.
            splits: number of tokens of each step; their sum is T.
            padding: number of padding tokens after each step, full of NaN.
            stale: value of the state's pages before the first step.
        """
        ratio, dim = len(self.ape), len(self.norm)
        tokens, entries, page = len(self.kv), 2, 4 if ratio == 4 else 8
        assert sum(splits) == tokens
        table_, pages = scattered_pages([tokens], page)
        state = torch.full((pages, page, 2 * self.kv.shape[1]), stale)
        entry_table, entry_pages = scattered_pages([tokens // ratio], entries)
        layout = f"rows_fp32_{dim}"
        target = guarded_cache(layout, entry_pages, entries)
        cos_sin = table(max(tokens, 1), compressed=True)
        start = 0
        for count in splits:
            positions = torch.arange(start, start + count)
            slots = slots_of(table_, 0, positions, page)
            number = positions // ratio
            closes = (positions + 1) % ratio == 0
            entry_slots = slots_of(entry_table, 0, torch.where(closes, number, 0), entries)
            entry_slots = torch.where(closes, entry_slots, -1)
            owner = torch.zeros(count, dtype=torch.int32)
            kv, gate = self.kv[start : start + count], self.gate[start : start + count]
            if padding:
                nothing = torch.full((padding,), -1)
                junk = torch.full((padding, kv.shape[1]), torch.nan)
                kv, gate = torch.cat((kv, junk)), torch.cat((gate, junk))
                positions = torch.cat((positions, torch.full((padding,), ratio - 1)))
                slots, entry_slots = torch.cat((slots, nothing)), torch.cat((entry_slots, nothing))
                owner = torch.cat((owner, nothing.int()))
            ops.save_partial_states(
                kv, gate, self.ape, positions, state, slots, compress_ratio=ratio
            )
            ops.compress_norm_rope_insert(
                state,
                table_,
                slots,
                owner,
                positions,
                self.norm,
                EPS,
                cos_sin,
                target.cache,
                entry_slots,
                compress_ratio=ratio,
                overlap=ratio == 4,
                layout=layout,
            )
            start += count
        numbers = torch.arange(tokens // ratio)
        slots = slots_of(entry_table, 0, numbers, entries)
        allowed = {place for slot in slots.tolist() for place in target.entry_bytes(slot)}
        expect(set(target.changed().tolist()) <= allowed, "bytes of no entry were written")
        return ROW_FORMATS[layout].decode(*read_entries(target.cache, slots, layout))

    def check(self, ops: Ops, splits: Sequence[int], name: str, **options: float) -> None:
        """Run and compare with the expected entries.

        A mean of n rows of unit size can be as small as 1 / sqrt(n), and the norm scales its
        errors, relative to the rows, back to unit size; values reach four units.
        """
        got = self.run(ops, splits, **options)  # type: ignore[arg-type]
        rows = 2 * len(self.ape)
        slack = accumulation(rows, torch.float32)
        assert_close(got, self.expected(), atol=slack, scale=4 * rows**0.5, name=name)


_SHAPES = ((4, 512), (4, 128), (128, 512))


@case("C1", "entries appear at tokens 4 and 128, and at every length around", *_OPS)
def boundaries(ops: Ops) -> None:
    for ratio, dim in _SHAPES:
        lengths = (1, 2, 3, 4, 5, 6, 7, 8, 9) if ratio == 4 else (127, 128, 129, 255, 256, 257)
        for length in lengths:
            sequence = Compressor.random(length, ratio, dim)
            sequence.check(ops, [length], f"ratio {ratio}, {length} tokens")


@case("C2", "entry j is visible to position p iff (j + 1) * ratio <= p + 1", "compressed_rows")
def visibility(ops: Ops) -> None:
    for ratio, last in ((1, 9), (2, 21), (4, 41), (128, 600)):
        positions = torch.arange(last)
        table_, _ = scattered_pages([last // ratio], 2)
        slots, local, lens = ops.compressed_rows(
            positions,
            torch.zeros(last, dtype=torch.int32),
            table_,
            ratio=ratio,
            block_size=2,
            width=last // ratio,
        )
        for position in range(last):
            seen = [j for j in range(last // ratio) if (j + 1) * ratio <= position + 1]
            name = f"ratio {ratio}, position {position}"
            expect(int(lens[position]) == len(seen), f"{name}: {lens[position]} entries")
            expect(local[position, : len(seen)].tolist() == seen, f"{name}: entries")
            want = slots_of(table_, 0, torch.tensor(seen, dtype=torch.int64), 2)
            expect(slots[position, : len(seen)].tolist() == want.tolist(), f"{name}: slots")
            expect(bool((slots[position, len(seen) :] == -1).all()), f"{name}: -1 behind")


@case(
    "C3",
    "every residue of the length modulo 4, at 57k tokens",
    "slot_mapping",
    "paged_mqa_logits",
    "topk_per_row",
)
def residues(ops: Ops) -> None:
    entries, longest = 64, 57_348
    table_, pages = scattered_pages([longest // 4], entries)
    guarded = guarded_cache(INDEX_FP8, pages, entries)
    slots = slots_of(table_, 0, torch.arange(longest // 4), entries)
    guarded.write(slots, torch.randn(longest // 4, 128))
    keys = ROW_FORMATS[INDEX_FP8].decode(*read_entries(guarded.cache, slots, INDEX_FP8))
    q, weights = coded(1, 1, 8, 128), torch.randn(1, 8)
    want, scale = index_scores(q[0], keys, weights), index_scale(q[0], keys, weights)
    slack = ops.dot_error
    for length in range(longest - 4, longest):
        position, visible = torch.tensor([length - 1]), length // 4
        written = ops.slot_mapping(
            position, torch.zeros(1, dtype=torch.int32), table_, page_size=entries, ratio=4
        )
        closes = length % 4 == 0
        expect(
            int(written[0]) == (int(slots[visible - 1]) if closes else -1),
            f"length {length}: entry slot {int(written[0])}",
        )
        lens = torch.tensor([visible], dtype=torch.int32)
        scores = ops.paged_mqa_logits(
            q, guarded.cache, weights, lens, table_, max_context=longest // 4
        )
        expect(bool((scores[0, visible:] == -torch.inf).all()), f"length {length}: behind the end")
        got = scores[:, :visible]
        assert_close(got, want[:, :visible], atol=slack, scale=scale[:, :visible], name="scores")
        chosen = ops.topk_per_row(scores, torch.zeros_like(lens), lens, 512)
        selections = Selections()
        selections.judge(
            want,
            torch.arange(longest // 4).unsqueeze(0) < visible,
            chosen.long(),
            512,
            2 * slack * scale.amax(1),
            f"length {length}",
        )
        expect(not selections.violations, "; ".join(selections.violations))


@case("C4", "any split of the tokens gives the same entries", *_OPS)
def chunks(ops: Ops) -> None:
    for ratio, dim in _SHAPES:
        length = 4 * ratio + 3
        sequence = Compressor.random(length, ratio, dim)
        ragged = [1, 2, 3, 5, 1]
        ragged += [7] * ((length - sum(ragged)) // 7)
        ragged.append(length - sum(ragged))
        splits = {
            "whole": [length],
            "ragged": ragged,
            "halves": [length // 2, length - length // 2],
        }
        if ratio == 4:
            splits["single tokens"] = [1] * length
        for name, split in splits.items():
            sequence.check(ops, split, f"ratio {ratio}, {name}")


@case("C8", "padding tokens enter no state and no entry", *_OPS, quick=True)
def padding_tokens(ops: Ops) -> None:
    for ratio, dim in _SHAPES:
        length = 2 * ratio + 1
        sequence = Compressor.random(length, ratio, dim)
        sequence.check(ops, [ratio, ratio + 1], f"ratio {ratio}", padding=3)


@case("C9", "what a previous request left in the state is never read", *_OPS)
def stale_state(ops: Ops) -> None:
    for ratio, dim in _SHAPES:
        sequence = Compressor.random(2 * ratio, ratio, dim)
        clean = sequence.run(ops, [2 * ratio], stale=0.0)
        dirty = sequence.run(ops, [2 * ratio], stale=1e3)
        assert_identical(dirty, clean, name=f"ratio {ratio}: entries after another request")
        sequence.check(ops, [2 * ratio], f"ratio {ratio}", stale=1e3)
