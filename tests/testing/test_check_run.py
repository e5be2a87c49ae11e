"""Runs of the engine, judged by the oracle that follows them."""

import dataclasses

import pytest
import torch

from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.conformance import Ops
from anymla.testing.oracle import OracleModel, RecordedModel, Recorder, RunReport, check_run
from anymla.testing.oracle.check import hidden_error
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tolerance import assert_close

GOOD = Ops("torch")
TINY = TinyOptions(
    hidden=128, heads=2, q_lora=128, o_lora=64, experts=8, experts_per_token=2, index_topk=16
)


def run(directory, ops: Ops, prompt_lengths, *, dtype=torch.float32, kv="fp8", drafts=0, chunk=90):
    """Recorded model, recorder and completions by request."""
    with ops.as_backend() as backend:
        model = load_model(directory, dtype=dtype, backend=backend, progress=False)
        recorder = Recorder()
        recorded = RecordedModel(model, recorder)
        requests = [
            Request(
                f"r{i}",
                tuple(torch.randint(2, model.config.vocab_size, (length,)).tolist()),
                max_new_tokens=6,
                prompt_logprobs=True,
            )
            for i, length in enumerate(prompt_lengths)
        ]
        options = EngineOptions(kv_cache=kv, chunk_size=chunk, draft_tokens=drafts)
        done = Engine.for_requests(recorded, options, requests).run(requests)
        logprobs = [
            recorded.logprobs(recorder.recordings[i], [*each.request.token_ids, *each.token_ids])
            for i, each in enumerate(done)
        ]
    return recorder, done, logprobs


def judge(directory, ops: Ops, length: int = 290, **options) -> RunReport:
    recorder, (done,), (logprobs,) = run(directory, ops, [length], **options)
    tokens = [*done.request.token_ids, *done.token_ids]
    dtype = options.get("dtype", torch.float32)
    report = check_run(directory, recorder.recordings[0], tokens, logprobs, dtype=dtype)
    print("\n".join(report.lines()))
    return report


@pytest.mark.parametrize(
    ("tiny", "options"),
    [
        ({}, {"drafts": 2}),
        ({"weights": "fp8", "scale_format": "fp32"}, {"kv": "fp32"}),
        ({"weights": "bf16", "nvfp4_attention": True}, {"kv": "fp8-mxfp4-index"}),
        ({"weights": "bf16", "ratios": (128, 4)}, {"kv": "bf16", "dtype": torch.bfloat16}),
        ({}, {"dtype": torch.bfloat16}),
    ],
    ids=["fp4 with drafts", "fp8 with plain rows", "nvfp4", "bfloat16", "rounded inputs"],
)
def test_the_engine_agrees_with_the_oracle(tmp_path, tiny, options) -> None:
    write_tiny_checkpoint(tmp_path, dataclasses.replace(TINY, **tiny))
    report = judge(tmp_path, GOOD, **options)
    assert report.ok
    assert report.compared == 290 + 6 - 1
    assert report.selections["topk"].checked > 0
    if options.get("dtype") is None:
        assert report.max_difference < 5e-5


def test_a_narrow_model_whose_first_layer_pools(tmp_path) -> None:
    """Its first layer has the narrowest bound, and entries that pool rows of unlike gates."""
    tiny = dataclasses.replace(TINY, hidden=80, weights="bf16", ratios=(4, 128))
    write_tiny_checkpoint(tmp_path, tiny)
    torch.manual_seed(0)
    report = judge(tmp_path, GOOD, kv="fp32")
    assert not report.rows["compressed"].unexplained
    assert report.ok


def test_requests_of_a_batch_are_told_apart(tmp_path) -> None:
    write_tiny_checkpoint(tmp_path, dataclasses.replace(TINY, ratios=(4, 128)))
    recorder, done, logprobs = run(tmp_path, GOOD, [150, 7, 131], drafts=1, chunk=40)
    for each, recording, values in zip(done, recorder.recordings, logprobs, strict=True):
        tokens = [*each.request.token_ids, *each.token_ids]
        assert check_run(tmp_path, recording, tokens, values).ok
        want = torch.tensor(each.prompt_logprobs[1:])
        torch.testing.assert_close(torch.tensor(values[1 : len(want) + 1]), want)


