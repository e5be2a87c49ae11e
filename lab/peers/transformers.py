"""transformers: the same checkpoint with its own cache, tokens chosen greedily."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from anymla.ops.registry import Support
from lab.peers import Peer

_INSTALL = "pip install '.[test]' in a clone"


class Transformers(Peer):
    """The DeepSeek-V4 of transformers."""

    name, title = "transformers", "transformers"
    modules = ("transformers",)

    def available(self) -> Support:
        """Return support if the installed version knows the model."""
        module, _ = self._found
        if module is None:
            return Support(False, f"transformers is not installed: {_INSTALL}")
        found = hasattr(module, "DeepseekV4ForCausalLM")
        reason = f"transformers {module.__version__} has no DeepSeek-V4; 5.23 has: {_INSTALL}"
        return Support(found, reason)

    def load(self, checkpoint: Path) -> Any:
        """Load the model in float32."""
        self.module.utils.logging.disable_progress_bar()
        self.module.utils.logging.set_verbosity_error()
        model = self.module.DeepseekV4ForCausalLM
        return model.from_pretrained(checkpoint, dtype=torch.float32).eval()


class Generation:
    """A prompt that has been read, and the tokens after it.

    Attributes:
        tokens: tokens generated so far.
        prefill_s: seconds of processor time that the prompt took.
    """

    def __init__(self, network: Any, ids: tuple[int, ...]) -> None:
        """Read the prompt."""
        from transformers import DynamicCache

        self._network = network
        self._cache = DynamicCache(config=network.config)
        self.tokens: list[int] = []
        start = time.process_time()
        self._run(torch.tensor([ids]))
        self.prefill_s = time.process_time() - start

    def next_token(self) -> int:
        """Run one forward pass of one token."""
        self._run(torch.tensor([self.tokens[-1:]]))
        return len(self.tokens)

    @torch.no_grad()
    def _run(self, ids: torch.Tensor) -> None:
        # The cache by its place: 5.24 calls it cache, and 5.23 past_key_values.
        out = self._network(ids, None, None, self._cache, use_cache=True, logits_to_keep=1)
        self.tokens.append(int(out.logits[0, -1].argmax()))
