"""A model in exact integer arithmetic that reads every cache through the step's metadata.

Its streams are sums over all rows that a token must see, so one wrong, stale, missing or poisoned
row changes the tokens that come out. All numbers are integers below 2**24: float32 sums are exact
in any order, and results cannot depend on how tokens are batched.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from anymla.formats.page_layout import get_layout
from anymla.layers.ranks import ALONE
from anymla.layers.spec import LayerSpec
from anymla.ops.choice import best_logits

VOCAB = 61
SPECS = tuple(
    LayerSpec(
        index=index,
        role=role,
        ratio=ratio,
        overlap=ratio == 4,
        selects=ratio == 4,
        window=128,
        selection_width=512 if ratio == 4 else 0,
    )
    for index, (role, ratio) in enumerate(
        [("backbone", 0), ("backbone", 4), ("backbone", 128), ("backbone", 4), ("mtp", 0)]
    )
)


def _slots(group, token_to_req, entries):
    """Slots of entries [T, K] of each token's request."""
    page = group.block_table[token_to_req.unsqueeze(1), entries // group.page_size]
    return page * group.page_size + entries % group.page_size


class FakeModel:
    device = torch.device("cpu")
    dtype = torch.float32
    backend = None
    ranks = ALONE
    engrams = ()
    leaving_streams = 1

    def __init__(self, specs=SPECS, max_position_embeddings=4096):
        self.layer_specs = tuple(specs)
        self.config = SimpleNamespace(
            num_hidden_layers=sum(spec.role == "backbone" for spec in specs),
            vocab_size=VOCAB,
            image_token_ids=(),
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=(1,),
            head_dim=0,
            qk_rope_head_dim=0,
            hc_mult=1,
            hidden_size=2,
        )
        self.steps = []
        self.logit_rows = []

    def kinds_of_layers(self):
        return range(self.config.num_hidden_layers)

    def reserve(self, max_seq_len):
        return []

    def forward(self, step, caches, taps=None):
        self.steps.append(step)
        checksum = torch.zeros(len(step.token_ids))
        for spec, cache in zip(self.layer_specs, caches, strict=False):
            checksum = checksum + self._layer(spec, cache, step, step.token_ids)
        return torch.stack((step.token_ids.float(), checksum % 4099), -1).unsqueeze(1)

    def logits(self, hidden):
        self.logit_rows.append(len(hidden))
        token, checksum = hidden[:, 0].unbind(-1)
        surprise = torch.where(checksum % 3 == 0, checksum % VOCAB, torch.zeros(()))
        best = (3 * token + 1 + surprise) % VOCAB
        # A distribution that sampling can spread over, with its peak at ``best``.
        distance = (torch.arange(VOCAB) - best.unsqueeze(1)) % VOCAB
        return -0.25 * distance + 0.0 * checksum.unsqueeze(1)

    def best(self, hidden):
        return self.best_of(self.logits(hidden))

    def best_of(self, logits):
        return ALONE.best(best_logits(logits, backend="reference"), first=0, vocab=VOCAB)

    def mtp_forward(self, hidden, next_ids, step, cache):
        rows = 0 * hidden[:, 0, 1] + self._layer(self.layer_specs[-1], cache, step, next_ids)
        return torch.stack((next_ids.float(), rows % 4099), -1).unsqueeze(1)

    def mtp_logits(self, hidden):
        # Blind to the checksum's surprises, so that about two guesses of three are right.
        token, checksum = hidden[:, 0].unbind(-1)
        return self.logits(torch.stack((token, 0 * checksum + 1), -1).unsqueeze(1))

    def _layer(self, spec, cache, step, token_ids):
        main, index = get_layout(cache.format.main), get_layout(cache.format.index)
        value = (token_ids + 1) * (1 + step.positions % 7) + spec.index
        rows = value.float().unsqueeze(1)
        main.write(cache.window, step.groups["window"].slot_mapping, rows.expand(-1, main.channels))
        total = self._sum(cache.window, step.window.indices, step.window.lengths)
        if not spec.ratio:
            return total
        pooled = self._pool(spec, spec.state_group, cache.state, step, rows)
        compressed = step.groups[spec.compressed_group]
        main.write(cache.compressed, compressed.slot_mapping, pooled.expand(-1, main.channels))
        if not spec.selects:
            dense = step.dense[spec.compressed_group]
            return total + self._sum(cache.compressed, dense.indices, dense.lengths)
        keys = self._pool(spec, "state_index", cache.index_state, step, rows)
        group = step.groups["index"]
        index.write(cache.index, group.slot_mapping, keys.expand(-1, index.channels))
        width = max(1, step.max_seq_len // spec.ratio)
        entries = torch.arange(width).expand(len(rows), width)
        entries = torch.where(entries < step.index_lens[spec.index_group].unsqueeze(1), entries, 0)
        for kind, where in (("index", cache.index), (spec.compressed_group, cache.compressed)):
            slots = _slots(step.groups[kind], step.token_to_req, entries)
            total = total + self._sum(where, slots, step.index_lens[spec.index_group])
        return total

    @staticmethod
    def _sum(cache, indices, lengths):
        """Sum of channel 0 of the leading ``lengths`` rows."""
        page, offset = indices.long() // cache.shape[1], indices.long() % cache.shape[1]
        used = torch.arange(indices.shape[1]) < lengths.unsqueeze(1)
        return torch.where(used, cache[page, offset, 0], torch.zeros(())).sum(1)

    @staticmethod
    def _pool(spec, name, state, step, rows):
        """Store each token's state, and sum those that its entry pools."""
        group = step.groups[name]
        width = state.shape[-1]
        page, offset = group.slot_mapping // group.page_size, group.slot_mapping % group.page_size
        kept = step.is_valid
        state[page[kept], offset[kept]] = rows.expand(-1, width)[kept]
        back = step.positions.unsqueeze(1) - torch.arange(spec.pooled_tokens)
        slots = _slots(group, step.token_to_req, back.clamp(min=0))
        stored = state[slots // group.page_size, slots % group.page_size, 0]
        closing = (step.positions + 1) % spec.ratio == 0
        used = (back >= 0) & closing.unsqueeze(1)
        return torch.where(used, stored, torch.zeros(())).sum(1, keepdim=True)


def generate_alone(prompt, max_new_tokens, specs=SPECS):
    """Greedy tokens of one request, by the same sums written down without caches."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        checksum = 0
        last = len(tokens) - 1
        for spec in specs:
            if spec.role == "mtp":
                continue
            values = [(token + 1) * (1 + p % 7) + spec.index for p, token in enumerate(tokens)]
            checksum += sum(values[max(0, last - spec.window + 1) :])
            if spec.ratio:
                entries = [
                    sum(values[max(0, end - spec.pooled_tokens) : end])
                    for end in range(spec.ratio, len(tokens) + 1, spec.ratio)
                ]
                checksum += sum(entries) * (2 if spec.selects else 1)
        checksum %= 4099
        surprise = checksum % VOCAB if checksum % 3 == 0 else 0
        tokens.append((3 * tokens[-1] + 1 + surprise) % VOCAB)
    return tokens[len(prompt) :]
