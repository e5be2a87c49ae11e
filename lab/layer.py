"""Time of a decode layer: whole layers as one CUDA graph, and a layer's kernels."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch

from anymla.bench.gpu_timing import sums
from anymla.bench.layer_setup import (
    MODELS,
    DecodeBatch,
    LayerCase,
    LayerSetup,
    shared_sizes,
)
from anymla.bench.runner import Call, Case, Clock, Subject, Values, Verdict, rounded
from anymla.layers.plans import Plans
from anymla.layers.side_stream import INLINE, SideStream
from anymla.ops.compile_ahead import compiled_together
from anymla.runtime.device_step import Reads
from anymla.runtime.options import EngineOptions
from lab.kernel_files import family_of
from lab.layer_rival import compile_unfused, rival_kernels
from lab.layer_work import layer_work
from lab.peers.deep_gemm import DeepGemm
from lab.peers.flash_mla import FlashMla
from lab.timeline import idle_us, timeline

PART = "decode layer"
RATIOS, BATCHES, CONTEXTS = (0, 4, 128), (1, 8, 32, 128), (4096, 65536, 524288)
EXPERTS = 32  # routed experts of a layer whose name does not say how many it has
_LAUNCH_US = 3.0
_FACTOR = 2.5
# FlashMLA, and DeepGEMM where it is installed.
Others = tuple[FlashMla, DeepGemm | None]
# Repetitions of each layer's copy in a graph. A model's graph has tens of layers, so that each
# bears little of the cost of starting a graph.
_ROUNDS = 3
_NAME = 48  # characters of a kernel's name that identify it


def cases(
    models: Iterable[str] = tuple(MODELS),
    ratios: Iterable[int] = RATIOS,
    batches: Iterable[int] = BATCHES,
    contexts: Iterable[int] = CONTEXTS,
    queries: int = 1,
    reads: Iterable[Reads] = (Reads.SLOTS,),
    experts: int = EXPERTS,
    share: int = 1,
) -> Iterator[LayerCase]:
    """Yield every combination once; a layer without entries takes as long at every context."""
    batches, contexts, reads = tuple(batches), tuple(contexts), tuple(reads)
    for model in models:
        for ratio in ratios:
            for context in contexts if ratio else contexts[:1]:
                for batch, read in itertools.product(batches, reads):
                    yield LayerCase(model, ratio, batch, context, experts, queries, read, share)


def layer_cases(
    chosen: Iterable[LayerCase],
    clock: Clock,
    *,
    beside: bool | None = None,
    others: Others | None = None,
    timelines: bool = False,
) -> Iterator[Case]:
    """Measure the chosen cases, of which those of one layer should be adjacent.

    A timeline's row also holds by how much later the layer ends by each family's kernels,
    ``adds_us``, and how long nothing ran in it, ``idle_us``.

    Args:
        chosen: cases to measure, in order.
        clock: clock on whose device the layers are made.
        beside: value of ``EngineOptions.side_stream``.
        others: peers with which the same layer is assembled and measured too.
        timelines: True to record when each kernel starts and ends.
    """
    device = clock.device
    options, second = EngineOptions(side_stream=beside), SideStream(device)
    for (model, ratio, experts, share), same in itertools.groupby(chosen, _layer):
        clock.release()
        torch.manual_seed(0)
        with torch.inference_mode():
            changes = shared_sizes(model, share)
            setup = LayerSetup(model, ratio, device, experts=experts, changes=changes)
            batches = []
            for case in same:
                side = second if options.runs_beside(case.batch * case.queries) else INLINE
                batch = setup.batch(
                    case.batch, case.context, side, queries=case.queries, reads=case.reads
                )
                batches.append((case, batch))
            compile_ahead(setup, [batch for _, batch in batches], others)
        for case, batch in batches:
            yield layer_case(setup, case, batch, others)
            if timelines:
                spans = functools.partial(_timeline, setup, batch)
                yield Case(f"{PART}, timeline", _name(case), spans)
        del setup, batches


def _timeline(setup: LayerSetup, batch: DecodeBatch, _: Clock) -> Iterator[Subject]:
    spans = timeline(_calls(setup, batch), torch.cuda.Stream())
    kernels = [dataclasses.astuple(span) for span in spans]
    last = max(span.end for span in spans)
    values = {
        "us": last,
        "adds_us": sums((family_of(span.name), span.adds) for span in spans),
        "idle_us": round(idle_us(spans), 1),
        "timeline_us": kernels,
    }
    yield Subject("", before=lambda: values)


def _name(case: LayerCase) -> str:
    name = f"{case.model}, ratio {case.ratio}, batch {case.batch}, context {case.context}"
    if case.share > 1:
        name += f", share 1/{case.share}"
    if case.share > 1 or case.experts != EXPERTS:
        name += f", {case.experts} experts"
    if case.queries == 1:
        return name
    return f"{name}, {case.queries} queries, rows {case.reads.value}"


def _layer(case: LayerCase) -> tuple[str, int, int, int]:
    return case.model, case.ratio, case.experts, case.share


def compile_ahead(
    setup: LayerSetup, batches: Iterable[DecodeBatch], others: Others | None = None
) -> None:
    """Compile the batches' kernels in parallel, where there are any to compile."""
    with compiled_together() as only_compiled:
        if only_compiled:
            for batch in batches:
                # Calls that only compile leave garbage, also in the plans of a step.
                step = dataclasses.replace(batch.step, plans=Plans())
                dataclasses.replace(batch, step=step).run(setup.layers[0])
                if others is not None:
                    compile_unfused(setup.layers[0].ffn_site, batch.streams)


