"""What type checkers say to who calls the package: right calls pass, wrong keywords are named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A line that must be refused says by which of mypy's codes.
SNIPPET = """
import functools
from typing import assert_type

import numpy as np
import torch
from torch import Tensor

from anymla import LLM, Generation
from anymla.ops.linear import fp8_block_linear
from anymla.ops.moe import experts, route_biased
from anymla.ops.attention import CacheRows, sparse_attention

q = torch.zeros(2, 8, 512)
slots = torch.zeros(2, 64, dtype=torch.int32)
rows = [CacheRows(q, "v4_main_fp8", slots)]
assert_type(sparse_attention(q, rows, sink=q[0, :, 0]), tuple[Tensor, Tensor])
assert_type(sparse_attention(q, rows=rows, backend="torch"), tuple[Tensor, Tensor])
assert_type(fp8_block_linear(q, q, q, quantize_activations=True), Tensor)
assert_type(route_biased(q, q, q, k=2, scale=1.0), tuple[Tensor, Tensor])
sparse_attention.supports(q, rows, backend="triton")
sparse_attention(q, rows, sinks=q)  # call-arg
sparse_attention(q, rows, sinks=q, backend="torch")  # call-arg
sparse_attention(q)  # call-arg
sparse_attention(q, q)  # arg-type
sparse_attention(q, rows, scale="1")  # arg-type
sparse_attention(q, rows, backend=1)  # arg-type
sparse_attention.supports(q, rows, sinks=q)  # call-arg
experts.resolve(q, slots, q, num_experts=3)  # call-arg
functools.partial(fp8_block_linear, quantise_activations=True)  # call-arg

llm = LLM("directory", dtype="auto", device=None)
LLM(model="directory", dtype=torch.bfloat16, device=torch.device("cuda"))
LLM("directory", torch_dtype="auto")  # call-arg
LLM("directory", tensor_parallel_size=2)  # call-arg
assert_type(llm.generate("text", max_new_tokens=3, temperature=0, stop="."), Generation)
assert_type(llm.generate([5, 6, 7]), Generation)
assert_type(llm.generate(["one", "two"], top_k=3), list[Generation])
assert_type(llm.generate([[5, 6], [7]]), list[Generation])
assert_type(llm.generate(np.zeros(3, dtype=np.int64)), Generation | list[Generation])
assert_type(llm.generate([torch.zeros(3)]), list[Generation])
assert_type(llm.chat("hello", seed=3), Generation)
assert_type(llm.chat([{"role": "user", "content": "hello"}]), Generation)
for part in llm.stream([5, 6, 7], max_new_tokens=2):
    assert_type(part, str)
llm.generate("text", max_tokens=3)  # call-overload
llm.generate("text", temperature="hot")  # call-overload
llm.stream("text", max_tokens=3)  # call-arg
llm.chat("text", max_tokens=3)  # call-arg
llm.chat("text", stop=3)  # arg-type
"""


@pytest.mark.slow
def test_wrong_calls_are_refused_and_right_ones_are_not(tmp_path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    words = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache")
    command = [sys.executable, "-m", "mypy", *words, "--no-pretty", tmp_path / "snippet.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = dict(re.findall(r"snippet\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE))
    wanted = {
        str(number): line.rpartition("# ")[2]
        for number, line in enumerate(SNIPPET.split("\n"), start=1)
        if re.search(r"  # [a-z-]+$", line)
    }
    assert len(wanted) > 10
    assert said == wanted, done.stdout + done.stderr
