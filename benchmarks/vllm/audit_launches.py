"""GPU time of the launches that an audit leaves in a captured graph: ``audit_launches.py ROWS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from anymla.audit.rows import RowRecorder
from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts

TENSORS, LAUNCHES, REPLAYS = 30, 20, 20


def main(path: Path) -> None:
    """Append the rows: of launches that record nothing, and of some that do."""
    device = torch.device("cuda")
    heads = [torch.randn(8, 64, 512, device=device).bfloat16() for _ in range(TENSORS)]
    for rows in (2, 4):
        recorder = RowRecorder(device, rows, ["layer"], rows * TENSORS * 66_000)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                for number, tensor in enumerate(heads):
                    recorder.note("layer", f"tensor {number}", tensor)
                recorder.flush()
        for asked in ([], ["layer"]):
            recorder.choose(1, [0], asked)
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            what = "asked for" if asked else "not asked for"
            row = {
                "part": "cost of an audit",
                "case": f"a launch for {TENSORS} tensors in a captured graph, {rows} rows, {what}",
                "us": start.elapsed_time(end) / REPLAYS / LAUNCHES * 1e3,
            }
            made = environment("python benchmarks/vllm/audit_launches.py rows.jsonl")
            print(row, flush=True)
            with path.open("a") as file:
                file.write(json.dumps(row | made | device_facts()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
