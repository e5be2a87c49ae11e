"""Time and peak memory of transformers' V4-Flash-sized layers on a GPU, beside its eager attention.

    python -m lab.transformers_layers [ROWS.jsonl]     # at most 150 seconds on one GPU

A process takes one kind of layer and one attention implementation through all lengths. They import
and compile side by side, then take turns on the GPU, each with a time limit; memory that ends is a
result. Anymla's begin with a comparison, side by side as well: output and gradients in bfloat16, of
both implementations, against eager in float32. The LoRA example with 32,768 tokens comes last.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import itertools
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click
import torch
from torch import Tensor, nn

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.report import append_lines
from anymla.child_process import python_command
from anymla.testing.tolerance import relative_l2

LENGTHS = {"anymla": (8192, 32768, 131072), "eager": (4096, 8192, 16384)}
KINDS = {
    "window": "sliding_attention",
    "ratio 4": "compressed_sparse_attention",
    "ratio 128": "heavily_compressed_attention",
}
COMPARED = 2048  # tokens; a layer of ratio 4 then selects all of its 512 entries
TURN_S = 40  # of one process on the GPU, at one length
LAYERS_S, ALL_S = 100.0, 150.0
EXAMPLE = Path(__file__).parents[1] / "examples" / "lora" / "finetune.py"
Row = dict[str, Any]


@click.command()
@click.argument("path", type=Path, required=False)
@click.option("--one", nargs=3, hidden=True, help="Attention, layer and file of the turns.")
def main(path: Path | None, one: tuple[str, str, str] | None) -> None:
    """Run all processes and print a JSON row a result, or be one of them."""
    if one is not None:
        for row in results(one[0], one[1], Path(one[2])):
            print(json.dumps(row), flush=True)
        return
    begin = time.monotonic()
    facts = environment("python -m lab.transformers_layers") | device_facts()
    cases = list(itertools.product(LENGTHS, KINDS))
    with NamedTemporaryFile() as turns, ThreadPoolExecutor(len(cases)) as pool:
        commands = [["-m", "lab.transformers_layers", "--one", *case, turns.name] for case in cases]
        found = list(pool.map(lambda words: _run(words, LAYERS_S), commands))
    rows: list[Row] = []
    for (attention, layer), (lines, error) in zip(cases, found, strict=True):
        each = [json.loads(line) for line in lines] + [{"error": error}] * bool(error)
        rows += [{"attention": attention, "layer": layer} | row for row in each]
    words = [str(EXAMPLE), "--gpu", "--dense", "--steps", "4", "--held", "1"]
    lines, error = _run(words, ALL_S - (time.monotonic() - begin))
    rows.append({"example": "LoRA", "tokens": 32768, "printed": lines, "error": error})
    for row in rows:
        print(json.dumps(row))
    if path is not None:
        append_lines(path, [row | facts for row in rows])


def _run(words: list[str], limit: float) -> tuple[list[str], str]:
    """Run Python; return what it printed, and its error or an empty string."""
    command = python_command("-W", "ignore", *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as late:
        printed: Any = late.stdout or ""  # bytes, whatever was asked for
        printed = printed.decode() if isinstance(printed, bytes) else printed
        return printed.splitlines(), f"more than {limit:.0f} s"
    error = ""
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        error = f"exit code {done.returncode}: {last}"[:300]
    return done.stdout.splitlines(), error


@contextlib.contextmanager
def turn(turns: Path, *, alone: bool) -> Iterator[None]:
    """Wait for the GPU; the process ends if it keeps it for longer than a turn."""
    with turns.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        signal.alarm(TURN_S)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        signal.alarm(0)


class Layer:
    """An attention layer of transformers, its input and what it is called with."""

    def __init__(self, layer: str, device: torch.device, **sizes: Any) -> None:
        """Draw the weights of a kind of ``KINDS``; ``sizes`` are other values than V4-Flash's."""
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

        from anymla.engines.transformers import AnymlaDeepseekV4Attention

        torch.manual_seed(0)
        self.config = DeepseekV4Config(num_hidden_layers=1, layer_types=[KINDS[layer]], **sizes)
        with device:
            self.module = AnymlaDeepseekV4Attention(self.config, 0).eval()
            self.rotary = DeepseekV4RotaryEmbedding(self.config)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(True)
            if name.endswith(("sinks", "position_bias")):  # left as the allocator gave them
                nn.init.normal_(parameter)
            elif parameter.ndim > 1:  # the others stay in float32, as from_pretrained leaves them
                parameter.data = parameter.data.bfloat16()

    def input(self, tokens: int) -> Tensor:
        """Return the same tokens every time, [1, tokens, hidden]."""
        torch.manual_seed(1)
        device = next(self.module.parameters()).device
        return torch.randn(1, tokens, self.config.hidden_size, device=device).bfloat16()

    def forward(self, module: Any, x: Tensor, attention: str) -> Tensor:
        """Attend by an implementation, with a mask as a whole model makes it."""
        from transformers.masking_utils import create_sliding_window_causal_mask

        self.config._attn_implementation = attention
        module.config = self.config
        at = torch.arange(x.shape[1], device=x.device)[None]
        angles = {
            name: self.rotary(x, position_ids=at, layer_type=name) for name in ("main", "compress")
        }
        mask = create_sliding_window_causal_mask(self.config, x, None, None, position_ids=at)
        out: Tensor = module(x, angles, position_ids=at, attention_mask=mask)[0]
        return out

    def gradients(self, module: Any, x: Tensor, attention: str) -> dict[str, Tensor]:
        """Return the output, and the gradients of the input and of all weights, in float32."""
        weights = dict(module.named_parameters())
        given = [x.detach().requires_grad_(), *weights.values()]
        with torch.enable_grad():
            out = self.forward(module, given[0], attention)
            pull = torch.linspace(-1, 1, out.numel(), device=x.device).sin().view_as(out)
            grads = torch.autograd.grad(out, given, pull.to(out.dtype), allow_unused=True)
        pairs = zip(("output", "input", *weights), (out.detach(), *grads), strict=True)
        return {name: grad.float() for name, grad in pairs if grad is not None}

    def compared(self, tokens: int) -> Row:
        """Return errors, relative L2, of both implementations in bfloat16 against float32.

        Those of the output, of the input's gradient and the worst of a weight's gradient.
        """
        x = self.input(tokens)
        exact = self.gradients(copy.deepcopy(self.module).float(), x.float(), "eager")
        row: Row = {"tokens": tokens, "compared with": "eager in float32"}
        for attention in LENGTHS:
            found = self.gradients(self.module, x, attention)
            errors = {
                name: relative_l2(found[name], want) for name, want in exact.items() if want.any()
            }
            output, given = errors.pop("output"), errors.pop("input")
            worst = max(errors, key=errors.__getitem__)
            row[f"{attention} error"] = {
                "output": output, "input's gradient": given, worst: errors[worst],
            }  # fmt: skip
        return row

    def measured(self, attention: str, tokens: int) -> Row:
        """Return the fewest milliseconds of five runs, and peak GiB over weights and input.

        Of the forward pass and of a training step, each after a run that may compile; one that
        fails has the reason in the row. What a run waits for is not the layer's.
        """
        x, row = self.input(tokens), Row(tokens=tokens)
        for name, train in (("forward", False), ("training step", True)):
            try:
                runs = [self._once(attention, x, name, train) for _ in range(6)][1:]
                row |= min(runs, key=lambda run: float(run[f"{name} ms"]))
            except RuntimeError as error:
                row[f"{name} error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            self.module.zero_grad(set_to_none=True)
            if x.is_cuda:
                torch.cuda.empty_cache()
        return row

    def _once(self, attention: str, x: Tensor, name: str, train: bool) -> Row:
        held, row = 0, Row()
        if x.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with torch.set_grad_enabled(train):
            given = x.detach().requires_grad_(train)
            out = self.forward(self.module, given, attention)
            if train:
                out.backward(torch.ones_like(out))
        if x.is_cuda:
            torch.cuda.synchronize()
            row[f"{name} GiB"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2)
        row[f"{name} ms"] = round((time.perf_counter() - start) * 1e3, 1)
        self.module.zero_grad(set_to_none=True)
        return row


def results(attention: str, layer: str, turns: Path) -> Iterator[Row]:
    """Yield the rows of a process; the first, of anymla alone, compares and compiles."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = Layer(layer, device)
    if attention == "anymla":
        with turn(turns, alone=False):
            row = made.compared(COMPARED)
        yield row
    for tokens in LENGTHS[attention]:
        with turn(turns, alone=True):
            row = made.measured(attention, tokens)
        yield row


if __name__ == "__main__":
    main()
