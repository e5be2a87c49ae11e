"""The trained tiny checkpoint finds passkeys through vLLM with the plugin."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from servers import Run, generate, needs_worker

from anymla import LLM
from anymla.cli.main import main
from anymla.engines.vllm.answers import CPU_TAKES, GPU_TAKES, missing_sizes
from anymla.testing.retrieval import ANSWER, hide
from anymla.testing.widen import widen

TINY = Path(__file__).parents[3] / "examples" / "tiny"
PAGE = 256  # tokens of a page of index keys
DEPTHS = (0.25, 0.5, 0.75)
PARTS = "attention,indexer,compressor"


def trained_config() -> dict:
    return json.loads((TINY / "checkpoint" / "config.json").read_text())


def test_sizes_that_vllm_does_not_take_are_named() -> None:
    config = trained_config()
    wanted = {"num_experts_per_tok": 8, "n_routed_experts": 64}
    assert missing_sizes(config, CPU_TAKES) == wanted
    more = {"index_n_heads": 64, "index_topk": 512, "o_lora_rank": 128}
    assert missing_sizes(config, GPU_TAKES) == wanted | more
    assert not missing_sizes(config | wanted | more, GPU_TAKES)
    # Twice as many a token are twice as many in all.
    many = config | {"n_routed_experts": 64}
    assert missing_sizes(many, CPU_TAKES) == {"num_experts_per_tok": 8, "n_routed_experts": 128}
    with pytest.raises(ValueError, match="n_routed_experts 1024 cannot be padded"):
        missing_sizes(config | {"n_routed_experts": 512}, CPU_TAKES)


@pytest.fixture(scope="module")
def text() -> str:
    return (TINY / "persuasion.txt").read_text("utf-8")


def worker(test):
    for mark in needs_worker:
        test = mark(test)
    return test


@worker
def test_a_passkey_is_found_and_lost_without_its_index_keys(tmp_path: Path, text: str) -> None:
    """2,048 tokens, by anymla's attention, indexer and compressor; the prompts are the same."""
    llm = LLM(TINY / "checkpoint", dtype="fp32", device="cpu", threads=1)
    served = tmp_path / "padded"
    widen(TINY / "checkpoint", served, missing_sizes(trained_config(), CPU_TAKES), plain=True)
    hidden = [hide(llm, text, 2048, depth, seed=round(100 * depth)) for depth in DEPTHS]
    unwritten = [
        (each.place // PAGE * PAGE, -(-(each.place + ANSWER) // PAGE) * PAGE) for each in hidden
    ]
    prompts = [list(each.token_ids) for each in hidden]
    asked = Run(prompts, ANSWER, mode=PARTS, unwritten=unwritten)
    answer = generate(asked, served, tmp_path)
    (classes,) = answer["classes"]
    assert classes["AnymlaAttention"] == 4
    right = [llm.tokenizer.decode(run["tokens"]) for run in answer["runs"]]
    broken = [llm.tokenizer.decode(tokens) for tokens in answer["broken"]]
    print(right, broken, [each.digits for each in hidden])
    assert all(each.digits in said for each, said in zip(hidden, right, strict=True))
    assert not any(each.digits in said for each, said in zip(hidden, broken, strict=True))


@worker
@pytest.mark.parametrize("length", [512, pytest.param(8192, marks=pytest.mark.slow)])
def test_the_command_asks_vllm(tmp_path: Path, length: int) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["conformance", "--end-to-end", str(TINY / "checkpoint"), "--engine", "vllm"]
    words += ["--text", str(TINY / "persuasion.txt"), "--length", str(length), "--json", str(rows)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].startswith("the checkpoint is padded for vLLM: num_experts_per_tok 8")
    assert lines[2].endswith("with the plugin")
    assert lines[3].split() == [str(length), "tokens", *"+++++"]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["depth"] for row in found] == [0, 0.25, 0.5, 0.75, 1]
    assert all(row["engine"].startswith("vLLM") and row["found"] for row in found)
