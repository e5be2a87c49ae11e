"""Audited methods of hyper-connections: gates and sums of each layer, and the head after the last.

vLLM calls them as layers of its own, and its CUDA models as functions; both are wrapped once for
the whole model. The weight of a call says whose it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from anymla.engines.vllm.audit.method import Layer, Method, Watch
from anymla.engines.vllm.audit.sample import HEAD, Sample
from anymla.engines.vllm.pinned import CUDA_MODELS

_MODEL = CUDA_MODELS[0]  # module of the audited model on CUDA; the others are of draft models
_GATES = ("h", "post", "comb", "y")  # tensors of a case of hc_pre
_SUMS = ("u", "h", "post", "comb", "streams")  # tensors of a case of hc_post
# Weights and numbers of gates, which are given beside a step's tensors.
_Given = tuple[dict[str, Tensor | None], dict[str, Any]]


class Streams(Method):
    """Gates of both sublayers of a layer, and the sum that precedes each in the same kernel.

    ``StreamCalls`` looks at the calls.
    """

    judged_by = ("hc_pre", "hc_post")

    def __init__(self, watch: Watch, layer: Layer, module: Any) -> None:
        """Find the weights of the layer's gates."""
        super().__init__(watch, layer, module)
        self.given: dict[str, _Given] = {}
        parameters = layer.block.named_parameters(recurse=False) if layer.block else ()
        self.names = {id(p): n for n, p in parameters if n.startswith("hc_") and n.endswith("_fn")}

    def note_call(self, given: dict[str, Any], result: Sequence[Tensor]) -> None:
        """Record a call of vLLM's; some give the streams as well, or make them from a sum."""
        streams, post, comb, y = result if len(result) == 4 else (given["residual"], *result)
        name, fused = self.names[id(given["fn"])], "x" in given
        if fused:
            _note_sums(self.watch, self.section, name, given, streams)
        numbers = {"norm_eps": given["rms_eps"], "hc_eps": given["hc_pre_eps"]}
        numbers |= {"iters": given["sinkhorn_repeat"], "fused": int(fused)}
        self.given[name] = _weights(given, given["fn"]), numbers
        tensors = _by_token(streams, h=streams, post=post, comb=comb, y=y)
        self.note(**{f"{name} {part}": each for part, each in tensors.items()})

    def plan(self, sample: Sample) -> None:
        for name in ("hc_attn_fn", "hc_ffn_fn"):
            where = f"{self.section.rpartition('.')[0]}.{name}"
            _plan_sums(sample, self.section, name, where)
            found = sample.recorded(self.section, *(f"{name} {part}" for part in _GATES))
            if found is not None:
                weights, numbers = self.given[name]
                tensors = dict(zip(_GATES, found, strict=True)) | sample.hold(**weights)
                sample.plan("hc_pre", where, tensors, None, **numbers)