def _calls(setup: LayerSetup, batch: DecodeBatch) -> list[Call]:
    return [functools.partial(batch.run, layer) for layer in setup.layers]


def layer_case(
    setup: LayerSetup, case: LayerCase, batch: DecodeBatch, others: Others | None = None
) -> Case:
    """Return the time, launches, time by kernel family, and share of the roofline of a layer.

    Times are in us, of one of the layers that follow each other in a graph. ``times_others`` is how
    many times as long the layer takes with others' kernels. Times by family are those of single
    kernels, without the gaps between them; ``kernels_us`` holds for every kernel the number of its
    launches and the time of all of them.
    """
    return Case(
        PART,
        _name(case),
        functools.partial(_subjects, setup, batch, others),
        judge=functools.partial(_row, case),
    )


def _subjects(
    setup: LayerSetup, batch: DecodeBatch, others: Others | None, clock: Clock
) -> Iterator[Subject]:
    calls = _calls(setup, batch)

    def after(_: float) -> Values:
        kernels = clock.kernel_times(calls[0])
        visited = setup.visited(batch)
        work = layer_work(setup.layers[0], setup.config, batch, visited)
        return {
            "launches": len(kernels),
            "queues": 1 if batch.step.side is INLINE else 3,
            "layers_of_graph": _ROUNDS * len(calls),
            "roofline_us": work.roofline_us(clock.copy_bandwidth(), clock.matmul_rate()),
            "weights_mb": work.weight_bytes / 1e6,
            "experts_mb": work.expert_bytes / 1e6,
            "caches_mb": work.cache_bytes / 1e6,
            "visited_experts": visited,
            "parts_us": sums((family_of(name), taken) for name, taken in kernels),
            "kernels_us": {
                name: [sum(name == other[:_NAME] for other, _ in kernels), taken]
                for name, taken in sums((name[:_NAME], taken) for name, taken in kernels).items()
            },
        }

    yield Subject("us", calls * _ROUNDS, after=after)
    if others is not None:
        inline = dataclasses.replace(batch, step=dataclasses.replace(batch.step, side=INLINE))
        theirs = _calls(setup, inline)

        def seen(_: float) -> Values:
            kernels = clock.kernel_times(theirs[0])
            parts = sums((family_of(name), taken) for name, taken in kernels)
            return {"others_launches": len(kernels), "others_parts_us": parts}

        within = functools.partial(rival_kernels, *others)
        yield Subject("others_us", theirs * _ROUNDS, after=seen, within=within)


def _row(case: LayerCase, values: Values) -> tuple[Values, Verdict]:
    us, roofline = values["us"], values["roofline_us"]
    if case.queries > 1:
        values |= {"queries": case.queries, "reads": case.reads.name.lower()}
    values["share_of_roofline"] = roofline / us
    if "others_us" in values:
        values["times_others"] = values["others_us"] / us
    allowed = _FACTOR * roofline + _LAUNCH_US * values["launches"]
    words = f"<= {_FACTOR} x roofline + {_LAUNCH_US} us a launch"
    verdict = (words, us <= allowed) if case.batch <= 8 else None
    tenths = ("us", "others_us", "roofline_us", "weights_mb", "experts_mb", "caches_mb")
    digits = dict.fromkeys(tenths, 1)
    return rounded(values, digits | {"times_others": 2, "share_of_roofline": 3}), verdict
