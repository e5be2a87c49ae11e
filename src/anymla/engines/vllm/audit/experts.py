"""Audited methods of a layer's mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from anymla.audit.packet import Held
from anymla.engines.vllm.audit.method import Layer, Look, Method, Watched
from anymla.engines.vllm.audit.sample import Sample
from anymla.engines.vllm.audit.weights import block_of_outputs

_EXPERTS_EVERY = 8  # a layer's experts are judged once in so many steps that look at it


class Router(Method):
    """The choice of experts, and their weights."""

    call = "forward"
    needs = ("experts", "expert_weights", "mixed")
    judged_by = ("router",)

    @staticmethod
    def modules(layer: Layer) -> list[Any]:
        return [] if layer.block is None else [layer.block.ffn]

    def watched(self) -> Iterable[Watched]:
        routed = _routed(self.module)
        chosen = [] if routed is None else [(routed, "forward_modular", self.choose)]
        return [*super().watched(), *chosen]

    def look(self, hidden: Tensor, input_ids: Any = None, *args: Any, **rest: Any) -> Look:
        token = input_ids.view(-1, 1) if isinstance(input_ids, Tensor) else None
        self.note(mixed=hidden, token=token)
        yield
        self.watch.recorder.flush()  # a graph's launch for all of the layer

    def choose(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **rest: Any
    ) -> Look:
        self.note(experts=topk_ids, expert_weights=topk_weights)
        yield

    def plan(self, sample: Sample, ids: Held, weights: Held, x: Held) -> None:
        """Plan a case from the logits; and one from their product where it chooses at once."""
        mixture, gate, k = self.module, self.module.gate, self.module.n_activated_experts
        if not _is_plain(mixture):
            return
        tensors = {"ids": ids.narrow(1, 0, k), "weights": weights.narrow(1, 0, k)}
        if gate.tid2eid is not None:
            tokens = sample.recorder.last(self.section, "token")
            if tokens is None:
                return
            known = gate.tid2eid[tokens[: len(sample.chosen), 0].long()]
            mark = sample.sections[self.section]["token"].mark
            tensors["known"] = sample.packet.hold(known)._replace(mark=mark)
        else:
            tensors |= sample.hold(bias=gate.e_score_correction_bias)
        numbers = {"scale": mixture.routed_scaling_factor, "k": k}
        name = f"{mixture.prefix}.gate"
        logits = sample.recorded(self.section, "logits")
        if logits is not None:
            sample.plan("router", name, {"logits": logits[0], **tensors}, **numbers)
        if type(mixture).__name__ == "AnymlaMoE":  # it multiplies and chooses at once
            tensors |= {"x": x, **sample.hold(weight=gate.weight)}
            sample.plan("router", name, tensors, **numbers)


class Experts(Method):
    """Both products of a token's experts, and their sum, in anymla's method of vLLM's layer.

    They are judged only where weights lie as in a checkpoint, which no kernel of vLLM's leaves
    them.
    """

    call = "run"
    needs = ("mixed", "experts", "expert_weights", "summed")
    judged_by = ("experts",)

    @staticmethod
    def modules(layer: Layer) -> list[Any]:
        routed = None if layer.block is None else _routed(layer.block.ffn)
        method = getattr(routed, "quant_method", None)
        return [method] if hasattr(method, "run") else []

    def look(
        self, x: Tensor, ids: Tensor, weights: Tensor, limit: float, shared: Tensor | None
    ) -> Look:
        self.note(experts=ids, expert_weights=weights, beside=shared)
        result = yield
        self.note(summed=result)

    def plan(self, sample: Sample, *given: Held) -> None:
        """Plan some outputs of one token now and then, because all weights travel along."""
        mixture, numbers = self.layer.block.ffn, sample.auditor.random(f"experts {self.section}")
        if numbers.randrange(_EXPERTS_EVERY):
            return
        routed, place = mixture.experts.routed_experts, numbers.randrange(len(sample.chosen))
        count = len(routed.w13_weight)
        chosen = sample.recorder.last(self.section, "experts")
        if chosen is None or count != mixture.n_routed_experts or mixture.tp_size > 1:
            return
        ids = chosen[place].long().clamp(0, count - 1)
        part = block_of_outputs(numbers, mixture.hidden_size)
        weights = sample.hold(
            w13=routed.w13_weight.data[ids],
            w13_scale=routed.w13_weight_scale.data[ids],
            w2=routed.w2_weight.data[:, part][ids],
            w2_scale=routed.w2_weight_scale.data[:, part][ids],
        )
        mark = sample.sections[self.section]["experts"].mark
        tensors = {name: each._replace(mark=mark) for name, each in weights.items()}
        x, _, factors, out = (each.narrow(0, place, 1) for each in given)
        first, wide = part.start, part.stop - part.start
        tensors |= {"x": x, "weights": factors, "out": out.narrow(1, first, wide)}
        beside = sample.recorded(self.section, "beside")
        if beside is not None:
            tensors["shared"] = beside[0].narrow(0, place, 1).narrow(1, first, wide)
        name, limit = f"{mixture.prefix}.experts", float(mixture.swiglu_limit)
        sample.plan("experts", name, tensors, [sample.chosen[place]], limit=limit, first=first)


def _routed(mixture: Any) -> Any:
    return getattr(mixture.experts, "routed_experts", None)


def _is_plain(mixture: Any) -> bool:
    """Return True if the router's check knows the mixture's way to choose experts."""
    gate, config = mixture.gate, getattr(mixture.experts, "moe_config", None)
    parallel = getattr(config, "moe_parallel_config", None)
    return (
        mixture.scoring_func == "sqrtsoftplus"
        and bool(mixture.renormalize)
        and getattr(gate, "bias_vl", None) is None
        and not getattr(parallel, "enable_eplb", False)
        and (gate.tid2eid is not None or gate.e_score_correction_bias is not None)
    )
