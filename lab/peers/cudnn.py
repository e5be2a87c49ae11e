"""cuDNN frontend: gradients of attention to listed rows, compiled by CuTe DSL at the first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from anymla.ops.attention.composed import named_rows
from lab.peers import Peer

if TYPE_CHECKING:
    from lab.backward_tiles import Call


class CudnnFrontend(Peer):
    """The package ``cudnn`` of nvidia-cudnn-frontend."""

    name, title = "cudnn_frontend", "cuDNN frontend"
    modules = ("cudnn.deepseek_sparse_attention",)

    def version(self) -> str | None:
        """Return the version of the package that the module belongs to."""
        stated = getattr(self._find("cudnn"), "__version__", None)
        return None if stated is None else str(stated)

    def gradients(self, call: Call) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Return a call that computes dq, drows and dsink of the same inputs.

        Its lists are one list of the rows of both ranges, -1 where a range is shorter; it is made
        beforehand.
        """
        given = call.options
        listed, _ = named_rows(call.ranges, call.lists, given["window"], given["entries"])
        backward = functools.partial(
            self.module.sparse_attention_backward_wrapper, call.q, call.rows, call.out, call.dout,
            call.lse, given["sink"], listed.contiguous(), softmax_scale=call.q.shape[2] ** -0.5,
        )  # fmt: skip

        def run() -> tuple[Tensor, Tensor, Tensor]:
            found: dict[str, Any] = backward()
            return found["dq"], found["dkv"], found["d_sink"]

        return run
