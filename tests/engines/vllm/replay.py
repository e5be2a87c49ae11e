"""The plugin's layers on a device, without vLLM, on steps that ``record.py`` kept of a real worker.

``replay.py RECORD ANSWER.json [DEVICE]``. vLLM's modules are stand-ins here: classes without
contents, in which the plugin's own methods find the attributes that the real ones have. What they
compute is compared with vLLM's own kernels, whose results are in the record. On a GPU a decode step
is also captured as a CUDA graph, and replayed with the next step's inputs.
"""

from __future__ import annotations

import collections
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measures
import stand_ins
import streams
import torch
from torch import Tensor

stand_ins.install()

import kept_layer  # noqa: E402

from anymla.engines.vllm.hyper_connection import FUNCTIONS  # noqa: E402


def stream_functions(device: torch.device) -> dict[str, float]:
    """The hyper-connection functions of vLLM's CUDA models beside themselves on a CPU.

    There they are compared with vLLM's own.
    """
    worst = 0.0
    for name, (arguments, keywords) in streams.calls().items():
        results = []
        for place in (device, torch.device("cpu")):
            put = [_put_on(each, place) for each in arguments]
            ours = FUNCTIONS[name](*put, **{k: _put_on(v, place) for k, v in keywords.items()})
            results.append(ours if isinstance(ours, tuple) else (ours,))
        for mine, other in zip(*results, strict=True):
            worst = max(worst, measures.ulps(mine.cpu().flatten(1), other.flatten(1)))
    return {"ulps": worst, "calls": len(streams.calls())}


def _put_on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _told(count: Callable[[], int]) -> dict[str, Any]:
    """What a count gives; a failure must not hide what else was found."""
    try:
        return {"bytes_that_differ": count()}
    except RuntimeError as error:
        return {"failed": " ".join(str(error).split())[:300]}


def replay(path: Path, device: torch.device) -> list[dict[str, Any]]:
    """The worst of every part, as ``compare.report``."""
    worst: dict[tuple[str, int, str], dict[str, Any]] = collections.defaultdict(dict)
    with gzip.open(path) as file:
        kept = torch.load(file, weights_only=True)
    for each in kept:
        layer = kept_layer.Layer(each, device)
        for step in layer.steps:
            phase = "decode" if len(step["query"]["positions"]) == 1 else "prefill"
            for part, values in layer.compare(step, layer.run(step)).items():
                seen = worst[part, layer.ratio, phase]
                seen["calls"] = seen.get("calls", 0) + 1
                for name, value in values.items():
                    known = seen.get(name, 0.0)
                    seen[name] = value if value != value or value > known else known
        if device.type == "cuda":
            worst["captured", layer.ratio, "decode"] = _told(layer.captured)
    worst["hyper-connections", 0, "decode"] = stream_functions(device)
    keys = ("part", "ratio", "phase")
    return [dict(zip(keys, key, strict=True)) | values for key, values in sorted(worst.items())]


if __name__ == "__main__":
    place = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
    with torch.no_grad():
        Path(sys.argv[2]).write_text(json.dumps(replay(Path(sys.argv[1]), place)))
