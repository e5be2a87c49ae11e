"""The oracle's DeepSeek-V4.1, and runs of the engine judged by it."""

import pytest
import torch

from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.oracle.check import check_run
from anymla.testing.oracle.recording import RecordedModel, Recorder
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

RATIOS = (0, 0, 2, 2, 1, 1, 1, 1)
OPTIONS = TinyOptions.shared(
    weights="fp8", hidden=128, heads=4, o_groups=2, o_lora=64, q_lora=64, index_heads=8,
    index_topk=6, experts=16, experts_per_token=4, moe_size=64, window=16, ratios=RATIOS,
    sharing=TinySharing.of(RATIOS, candidate_blocks=3, candidate_block_size=4),
)  # fmt: skip
PROMPT = tuple(range(3, 90))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared")
    write_tiny_checkpoint(directory, OPTIONS)
    return directory


def _run(checkpoint, dtype, kv_cache, **changes):
    recorder = Recorder()
    model = RecordedModel(load_model(checkpoint, dtype=dtype, progress=False), recorder)
    options = EngineOptions(kv_cache=kv_cache, **({"chunk_size": 33} | changes))
    request = Request("only", PROMPT, max_new_tokens=9)
    done = Engine.for_requests(model, options, [request]).run([request])[0]
    tokens = [*PROMPT, *done.token_ids]
    (recording,) = recorder.recordings
    return recording, tokens, model.logprobs(recording, tokens)


@pytest.mark.parametrize("kv_cache", ["fp32", "nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_is_right(checkpoint, dtype, kv_cache):
    report = check_run(checkpoint, *_run(checkpoint, dtype, kv_cache), dtype=dtype)
    print("\n".join(report.lines()))
    assert report.ok, "\n".join(report.lines())
    # Rows of all layers' windows, and entries and keys of those that write them.
    assert report.rows["window"].rows == 8 * 95
    assert report.rows["compressed"].rows == report.rows["index"].rows == 95 + 47
    assert report.selections["topk"].checked == 3 * 95
