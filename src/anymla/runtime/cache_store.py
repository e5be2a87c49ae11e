"""All caches of an engine: the tensors of each layer, the page pools and the block tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.state_layout import allocate_states
from anymla.layers.caches import CacheFormat, LayerCache
from anymla.layers.spec import LayerSpec
from anymla.runtime.block_table import BlockTable, joint_tables
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.page_pool import PagePool
from anymla.runtime.request import Request, RequestState


class CacheStore:
    """Caches for requests that join and leave.

    Attributes:
        groups: cache groups of the layers.
        pools: page pools by group name.
        tables: block tables by group name.
        joint_tables: int32 tensor of the tables of all groups, side by side.
        layers: cache tensors of each layer, in the order of ``specs``; layers that share a cache
            hold the same tensor.
        absent_row: row of the block tables that serves padding requests.
        device: device of the tensors.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        specs: Sequence[LayerSpec],
        cache_format: CacheFormat,
        pages: Mapping[str, int],
        *,
        max_requests: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.device = device
        self.absent_row = max_requests
        # One page more than can be used: the null page.
        self.pools = {group.name: PagePool(group.name, pages[group.name] + 1) for group in groups}
        self.joint_tables, columns = joint_tables(
            groups, max_requests=max_requests, max_seq_len=max_seq_len, device=device
        )
        self.tables = {
            group.name: BlockTable(
                group, self.pools[group.name], self.joint_tables, columns[group.name]
            )
            for group in groups
        }
        tensors: list[dict[str, Tensor]] = [{} for _ in specs]
        for group in groups:
            num_pages = self.pools[group.name].num_pages
            for layer in group.layers:
                tensors[layer][group.kind] = _allocate(
                    group, specs[layer], cache_format, num_pages, device
                )
        for layer, spec in enumerate(specs):
            if spec.ratio and not spec.compresses:
                assert spec.kv_source is not None
                shared = tensors[spec.kv_source]
                tensors[layer]["compressed"] = shared["compressed"]
                if spec.selects:
                    tensors[layer]["index"] = shared["index"]
        self.layers = [LayerCache(format=cache_format, **caches) for caches in tensors]
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._reservations: dict[int, dict[str, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all cache tensors, page padding and null pages included."""
        return sum(
            cache.untyped_storage().nbytes()
            for group in self.groups
            for cache in self.tensors(group)
        )

    def step_groups(self, *, window_only: bool = False) -> tuple[CacheGroup, ...]:
        """Return the groups that a step needs; a draft layer's step needs the window only."""
        return tuple(group for group in self.groups if group.kind == "window" or not window_only)

    def tensors(self, group: CacheGroup) -> list[Tensor]:
        """Return the group's cache tensors, in the order of its layers."""
        return [getattr(self.layers[layer], group.kind) for layer in group.layers]

    def check_fits(self, request: Request, needs: Mapping[str, int]) -> None:
        """Raise ValueError if a request with these needs could not run even alone."""
        for name, pages in needs.items():
            if pages > self.pools[name].capacity:
                raise ValueError(
                    f"request {request.request_id!r} can never fit: its "
                    f"{request.max_length} tokens need {pages} pages of cache group {name!r}, "
                    f"which has {self.pools[name].capacity}"
                )

    def has_room(self, needs: Mapping[str, int]) -> bool:
        """True if a row, and the given number of pages of each group, are free."""
        return bool(self._free_rows) and all(
            self.pools[name].can_reserve(pages) for name, pages in needs.items()
        )

    def admit(self, state: RequestState, needs: Mapping[str, int]) -> bool:
        """Give the request a row and reserve its worst case, if all of it is free."""
        if not self.has_room(needs):
            return False
        state.row = self._free_rows.pop()
        self._reservations[state.row] = dict(needs)
        for name, pages in needs.items():
            self.pools[name].reserve(pages)
        return True

    def slide(self, state: RequestState) -> None:
        """Return the pages before every window of the request's confirmed length."""
        for table in self.tables.values():
            table.slide(state.row, state.computed, state.kept_at)

    def can_rewind(self, state: RequestState, length: int) -> bool:
        """True if a request could continue after its first ``length`` tokens."""
        return all(table.can_rewind(state.row, length) for table in self.tables.values())

    def take_over(
        self, kept: RequestState, state: RequestState, needs: Mapping[str, int], length: int
    ) -> bool:
        """Give a request the row of an ended one, with the caches of their common tokens.

        Args:
            kept: request that has ended; it has no row afterwards.
            state: request that begins in its row.
            needs: worst case of pages by group of the new request.
            length: number of common tokens; ``can_rewind`` must hold for it.

        Returns:
            False if its worst case is not free; then nothing has changed.
        """
        reserved = self._reservations[kept.row]
        more = {name: pages - reserved[name] for name, pages in needs.items()}
        if not all(self.pools[name].can_reserve(pages) for name, pages in more.items()):
            return False
        for name, pages in more.items():
            self.tables[name].rewind(kept.row, length)
            if pages > 0:
                self.pools[name].reserve(pages)
            else:
                self.pools[name].cancel(-pages)
        self._reservations[kept.row] = dict(needs)
        state.row, kept.row = kept.row, -1
        state.computed = state.cached = length
        return True

    def release(self, state: RequestState) -> None:
        """Return the request's row, pages and reservations."""
        for name, pages in self._reservations.pop(state.row).items():
            self.tables[name].clear(state.row)
            self.pools[name].cancel(pages)
        self._free_rows.append(state.row)
        state.row = -1


def _allocate(
    group: CacheGroup,
    spec: LayerSpec,
    cache_format: CacheFormat,
    num_pages: int,
    device: torch.device,
) -> Tensor:
    layout = get_layout(cache_format.of(group.kind))
    if group.kind in ("state", "index_state"):
        # With overlap a token feeds two entries, each through half of its channels.
        width = layout.channels * spec.pooled_tokens // spec.ratio
        return allocate_states(num_pages, group.page_size, width, device)
    return layout.allocate(num_pages, group.page_size, device)