def sink_dropped(*args, sink=None, **rest):
    return GOOD.sparse_attention(*args, **rest)


def window_one_token_late(positions, *args, **rest):
    return GOOD.window_rows(positions - 1, *args, **rest)


def entries_a_token_early(positions, *args, **rest):
    return GOOD.compressed_rows(positions + 1, *args, **rest)


def gate_bias_forgotten(x, gate, bias, **rest):
    return GOOD.route_biased(x, gate, bias * 0, **rest)


def worst_entries(q, cache, weights, *args, **rest):
    return GOOD.select_topk(q, cache, -weights, *args, **rest)


def entries_rotated_late(*args, **rest):
    args = list(args)
    args[7] = args[7].roll(1 - rest["compress_ratio"], 0)
    return GOOD.compress_norm_rope_insert(*args, **rest)


def linear_off_by_a_thousandth(*args, **rest):
    return GOOD.linear_float32(*args, **rest) * 1.001


def log_difference(report: RunReport) -> bool:
    return report.max_difference > report.allowed


@pytest.mark.parametrize(
    ("operation", "faulty", "noticed"),
    [
        ("sparse_attention", sink_dropped, log_difference),
        ("window_rows", window_one_token_late, log_difference),
        ("compressed_rows", entries_a_token_early, log_difference),
        (
            "compress_norm_rope_insert",
            entries_rotated_late,
            lambda report: report.rows["compressed"].unexplained > 0,
        ),
        (
            "linear_float32",
            linear_off_by_a_thousandth,
            lambda report: report.rows["index"].unexplained > 0,
        ),
        ("select_topk", worst_entries, lambda report: report.selections["topk"].violations),
        (
            "route_biased",
            gate_bias_forgotten,
            lambda report: report.selections["experts"].violations,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_in_one_operation_is_noticed(tmp_path, operation, faulty, noticed) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    report = judge(tmp_path, Ops("torch", {operation: faulty}))
    assert not report.ok
    assert noticed(report)


def test_tokens_and_logprobs_must_belong_to_the_recording(tmp_path) -> None:
    write_tiny_checkpoint(tmp_path, dataclasses.replace(TINY, ratios=(0,)))
    recorder, (done,), (logprobs,) = run(tmp_path, GOOD, [9])
    tokens = [*done.request.token_ids, *done.token_ids]
    with pytest.raises(ValueError, match="15 tokens but 14 log-probabilities"):
        check_run(tmp_path, recorder.recordings[0], tokens, logprobs[1:])
    with pytest.raises(ValueError, match="of other tokens"):
        check_run(tmp_path, recorder.recordings[0], tokens[::-1], logprobs)


class DraftSpy(RecordedModel):
    """Keeps what the draft layer computed, by position."""

    def __init__(self, model, recorder) -> None:
        super().__init__(model, recorder)
        self.model = model
        self.logits_at: dict[int, torch.Tensor] = {}

    def mtp_forward(self, h, next_ids, step, cache):
        out = self.model.mtp_forward(h, next_ids, step, cache)
        for position, row in zip(step.positions.tolist(), self.model.mtp_logits(out), strict=True):
            self.logits_at.setdefault(position, row)
        return out


@pytest.mark.parametrize("weights", ["fp4", "bf16"])
def test_the_draft_layer_agrees_with_the_oracle(tmp_path, weights) -> None:
    write_tiny_checkpoint(tmp_path, dataclasses.replace(TINY, ratios=(0, 4), weights=weights))
    model = load_model(tmp_path, dtype=torch.float32, progress=False)
    spy = DraftSpy(model, Recorder())
    ids = torch.randint(2, model.config.vocab_size, (60,)).tolist()
    request = Request("r", tuple(ids), max_new_tokens=3)
    options = EngineOptions(kv_cache="fp32", draft_tokens=1, chunk_size=25)
    (done,) = Engine.for_requests(spy, options, [request]).run([request])
    oracle = OracleModel(tmp_path)
    streams = oracle.run(ids).streams
    want = oracle.run_draft(streams, [*ids[1:], done.token_ids[0]])
    got = torch.stack([spy.logits_at[position] for position in range(60)])
    bound = hidden_error(torch.float32, 3, TINY.hidden)
    assert_close(got, want, atol=bound * float(want.std()), rtol=bound, scale=4.0)
