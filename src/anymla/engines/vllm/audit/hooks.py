"""Hooks of a model: choose an audited step's tokens, and hand its cases over when it has run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from anymla.audit.auditor import Auditor
from anymla.audit.rows import RowRecorder
from anymla.engines.vllm.audit.at_rest import RowsAtRest
from anymla.engines.vllm.audit.method import Layer, Method, Watch
from anymla.engines.vllm.audit.sample import HEAD, Sample, on_device, pick
from anymla.engines.vllm.audit.streams import StreamCalls
from anymla.engines.vllm.audit.table import METHODS


class Hooks(Watch):
    """Puts itself around the methods of one model.

    Attributes:
        request_ids: ids of the running batch's requests in its order, where the runner does not
            choose.
        runner_chooses: True once a runner has called ``begin_batch``.
        at_rest: rows of the caches that are looked at again.
        streams: calls of the model's hyper-connections.
    """

    def __init__(self, model: nn.Module, auditor: Auditor) -> None:
        """Find the layers and put the hooks in."""
        super().__init__(auditor, next(model.parameters()).device)
        self.request_ids: list[str] = []
        self.runner_chooses = False
        names = {id(module): name for name, module in model.named_modules()}
        modules: list[Any] = list(model.modules())
        blocks = {m.attn.prefix: m for m in modules if hasattr(m, "attn") and hasattr(m, "ffn")}
        self._attentions = {m.prefix: m for m in modules if hasattr(m, "swa_cache_layer")}
        self._by_ratio: dict[int, list[str]] = {}
        self._methods: dict[str, list[Method]] = {}
        for prefix, attention in self._attentions.items():
            layer = Layer(attention, blocks.get(prefix), names)
            self._by_ratio.setdefault(attention.compress_ratio, []).append(prefix)
            self._methods[prefix] = [
                kind(self, layer, each) for kind in METHODS for each in kind.modules(layer)
            ]
        every = [each for methods in self._methods.values() for each in methods]
        for each in every:
            each.install()
        self.at_rest = RowsAtRest(self._attentions)
        self.streams = StreamCalls(self, every)
        self.streams.wrap_layers(model)
        inner: Any = model.model
        inner.forward = self._forward(inner.forward)

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._recorder is None:
                self._recorder = self._make_recorder()
            self.streams.begin()
            self.recorder.tokens = len(positions)
            chooses = self.auditor.active and not self.runner_chooses
            if chooses:
                with self.guarded("a step"):
                    self._choose(positions)
            try:
                return forward(input_ids, positions, *args, **kwargs)
            finally:
                with self.guarded("a step"):
                    self.recorder.flush()
                if chooses:
                    self.end(get_forward_context().attn_metadata)

        return wrapped

    def _make_recorder(self) -> RowRecorder:
        """Make the recorder at the first step.

        Memory that is reserved while a model is built may be put to sleep with its weights.
        """
        sections = [*self._attentions, HEAD]
        size = max((_row_bytes(each) for each in self._attentions.values()), default=0)
        count = self.auditor.settings.requests
        return RowRecorder(self.device, count, sections, count * size)

    def _choose(self, positions: Tensor) -> None:
        """Choose from what the step's metadata say, which may lie on a device."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not self._attentions:
            return
        window = metadata[next(iter(self._attentions.values())).swa_cache_layer.prefix]
        tokens = len(window.slot_mapping)
        if window.is_valid_token is not None:
            tokens = min(tokens, len(window.is_valid_token))
        tokens = min(tokens, len(positions))
        valid = (window.slot_mapping[:tokens] >= 0).cpu().numpy()
        owners = window.token_to_req_indices[:tokens].cpu().numpy()
        self.begin(positions[:tokens].cpu().numpy(), owners, self.request_ids, valid)

    def begin_batch(self, batch: Any, *, exact: bool) -> None:
        """Choose from a batch of vLLM's second runner, for the most part without the device.

        Args:
            batch: vLLM's ``InputBatch`` of the step.
            exact: True if the runner knows on the CPU how far requests are, which it does not while
                it drafts.
        """
        self.runner_chooses = True
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        owners = np.repeat(np.arange(batch.num_reqs), np.diff(starts))[: batch.num_tokens]
        if exact:
            ahead = np.arange(len(owners)) - starts[owners]
            positions = batch.num_computed_tokens_np[owners] + ahead
        else:
            positions = batch.positions[: len(owners)].cpu().numpy()
        self.begin(positions, owners, list(batch.req_ids), np.ones(len(owners), dtype=bool))

    def begin(
        self, positions: np.ndarray, owners: np.ndarray, names: list[str], valid: np.ndarray
    ) -> None:
        """Choose what is looked at in the step that comes.

        Args:
            positions: position of every token in its request, on the CPU.
            owners: index of the request of each token.
            names: names of the requests.
            valid: True for each token that is no padding.
        """
        auditor = self.auditor
        if self._recorder is None:
            return
        if auditor.full:
            auditor.skip()
            return
        groups = [np.flatnonzero(valid & (owners == each)) for each in np.unique(owners[valid])]
        if not groups:
            return
        layers = {name for kind in self._by_ratio.values() for name in auditor.turn(kind)}
        chosen = pick(auditor, self.recorder.rows, "tokens", groups)
        where = [chosen, positions[chosen].tolist(), owners[chosen].tolist()]
        rows, at, of = on_device(self.device, where)
        self.recorder.tokens = len(positions)
        self.recorder.choose(auditor.step, chosen, [*layers, HEAD])
        self.sample = Sample(
            auditor, self.recorder, positions, owners, list(names), layers, chosen, rows, at, of
        )

    def end(self, metadata: Any) -> None:
        """Gather what the step's cases still lack, after it has run, and have them judged."""
        sample = self.sample
        if sample is None:
            return
        try:
            if isinstance(metadata, dict):
                for prefix in sorted(sample.layers):
                    self._plan_layer(sample, prefix, metadata)
                with self.guarded("what follows the last layer"):
                    self.streams.plan_head(sample)
                with self.guarded("rows at rest"):
                    self.at_rest.visit(sample, metadata)
                with self.guarded("a step"):
                    self.submit(sample.packet, self.recorder)
        finally:
            self.sample = None
            self.recorder.release()

    def _plan_layer(self, sample: Sample, prefix: str, metadata: dict[str, Any]) -> None:
        methods = self._methods[prefix]
        with self.guarded(prefix):
            for each in methods:
                each.gather_once(sample, metadata)
        sample.sections[prefix] = self.recorder.hold(sample.packet, prefix)
        for each in methods:
            with self.guarded(f"{type(each).__name__} of {prefix}"):
                each.plan_cases(sample)


def _row_bytes(layer: Any) -> int:
    """Return the bytes of the recorded tensors of one token in a layer, by the larger of them."""
    heads = max(layer.padded_heads, layer.n_local_heads) * layer.head_dim
    index = 0 if layer.indexer is None else layer.indexer.n_head * layer.indexer.head_dim
    streams = 4 * layer.hidden_size
    return 2 * (6 * heads + 4 * index + 10 * streams) + (1 << 16)
