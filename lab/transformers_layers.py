"""Time and peak memory of transformers' V4-Flash-sized layers on a GPU, beside its eager attention.

    python -m lab.transformers_layers                 # all lengths; a few minutes on one GPU

Each measurement has a process of its own with a time limit, so that one that runs out of memory
ends nothing else. Prints one JSON row a measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time

from anymla.child_process import python_command

LENGTHS = (8192, 32768, 131072)
KINDS = {
    "window": "sliding_attention",
    "ratio 4": "compressed_sparse_attention",
    "ratio 128": "heavily_compressed_attention",
}
LIMIT_S = 25.0  # of one process
BUDGET_S = 230.0  # of all of them
EAGER_LENGTHS = (8192, 16384)  # it ends between them


def main() -> None:
    """Run all measurements, or the one that is named."""
    parser = argparse.ArgumentParser(description="V4-Flash-sized layers in transformers")
    parser.add_argument("--one", help="a measurement as JSON; for the processes of this one")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(**json.loads(options.one))), flush=True)
        return
    stop = time.monotonic() + options.budget
    cases = [("anymla", length) for length in LENGTHS] + [("eager", n) for n in EAGER_LENGTHS]
    for name, length in cases:
        for kind in KINDS:
            case = {"attention": name, "layer": kind, "tokens": length}
            left = min(LIMIT_S, stop - time.monotonic())
            print(json.dumps(case | (_run(case, left) if left > 5 else {"error": "no time left"})))


def _run(case: dict[str, object], limit: float) -> dict[str, object]:
    command = python_command("-W", "ignore", "-m", __spec__.name, "--one", json.dumps(case))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": last[:200]}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(attention: str, layer: str, tokens: int) -> dict[str, float | str]:
    """Time an attention layer in bfloat16: forward alone, and forward with backward.

    Args:
        attention: attention implementation, "anymla" or "eager".
        layer: key of ``KINDS``.
        tokens: length of the sequence.

    Returns:
        Milliseconds and peak GiB over weights and input, of the second of two runs each; for a
        training step that fails, its error in place of both.
    """
    import torch
    from transformers import DeepseekV4Config
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
        DeepseekV4Attention,
        DeepseekV4RotaryEmbedding,
    )

    from anymla.engines.transformers import AnymlaDeepseekV4Attention

    config = DeepseekV4Config(num_hidden_layers=1, layer_types=[KINDS[layer]])
    config._attn_implementation = attention
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = AnymlaDeepseekV4Attention if attention == "anymla" else DeepseekV4Attention
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        module = kind(config, 0).eval()
        rotary = DeepseekV4RotaryEmbedding(config)
        x = torch.randn(1, tokens, config.hidden_size)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                parameter.zero_()
    positions = torch.arange(tokens, device=device)[None]
    angles = {
        name: rotary(x, position_ids=positions, layer_type=name) for name in ("main", "compress")
    }

    def run(train: bool) -> None:
        mask = create_sliding_window_causal_mask(config, x, None, None, position_ids=positions)
        with torch.set_grad_enabled(train):
            given = x.detach().requires_grad_(train)
            out, _ = module(given, angles, position_ids=positions, attention_mask=mask)
            if train:
                out.backward(torch.ones_like(out))
        module.zero_grad(set_to_none=True)

    found: dict[str, float | str] = {"device": torch.cuda.get_device_name() if x.is_cuda else "cpu"}
    for name, train in (("forward", False), ("training step", True)):
        try:
            run(train)
            if x.is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            start = time.perf_counter()
            run(train)
            if x.is_cuda:
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - held
                found[f"{name} GiB"] = round(peak / 2**30, 2)
            found[f"{name} ms"] = round((time.perf_counter() - start) * 1e3, 1)
        except (RuntimeError, ValueError) as error:
            found[f"{name} error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found


if __name__ == "__main__":
    main()
