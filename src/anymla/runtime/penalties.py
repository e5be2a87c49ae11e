"""Penalties on tokens that a text already holds.

Sources: Keskar et al. 2019 (CTRL), section 4.1, for repetition, as transformers' generation has it
(a positive logit is divided, another one multiplied); OpenAI's API reference for presence and
frequency, which count what has been generated, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.runtime.sampler import Sampling
from anymla.runtime.upload import upload


class TokenCounts:
    """How often each token has come in one request, on the device of its logits."""

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device) -> None:
        """Count nothing but the prompt.

        Args:
            prompt: token ids of the prompt.
            vocab: V, the size of the vocabulary.
            device: where the logits are.
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
        """Logits of consecutive positions, less their penalties.

        Args:
            logits: float [n, V]; row i follows all but the last n - 1 - i drafts.
            sampling: holds the three penalties.
            generated: token ids since the prompt, which only grow from call to call.
            drafts: ids behind them that are not final, n - 1 at least.

        Returns:
            float32 [n, V].
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
