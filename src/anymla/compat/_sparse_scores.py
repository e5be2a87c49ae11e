"""Index scores of listed blocks of keys: DeepGEMM's sparse logits over ``paged_mqa_logits``.

DeepGEMM's metadata argument holds here the position of each listed block and the range of its
visible keys. Keys are gathered, some rows at a time, into pages that kernels of anymla score: work
and memory follow the lists, not the context. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from anymla.compat._index_keys import Operand, StoredKeys, queries
from anymla.ops.indexer import paged_mqa_logits
from anymla.ops.registry import INT32, check, require

# Upper bound of gathered keys at a time, in bytes.
_GATHERED_BYTES = 1 << 28
_PAGE = 64
_MOST_KEYS = 1 << 15  # keys per block: two bounds share an int32


def get_sparse_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int,
    sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> Tensor:
    """Return the metadata argument of ``fp8_fp4_sparse_mqa_logits`` for the rows' blocks.

    The first ceil((end - start) / sparse_block_kv) blocks of a row's list count, or all if it has
    fewer. Block i holds the keys from ``i * sparse_block_kv`` on, or with ``use_unaligned_ks`` from
    ``i * sparse_block_kv + start % sparse_block_kv`` on.

    Args:
        cu_seq_len_k_start: int32 [M], first visible key of each row.
        cu_seq_len_k_end: int32 [M], one past the last visible key.
        num_kv_tokens: number of keys in the list; bounds are clamped to it.
        sparse_kv_block_indices: int32 [M, blocks], numbers of blocks in any order; negative numbers
            name no block.
        qk_dtype: ignored, because the scores follow the dtype of the queries.
        sparse_block_kv: number of keys per block; DeepGEMM supports 8 and 16.
        use_unaligned_ks: True if blocks are counted from the start, see above.

    Returns:
        uint8 [M * blocks * 8] metadata, independent of the arguments' memory.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape or device.
    """
    name = "get_sparse_mqa_logits_metadata"
    check(
        name,
        sparse_kv_block_indices=(sparse_kv_block_indices, "M _", INT32),
        cu_seq_len_k_start=(cu_seq_len_k_start, "M", INT32),
        cu_seq_len_k_end=(cu_seq_len_k_end, "M", INT32),
    )
    _check_block(name, sparse_block_kv)
    start = cu_seq_len_k_start.long().clamp(0, num_kv_tokens).unsqueeze(1)
    end = cu_seq_len_k_end.long().clamp(0, num_kv_tokens).unsqueeze(1)
    first = sparse_kv_block_indices.long() * sparse_block_kv
    if use_unaligned_ks:
        first = first + start % sparse_block_kv
    counts = _is_counted(sparse_kv_block_indices, end - start, sparse_block_kv)
    low, high = ((each - first).clamp(0, sparse_block_kv) for each in (start, end))
    return _metadata(first, low, torch.where(counts, high, 0))


def get_paged_sparse_mqa_logits_metadata(
    context_lens: Tensor,
    block_table: Tensor,
    indices: Tensor | None,
    page_kv: int,
    sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
) -> Tensor:
    """Return the metadata argument of ``fp8_fp4_paged_sparse_mqa_logits`` for the rows' blocks.

    The first ceil(length / sparse_block_kv) blocks of a row's list count, or all if it has fewer.

    Args:
        context_lens: int32 [T] or [T, 1], number of entries visible to each row.
        block_table: int32 [T, pages], pages of each row.
        indices: int32 [T], request of each row, or None; it changes no result.
        page_kv: number of entries per page, a multiple of ``sparse_block_kv``.
        sparse_kv_block_indices: int32 [T, blocks], numbers of blocks of the row's own entries in
            any order; negative numbers name no block.
        qk_dtype: ignored, because the scores follow the dtype of the queries.
        sparse_block_kv: number of entries per block; DeepGEMM supports 8 and 16.

    Returns:
        uint8 [T * blocks * 8] metadata, independent of the arguments' memory.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape or device, or blocks do not
            divide a page.
    """
    name = "get_paged_sparse_mqa_logits_metadata"
    check(
        name,
        sparse_kv_block_indices=(sparse_kv_block_indices, "T _", INT32),
        context_lens=(context_lens, "T" if context_lens.ndim == 1 else "T 1", INT32),
        block_table=(block_table, "T _", INT32),
        indices=(indices, "T", INT32),
    )
    _check_block(name, sparse_block_kv)
    divides = page_kv >= 1 and page_kv % sparse_block_kv == 0
    require(divides, name, "page_kv", f"a multiple of {sparse_block_kv}", page_kv)
    length = context_lens.view(-1, 1).long()
    block = sparse_kv_block_indices.long()
    counts = _is_counted(sparse_kv_block_indices, length, sparse_block_kv)
    share = page_kv // sparse_block_kv
    column = block // share
    counts &= column < block_table.shape[1]
    if not block_table.shape[1]:
        block_table = functional.pad(block_table, (0, 1), value=-1)
    page = block_table.gather(1, torch.where(counts, column, 0)).long()
    counts &= page >= 0
    high = (length - block * sparse_block_kv).clamp(0, sparse_block_kv)
    # Counted in blocks, because entries of a large cache exceed 2^31.
    return _metadata(page * share + block % share, 0 * high, torch.where(counts, high, 0))


def fp8_fp4_sparse_mqa_logits(
    q: Operand,
    kv: Operand,
    weights: Tensor,
    metadata: Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> Tensor:
    """Score the listed blocks of one dense list of keys, side by side.

    Column ``i * sparse_block_kv + j`` of a row is ``sum_h weights[m, h] * relu(q[m, h] . k)`` for
    key j of the i-th block of its list, and -inf if that key is not visible.

    Args:
        q: queries and their scales: [M, H, 128] float8_e4m3fn or [M, H, 64] packed e2m1, and [M, H]
            int32 of four scale bytes. Or [M, H, 128] float8_e4m3fn without scales, for keys with
            float32 scales, which DeepGEMM does not support.
        kv: keys [N, 128] or [N, 64] in q's format, and their scales, [N] int32 (or float32).
        weights: [M, H] bfloat16, or float32, which DeepGEMM does not support.
        metadata: result of ``get_sparse_mqa_logits_metadata`` for the same rows and blocks.
        num_max_sparse_blocks: number of blocks per list.
        sparse_block_kv: number of keys per block, as for the metadata.
        use_unaligned_ks: ignored, because the metadata holds it.

    Returns:
        [M, num_max_sparse_blocks * sparse_block_kv] scores in the dtype of the weights.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape or device.
    """
    name = "fp8_fp4_sparse_mqa_logits"
    values, factors, form = queries(name, q)
    require(values.ndim == 3, name, "q", "[M, H, D]", list(values.shape))
    keys = StoredKeys.of_list(name, kv, form)
    blocks = _Blocks(name, metadata, len(values), num_max_sparse_blocks, sparse_block_kv, 1)
    return blocks.scores(values, factors, keys, weights)


def fp8_fp4_paged_sparse_mqa_logits(
    q: Operand,
    kv_cache: Tensor,
    weights: Tensor,
    metadata: Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
) -> Tensor:
    """Score the listed blocks of every row's pages, side by side.

    The scores are those of ``fp8_fp4_sparse_mqa_logits``; blocks on pages beyond the cache are not
    visible.

    Args:
        q: queries with a dimension of 1 after the first, else as that function takes them: [T, 1,
            H, _], scales [T, 1, H].
        kv_cache: [P, page_kv, 1, D + 4] uint8, a page's codes and then its scales; or [P, page_kv,
            1, D / 2 + 4], packed. Any page stride.
        weights: head weights [T, H], bfloat16 or float32.
        metadata: result of ``get_paged_sparse_mqa_logits_metadata`` for the same rows and blocks.
        num_max_sparse_blocks: number of blocks per list.
        sparse_block_kv: number of entries per block, as for the metadata.

    Returns:
        [T, num_max_sparse_blocks * sparse_block_kv] scores in the dtype of the weights.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape or device.
    """
    name = "fp8_fp4_paged_sparse_mqa_logits"
    values, factors, form = queries(name, q)
    one = values.ndim == 4 and values.shape[1] == 1
    require(one, name, "q", "[T, 1, H, D]", list(values.shape))
    keys = StoredKeys.of_cache(name, kv_cache, form)
    page = kv_cache.shape[1]
    divides = sparse_block_kv >= 1 and page % sparse_block_kv == 0
    require(divides, name, "sparse_block_kv", f"a divisor of {page}", sparse_block_kv)
    blocks = _Blocks(
        name, metadata, len(values), num_max_sparse_blocks, sparse_block_kv, sparse_block_kv
    )
    factors = None if factors is None else factors.squeeze(1)
    return blocks.scores(values.squeeze(1), factors, keys, weights)


class _Blocks:
    """The listed blocks, read from the metadata argument."""

    def __init__(
        self, name: str, metadata: Tensor, rows: int, blocks: int, keys: int, unit: int
    ) -> None:
        """Read metadata of rows that list ``blocks`` blocks of ``keys`` keys.

        Args:
            name: name of the called function, for messages.
            metadata: metadata argument of the caller.
            rows: number of queries.
            blocks: number of blocks per list.
            keys: number of keys per block.
            unit: number of keys that a position in the metadata counts.
        """
        _check_block(name, keys)
        fits = metadata.dtype == torch.uint8 and metadata.numel() == rows * blocks * 8
        expected = f"the metadata of {rows} rows of {blocks} blocks, uint8 [{rows * blocks * 8}]"
        got = f"{metadata.dtype} {list(metadata.shape)}"
        require(fits, name, "metadata", expected, got)
        place, bounds = metadata.contiguous().view(INT32).view(rows, blocks, 2).unbind(2)
        self._name, self._unit, self._keys = name, unit, keys
        self._place, self._low, self._high = place, bounds >> 16, bounds & 0xFFFF

    def scores(
        self, q: Tensor, q_scales: Tensor | None, keys: StoredKeys, weights: Tensor
    ) -> Tensor:
        """Return scores [T, blocks * keys] of q [T, H, _], in the dtype of the weights."""
        rows, columns = len(q), self._place.shape[1] * self._keys
        dtypes = (torch.bfloat16, torch.float32)
        check(
            self._name,
            q=(q, "T H _", q.dtype),
            weights=(weights, "T H", dtypes),
            metadata=(self._place, "T _", INT32),
        )
        require(keys.device == q.device, self._name, "kv", f"on {q.device}", keys.device)
        out = torch.full((rows, columns), -torch.inf, dtype=weights.dtype, device=q.device)
        padded = -(-columns // _PAGE) * _PAGE
        step = max(1, _GATHERED_BYTES // max(1, padded * 256))
        for first in range(0, rows if columns and keys.count else 0, step):
            some = slice(first, first + step)
            entries, visible = self._entries(some, keys.count)
            cache = keys.pages(functional.pad(entries, (0, padded - columns)).flatten(), _PAGE)
            table = torch.arange(len(cache), dtype=INT32, device=q.device)
            column = torch.arange(1, columns + 1, dtype=INT32, device=q.device)
            logits = paged_mqa_logits(
                q[some].unsqueeze(1),
                cache,
                weights[some].float(),
                (visible * column).amax(1, keepdim=True),
                table.view(len(entries), -1),
                max_context=columns,
                layout=keys.layout,
                q_scales=None if q_scales is None else q_scales[some].unsqueeze(1),
            )
            out[some] = logits.masked_fill_(~visible, -torch.inf).to(out.dtype)
        return out

    def _entries(self, rows: slice, count: int) -> tuple[Tensor, Tensor]:
        """Return each column's entry [t, columns], 0 for none, and the mask of visible ones."""
        key = torch.arange(self._keys, device=self._place.device)
        first = self._place[rows].long().unsqueeze(2) * self._unit
        low, high = (each[rows].unsqueeze(2) for each in (self._low, self._high))
        entry = first + key
        visible = (key >= low) & (key < high) & (entry >= 0) & (entry < count)
        return torch.where(visible, entry, 0).flatten(1), visible.flatten(1)


def _check_block(name: str, keys: int) -> None:
    fits = 1 <= keys < _MOST_KEYS
    require(fits, name, "sparse_block_kv", f"within 1..{_MOST_KEYS - 1}", keys)


def _is_counted(blocks: Tensor, length: Tensor, keys: int) -> Tensor:
    """Return the mask of columns of lists [T, n] that count for rows of [T, 1] visible keys."""
    column = torch.arange(blocks.shape[1], device=blocks.device)
    return (column < (length.clamp(min=0) + keys - 1) // keys) & (blocks >= 0)


def _metadata(place: Tensor, low: Tensor, high: Tensor) -> Tensor:
    there = (high > low) & (place <= torch.iinfo(INT32).max)
    place, high = torch.where(there, place, 0), torch.where(there, high, 0)
    return torch.stack((place, low << 16 | high), 2).to(INT32).view(torch.uint8).flatten()
