import statistics
from pathlib import Path
from typing import Any

import pytest
from inputs import prompt_of
from measures import E4M3_STEP
from servers import Run, generate, needs_worker, score_with_transformers

pytestmark = needs_worker

LENGTHS = (700, 2600)  # every entry fits the selection of 512; the indexer has to choose
NEW_TOKENS = 32  # after each prompt a page of 64 is filled and the next begun
LAYERS = {1: 1, 4: 2, 128: 1}  # of each ratio


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    parts = "attention,indexer,compressor"
    return run(checkpoint, tmp_path_factory.mktemp("alone"), ranks=1, mode=parts)


@pytest.fixture(scope="module")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tensor-parallel ranks, with anymla's hyper-connections as well."""
    return run(checkpoint, tmp_path_factory.mktemp("both"), ranks=2, mode="force")


def run(checkpoint: Path, directory: Path, *, ranks: int, mode: str) -> dict[str, Any]:
    prompts = [prompt_of(length) for length in LENGTHS]
    asked = Run(prompts, NEW_TOKENS, ranks=ranks, compare=True, score=True, mode=mode)
    return generate(asked, checkpoint, directory)


@pytest.fixture(params=["alone", "both"])
def answer(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def test_tokens_follow_both_prompts(answer: dict[str, Any]) -> None:
    plain = [run for run in answer["runs"] if not run["compared"]]
    assert [run["prompt_tokens"] for run in plain] == list(LENGTHS)
    for run_again in answer["runs"]:
        assert len(run_again["tokens"]) == NEW_TOKENS
        assert len(set(run_again["tokens"])) > 4
    assert [run["prompt_tokens"] for run in answer["runs"]] == 2 * list(LENGTHS)


def test_every_layer_is_anymlas_and_the_log_says_so(
    alone: dict[str, Any], both: dict[str, Any]
) -> None:
    for answer, ranks in ((alone, 1), (both, 2)):
        assert len(answer["classes"]) == ranks
        for classes in answer["classes"]:
            assert classes["AnymlaAttention"] == 4
            assert classes["AnymlaCompressor"] == 5
            assert classes["AnymlaIndexer"] == classes["AnymlaSparseAttnIndexer"] == 2
            assert classes.get("AnymlaMHCPreOp", 0) == (4 if ranks == 2 else 0)
        assert said_of_parts(answer) == {
            "attention": "replaced",
            "indexer": "replaced",
            "compressor": "replaced",
            "mhc": "replaced" if ranks == 2 else "kept",
            "experts": "kept",
            "linears": "kept",
            "draft": "kept",
            "metadata": "replaced",
        }


def said_of_parts(answer: dict[str, Any]) -> dict[str, str]:
    """What one line each of the log says."""
    lines = [line.partition("anymla on CPU: ")[2] for line in answer["log"].splitlines()]
    words = [line.split() for line in lines if line]
    found = {name: next(w for w in rest if w in ("kept", "replaced")) for name, *rest in words}
    assert len(found) == len(words)
    return found


def test_attention_runs_with_vllms_own_compressor(checkpoint: Path, tmp_path: Path) -> None:
    """What ``auto`` takes on a CPU: each layer beside vLLM's, over rows that vLLM's own wrote."""
    asked = Run([prompt_of(LENGTHS[1])], 8, plain=False, compare=True)
    answer = generate(asked, checkpoint, tmp_path)
    (classes,) = answer["classes"]
    assert classes["DeepseekV4CPUCompressor"] == 5
    assert "AnymlaCompressor" not in classes
    (found,) = answer["reports"]
    by_key = {(row["part"], row["ratio"], row["phase"]): row for row in found}
    for phase in ("decode", "prefill"):
        for ratio in LAYERS:
            for part in ("query", "attention", "output projection"):
                assert by_key[part, ratio, phase]["ulps"] <= 2
        assert by_key["selection", 4, phase]["missed"] < 1e-5
    assert said_of_parts(answer)["compressor"] == "kept"


def test_each_layer_and_step_agrees_with_vllms_own_kernels(answer: dict[str, Any]) -> None:
    for found in answer["reports"]:
        by_key = {(row["part"], row["ratio"], row["phase"]): row for row in found}
        for part in ("query", "attention", "output projection"):
            for ratio, layers in LAYERS.items():
                assert_calls(by_key, part, ratio, layers, prompts=2)
                for phase in ("decode", "prefill"):
                    assert by_key[part, ratio, phase]["ulps"] <= 2
        for part, ratios in {
            "window rows": (1, 4, 128),
            "compressed rows": (4, 128),
            "index rows": (4,),
        }.items():
            for ratio in ratios:
                assert_calls(by_key, part, ratio, LAYERS[ratio], prompts=2)
                for phase in ("decode", "prefill"):
                    assert_rarely_rounded_otherwise(by_key[part, ratio, phase])


def test_the_selection_is_the_best_of_vllms_own_scores(answer: dict[str, Any]) -> None:
    for found in answer["reports"]:
        by_key = {(row["part"], row["ratio"], row["phase"]): row for row in found}
        for part in ("index query", "index weights", "selection"):
            assert_calls(by_key, part, 4, LAYERS[4], prompts=1)
        for phase in ("decode", "prefill"):
            assert_rarely_rounded_otherwise(by_key["index query", 4, phase])
            # products and sums of float32 in another order
            assert by_key["index weights", 4, phase]["relative"] < 1e-6
            assert by_key["selection", 4, phase]["missed"] < 1e-5


def test_hyper_connections_agree_with_vllms_own(both: dict[str, Any]) -> None:
    for found in both["reports"]:
        rows = {(row["part"], row["phase"]): row["ulps"] for row in found if row["ratio"] == 0}
        for layer in ("MHCPreOp", "MHCPostOp", "HCHeadOp"):
            for phase in ("decode", "prefill"):
                assert rows[f"{layer} streams", phase] <= 2
        # float32 sums of 1024 products, then 20 rounds of Sinkhorn: far below a bf16 rounding
        assert rows["MHCPreOp gates", "prefill"] <= 1 / 64


def assert_calls(
    found: dict[tuple[str, int, str], dict[str, float]],
    part: str,
    ratio: int,
    layers: int,
    prompts: int,
) -> None:
    assert found[part, ratio, "prefill"]["calls"] == layers * prompts
    assert found[part, ratio, "decode"]["calls"] == layers * prompts * (NEW_TOKENS - 1)


def assert_rarely_rounded_otherwise(row: dict[str, float]) -> None:
    """Both sides compute in float32 and round once, so few values come out on different sides.

    In a decode step a single value of a row of 128 is 0.8 %.
    """
    assert row["share_changed"] <= (0.01 if row["phase"] == "decode" else 0.001)
    assert row["relative"] <= E4M3_STEP


def test_prompt_scores_differ_from_transformers_as_two_precisions_of_it_do(
    alone: dict[str, Any], both: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    theirs = score_with_transformers(checkpoint, prompt_of(LENGTHS[0]), tmp_path)
    noise = differences(theirs["float32"], theirs["bfloat16"])
    for answer in (alone, both):
        scored = answer["runs"][0]["prompt_logprobs"]
        assert len(scored) == LENGTHS[0] - 1
        found = differences(scored, theirs["float32"])
        # The two are samples of 699 of the same distribution; a median of so many varies by 5 %.
        for measure in (statistics.median, statistics.mean):
            assert measure(found) < 1.25 * measure(noise)


def differences(a: list[float], b: list[float]) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]
