"""SGLang's attention and selection beside the plugin's, within SGLang's backend on a GPU.

``backend.py ROWS`` appends rows of JSON. Both compute by the same backend from the same pools and
lists; what differs is whether SGLang's hooks are in place. Decode steps and selections are captured
as SGLang's runner captures them, with the step's lists made within the graph, and replayed with a
cold cache. Times of a layer are those of a graph with several layers, less those of a graph with
the lists alone. Outputs are judged against float64.

Kernels are compiled first, by processes of their own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import absent_libraries

absent_libraries.install()

import scene as scenes  # noqa: E402  # SGLang's stand-ins come first
import torch  # noqa: E402
from scene import Load, Scene  # noqa: E402
from torch import Tensor  # noqa: E402

from anymla.bench.environment import environment  # noqa: E402
from anymla.bench.gpu import device_facts  # noqa: E402

# Heads of a rank, and entries that an indexer selects: V4-Flash whole, at TP4 and at TP8; V4-Pro.
MODELS = ((64, 512), (16, 512), (8, 512), (128, 1024))
DECODES = ((8, 8192), (32, 8192), (128, 8192), (1, 8192), (8, 65536))
DECODES_OF_OTHERS = 3  # of these, for what is not V4-Flash whole
PREFILLS = (
    Load((4096,), (4096,)),
    Load((32768,), (4096,)),
    Load((9216,) * 4, (1024,) * 4),
)
SELECTIONS = ((8, 8192), (8, 65536), (32, 8192), (128, 8192), (1, 8192), (1, 65536), (32, 65536))
PARTS = (
    *("decode-64", "selection", "prefill-64", "decode-8"),
    *("prefill-8", "decode-16", "decode-128"),
)
LAYERS = 4  # layers of each ratio in a graph
_PADDED = 64  # heads that SGLang pads a rank's to
_COMPILING = 100.0  # most seconds until processes that compile have ended
_TOPK = "topk"  # compiles SGLang's top-k and what a selection by it calls
_KINDS = {0: "window", 4: "ratio 4", 128: "ratio 128"}
Row = dict[str, Any]


class Engines:
    """SGLang's functions without the plugin's hooks and with them; one kind is in place."""

    def __init__(self) -> None:
        """Have SGLang apply the hooks of attention and selection."""
        from sglang.kernels.ops.attention import flash_mla_interface
        from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin
        from sglang.srt.plugins.hook_registry import HookRegistry

        from anymla.engines.sglang import attention, indexer

        self._interface = flash_mla_interface
        self._places = (
            (flash_mla_interface, "flash_mla_with_kvcache"),
            (flash_mla_interface, "flash_mla_sparse_fwd"),
            (C4IndexerBackendMixin, "forward_c4_indexer"),
        )
        without = [getattr(*place) for place in self._places]
        attention.register()
        indexer.register()
        HookRegistry.apply_hooks()
        self._functions = {False: without, True: [getattr(*place) for place in self._places]}
        for plain, hooked in zip(*self._functions.values(), strict=True):
            assert plain is not hooked

    def use(self, scene: Scene, plugin: bool) -> int:
        """Put functions in place, and return the number of heads that attention is called with."""
        for (owner, name), function in zip(self._places, self._functions[plugin], strict=True):
            setattr(owner, name, function)
        scene.backend._flash_mla_with_kvcache = functools.partial(
            self._interface.flash_mla_with_kvcache, use_legacy=True
        )
        return scene.heads if plugin else max(_PADDED, scene.heads)


class Clock:
    """Times of graphs in turns, each replayed with a cold cache."""

    def __init__(self, rounds: int) -> None:
        """Reserve what is written between replays.

        Args:
            rounds: replays of each graph.
        """
        self._rounds = rounds
        self._flushed = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def medians(self, graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
        """Return the median microseconds of each graph."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(self._rounds):
            for name, graph in graphs.items():
                self._flushed.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3)
        return {name: statistics.median(each) for name, each in times.items()}


