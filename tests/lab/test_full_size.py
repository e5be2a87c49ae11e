"""The benchmark of a whole model on several ranks, small and on this machine."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from anymla.layers.ranks import ALONE, Ranks
from anymla.model.build import shares_channels
from anymla.model.config import ModelConfig
from lab.full_size import MODELS, drafting_config
from lab.launches import derived_families
from lab.model_steps import random_transformer
from lab.step_parts import FAMILIES, step_parts

CPU = torch.device("cpu")


def test_published_sizes_and_fewer_layers_of_them():
    assert drafting_config("flash-0731") == ModelConfig.from_dict(MODELS["flash-0731"])
    few = drafting_config("flash-0731", layers=4, experts=8)
    assert few.compress_ratios == (0, 0, 4, 128, 0, 0, 0)
    assert few.dspark.target_layer_ids == (1, 2, 3)
    assert (few.n_routed_experts, few.num_hash_layers) == (8, 3)
    assert drafting_config("pro-0813", layers=2).dspark.target_layer_ids == (0, 1)


def test_ranks_make_shares_of_one_model():
    """Whoever makes a weight makes the same one, whatever was made before."""
    config = drafting_config("tiny", layers=2, experts=8)
    whole = random_transformer(config, CPU, dtype=torch.float32, seed=0)
    shares = [
        random_transformer(config, CPU, Ranks(n, 2), dtype=torch.float32, seed=0) for n in range(2)
    ]
    stages = [model.dspark.stages[2] for model in (whole, *shares)]
    for layer, *parts in (stages, [model.layers[1] for model in (whole, *shares)]):
        heads = [part.attention.wq_b.packed.weight for part in parts]
        assert torch.equal(torch.cat(heads), layer.attention.wq_b.packed.weight)
        codes = [weight for part in parts for weight in part.ffn.w2.weights]
        assert len(codes) == len(layer.ffn.w2.weights)
        assert all(map(torch.equal, codes, layer.ffn.w2.weights))
        for part in parts:
            assert torch.equal(part.ffn.router.gate, layer.ffn.router.gate)
    other = random_transformer(config, CPU, dtype=torch.float32, seed=1)
    assert not torch.equal(other.embedding, whole.embedding)


def test_ranks_share_experts_by_their_channels():
    """Their parts add up to the whole experts' result."""
    config = drafting_config("tiny", layers=2, experts=8)
    make = functools.partial(
        random_transformer, config, CPU, dtype=torch.float32, seed=0, share_channels=True
    )
    whole = random_transformer(config, CPU, dtype=torch.float32, seed=0).layers[1].ffn
    parts = [make(ranks=Ranks(n, 2)).layers[1].ffn for n in range(2)]
    for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
        for kind in ("weights", "scales"):
            each = [getattr(getattr(part, name), kind) for part in parts]
            joined = [torch.cat(halves, dim) for halves in zip(*each, strict=True)]
            assert all(map(torch.equal, joined, getattr(getattr(whole, name), kind)))
    assert [part.expert_offset for part in parts] == [0, 0]
    inner = config.moe_intermediate_size
    fits = Ranks(0, 4), torch.device("cuda")
    many = dataclasses.replace(config, expert_dtype="fp4", moe_intermediate_size=1024)
    assert shares_channels(many, *fits)
    assert not shares_channels(many, *fits[:1], CPU)
    assert not shares_channels(many, ALONE, fits[1])
    assert not shares_channels(dataclasses.replace(many, expert_dtype="fp8"), *fits)
    assert not shares_channels(dataclasses.replace(many, moe_intermediate_size=inner), *fits)


def test_a_share_keeps_no_more_than_its_part():
    """Not the whole weight behind a view of it, on devices."""
    config, device = drafting_config("tiny", layers=2), torch.device("meta")
    share = random_transformer(config, device, Ranks(1, 2), seed=0)
    attention = share.layers[0].attention
    for packed in (attention.wq_b.packed, attention.output.wo_a):
        weight = packed.weight
        assert weight.untyped_storage().nbytes() == weight.nbytes


def _graph(launch, start, *kernels):
    """Kernels of one launch, each (begin, length, name)."""
    return [
        {"cat": "kernel", "ts": start + at, "dur": lasts, "name": name,
         "args": {"correlation": launch}}
        for at, lasts, name in kernels
    ]  # fmt: skip


def _step(number, start):
    """60 us: a graph of 52, whose draft takes 12, idle for 6 of them; 4 with a copy, 4 idle."""
    return [
        *_graph(
            number, start,
            (0, 10, "decode_m64_kernel"),
            (8, 12, "grouped_gemm_kernel"),  # launched early: adds 10
            (12, 6, "swiglu_kernel"),  # beside it: adds nothing
            (25, 3, "push_sum_kernel"),
            (28, 2, "collapse_kernel"),
            (30, 6, "nvjet_gemm"),
            (36, 2, "chunk_kernel"),
            (38, 2, "ranks_best_kernel"),
            (40, 8, "mix_kernel"),
            (49, 3, "product_kernel"),
        ),
        *_graph(100 + number, start + 54, (0, 4, "Memcpy DtoH")),
    ]  # fmt: skip


def test_parts_add_up_to_the_step():
    events = [event for number in range(3) for event in _step(number, 100.0 + 60 * number)]
    found = step_parts(events, 2, drafts=True)
    assert found.us == 60
    assert found.launches == 10 + 1
    assert found.parts == {
        "attention": 10,
        "experts": 10,
        "gaps in graphs": 5,
        "all-reduce": 3,
        "hyper-connections": 2,
        "head and choice": 10,
        "draft": 12,
        "between graphs": 8,
    }
    assert sum(found.parts.values()) == found.us
    assert found.draft_parts == {
        "hyper-connections": 8,
        "head and choice": 3,
        "gaps in graphs": 1,
    }
    assert step_parts(events, 3, drafts=True) is None
    plain = step_parts(events, 2, drafts=False)
    assert "draft" not in plain.parts
    assert sum(plain.parts.values()) == plain.us


def test_the_kernels_of_every_family_have_a_part():
    # The choice marks where the backbone's part of a step ends.
    assert {*FAMILIES, "choice"} == {*derived_families()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_processes_measure_a_small_model(tmp_path, dtype):
    """The command for torchrun, over gloo: texts with drafts are those without."""
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "anymla", "bench", "full-size", "--model", "tiny"]
    command += ["--device", "cpu", "--dtype", dtype, "--batch", "2", "--context", "150"]
    command += ["--layers", "3", "--steps", "2", "--json", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    made, *sums, step = map(json.loads, out.read_text().splitlines())
    assert done.stdout.count("full size, model") == 1  # one of them speaks
    assert (made["ranks"], made["one_shot_sums"]) == (2, False)
    assert [row["case"] for row in sums] == ["2 ranks, 6 rows", "2 ranks, 12 rows"]
    assert all(row["group_us"] > 0 for row in sums)
    assert step["us"] > 0 < step["plain_us"]
    assert step["tokens_a_step"] >= 1
    if dtype == "fp32":
        assert step["met"]
        assert step["same_texts"] == "2 of 2"