class StreamCalls:
    """The calls of a model's hyper-connections, each with the layer that it belongs to."""

    judged_by = ("hc_post", "hc_head")  # of what follows the last layer

    def __init__(self, watch: Watch, layers: Iterable[Method]) -> None:
        """Take the layers whose streams are looked at."""
        self._watch, self._posts = watch, 0
        self._head: _Given = {}, {}
        self._owners = {
            fn: each for each in layers if isinstance(each, Streams) for fn in each.names
        }

    def begin(self) -> None:
        """Begin a forward pass."""
        self._posts = 0

    def wrap_layers(self, model: nn.Module) -> None:
        """Look at vLLM's layers of hyper-connections, in their order or by their base class."""
        by_name = {call.layer: call for call in _CALLS if call.layer}
        for module in model.modules():
            names = (each.__name__ for each in type(module).__mro__)
            found = next((by_name[name] for name in names if name in by_name), None)
            if found is not None:
                module.forward = self._around(found, module.forward)

    def wrap_functions(self) -> None:
        """Look at the functions that vLLM's CUDA model calls.

        Draft models import functions of the same names. Their calls belong to no pass of the
        audited model: what a graph of a draft recorded would be copied in the model's next pass.
        """
        held = vars(sys.modules[_MODEL]) if _MODEL in sys.modules else {}
        for call in _CALLS:
            if call.function in held:
                held[call.function] = self._around(call, held[call.function])

    def plan_head(self, sample: Sample) -> None:
        """Plan the cases of what follows the last layer."""
        sample.sections[HEAD] = sample.recorder.hold(sample.packet, HEAD)
        for number in range(self._posts):
            _plan_sums(sample, HEAD, f"post {number}", "streams after a sublayer")
        found = sample.recorded(HEAD, "h", "y")
        if found is not None:
            weights, numbers = self._head
            tensors = {"h": found[0], "y": found[1], **sample.hold(**weights)}
            sample.plan("hc_head", HEAD, tensors, None, **numbers)

    def _around(self, call: _Call, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if self._watch.looks:
                with self._watch.guarded(call.function):
                    given = dict(zip(call.parameters.split(), args, strict=False)) | kwargs
                    call.look(self, given, result)
            return result

        return wrapped

    def _gates(self, given: dict[str, Any], result: Any) -> None:
        owner = self._owners.get(id(given["fn"]))
        if owner is not None and self._watch.recorder.wants(owner.section):
            owner.note_call(given, result)

    def _post(self, given: dict[str, Any], result: Any) -> None:
        if self._watch.recorder.wants(HEAD):
            _note_sums(self._watch, HEAD, f"post {self._posts}", given, result)
        self._posts += 1

    def _collapse(self, given: dict[str, Any], result: Any) -> None:
        if self._watch.recorder.wants(HEAD):
            numbers = {"norm_eps": given["rms_norm_eps"], "hc_eps": given["hc_eps"]}
            self._head = _weights(given, given["hc_fn"]), numbers
            h, y = given["hidden_states"].flatten(0, -3), result.flatten(0, -2)
            self._watch.note(HEAD, h=h, y=y)


def _weights(given: dict[str, Any], fn: Tensor) -> dict[str, Tensor | None]:
    names = {"base": "hc_base", "scale": "hc_scale", "norm_weight": "norm_weight"}
    return {"fn": fn, **{name: given.get(each) for name, each in names.items()}}


def _by_token(streams: Tensor, /, **tensors: Tensor) -> dict[str, Tensor]:
    """Reshape what is made from streams [.., N, D], or makes them, to a row per token."""
    n, width = streams.shape[-2:]
    shapes = {"u": (width,), "y": (width,), "post": (n,), "comb": (n, n)}
    return {name: t.reshape(-1, *shapes.get(name, (n, width))) for name, t in tensors.items()}


def _note_sums(
    watch: Watch, section: str, name: str, given: dict[str, Any], streams: Tensor
) -> None:
    """Record what a sum of streams is made of, and the streams after it."""
    inputs = {"u": "x", "h": "residual", "post": "post_layer_mix", "comb": "comb_res_mix"}
    made_of = {part: given[each] for part, each in inputs.items()}
    tensors = _by_token(streams, **made_of, streams=streams)
    watch.note(section, **{f"{name} sum {part}": each for part, each in tensors.items()})


def _plan_sums(sample: Sample, section: str, name: str, where: str) -> None:
    found = sample.recorded(section, *(f"{name} sum {part}" for part in _SUMS))
    if found is not None:
        sample.plan("hc_post", where, dict(zip(_SUMS, found, strict=True)))


class _Call(NamedTuple):
    """One of vLLM's hyper-connections.

    Attributes:
        layer: name of vLLM's layer, or "".
        function: name of the function that CUDA models call.
        look: records a call, from its arguments by name and its result.
        parameters: names of the parameters that may be given by place.
    """

    layer: str
    function: str
    look: Callable[[StreamCalls, dict[str, Any], Any], None]
    parameters: str


_SUM = "x residual post_layer_mix comb_res_mix"
_GATE = (
    "fn hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value sinkhorn_repeat "
    "n_splits"
)
_NORM = "norm_weight norm_eps"
_PRE, _POST_PRE = f"residual {_GATE} {_NORM}", f"{_SUM} {_GATE} tile_n {_NORM}"
_HEAD = "hidden_states hc_fn hc_scale hc_base rms_norm_eps hc_eps"
_gates, _post, _collapse = StreamCalls._gates, StreamCalls._post, StreamCalls._collapse
_CALLS = (
    _Call("MHCPreOp", "mhc_pre_tilelang", _gates, _PRE),
    _Call("", "mhc_pre_broadcast_tilelang", _gates, _PRE),
    _Call("MHCPostOp", "mhc_post_tilelang", _post, _SUM),
    _Call("MHCFusedPostPreOp", "mhc_fused_post_pre_tilelang", _gates, _POST_PRE),
    _Call("HCHeadOp", "hc_head_fused_kernel_tilelang", _collapse, _HEAD),
)