def attention_rows(engines: Engines, clock: Clock, scene: Scene, case: str) -> Iterator[Row]:
    """Compare the attention of each kind of layer; decode steps make their lists in the graph."""
    decodes = not scene.load.extends
    part = "SGLang's decode" if decodes else "SGLang's prefill"
    scene.backend.init_forward_metadata(scene.batch)
    engines.use(scene, True)
    scene.select(scene.layers[4][0])
    lists = scene.core.c4_sparse_page_indices.clone()
    stream = torch.cuda.Stream()

    def captured(layers: Callable[[], object]) -> torch.cuda.CUDAGraph:
        def step() -> None:
            scene.core.c4_sparse_page_indices.copy_(lists)
            layers()

        if decodes:
            return scenes.capture(scene, step, stream)
        return recorded(step, stream)

    empty = captured(lambda: None)
    for ratio, kind in _KINDS.items():
        row: Row = {"part": part, "case": f"{kind}, {scene.heads} heads, {case}"}
        graphs, found = {"lists": empty}, {}
        for name, plugin in (("sglang", False), ("us", True)):
            heads = engines.use(scene, plugin)
            out: list[Tensor] = []
            graphs[name] = captured(functools.partial(_attend, scene, ratio, heads, out))
            found[name] = out[-1][:, : scene.heads].clone()
        # The graph's own lists are those that were attended to.
        errors = _errors(scene, scene.layers[ratio][-1], found)
        times = clock.medians(graphs)
        each = {n: (times[n] - times["lists"]) / len(scene.layers[ratio]) for n in found}
        yield row | {
            "us": round(each["us"], 2),
            "sglang_us": round(each["sglang"], 2),
            "times": round(each["sglang"] / each["us"], 3),
            "error": errors["us"],
            "sglang_error": errors["sglang"],
        }


def _attend(scene: Scene, ratio: int, heads: int, out: list[Tensor]) -> None:
    out[:] = [scene.attend(layer, heads) for layer in scene.layers[ratio]]


def _errors(scene: Scene, layer: int, found: dict[str, Tensor]) -> dict[str, float]:
    """Return each output's largest error for some tokens, in standard deviations of the output."""
    worst = dict.fromkeys(found, 0.0)
    for token in scenes.spread(len(scene.q), 4):
        want = scene.expected(layer, token)
        for name, out in found.items():
            error = float((out[token].double() - want).abs().max() / want.std())
            worst[name] = round(max(worst[name], error), 5)
    return worst


