"""Decode attention by portable Triton beside public engines for Ampere, on the same rows.

Engines that cache bfloat16 rows get V4's rows decoded, which bfloat16 represents exactly; this
package is then timed over these, too, by ``sparse_attention_rows``, whose list names both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from anymla.bench.runner import Case, Clock, Subject, beside
from anymla.ops.attention import sparse_attention_rows
from anymla.ops.compile_ahead import compiled_together
from lab.cases.sparse_attention import Decode, DecodeInputs, first_result
from lab.peers.ampere import AmpereEngine

PART = "portable decode attention beside public engines for Ampere"
_LEAST = 1.5


def shapes() -> Iterator[Decode]:
    """Yield shapes with one query a request, of whole models and of shards."""
    for heads in (64, 8, 128, 16):
        for batch in (1, 8, 32, 64, 128, 256) if heads == 64 else (1, 8, 64, 256):
            yield Decode(batch, 1, heads, 512)
        for batch in (8, 64, 256):
            yield Decode(batch, 1, heads, 1024)


def over_decoded_rows(inputs: DecodeInputs, backend: str) -> list[Callable[[], Tensor]]:
    """Return calls of ``sparse_attention_rows`` over decoded rows, one for each set of lists."""
    rows, count = inputs.decoded_caches
    q = inputs.q.flatten(0, 1)
    out = torch.empty_like(q)
    calls: list[Callable[[], Tensor]] = []
    for lists in inputs.lists:
        first, second = inputs.cache_rows(*lists)
        both = torch.cat((first.indices, second.indices + count), dim=1)
        calls.append(
            functools.partial(
                first_result, sparse_attention_rows, q, rows, both,
                sink=inputs.sink, out=out, backend=backend,
            )
        )  # fmt: skip
    return calls


def ampere_cases(
    chosen: Iterable[Decode], peers: Sequence[AmpereEngine], backend: str = "triton"
) -> Iterator[Case]:
    """Yield cases beside the given engines.

    Args:
        chosen: shapes whose lists are full.
        peers: engines, whose fastest counts.
        backend: backend of this package's operations.
    """
    cached = {f"{peer.name}_rows": peer.cached for peer in peers}
    words = f"at least {_LEAST:g} times the speed of the fastest of them"
    for shape in chosen:
        yield Case(
            PART,
            shape.label,
            functools.partial(_subjects, shape, peers, backend),
            shape.fields | {"backend": backend} | cached,
            beside("us", [f"{peer.name}_us" for peer in peers], _LEAST, words),
        )


def compile_ahead(
    chosen: Iterable[Decode], peers: Sequence[AmpereEngine], device: torch.device
) -> None:
    """Compile the kernels of all libraries on all cores, on targets that compile."""
    with compiled_together() as only_compiled, torch.inference_mode():
        for shape in chosen if only_compiled else ():
            inputs = DecodeInputs.draw(shape, device)
            inputs.lists[1:] = []
            for calls in _own_calls(inputs, peers, "triton").values():
                calls[0]()
            for peer in peers:
                peer.compile(inputs)


def _own_calls(
    inputs: DecodeInputs, peers: Sequence[AmpereEngine], backend: str
) -> dict[str, list[Callable[[], Tensor]]]:
    """Return this package's calls beside the peers, by the prefix of their fields."""
    calls = {"": inputs.attention(backend)}
    if any(peer.cached != "FP8" for peer in peers):
        calls["bf16_"] = over_decoded_rows(inputs, backend)
    return calls


def _subjects(
    shape: Decode, peers: Sequence[AmpereEngine], backend: str, clock: Clock
) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)
    for prefix, calls in _own_calls(inputs, peers, backend).items():
        yield inputs.checked(calls, f"{prefix}us", f"{prefix}error")
    for peer in peers:
        yield inputs.checked(peer.decode(inputs), f"{peer.name}_us", f"{peer.name}_error")
