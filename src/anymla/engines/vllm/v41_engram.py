"""vLLM's n-grams of DeepSeek-V4.1 (Engram) with anymla's layer inside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_engram_dp_size,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.models.deepseek_v41.common.engram import (
    Engram,
    NgramHashState,
    _engram_head_shard_weight_loader,
)
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from anymla.layers.engram import EngramTable, NgramHash, decoded
from anymla.ops.engram import engram_gate
from anymla.ops.step_indices import slot_mapping as slots_of
from anymla.ops.step_indices import token_to_request

_BLOCK = 32  # channels per scale of a table


class AnymlaNgrams(NgramHashState):
    """Hash of a token's n-grams to rows of the tables.

    The tokens before a step come from vLLM. If its runner has no history on the device, they come
    from earlier steps, stored by slot of the first layer's window.
    """

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        dead_mask: Tensor,
        lookback_token_ids: Tensor,
        lookback_dead_mask: Tensor,
        slot_mapping: Tensor | None,
        block_table: Tensor | None,
    ) -> Tensor:
        """Return the row numbers int32 [T, layers, columns]."""
        tokens = torch.where(dead_mask, -1, input_ids.long())
        kept = self._cache if self.use_slot_cache else None
        if kept is not None:
            assert slot_mapping is not None
            slots = slot_mapping[: len(tokens)]
            own, at = tokens[: len(slots)].to(kept.dtype), slots.clamp(min=0)
            kept[at] = torch.where(slots >= 0, own, kept[at])  # slot 0 belongs to no request
        known = torch.where(lookback_dead_mask, -1, lookback_token_ids.long())
        missing = ~lookback_dead_mask & (lookback_token_ids < 0)
        request = token_to_request(query_start_loc, len(tokens)).clamp(min=0)
        first = query_start_loc[request.long()].long()
        place = torch.arange(len(tokens), device=tokens.device)
        columns = []
        for back in range(1, self.lookback_depth + 1):
            inside = place - back >= first
            column = (back - 1 - (place - first)).clamp(min=0)
            before = known[request.long(), column]
            if kept is not None:
                assert block_table is not None
                at = slots_of(
                    (positions - back).clamp(min=0), request, block_table, page_size=self.block_size
                )
                unknown = missing[request.long(), column] | (at < 0)
                before = torch.where(unknown, kept[at.clamp(min=0)].long(), before)
            token = torch.where(inside, tokens[(place - back).clamp(min=0)], before)
            columns.append(torch.where(positions < back, -1, token))
        previous = torch.stack(columns, 1)
        return torch.stack([rows(tokens, previous) for rows in self._hashes], 1).int()

    @functools.cached_property
    def _hashes(self) -> list[NgramHash]:
        """Return the hash of each layer."""
        token_map = self.token_map.long()
        return [
            NgramHash(token_map, self.pad_id, multipliers, moduli, offsets.view_as(moduli))
            for multipliers, moduli, offsets in zip(
                self.multipliers, self.primes, self.offsets, strict=True
            )
        ]


class AnymlaEngramTable(nn.Module):
    """This rank's heads of a table: FP8 rows and scales, or plain rows.

    Attributes:
        cpu_offload: True if the table is in pinned host memory.
        dp_size: number of replicas that share it, always one.
        tp_size: number of ranks that have a part each.
        n_hash_cols: number of heads of all ranks.
        part_n_hash_cols: number of heads of this rank.
    """

    dp_size = 1

    def __init__(
        self, rows: int, dim: int, head_sizes: tuple[int, ...], *, coded: bool, cpu_offload: bool
    ) -> None:
        super().__init__()
        self.dim, self.cpu_offload = dim, cpu_offload
        self.tp_size = get_tensor_model_parallel_world_size()
        self.n_hash_cols = len(head_sizes)
        self.part_n_hash_cols = -(-self.n_hash_cols // self.tp_size)
        self.head_start = get_tensor_model_parallel_rank() * self.part_n_hash_cols
        head_end = self.head_start + self.part_n_hash_cols
        self.first_row = sum(head_sizes[: self.head_start])
        held = sum(head_sizes[:head_end]) - self.first_row
        assert 0 < held <= rows
        where: dict[str, Any] = {"device": "cpu", "pin_memory": True} if cpu_offload else {}
        dtype = torch.float8_e4m3fn if coded else torch.bfloat16
        self.weight = self._parameter(torch.empty(held, dim, dtype=dtype, **where))
        self.weight_scale_inv = None
        if coded:
            scales = torch.empty(held, dim // _BLOCK, dtype=torch.uint8, **where)
            self.weight_scale_inv = self._parameter(scales)

    def _parameter(self, values: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(values, requires_grad=False)
        attributes = {
            "weight_loader": _engram_head_shard_weight_loader,
            "engram_vocab_start": self.first_row,
        }
        set_weight_attrs(parameter, attributes)
        return parameter

    def lookup(self, indices: Tensor, out: Tensor, background: bool = False) -> None:
        """Write this rank's rows [T, heads, D], given the row numbers [T, all heads]."""
        local = indices[:, self.head_start : self.head_start + self.part_n_hash_cols].long()
        values = [self.weight.data]
        if self.weight_scale_inv is not None:
            values = [values[0].view(torch.uint8), self.weight_scale_inv.data]
        if self.cpu_offload:
            values = [get_accelerator_view_from_cpu_tensor(each) for each in values]
        table = EngramTable(values[0], values[1] if len(values) > 1 else None)
        heads = local.shape[1]
        rows = decoded(table.rows(local - self.first_row), out.dtype)
        out[:, :heads] = rows.unflatten(1, (heads, self.dim))
        out[:, heads:] = 0  # columns of the last rank, if the heads do not divide evenly


class AnymlaEngram(Engram):
    """Rows of the table, projected, and added to the streams by gates."""

    def __init__(self, config: Any, quant_config: Any, *args: Any, **kwargs: Any) -> None:
        self.coded = quant_config is not None
        super().__init__(config, quant_config, *args, **kwargs)
        if self.use_sequence_parallel or get_engram_dp_size() > 1:
            raise NotImplementedError("anymla's n-grams are for tensor parallel alone")

    def _create_embedding(self, layout: Any, layer_hash_index: int) -> AnymlaEngramTable:
        options = get_current_vllm_config().engram_config
        return AnymlaEngramTable(
            layout.num_embeddings[layer_hash_index],
            layout.head_dim,
            tuple(size for order in layout.primes[layer_hash_index] for size in order),
            coded=self.coded,
            cpu_offload=options.cpu_offload and is_pin_memory_available(),
        )

    def _init_staging(self, max_tokens: int, head_dim: int) -> None:
        super()._init_staging(max_tokens, head_dim)
        if not current_platform.is_cuda():  # only CUDA looks rows up in parallel with other work
            self._prefetch_stream = self._prefetch_done = None

    def forward(
        self, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None
    ) -> Tensor:
        """Add to streams [T, N, hidden]; tokens that the mask excludes stay unchanged."""
        projected = self.wkv(self.embed(hash_ids).flatten(-2))
        weight = self.q_weight.float() * self.k_weight.float()
        added = engram_gate(hidden_states, projected, weight, eps=self.eps)
        if token_mask is None:
            return added
        return torch.where(token_mask.view(-1, 1, 1), added, hidden_states)
