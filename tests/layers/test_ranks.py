"""Models that several processes share: what each has, and that together they are the whole."""

import dataclasses
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.nvfp4 import quantize_nvfp4
from anymla.layers.linear import PackedWeight
from anymla.layers.ranks import ALONE, Ranks
from anymla.model.config import ConfigError
from anymla.model.load import load_model
from anymla.runtime import launch
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

TRAINED = Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"
OPTIONS = TinyOptions(
    weights="fp4",
    ratios=(0, 4, 128),
    hidden=128,
    heads=4,
    o_groups=2,
    q_lora=64,
    o_lora=128,
    index_heads=4,
    index_topk=16,
    experts=7,
    experts_per_token=2,
    moe_size=256,
    rope_factor=1.0,
)


_RATIOS = (0, 2, 2, 1, 1, 1)
CHECKPOINTS = {
    "mtp": dataclasses.replace(OPTIONS, drafter="mtp"),
    "dspark": dataclasses.replace(OPTIONS, drafter="dspark"),
    # Rows, keys and selections that layers share, n-grams, and their drafter's own experts.
    "v4.1": TinyOptions.shared(
        ratios=_RATIOS,
        sharing=TinySharing.of(_RATIOS, candidate_blocks=5, candidate_block_size=4),
        heads=4,
        o_groups=2,
        experts=7,
        experts_per_token=2,
        moe_size=256,
        index_topk=16,
        drafter="dspark",
        draft_experts=5,
        draft_experts_per_token=2,
    ),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared")
    write_tiny_checkpoint(directory, CHECKPOINTS[request.param])
    return directory


def _packed(kind, rows, columns):
    weight = torch.randn(rows, columns)
    if kind == "plain":
        return PackedWeight(kind, weight)
    quantize = {"fp8": quantize_fp8_weight, "mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4}
    return PackedWeight(kind, *quantize[kind](weight))


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4", "nvfp4"])
def test_parts_of_a_weight_are_parts_of_its_values(kind):
    whole = _packed(kind, 320, 256)
    dense = whole.dense(torch.float32)
    for part in (range(0, 128), range(128, 320), range(256, 320)):
        assert torch.equal(whole.rows(part).dense(torch.float32), dense[part.start : part.stop])
    for part in (range(0, 128), range(128, 256)):
        assert torch.equal(
            whole.columns(part).dense(torch.float32), dense[:, part.start : part.stop]
        )


def test_a_part_within_a_block_of_fp8_has_its_scale():
    """Of a projection whose ranks have 64 channels each: the block of each is a short one."""
    whole = _packed("fp8", 320, 192)
    dense = whole.dense(torch.float32)
    for part in (range(64, 128), range(32, 96), range(288, 320)):
        assert torch.equal(whole.rows(part).dense(torch.float32), dense[part.start : part.stop])
    for part in (range(64, 128), range(128, 160)):
        assert torch.equal(
            whole.columns(part).dense(torch.float32), dense[:, part.start : part.stop]
        )


def test_a_scale_is_never_cut():
    with pytest.raises(ValueError, match=r"rows 64\.\.191 of a fp8 weight \[256, 256\]"):
        _packed("fp8", 256, 256).rows(range(64, 192))
    with pytest.raises(ValueError, match=r"columns 8\.\.23 of a nvfp4 weight"):
        _packed("nvfp4", 64, 48).columns(range(8, 24))
    with pytest.raises(ValueError, match=r"columns 0\.\.15 of a mxfp4 weight"):
        _packed("mxfp4", 64, 64).columns(range(16))


def test_shares_cover_everything_once():
    for count in (1, 7, 256):
        for size in (1, 2, 3, 8):
            parts = [Ranks(rank, size).share(count) for rank in range(size)]
            assert [each for part in parts for each in part] == list(range(count))


def test_ranks_have_all_of_the_model_between_them(checkpoint):
    whole = load_model(checkpoint, dtype=torch.float32, progress=False)
    parts = [
        load_model(checkpoint, dtype=torch.float32, ranks=Ranks(rank, 2), progress=False)
        for rank in range(2)
    ]
    for layer, *shared in zip(whole.layers, *(part.layers for part in parts), strict=True):
        sinks = torch.cat([each.attention.heads.sink for each in shared])
        assert torch.equal(sinks, layer.attention.heads.sink)
        assert [len(each.ffn.w1.weights) for each in shared] == [3, 4]
        assert [each.ffn.expert_offset for each in shared] == [0, 3]
        # 256 channels come apart in two whole blocks of scales.
        widths = [each.ffn.shared.w2.packed.weight.shape[1] for each in shared]
        assert widths == [128, 128]


def test_a_model_that_does_not_come_apart_says_so(checkpoint):
    message = "2 output groups cannot be shared evenly by 4 ranks; possible are 1, 2$"
    with pytest.raises(ConfigError, match=message):
        load_model(checkpoint, ranks=Ranks(0, 4), progress=False)


def test_a_weight_that_does_not_come_apart_is_named(tmp_path):
    """Three groups of 192 channels: halves would cut the second of five blocks of scales."""
    small = {"heads": 6, "o_groups": 6, "o_lora": 96, "experts": 6, "experts_per_token": 2}
    write_tiny_checkpoint(tmp_path, TinyOptions(ratios=(0,), mtp=0, hash_layers=0, **small))
    message = (
        r"^layers\.0\.attn\.wo_a\.weight cannot be shared by 2 ranks: rows 288\.\.575 of a fp8 "
        r"weight .* 128 belong together; possible are 1$"
    )
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, ranks=Ranks(1, 2), progress=False)


def test_alone_nothing_is_exchanged():
    x = torch.randn(3)
    assert ALONE.total(x) is x
    assert ALONE.agree([1, 2], x.device) == [1, 2]


def test_alone_everything_stays_as_it_is():
    x = torch.arange(6).view(2, 3)
    assert ALONE.agreed(x) is x
    assert ALONE.gathered(x) is x
    assert launch.with_peer_memory(ALONE, torch.device("cuda"), torch.bfloat16) is ALONE
    on_cpu = Ranks(1, 2)
    assert launch.with_peer_memory(on_cpu, torch.device("cpu"), torch.bfloat16) is on_cpu


_EXCHANGE = """
import torch
from anymla.runtime.launch import joined
with joined(torch.device("cpu")) as ranks:
    part = (100 * ranks.rank + torch.arange(12)).view(2, 3, 2)
    whole = ranks.gathered(part)
    assert whole.shape == (2, 3, 4)
    assert whole[1, 2].tolist() == [10, 11, 110, 111], whole
    assert ranks.gathered(part[:, 0])[1].tolist() == [6, 7, 106, 107]
    chosen = torch.tensor([[5, 6], [7, 8]]) + 10 * ranks.rank
    assert ranks.agreed(chosen.t()).tolist() == [[5, 7], [6, 8]]
    assert ranks.agree([3 + ranks.rank], torch.device("cpu")) == [3]
    assert ranks.total(torch.ones(3)).tolist() == [2, 2, 2]
"""


def test_two_processes_exchange(tmp_path):
    program = tmp_path / "exchange.py"
    program.write_text(_EXCHANGE)
    command = [*_torchrun(2)[:-2], str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


_ONE_SHOT = """
import dataclasses, torch
from anymla.runtime.graphs import Graph
from anymla.runtime.launch import joined, launched, local_device, with_peer_memory
device = local_device("cuda")
with joined(device):
    ranks = with_peer_memory(launched(), device, torch.bfloat16)
    assert ranks.peers is not None
    torch.manual_seed(ranks.rank)
    for rows in (1, 6, 48, 100):
        x = torch.randn(rows, 4096, device=device).bfloat16()
        into = torch.empty_like(x)
        graph = Graph(lambda: (ranks.total(into.copy_(x)),), device, record=True)
        for _ in range(50):
            (found,) = graph()
            assert torch.equal(found, launched().total(x.clone()))
    graph = None
"""


@pytest.mark.gpu
def test_one_shot_sums_are_the_groups(tmp_path):
    """Two ranks round once, whoever adds."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    program = tmp_path / "one_shot.py"
    program.write_text(_ONE_SHOT)
    command = [*_torchrun(2)[:-2], str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_what_was_recorded_is_gone_before_the_others_are_left(monkeypatch):
    class Step:
        def __init__(self):
            self.run = self.__str__  # as recorded steps do, which know what they run

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(launch.distributed, "init_process_group", lambda *_, **__: None)
    alive = []
    monkeypatch.setattr(
        launch.distributed, "destroy_process_group", lambda: alive.append(kept[0]() is not None)
    )
    kept = []
    with launch.joined(torch.device("cpu")) as ranks:
        assert ranks == Ranks(1, 2)
        kept.append(weakref.ref(Step()))
    assert alive == [False]


_ARGUMENTS = ["--dtype", "fp32", "--kv-cache", "fp32", "--max-new-tokens", "8", "--ignore-eos"]


def _generate(launcher, checkpoint, out, *more):
    prompt = "Two processes share the heads, the groups and the experts of one model. " * 3
    command = [*launcher, "generate", "--checkpoint", str(checkpoint), "--prompt", prompt]
    command += [*_ARGUMENTS, *more, "--json", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    return result, done.stdout


def _torchrun(processes):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(processes), "-m", "anymla",
    ]  # fmt: skip


def test_two_processes_generate_what_one_does(checkpoint, tmp_path):
    """With drafts, over gloo; float32 sums in another order, and the same tokens."""
    one, text = _generate([sys.executable, "-m", "anymla"], checkpoint, tmp_path / "1.json")
    two, both = _generate(_torchrun(2), checkpoint, tmp_path / "2.json", "--speculate")
    assert two["token_ids"] == one["token_ids"]
    assert two["drafted"] > 5
    assert both == text  # said once
    assert two["logprobs"] == pytest.approx(one["logprobs"], abs=1e-3)


def test_two_processes_share_the_trained_checkpoint(tmp_path):
    """Whose groups are 64 channels wide, half a block of scales; greedy, and the same tokens."""
    one, _ = _generate([sys.executable, "-m", "anymla"], TRAINED, tmp_path / "1.json")
    two, _ = _generate(_torchrun(2), TRAINED, tmp_path / "2.json")
    assert two["token_ids"] == one["token_ids"]


def test_two_processes_adapt_alike(checkpoint, tmp_path):
    """Each measures its own steps; if they chose for themselves, they would wait for each other."""
    how = ("--speculate", "--adapt-drafts", "--draft-tokens", "3", "--max-new-tokens", "60")
    one, _ = _generate([sys.executable, "-m", "anymla"], checkpoint, tmp_path / "1.json", *how)
    two, _ = _generate(_torchrun(2), checkpoint, tmp_path / "2.json", *how)
    assert two["token_ids"] == one["token_ids"]
    assert two["drafted"] > 20


@pytest.mark.gpu
def test_two_gpus_generate_what_one_does(checkpoint, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cuda = ("--device", "cuda")
    one, _ = _generate([sys.executable, "-m", "anymla"], checkpoint, tmp_path / "1.json", *cuda)
    for how in ((), ("--no-graphs",)):
        two, _ = _generate(_torchrun(2), checkpoint, tmp_path / "2.json", *cuda, *how)
        assert two["token_ids"] == one["token_ids"]
