"""Recordings of a run's cache rows and decisions, for the oracle to follow and to judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries

if TYPE_CHECKING:
    from anymla.layers.caches import LayerCache
    from anymla.layers.dspark import Taps
    from anymla.layers.step import Step

WINDOW, COMPRESSED, INDEX = "window", "compressed", "index"


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Bytes of cache entries 0 .. n-1 of one layer.

    Attributes:
        layout_id: layout id of the entries.
        data: uint8 [n, data_bytes], bytes of the values.
        scales: uint8 [n, scale_bytes], bytes of the scales.
    """

    layout_id: str
    data: Tensor
    scales: Tensor

    def decode(self) -> Tensor:
        """Decode to float64 [n, channels]."""
        return ROW_FORMATS[self.layout_id].decode(self.data, self.scales)


class Recording:
    """One request: its tokens, cache entries as they were written, and selections.

    If a slot is written twice (after a rejected draft), the last write counts.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._entries: dict[tuple[int, str], list[tuple[Tensor, StoredRows]]] = {}
        self._decisions: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
        self._streams: list[tuple[Tensor, Tensor]] = []

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens that were run, by position."""
        return [self._tokens[position] for position in range(len(self._tokens))]

    def add_tokens(self, positions: Tensor, token_ids: Tensor) -> None:
        """Record the tokens at these positions."""
        self._tokens.update(zip(positions.tolist(), token_ids.tolist(), strict=True))

    def add_entries(self, layer: int, kind: str, numbers: Tensor, rows: StoredRows) -> None:
        """Record entries (positions for "window", compressed entry numbers otherwise)."""
        self._entries.setdefault((layer, kind), []).append((numbers, rows))

    def add_decision(self, layer: int, kind: str, positions: Tensor, chosen: Tensor) -> None:
        """Record "topk" or "experts" [n, k] at these positions."""
        self._decisions.setdefault((layer, kind), []).append((positions, chosen))

    def add_streams(self, positions: Tensor, streams: Tensor) -> None:
        """Record the backbone's streams [n, N, D] at these positions."""
        self._streams.append((positions, streams))

    def streams(self, n: int) -> Tensor:
        """Return the backbone's streams [n, N, D] at positions 0 .. n-1, in the run's dtype.

        Raises:
            LookupError: one of them was never computed.
        """
        last = _last_written([positions for positions, _ in self._streams], n, "stream of")
        return torch.cat([streams for _, streams in self._streams])[last]

    def rows(self, layer: int, kind: str, n: int) -> StoredRows:
        """Return entries 0 .. n-1 as stored.

        Raises:
            LookupError: one of them was never written.
        """
        parts = self._entries.get((layer, kind), [])
        if not parts:
            raise LookupError(f"layer {layer}: no {kind} rows were recorded")
        last = _last_written([numbers for numbers, _ in parts], n, f"layer {layer} {kind} row")
        first = parts[0][1]
        data = torch.cat([rows.data for _, rows in parts])[last]
        return StoredRows(
            first.layout_id, data, torch.cat([rows.scales for _, rows in parts])[last]
        )

    def decisions(self, layer: int, kind: str, n: int) -> Tensor:
        """Return decisions [n, k] at positions 0 .. n-1 (int64).

        Raises:
            LookupError: one of them was never made.
        """
        parts = self._decisions.get((layer, kind), [])
        if not parts:
            raise LookupError(f"layer {layer}: no {kind} decisions were recorded")
        last = _last_written([positions for positions, _ in parts], n, f"layer {layer} {kind} of")
        return torch.cat([chosen for _, chosen in parts])[last].long()


