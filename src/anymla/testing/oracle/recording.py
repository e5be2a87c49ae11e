"""What a run stored and decided, copied while it runs, for the oracle to follow and to judge."""

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
        layout_id: how to read them.
        data: uint8 [n, data_bytes].
        scales: uint8 [n, scale_bytes].
    """

    layout_id: str
    data: Tensor
    scales: Tensor

    def decode(self) -> Tensor:
        """Float64 [n, channels]."""
        return ROW_FORMATS[self.layout_id].decode(self.data, self.scales)


class Recording:
    """One request: its tokens, cache entries at the moment they were written, and selections.

    What is written twice (a rejected draft's place) counts as it was written last.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._entries: dict[tuple[int, str], list[tuple[Tensor, StoredRows]]] = {}
        self._decisions: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
        self._streams: list[tuple[Tensor, Tensor]] = []

    @property
    def token_ids(self) -> list[int]:
        """The tokens run, by position."""
        return [self._tokens[position] for position in range(len(self._tokens))]

    def add_tokens(self, positions: Tensor, token_ids: Tensor) -> None:
        """Note the tokens at these positions."""
        self._tokens.update(zip(positions.tolist(), token_ids.tolist(), strict=True))

    def add_entries(self, layer: int, kind: str, numbers: Tensor, rows: StoredRows) -> None:
        """Note entries (positions for "window", compressed entry numbers otherwise)."""
        self._entries.setdefault((layer, kind), []).append((numbers, rows))

    def add_decision(self, layer: int, kind: str, positions: Tensor, chosen: Tensor) -> None:
        """Note "topk" or "experts" [n, k] at these positions."""
        self._decisions.setdefault((layer, kind), []).append((positions, chosen))

    def add_streams(self, positions: Tensor, streams: Tensor) -> None:
        """Note the backbone's streams [n, N, D] at these positions."""
        self._streams.append((positions, streams))

    def streams(self, n: int) -> Tensor:
        """Backbone streams [n, N, D] at positions 0 .. n-1, in the run's dtype.

        Raises:
            LookupError: one of them was never computed.
        """
        last = _last_written([positions for positions, _ in self._streams], n, "stream of")
        return torch.cat([streams for _, streams in self._streams])[last]

    def rows(self, layer: int, kind: str, n: int) -> StoredRows:
        """Entries 0 .. n-1.

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
        """Decisions [n, k] at positions 0 .. n-1 (int64).

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

    It needs no help from the engine: a request's later steps are recognised by the slot of the
    token before, which belongs to whoever wrote it last.

    Attributes:
        recordings: one a request, in the order in which they started.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self._owner: dict[int, Recording] = {}
        self._pending: list[tuple[str, int, Tensor]] = []

    def __call__(self, kind: str, layer: int, tensor: Tensor) -> None:
        """Hook for ``Step.recorder``."""
        self._pending.append((kind, layer, tensor.detach().cpu().clone()))

    def after_step(
        self, step: Step, caches: Sequence[LayerCache], specs: Sequence[Any], streams: Tensor
    ) -> None:
        """Copy what the step wrote; call it before anything else runs on the caches.

        Args:
            step: the step just run.
            caches: of the backbone's layers.
            specs: of the same layers.
            streams: [T, N, D], what the backbone returned.
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
    """A model whose backbone runs are recorded; everything else is the model's own.

    Give it to an engine in the model's place. Draft layers are not recorded: what they guess
    changes how fast a run is, not what it computes.
    """

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self, step: Step, caches: Sequence[LayerCache], *, taps: Taps | None = None
    ) -> Tensor:
        """Run the backbone, then copy what it wrote."""
        step = dataclasses.replace(step, recorder=self._recorder)
        hidden: Tensor = self._model.forward(step, caches, taps=taps)
        self._recorder.after_step(step, caches, self._model.layer_specs, hidden)
        return hidden

    __call__ = forward

    def logprobs(self, recording: Recording, token_ids: Sequence[int]) -> list[float | None]:
        """The run's log-probability of every token given those before it.

        Args:
            recording: of one request.
            token_ids: the request's tokens; the last may be one that was never run.

        Returns:
            One for each token; None for the first.
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
    """Copy what a layer writes; what it reads of another layer is copied with that one."""
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
    """For each of 0 .. n-1, the last place in the concatenated ``numbers`` where it stands."""
    every = torch.cat(numbers).tolist()
    place = {number: at for at, number in enumerate(every)}
    missing = [number for number in range(n) if number not in place]
    if missing:
        raise LookupError(f"{what} {missing[0]} was not recorded ({len(missing)} of {n} missing)")
    return torch.tensor([place[number] for number in range(n)], dtype=torch.int64)
