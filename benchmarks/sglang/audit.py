"""SGLang's captured decode steps under the plugin's audit, without a fault and with seeded ones.

``ANYMLA_SGLANG=audit audit.py ROWS`` audits SGLang's own kernels, ``ANYMLA_SGLANG=force,audit`` the
plugin's. The plugin is registered by its entry point, and every step runs through the hook of
``ModelRunner.forward``. A fault is planted in one layer of a captured graph, where attention or
selection reads; the tables and pools that the audit reads stay as they are. A row says which layer
and method was named.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import absent_libraries

absent_libraries.install()
os.environ.setdefault("ANYMLA_AUDIT", "every=1,requests=8,layers=2")

import scene as scenes  # noqa: E402  # SGLang's stand-ins come first
import torch  # noqa: E402
from scene import PAGE, WINDOW, Load, Scene  # noqa: E402
from torch import Tensor  # noqa: E402

from anymla.bench.environment import environment  # noqa: E402
from anymla.bench.gpu import device_facts  # noqa: E402

SWITCH = os.environ.get("ANYMLA_SGLANG", "auto")
LOAD = Load(tuple(4096 - 37 * request for request in range(8)))
_ROPE_AND_VALUES = 576  # bytes of a row before the page's scales
_ROW_SCALES = 8
Fault = Callable[[Scene, int], Any]


@contextlib.contextmanager
def no_fault(scene: Scene, layer: int) -> Iterator[None]:
    """Leave the layer as it is."""
    yield


@contextlib.contextmanager
def wrong_scale_byte(scene: Scene, layer: int) -> Iterator[None]:
    """Have attention read the newest row with its first scale doubled."""

    def spoil(buffer: Tensor, slots: Tensor, older: Tensor) -> None:
        page, row = slots // PAGE, slots % PAGE
        buffer[page, PAGE * _ROPE_AND_VALUES + row * _ROW_SCALES] += 1

    with _other_rows(scene, spoil):
        yield


@contextlib.contextmanager
def stale_row(scene: Scene, layer: int) -> Iterator[None]:
    """Have attention read, in place of the newest row, the one a window earlier."""

    def spoil(buffer: Tensor, slots: Tensor, older: Tensor) -> None:
        for first, width in ((0, _ROPE_AND_VALUES), (PAGE * _ROPE_AND_VALUES, _ROW_SCALES)):
            byte = first + torch.arange(width, device=buffer.device)
            to, of = ((each % PAGE).unsqueeze(1) * width + byte for each in (slots, older))
            buffer[(slots // PAGE).unsqueeze(1), to] = buffer[(older // PAGE).unsqueeze(1), of]

    with _other_rows(scene, spoil):
        yield


@contextlib.contextmanager
def _other_rows(scene: Scene, spoil: Callable[[Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """Have attention read a spoiled copy of a layer's window."""
    pool, table = scene.backend.token_to_kv_pool, scene.backend.req_to_token
    request, newest = scene.batch.req_pool_indices, scene.batch.seq_lens - 1
    slots, older = (
        pool.translate_loc_from_full_to_swa(table[request, newest - back].long())
        for back in (0, WINDOW)
    )
    read = pool.get_swa_key_buffer_radix

    def spoiled(layer_id: int) -> Tensor:
        buffer = read(layer_id)
        copy = buffer.clone()
        spoil(copy.view(torch.uint8), slots, older)
        return copy

    with _patched(pool, get_swa_key_buffer_radix=spoiled):
        yield


@contextlib.contextmanager
def dropped_sink(scene: Scene, layer: int) -> Iterator[None]:
    """Have attention compute without the sink."""
    with _other_call(scene, attn_sink=lambda sink: torch.full_like(sink, -torch.inf)):
        yield


@contextlib.contextmanager
def wrong_slot(scene: Scene, layer: int) -> Iterator[None]:
    """Have attention read the row beside one of the window's."""
    with _other_call(scene, indices=_one_beside):
        yield


@contextlib.contextmanager
def wrong_entry(scene: Scene, layer: int) -> Iterator[None]:
    """Have attention read the entry beside the first selected one."""
    with _other_call(scene, extra_indices_in_kvcache=_one_beside):
        yield


def _one_beside(indices: Tensor) -> Tensor:
    spoiled = indices.clone()
    spoiled[..., 0] ^= 1
    return spoiled


