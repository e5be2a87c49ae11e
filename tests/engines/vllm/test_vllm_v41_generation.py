"""DeepSeek-V4.1 through vLLM on a CPU, for which vLLM has no model of it by itself."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from inputs import V41_LENGTHS, prompt_of, v41_twin
from servers import HERE, Run, generate, needs_worker, serve

pytestmark = needs_worker

NEW_TOKENS = 24
# Of the prompts' tokens, by nemo-automodel in float32; ``tests/model/record_nemo.py`` wrote them.
NEMO = json.loads((HERE / "nemo_log_probabilities.json").read_text())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v41_twin(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def answer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    prompts = [prompt_of(length) for length in V41_LENGTHS]
    asked = Run(prompts, NEW_TOKENS, score=True, engine={"gpu_memory_utilization": 0.3})
    return generate(asked, checkpoint, tmp_path_factory.mktemp("run"))


def test_every_part_is_anymlas_and_the_log_says_so(answer: dict[str, Any]) -> None:
    (classes,) = answer["classes"]
    wanted = {
        "AnymlaV41Attention": 8,
        "AnymlaV41Compressor": 2,
        "AnymlaStateCache": 1,
        "AnymlaV41Indexer": 3,
        "AnymlaV41Scores": 3,
        "AnymlaV41IndexerCache": 2,
        "AnymlaEngram": 2,
        "AnymlaNgrams": 1,
    }
    assert {name: classes[name] for name in wanted} == wanted
    lines = [line for line in answer["log"].splitlines() if "anymla on CPU: DeepSeek-V4.1" in line]
    said = [line.partition("DeepSeek-V4.1 ")[2].partition(" replaced")[0] for line in lines]
    parts = ["attention", "indexer", "compressor", "mhc", "engram", "metadata kernels"]
    assert said == parts


def test_log_probabilities_differ_from_anymlas_as_two_precisions_of_it_do(
    answer: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """Of the prompts' tokens and of those that were decoded, given the same text.

    vLLM's router rounds its logits to bfloat16 on a CPU, and so does the yardstick's.
    """
    found: list[float] = []
    noise: list[float] = []
    for run, length in zip(answer["runs"], V41_LENGTHS, strict=True):
        assert len(run["tokens"]) == NEW_TOKENS
        scored = run["prompt_logprobs"] + run["logprobs"]
        assert len(scored) == length - 1 + NEW_TOKENS
        text = prompt_of(length) + run["tokens"]
        wide = scores(checkpoint, text, "fp32", tmp_path, ["-m", "anymla"])
        narrow = scores(checkpoint, text, "bf16", tmp_path, [str(HERE / "score_rounded.py")])
        found += differences(scored, wide)
        noise += differences(narrow, wide)
    # Two samples of 407 of the same distribution: a median of so many varies by 6 %.
    for measure in (statistics.median, statistics.mean):
        assert measure(found) < 1.25 * measure(noise)


def test_log_probabilities_are_those_of_nemo_automodel(
    answer: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """An independent implementation in float32, from which this one in bfloat16 differs as much."""
    found: list[float] = []
    noise: list[float] = []
    for run, length in zip(answer["runs"], V41_LENGTHS, strict=True):
        given = NEMO[str(length)]
        narrow = scores(
            checkpoint, prompt_of(length), "bf16", tmp_path, [str(HERE / "score_rounded.py")]
        )
        found += differences(run["prompt_logprobs"], given)
        noise += differences(narrow, given)
    for measure in (statistics.median, statistics.mean):
        assert measure(found) < 1.25 * measure(noise)


def scores(
    checkpoint: Path, text: list[int], dtype: str, directory: Path, program: list[str]
) -> list[float]:
    """Of each token after the first, by ``anymla score`` with vLLM's cache rows."""
    given, made = directory / "text.json", directory / "scores.json"
    given.write_text(json.dumps(text))
    command = [sys.executable, *program, "score", "--checkpoint", str(checkpoint)]
    command += ["--token-ids", str(given), "--json", str(made), "--dtype", dtype]
    subprocess.run([*command, "--kv-cache", "fp8"], check=True, capture_output=True)
    return json.loads(made.read_text())["logprobs"][1:]


def differences(a: list[float], b: list[float]) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


def test_a_server_completes_and_chats(checkpoint: Path, tmp_path: Path) -> None:
    """Prompts of fewer entries than are selected, and of more blocks than are candidates."""
    openai = pytest.importorskip("openai")
    options = "--max-model-len", "1024", "--max-num-seqs", "4"
    with serve(checkpoint, tmp_path / "log.txt", *options) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0)
        (listed,) = client.models.list().data
        asked = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for length in (10, 300):
            prompt = prompt_of(length)
            first, again = (
                client.completions.create(model=listed.id, prompt=prompt, **asked) for _ in range(2)
            )
            assert first.usage.prompt_tokens == length
            assert first.usage.completion_tokens == 8
            assert first.choices[0].text == again.choices[0].text
        said = client.chat.completions.create(
            model=listed.id, messages=[{"role": "user", "content": "How many sinks?"}], **asked
        )
        assert said.usage.completion_tokens == 8
