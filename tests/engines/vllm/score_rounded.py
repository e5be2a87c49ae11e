"""``anymla score`` of a model whose router rounds its logits to bfloat16, as vLLM's does on a CPU.

``score_rounded.py`` with the command's arguments.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from anymla.cli.main import main
from anymla.ops.moe import reference


def scores(x: Tensor, gate: Tensor) -> Tensor:
    """Square roots of softplus of rounded logits."""
    logits = (x.float() @ gate.float().T).bfloat16().float()
    return functional.softplus(logits).sqrt()


if __name__ == "__main__":
    reference._scores = scores
    main()
