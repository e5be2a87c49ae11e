"""Contracts of the compressor: save tokens' states, compress closed windows to cache entries."""

from torch import Tensor

from anymla.ops._pages import check_cache
from anymla.ops.compressor.support import norm_support
from anymla.ops.device import float32_support
from anymla.ops.registry import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    INT64,
    check,
    check_cos_sin,
    operation,
    require,
)


@operation(mutates=("state_cache",))
def save_partial_states(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    backend: str | None = None,
) -> None:
    """Store each token's part of a window: ``state[slot] = kv | score + ape[p mod ratio]``.

    States are addressed by token position through a block table, so nothing moves when a window
    closes, and returning to an earlier position needs no undo.

    Args:
        kv: projected values, [T, W] float32 (or float64); W = D, or 2 D with overlap.
        score: projected gate logits, [T, W] float32 (or float64); may be a strided view, like kv.
        ape: position embedding within the window, [ratio, W] float32 (or float64).
        positions: positions of the tokens, [T] int64.
        state_cache: states to write, [P, S, 2 W] float32 (or float64) with inner strides (2 W, 1)
            and any page stride.
        slot_mapping: slots ``page * S + offset`` of the first N <= T tokens, [N] int64. Slots
            outside the cache are skipped; valid slots are distinct.
        compress_ratio: number of tokens in a window, at least 1.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: DeepSeek-V4 reference, inference/model.py (Compressor), with position-addressed state.
    """
    name = "save_partial_states"
    require(compress_ratio >= 1, name, "compress_ratio", "at least 1", compress_ratio)
    dims = check(
        name,
        dims={"r": compress_ratio},
        kv=(kv, "T W", FLOAT32_UP),
        score=(score, "T W", FLOAT32_UP),
        ape=(ape, "r W", FLOAT32_UP),
        positions=(positions, "T", INT64),
        state_cache=(state_cache, "P S _", FLOAT32_UP),
        slot_mapping=(slot_mapping, "_", INT64),
    )
    stored = slot_mapping.shape[0]
    require(stored <= dims["T"], name, "slot_mapping", f"at most T={dims['T']} long", stored)
    _check_state(name, state_cache, 2 * dims["W"])


@operation(mutates=("k_cache",))
def compress_norm_rope_insert(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    k_slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    layout: str,
    hadamard: bool = False,
    backend: str | None = None,
) -> None:
    """Compress every window that closes in this step to an entry of the compressed cache.

    Token t at position p closes window w = p // ratio when (p + 1) mod ratio = 0. With kv_i and
    s_i [W] the state of position i of its request, the entry is, channel by channel,

        c = sum_i softmax_i(s_i) kv_i
        row = rope(c / sqrt(mean(c^2) + eps) * norm_weight, position w * ratio)

    Without overlap, i runs over the window's own positions w ratio .. p, and W = D. With overlap, W
    = 2 D and the sum has 2 ratio terms: the first D channels of the previous window's positions,
    and the last D channels of its own. Positions below 0 are left out. The row, with ``hadamard``
    multiplied by the Hadamard matrix, is then encoded in ``layout`` and stored at
    k_slot_mapping[t]. Nothing is rounded before the encoding.

    A token is skipped, and nothing is written for it, if it closes no window, or if its position,
    state slot, request or target slot is negative or out of range. A position whose page id is
    outside the state cache counts as absent; an entry without any present position is skipped.

    Args:
        state_cache: states, including those of this step, [P, S, 2 W] float32 (or float64) with
            inner strides (2 W, 1) and any page stride.
        state_block_table: page ids of each request, [R, SP] int32; position i is at ``table[i // S]
            * S + i % S``.
        state_slot_mapping: slots of the tokens' states, [T] int64; negative for tokens without a
            state (padding).
        token_to_req: each token's row of the block table, [T] int32; -1 for padding.
        positions: positions of the tokens, [T] int64.
        norm_weight: weight of the RMS norm, [D] floating point.
        eps: number added to the mean square.
        cos_sin_cache: rotary table as in ``norm_rope.rope`` with the frequencies of compressed
            layers, [L, Rd] float32 (or float64).
        k_cache: cache to write, [Pages, B, row] (or [Pages, B, 1, row]) in ``layout``, any page
            stride.
        k_slot_mapping: slot ``page * B + offset`` of each entry, [T] int64; valid slots are
            distinct.
        compress_ratio: number of tokens in a window, at least 1.
        overlap: True if an entry also pools the previous window.
        layout: identifier of the target cache's layout, whose rows have D channels.
        hadamard: True to multiply by the normalised Hadamard matrix first; D must be a power of
            two.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong.

    Source: DeepSeek-V4 reference, inference/model.py (Compressor), in float32 up to the encoding.
    """
    name = "compress_norm_rope_insert"
    require(compress_ratio >= 1, name, "compress_ratio", "at least 1", compress_ratio)
    dims = check(
        name,
        state_cache=(state_cache, "P S _", FLOAT32_UP),
        state_block_table=(state_block_table, "R _", INT32),
        state_slot_mapping=(state_slot_mapping, "T", INT64),
        token_to_req=(token_to_req, "T", INT32),
        positions=(positions, "T", INT64),
        norm_weight=(norm_weight, "D", FLOATS),
        k_slot_mapping=(k_slot_mapping, "T", INT64),
    )
    width = dims["D"]
    _check_state(name, state_cache, (4 if overlap else 2) * width)
    check_cache(name, "k_cache", k_cache, layout, channels=width, device=positions.device)
    check_cos_sin(name, cos_sin_cache, positions, width)


