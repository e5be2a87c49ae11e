"""The frame of an audited method: a hook around vLLM's method, cached rows, and cases."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from anymla.audit.auditor import Auditor
from anymla.audit.rows import RowRecorder
from anymla.audit.watcher import Watcher
from anymla.engines.vllm.audit.sample import Sample

LOG = init_logger("vllm.plugins.anymla.audit")
# Records a call's arguments, yields once, is sent the result, and records that.
Look = Generator[None, Any, None]
Watched = tuple[Any, str, Callable[..., Look]]


class Watch(Watcher):
    """State that all audited methods of a model share.

    Attributes:
        sample: sample of the running step; None if it is not audited.
    """

    def __init__(self, auditor: Auditor, device: torch.device) -> None:
        """Watch nothing yet."""
        super().__init__(auditor, device)
        self.sample: Sample | None = None
        self._recorder: RowRecorder | None = None

    @property
    def recorder(self) -> RowRecorder:
        """The recorder, which the first step makes."""
        assert self._recorder is not None
        return self._recorder

    @property
    def looks(self) -> bool:
        """True if this forward pass is recorded, at once or in a graph's replays."""
        if self.sample is not None:
            return True
        return self._recorder is not None and self._recorder.captured

    def note(self, section: str, **tensors: Any) -> None:
        """Record a method's tensors; a graph has one launch for a layer, for they cost time.

        The recorder holds the tensors until then, so that nothing else gets their memory.
        """
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                self.recorder.note(section, name, tensor)
        if not self.recorder.captured:
            self.recorder.flush()


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of the model.

    Attributes:
        attention: attention layer; its prefix names the layer's section of the recorder.
        block: decoder layer that holds ``attn`` and ``ffn``; None if there is none.
        names: name of each module of the model, by its id.
    """

    attention: Any
    block: Any
    names: Mapping[int, str]

    @property
    def compressors(self) -> dict[str, Any]:
        """The compressors: "main" for the layer's entries, then "index" for its index keys."""
        indexer = self.attention.indexer
        found = {"main": self.attention.compressor, "index": indexer and indexer.compressor}
        return {kind: each for kind, each in found.items() if each is not None}


class Method:
    """One audited method of one layer.

    A subclass states what is recorded (``look``), what is read from caches (``gather``), and which
    cases of which checks that makes (``plan``). The checks recompute a case and judge it.

    Attributes:
        call: name of vLLM's method that ``look`` records.
        needs: names of recorded tensors without which there is no case.
        judged_by: names of the checks that judge the cases.
        look: generator function; it gets the arguments of the call, and yields for its result.
        gather: reads from caches what the method has read or written, at once after it if no graph
            is captured; it gets the sample and the step's metadata by layer, and the sample keeps
            what it returns. None if the method uses no cache.
        plan: plans the cases; it gets the sample, and a row per chosen token of what it needs.
    """

    call = ""
    needs: tuple[str, ...] = ()
    judged_by: tuple[str, ...] = ()
    look: Callable[..., Look]
    gather: Callable[..., Any] | None = None
    plan: Callable[..., None]

    def __init__(self, watch: Watch, layer: Layer, module: Any) -> None:
        """Take one of the layer's ``modules``."""
        self.watch, self.layer, self.module = watch, layer, module
        self.attention, self.section = layer.attention, layer.attention.prefix

    @staticmethod
    def modules(layer: Layer) -> list[Any]:
        """Return the layer's modules that have a method of this kind."""
        return [layer.attention]

    def watched(self) -> Iterable[Watched]:
        """Return modules, the names of their methods, and what looks at them."""
        return [(self.module, self.call, self.look)] if self.call else []

    def note(self, **tensors: Any) -> None:
        """Record tensors [tokens, ..] by name."""
        self.watch.note(self.section, **tensors)

    def install(self) -> None:
        """Put the hooks around vLLM's methods."""
        for module, name, look in self.watched():
            module.__dict__[name] = self._around(getattr(module, name), name, look)

    def _around(
        self, method: Callable[..., Any], name: str, look: Callable[..., Look]
    ) -> Callable[..., Any]:
        """Look at a method; whatever goes wrong in ``look``, it runs once and gives its result."""
        watch = self.watch

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not watch.looks or not watch.recorder.wants(self.section):
                return method(*args, **kwargs)
            looking: Look | None = None
            with watch.guarded(name):
                looking = look(*args, **kwargs)
                next(looking, None)
            result = method(*args, **kwargs)
            if looking is not None:
                with watch.guarded(name):
                    with contextlib.suppress(StopIteration):
                        looking.send(result)
                    self._gather_here()
            return result

        return wrapped

    def _gather_here(self) -> None:
        """Gather where the method has just run, which is in no captured graph."""
        sample = self.watch.sample
        if self.gather is not None and sample is not None and not self.watch.recorder.captured:
            metadata = get_forward_context().attn_metadata
            if isinstance(metadata, dict):
                self.gather_once(sample, metadata)

    def gather_once(self, sample: Sample, metadata: dict[str, Any]) -> None:
        """Gather from caches, unless this step has done so where the method ran."""
        if self.gather is not None and self not in sample.gathered:
            sample.gathered[self] = self.gather(sample, metadata)

    def plan_cases(self, sample: Sample) -> None:
        """Plan the cases if all that they need was recorded."""
        found = sample.recorded(self.section, *self.needs)
        if found is not None:
            self.plan(sample, *found)
