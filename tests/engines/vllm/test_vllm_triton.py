import dataclasses
import os
from pathlib import Path

from inputs import bf16_twin, prompt_of
from servers import Run, generate, needs_worker
from test_vllm_replay import RECORD, assert_as_vllms_own, replayed

from anymla.testing.tiny_checkpoint import TinyOptions

pytestmark = needs_worker


def test_the_triton_kernels_run_in_a_worker_under_the_interpreter(tmp_path: Path) -> None:
    """Four tokens after 129: an entry of ratio 128, one of ratio 4, a selection of 16 of 32."""
    options = TinyOptions(index_topk=16, index_heads=16, heads=4, o_lora=32)
    checkpoint = bf16_twin(tmp_path, options)
    record = Path(os.environ.get(RECORD) or tmp_path / "steps")
    parts = "attention,indexer,compressor"
    asked = Run([prompt_of(129)], 4, backend="triton", compare=True, plain=False, mode=parts)
    answer = generate(dataclasses.replace(asked, record=str(record)), checkpoint, tmp_path)

    assert answer["modules"] == [4 + 5 + 2 + 2]
    (found,) = answer["reports"]
    by_key = {(row["part"], row["ratio"], row["phase"]): row for row in found}
    for phase in ("decode", "prefill"):
        for ratio in (1, 4, 128):
            for part in ("query", "attention", "output projection"):
                assert by_key[part, ratio, phase]["ulps"] <= 2
        assert by_key["compressed rows", 128, phase]["share_changed"] <= 0.01
        assert by_key["selection", 4, phase]["missed"] < 1e-5

    # The same steps once more, without vLLM: what a GPU that has none can run as well.
    assert_as_vllms_own(replayed(record, "cpu", tmp_path))