class Recorder:
    """Collects the recordings of all requests of an engine.

    The engine takes no part: a request's later steps are recognised by the slot of the preceding
    token, which belongs to the request that wrote it last.

    Attributes:
        recordings: one for each request, in the order of their start.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self._owner: dict[int, Recording] = {}
        self._pending: list[tuple[str, int, Tensor]] = []

    def __call__(self, kind: str, layer: int, tensor: Tensor) -> None:
        """Record a decision; the hook ``Step.recorder``."""
        self._pending.append((kind, layer, tensor.detach().cpu().clone()))

    def after_step(
        self, step: Step, caches: Sequence[LayerCache], specs: Sequence[Any], streams: Tensor
    ) -> None:
        """Copy the rows that the step wrote; call it before anything else runs on the caches.

        Args:
            step: step that has just run.
            caches: caches of the backbone's layers.
            specs: specs of the same layers.
            streams: streams [T, N, D] that the backbone returned.
        """
        pending, self._pending = self._pending, []
        positions, owners = step.positions.cpu(), step.token_to_req.cpu()
        window = step.groups[WINDOW]
        slots, table = window.slot_mapping.cpu(), window.block_table.cpu()
        for request in range(len(step.seq_lens)):
            tokens = ((owners == request) & step.is_valid.cpu()).nonzero().squeeze(1)
            if not len(tokens):
                continue
            recording = self._recording(int(positions[tokens[0]]), table[request], window.page_size)
            recording.add_tokens(positions[tokens], step.token_ids.cpu()[tokens])
            recording.add_streams(positions[tokens], streams.detach().cpu()[tokens])
            self._owner.update(dict.fromkeys(slots[tokens].tolist(), recording))
            for kind, layer, chosen in pending:
                recording.add_decision(layer, kind, positions[tokens], chosen[tokens])
            for layer, cache in enumerate(caches):
                _copy_entries(recording, specs[layer], step, cache, tokens)

    def _recording(self, start: int, table: Tensor, page_size: int) -> Recording:
        if start == 0:
            self.recordings.append(Recording())
            return self.recordings[-1]
        page, offset = divmod(start - 1, page_size)
        return self._owner[int(table[page]) * page_size + offset]


class RecordedModel:
    """A model whose backbone runs are recorded; all else is the model's own.

    Pass it to an engine instead of the model. Draft layers are not recorded: their guesses change
    the speed of a run, but not its results.
    """

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self, step: Step, caches: Sequence[LayerCache], *, taps: Taps | None = None
    ) -> Tensor:
        """Run the backbone, then copy the rows that it wrote."""
        step = dataclasses.replace(step, recorder=self._recorder)
        hidden: Tensor = self._model.forward(step, caches, taps=taps)
        self._recorder.after_step(step, caches, self._model.layer_specs, hidden)
        return hidden

    __call__ = forward

    def logprobs(self, recording: Recording, token_ids: Sequence[int]) -> list[float | None]:
        """Return the run's log-probability of every token given those before it.

        Args:
            recording: recording of one request.
            token_ids: token ids of the request; the last may be one that was never run.

        Returns:
            One value for each token; None for the first.
        """
        n = len(token_ids) - 1
        result: list[float | None] = [None]
        for block in torch.arange(n).split(512):
            streams = recording.streams(n)[block].to(self._model.device)
            table = self._model.logits(streams).double().log_softmax(-1).cpu()
            following = torch.as_tensor(token_ids)[block + 1]
            result += table.gather(1, following.unsqueeze(1)).squeeze(1).tolist()
        return result


def _copy_entries(
    recording: Recording, spec: Any, step: Step, cache: LayerCache, tokens: Tensor
) -> None:
    """Copy the rows that a layer writes; shared rows are copied with their writer's."""
    layer, ratio, formats = spec.index, spec.ratio, cache.format
    sources = [(WINDOW, WINDOW, 1, cache.window, formats.main)]
    if spec.compresses and cache.compressed is not None:
        group = spec.compressed_group
        sources.append((COMPRESSED, group, ratio, cache.compressed, formats.entries))
    if spec.keeps_keys and cache.index is not None:
        sources.append((INDEX, spec.index_group, ratio, cache.index, formats.index))
    positions = step.positions.cpu()[tokens]
    for kind, group, tokens_per_entry, pages, layout_id in sources:
        slots = step.groups[group].slot_mapping.cpu()[tokens]
        written = slots >= 0
        if written.any():
            data, scales = read_entries(pages, slots[written].to(pages.device), layout_id)
            numbers = positions[written] // tokens_per_entry
            recording.add_entries(layer, kind, numbers, StoredRows(layout_id, data, scales))


def _last_written(numbers: list[Tensor], n: int, what: str) -> Tensor:
    """Return, for each of 0 .. n-1, its last position in the concatenated ``numbers``."""
    every = torch.cat(numbers).tolist()
    place = {number: at for at, number in enumerate(every)}
    missing = [number for number in range(n) if number not in place]
    if missing:
        raise LookupError(f"{what} {missing[0]} was not recorded ({len(missing)} of {n} missing)")
    return torch.tensor([place[number] for number in range(n)], dtype=torch.int64)
