"""Penalties on tokens that a text already holds.

Sources: Keskar et al. 2019 (CTRL), section 4.1, for repetition, in the form of transformers'
generation (a positive logit is divided, any other is multiplied); OpenAI's API reference for
presence and frequency, which count generated tokens only, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.runtime.sampler import Sampling
from anymla.runtime.upload import upload


class TokenCounts:
    """Occurrences of each token in one request, on the device of its logits."""

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device) -> None:
        """Count the prompt's tokens.

        Args:
            prompt: token ids of the prompt.
            vocab: V, the size of the vocabulary.
            device: device of the logits.
        """
        self._device = device
        self._in_prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        (ids,) = upload([sorted(set(prompt))], device)
        self._in_prompt[ids.long()] = True
        self._generated = torch.zeros(vocab, device=device)
        self._noted = 0

    def penalised(
        self, logits: Tensor, sampling: Sampling, generated: Sequence[int], drafts: Sequence[int]
    ) -> Tensor:
        """Subtract their penalties from the logits of consecutive positions.

        Args:
            logits: float [n, V]; row i follows all but the last n - 1 - i drafts.
            sampling: source of the three penalties.
            generated: token ids after the prompt; later calls may only append to them.
            drafts: draft token ids after them, n - 1 at least, not final.

        Returns:
            Logits minus their penalties, float32 [n, V].
        """
        self._note(generated)
        counts = self._generated.expand(len(logits), -1)
        if drafts:
            first = len(drafts) - len(logits) + 1
            pairs = [(row, id) for row in range(len(logits)) for id in drafts[: first + row]]
            if pairs:
                rows, ids = upload(list(map(list, zip(*pairs, strict=True))), self._device)
                ones = torch.ones(len(pairs), device=self._device)
                counts = counts.clone().index_put_((rows.long(), ids.long()), ones, accumulate=True)
        logits = logits.float()
        factor = sampling.repetition_penalty
        if factor != 1:
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self._in_prompt | (counts > 0), scaled, logits)
        less = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return logits - less

    def _note(self, generated: Sequence[int]) -> None:
        new = generated[self._noted :]
        if new:
            (ids,) = upload([list(new)], self._device)
            self._generated.index_add_(0, ids, torch.ones(len(new), device=self._device))
            self._noted = len(generated)