def recorded(run: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Record calls on a stream as a graph, and replay it once."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        stream.synchronize()
    return graph


def loads_of(part: str) -> Sequence[Any]:
    """Return the loads of a part: batches of a prefill, or requests and the tokens of each."""
    name, _, heads = part.partition("-")
    if name == "decode":
        return DECODES if int(heads) == MODELS[0][0] else DECODES[:DECODES_OF_OTHERS]
    return PREFILLS if name == "prefill" else SELECTIONS


def decode_rows(engines: Engines, clock: Clock, heads: int, load: tuple[int, int]) -> Iterator[Row]:
    """Compare a decode step's attention for one number of heads."""
    topk = dict(MODELS)[heads]
    requests, tokens = load
    scene = Scene(uneven(requests, tokens), heads=heads, topk=topk, each=LAYERS)
    case = f"{requests} requests x {tokens}, 128 + {topk}"
    yield from attention_rows(engines, clock, scene, case)


def prefill_rows(engines: Engines, clock: Clock, heads: int, load: Load) -> Iterator[Row]:
    """Compare a prefill's attention for one number of heads."""
    scene = Scene(load, heads=heads, each=2)
    behind = load.lengths[0] - load.extends[0]
    case = f"{len(load.lengths)} x {load.extends[0]} tokens behind {behind}"
    yield from attention_rows(engines, clock, scene, case)


def selection_row(engines: Engines, clock: Clock, load: tuple[int, int]) -> Row:
    """Compare the selection of a decode step: scores and top-k of layers of ratio 4."""
    requests, tokens = load
    scene = Scene(uneven(requests, tokens), heads=8, each=LAYERS)
    stream = torch.cuda.Stream()
    graphs = {"lists": scenes.capture(scene, lambda: None, stream)}
    found = {}
    for name, plugin in (("sglang", False), ("us", True)):
        engines.use(scene, plugin)
        layers = functools.partial(_select, scene)
        graphs[name] = scenes.capture(scene, layers, stream)
        found[name] = scene.core.c4_sparse_page_indices.clone()
    times = clock.medians(graphs)
    each = {n: (times[n] - times["lists"]) / LAYERS for n in found}
    return {
        "part": "SGLang's selection",
        "case": f"64 index heads, 512 entries, {requests} requests x {tokens}",
        "us": round(each["us"], 2),
        "sglang_us": round(each["sglang"], 2),
        "times": round(each["sglang"] / each["us"], 3),
        **_compared(scene, scene.layers[4][-1], found),
    }


def _select(scene: Scene) -> None:
    for layer in scene.layers[4]:
        scene.select(layer)


def _compared(scene: Scene, layer: int, found: dict[str, Tensor]) -> Row:
    """Compare selections with each other, and those of some tokens with float64's."""
    ours, theirs = (found[name].sort(1).values for name in ("us", "sglang"))
    row: Row = {"differing_tokens": int((ours != theirs).any(1).sum())}
    wrong = dict.fromkeys(found, 0)
    for token in scenes.spread(len(ours), 4):
        scores, slots = scene.index_scores(layer, token)
        best = slots[scores.topk(min(ours.shape[1], len(slots))).indices].tolist()
        for name, lists in found.items():
            listed = {slot for slot in lists[token].tolist() if slot >= 0}
            wrong[name] += len(set(best) - listed)
    return row | {"missing": wrong["us"], "sglang_missing": wrong["sglang"]}


def uneven(requests: int, tokens: int) -> Load:
    """Return a decode step whose requests hold nearly the same number of tokens."""
    return Load(tuple(tokens - 37 * (request % 16) for request in range(requests)))


def rows_of(part: str, engines: Engines, clock: Clock, load: Any, own_topk: bool) -> Iterator[Row]:
    """Yield the rows of one load of a part.

    Args:
        part: one of PARTS, or "topk" for a selection.
        engines: functions of both.
        clock: measures them.
        load: one of ``loads_of(part)``.
        own_topk: True for a selection by SGLang's top-k, if that compiles; False for torch's.
    """
    name, _, heads = part.partition("-")
    if name in ("selection", _TOPK):
        own = own_topk and topk_compiles()
        scenes.select_as(scores=True, topk=own)
        row = selection_row(engines, clock, load)
        yield row | {"sglang_topk": "SGLang's kernel" if own else "torch"}
    else:
        scenes.select_as(scores=False, topk=False)
        rows = decode_rows if name == "decode" else prefill_rows
        yield from rows(engines, clock, int(heads), load)


def topk_compiles() -> bool:
    """Compile SGLang's top-k, or load what was compiled; True if that worked."""
    from sglang.kernels.ops.attention.dsv4 import topk

    try:
        topk._jit_topk_v2_module()
    except RuntimeError as error:
        print(f"SGLang's top-k does not compile: {str(error)[-300:]}", flush=True)
        return False
    return True


def versions() -> Row:
    """Return the versions of the libraries that SGLang calls."""
    import deep_gemm
    import flash_mla

    return {
        "sglang": metadata.version("sglang"),
        "sgl_flash_mla": str(flash_mla.__version__),
        "deep_gemm": str(getattr(deep_gemm, "__version__", "unknown")),
    }


class Compilers:
    """Processes that compile the parts' kernels, all at the same time."""

    def __init__(self, parts: Sequence[str]) -> None:
        """Start a process for each part, and two for one of many loads."""
        self._begun = time.monotonic()
        jobs = []
        for part in parts:
            count = len(loads_of(part))
            halves = (range(0, count, 2), range(1, count, 2)) if count > 3 else (range(count),)
            jobs += [(part, half) for half in halves]
        if "selection" in parts:
            jobs.append((_TOPK, range(1)))
        command = [sys.executable, __file__, os.devnull]
        self._running = {}
        for part, loads in jobs:
            options = ["--rounds", "1", "--here", "--loads", *map(str, loads)]
            self._running[part, loads] = subprocess.Popen(
                [*command, part, *options], stdout=subprocess.DEVNULL
            )

    def wait(self, most: float) -> None:
        """Wait for the kernels, but not until longer than ``most`` seconds after the start."""
        for (part, loads), process in self._running.items():
            try:
                process.wait(max(0.1, most - (time.monotonic() - self._begun)))
            except subprocess.TimeoutExpired:
                process.kill()
            taken = time.monotonic() - self._begun
            print(f"compiled {part} {list(loads)}: {process.wait()}, {taken:.0f} s", flush=True)


def main() -> None:
    """Append the rows."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path, help="file of rows that is appended to")
    parser.add_argument("parts", nargs="*", default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=12, help="replays of each graph")
    parser.add_argument("--loads", type=int, nargs="+", help="numbers of a part's loads; all")
    parser.add_argument("--compiling", type=float, default=_COMPILING, help="seconds at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no load begins after")
    parser.add_argument("--here", action="store_true", help="compile in this process")
    given = parser.parse_args()
    if not given.here:  # nothing is timed beside processes that use the device
        Compilers(given.parts).wait(given.compiling)
        os.environ["SGLANG_CRASH_ON_JIT_COMPILE"] = "1"  # what took too long is not begun again
    scenes.configure()
    engines, clock = Engines(), Clock(given.rounds)
    gc.freeze()  # each capture collects garbage, among all that SGLang imports
    common = environment("python benchmarks/sglang/backend.py ROWS") | device_facts() | versions()
    # One load of each part, then the next, so that a run that is cut short has something of each.
    numbered = [(n, part) for part in given.parts for n in range(len(loads_of(part)))]
    for number, part in sorted(numbered, key=lambda each: each[0]):
        if given.loads is not None and number not in given.loads:
            continue
        if time.monotonic() - begun > given.seconds:
            print(f"no time: {part}, load {number}", flush=True)
            continue
        try:
            own = part == _TOPK or not given.here
            for row in rows_of(part, engines, clock, loads_of(part)[number], own):
                print(json.dumps(row), flush=True)
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | common) + "\n")
        except Exception:
            traceback.print_exc()
            print(f"failed: {part}, load {number}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