@operation(
    outputs=lambda state_cache, positions, norm_weight, **_: (
        state_cache.new_empty((len(positions), len(norm_weight))),
    )
)
def compress_norm(
    state_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    compress_ratio: int,
    overlap: bool,
    backend: str | None = None,
) -> Tensor:
    """Compress every window that closes in this step, without rotating or storing the entries.

    Returns ``c / sqrt(mean(c^2) + eps) * norm_weight`` of ``compress_norm_rope_insert``, for models
    that project index keys from entries before rotation.

    Args:
        state_cache: states, including those of this step, as in ``compress_norm_rope_insert``.
        state_block_table: page ids of each request, [R, SP] int32.
        state_slot_mapping: slots of the tokens' states, [T] int64; negative for padding.
        token_to_req: each token's row of the block table, [T] int32; -1 for padding.
        positions: positions of the tokens, [T] int64.
        norm_weight: weight of the RMS norm, [D] floating point.
        eps: number added to the mean square.
        compress_ratio: number of tokens in a window, at least 1.
        overlap: True if an entry also pools the previous window.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Entries [T, D] in the states' dtype; zero for tokens that close no window or would be
        skipped.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: DeepSeek-V4.1 reference, inference/model.py (Compressor), in float32 throughout.
    """
    name = "compress_norm"
    require(compress_ratio >= 1, name, "compress_ratio", "at least 1", compress_ratio)
    dims = check(
        name,
        state_cache=(state_cache, "P S _", FLOAT32_UP),
        state_block_table=(state_block_table, "R _", INT32),
        state_slot_mapping=(state_slot_mapping, "T", INT64),
        token_to_req=(token_to_req, "T", INT32),
        positions=(positions, "T", INT64),
        norm_weight=(norm_weight, "D", FLOATS),
    )
    _check_state(name, state_cache, (4 if overlap else 2) * dims["D"])


def _check_state(name: str, state_cache: Tensor, width: int) -> None:
    shape, strides = state_cache.shape, state_cache.stride()
    if shape[2] != width or shape[1] < 1:
        require(False, name, "state_cache", f"[P, S, {width}]", list(shape))
    dense = strides[2] == 1 and (shape[1] == 1 or strides[1] == width)
    if not dense and state_cache.numel():
        expected = f"of inner strides [{width}, 1]"
        require(False, name, "state_cache", expected, list(strides))


_FAMILY = "anymla.ops.compressor"
for _operation, _kernel in (
    (save_partial_states, "partial_states"),
    (compress_norm_rope_insert, "compress"),
    (compress_norm, "compress"),
):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_{_kernel}")
for _operation, _kernel in (
    (save_partial_states, "partial_states"),
    (compress_norm_rope_insert, "compress"),
):
    _operation.register_lazy("triton", f"{_FAMILY}.triton_{_kernel}", supports=float32_support)
compress_norm.register_lazy("triton", f"{_FAMILY}.triton_norm", supports=norm_support)
