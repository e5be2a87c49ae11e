"""The exact integer model with a DSpark drafter, whose guesses are sums over all that it must see.

One wrong, stale, missing or poisoned row of its context, or of another request's block, changes
what it guesses; ``guess_alone`` says what it must guess, from the tokens and nothing else.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from fake_model import SPECS, VOCAB, FakeModel

from anymla.formats.page_layout import get_layout
from anymla.layers.dspark import BlockGuess
from anymla.layers.spec import CONTEXT_ROWS

BACKBONE = SPECS[:4]
STAGES = 3
BLOCK_SPECS = (
    *BACKBONE,
    *(dataclasses.replace(BACKBONE[0], index=4 + i, role="dspark") for i in range(STAGES)),
)
TARGETS = (1, 3)
NOISE, BLOCK, WINDOW = VOCAB - 1, 5, 128


def _tap(token, position, layer):
    """What the backbone leaves behind a layer."""
    return (token + 1) * (1 + position % 5) + layer


def _row(token, position, stage):
    """What a block's row holds."""
    return (token + 1) * (1 + position % 7) + stage


def _best(before, checksum, erratic):
    """The guess after a token; ``erratic`` ones tell every checksum from every other."""
    if erratic:
        return (before + checksum) % VOCAB
    surprise = checksum % 4 == 0
    return (3 * before + 1 + surprise * (checksum % VOCAB)) % VOCAB


class FakeBlockModel(FakeModel):
    """See above.

    Attributes:
        erratic: guesses are seldom right, and all depend on every row.
    """

    def __init__(self, *, erratic=False, **changes):
        super().__init__(BLOCK_SPECS, **changes)
        self.erratic = erratic
        self.dspark = SimpleNamespace(
            block_size=BLOCK, noise_token_id=NOISE, target_layer_ids=TARGETS, tapped=TARGETS
        )
        self.config.dspark = self.dspark
        self.committed, self.blocks = [], []

    def forward(self, step, caches, taps=None):
        hidden = super().forward(step, caches)
        if taps is not None:
            for place, layer in enumerate(taps.layers):
                value = _tap(step.token_ids, step.positions, layer).float()
                value = value if taps.rows is None else value[taps.rows.long()]
                taps.out[:, place] = value.unsqueeze(1)
        return hidden

    def write_context(self, taps, step, caches):
        valid = step.is_valid
        self.committed.append(list(zip(step.positions[valid].tolist(), strict=True)))
        for stage, cache in enumerate(caches):
            main = get_layout(cache.format.main)
            rows = (taps[:, :, 0].sum(1) + stage).unsqueeze(1).expand(-1, main.channels)
            main.write(cache.window, step.groups["window"].slot_mapping, rows)

    def block_forward(self, step, caches):
        self.blocks.append(step)
        total = torch.zeros(len(step.token_ids))
        for stage, cache in enumerate(caches):
            main = get_layout(cache.format.main)
            rows = _row(step.token_ids, step.positions, stage).float().unsqueeze(1)
            own = step.groups["window"].slot_mapping
            main.write(cache.window, own, rows.expand(-1, main.channels))
            context = step.dense[CONTEXT_ROWS]
            total = total + self._sum(cache.window, step.window.indices, step.window.lengths)
            total = total + self._sum(cache.compressed, context.indices, context.lengths)
        # Rows of a block see the same; their positions tell them apart.
        return torch.stack(((total + 17 * step.positions) % 4099, total), -1)

    def guess_block(self, h, anchors, choose):
        tokens, before = [], anchors
        for i in range(h.shape[1]):
            best = _best(before.float(), h[:, i, 0], self.erratic)
            distance = (torch.arange(VOCAB) - best.unsqueeze(1)) % VOCAB
            before = choose(-0.25 * distance, i)
            tokens.append(before)
        return BlockGuess(torch.stack(tokens, 1), torch.ones(h.shape[:2]))

    def guess_best_block(self, h, anchors):
        return self.guess_block(h, anchors, lambda logits, _: self.best_of(logits)[0]).tokens


def guess_alone(tokens, count, *, erratic, block=BLOCK, choose=None):
    """Guesses behind the last of some final tokens, by the same sums written down without caches.

    ``choose`` makes a token of the best one and the guess's number, where that is not the best.
    """
    last = len(tokens) - 2
    context = range(max(0, last - WINDOW + 1), last + 1)
    positions = range(last + 1, last + 1 + block)
    total = 0
    for stage in range(STAGES):
        total += sum(sum(_tap(tokens[p], p, layer) for layer in TARGETS) + stage for p in context)
        ids = [tokens[-1], *[NOISE] * (block - 1)]
        total += sum(_row(token, p, stage) for token, p in zip(ids, positions, strict=True))
    before, guesses = tokens[-1], []
    for i, position in enumerate(list(positions)[:count]):
        best = _best(before, (total + 17 * position) % 4099, erratic)
        before = best if choose is None else choose(best, i)
        guesses.append(before)
    return guesses