@contextlib.contextmanager
def _other_call(scene: Scene, **changes: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change arguments of FlashMLA's function."""
    attend = scene.backend._flash_mla_with_kvcache

    def changed(**given: Any) -> Any:
        return attend(**given | {name: each(given[name]) for name, each in changes.items()})

    with _patched(scene.backend, _flash_mla_with_kvcache=changed):
        yield


@contextlib.contextmanager
def stale_keys(scene: Scene, layer: int) -> Iterator[None]:
    """Have the indexer read every other page of keys in another page's place."""
    pool = scene.backend.token_to_kv_pool
    read = pool.get_index_k_with_scale_buffer

    def spoiled(layer_id: int) -> Tensor:
        copy = read(layer_id=layer_id).clone()
        copy[1::2] = copy[1::2].roll(1, 0)
        return copy

    with _patched(pool, get_index_k_with_scale_buffer=spoiled):
        yield


@contextlib.contextmanager
def _patched(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: owner.__dict__.get(name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# Each fault, the ratio of the layer that it is planted in, and the method that it spoils.
FAULTS: tuple[tuple[Fault, int, str], ...] = (
    (no_fault, 0, ""),
    (wrong_scale_byte, 0, "attention"),
    (stale_row, 128, "attention"),
    (dropped_sink, 4, "attention"),
    (wrong_slot, 0, "attention"),
    (wrong_entry, 4, "attention"),
    (stale_keys, 4, "selection"),
    (no_fault, 0, ""),
)


def start() -> Any:
    """Register the plugin by its entry point, and return SGLang's class of model runners."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry

    from anymla.engines.sglang import plugin

    # What a step is here; the audit's hook goes around it.
    ModelRunner.forward = lambda runner, batch: runner.step()
    plugin.register()
    HookRegistry.apply_hooks()
    scenes.configure()
    scenes.select_as(scores=torch.cuda.is_available(), topk=False)
    return ModelRunner


def layers_of(scene: Scene, fault: Fault, spoilt: int, method: str) -> Callable[[], None]:
    """Return a step's layers with a fault in one of them."""

    def run() -> None:
        for ratio in scenes.RATIOS:
            for layer in scene.layers[ratio]:
                here = fault if layer == spoilt else no_fault
                if ratio == 4:
                    with here(scene, layer) if method == "selection" else no_fault(scene, layer):
                        scene.select(layer)
                with here(scene, layer) if method != "selection" else no_fault(scene, layer):
                    scene.attend(layer)

    return run


def row_of(
    scene: Scene, runner_class: Any, fault: Fault, ratio: int, method: str
) -> dict[str, Any]:
    """Capture steps with a fault, replay one under the audit, and say what was named."""
    from anymla.engines.sglang import audit

    auditor = audit._watches[id(scene.backend)].auditor
    spoilt = scene.layers[ratio][-1]
    layers = layers_of(scene, fault, spoilt, method)
    runner = scene.backend.model_runner
    if torch.cuda.is_available():
        graph = scenes.capture(scene, layers, torch.cuda.Stream())
        runner.step = graph.replay
    else:
        scene.backend.init_forward_metadata(scene.batch)
        layers()  # tells the audit which layers there are
        runner.step = layers
    auditor.drain()
    before = sum(each.judged for each in auditor.tallies.values())
    auditor.alarms.clear()
    runner_class.forward(runner, scene.batch)
    auditor.drain()
    judged = sum(each.judged for each in auditor.tallies.values()) - before
    named = sorted({f"{case.method}, {case.layer}" for case, _ in auditor.alarms})
    expected = [f"{method}, layer {spoilt}"] if method else []
    return {
        "part": "SGLang's audit",
        "case": fault.__name__.replace("_", " "),
        "switch": SWITCH,
        "judged": judged,
        "alarms": len(auditor.alarms),
        "named": named,
        "ok": named == expected and judged > 0,
    }


def main(path: Path) -> None:
    """Append the rows."""
    runner_class = start()
    common = environment(f"ANYMLA_SGLANG={SWITCH} python benchmarks/sglang/audit.py ROWS")
    scene = Scene(LOAD, heads=64, each=2, device="cuda" if torch.cuda.is_available() else "cpu")
    for fault, ratio, method in FAULTS:
        row = row_of(scene, runner_class, fault, ratio, method)
        print(json.dumps(row), flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | common | device_facts()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
