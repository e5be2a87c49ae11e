from pathlib import Path

from inputs import bf16_twin, prompt_of
from servers import Run, generate, needs_vllm

from anymla.testing.tiny_checkpoint import TinyOptions

pytestmark = needs_vllm


def test_the_triton_kernels_run_in_a_worker_under_the_interpreter(tmp_path: Path) -> None:
    """Three tokens after 128: the first entry of ratio 128, and a selection of 16 of 32."""
    checkpoint = bf16_twin(tmp_path, TinyOptions(index_topk=16))
    asked = Run([prompt_of(128)], new_tokens=3, backend="triton", compare=True, plain=False)
    answer = generate(asked, checkpoint, tmp_path)

    assert answer["modules"] == [4 + 5 + 2 + 2]
    (found,) = answer["reports"]
    by_key = {(row["part"], row["ratio"], row["phase"]): row for row in found}
    for phase in ("decode", "prefill"):
        for ratio in (1, 4, 128):
            for part in ("query", "attention", "output projection"):
                assert by_key[part, ratio, phase]["ulps"] <= 2
        assert by_key["compressed rows", 128, phase]["share_changed"] <= 0.01
        assert by_key["selection", 4, phase]["missed"] < 1e-5
