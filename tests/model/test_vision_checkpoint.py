"""DeepSeek-V4-Flash-Vision-Exp: the text model alone, without what it has for images."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, Tensors, changed

from anymla import LLM
from anymla.cli.checkpoint_report import checkpoint_report
from anymla.model.config import ModelConfig
from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.published import FLASH_0731, FLASH_VISION
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

PROMPT = tuple(range(2, 14))
FIELDS = {name: value for name, value in FLASH_VISION.items() if name not in FLASH_0731}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like 0731: a DSpark drafter and no vision tower."""
    directory = tmp_path_factory.mktemp("text")
    options = {**vars(SMALL), "drafter": "dspark", "hash_layers": 2}
    write_tiny_checkpoint(directory, TinyOptions(**options))
    return directory


@pytest.fixture(scope="module")
def seeing(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vision tower."""

    def add(tensors: Tensors) -> None:
        tensors |= {
            "vision.patch_embed.proj.weight": torch.ones(2, 2),
            "vision.blocks.0.attn.wqkv.bias": torch.ones(6),
            "aligner.w1.weight": torch.ones(2, 2),
            **{f"image_{name}": torch.ones(160) for name in ("start", "end", "newline", "pad")},
            # A layer that routes by token id has a bias as well.
            "layers.0.ffn.gate.bias": torch.full((4,), torch.nan),
            "layers.1.ffn.gate.bias": torch.full((4,), torch.nan),
        }
        for name in [name for name in tensors if name.endswith(".ffn.gate.weight")]:
            tensors[name.replace(".weight", ".bias_vl")] = torch.full((4,), torch.nan)

    directory = tmp_path_factory.mktemp("seeing")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((text / name).read_bytes())
    return changed(text, directory, add, **FIELDS, num_nextn_predict_layers=3)


def generate(directory: Path, sampling: Sampling | None = None, drafts: Any = "off") -> list[int]:
    model = load_model(directory, dtype=torch.float32, drafts=drafts, progress=False)
    request = Request("only", PROMPT, max_new_tokens=8, sampling=sampling or Sampling())
    options = EngineOptions(draft_tokens=model.config.default_draft_tokens)
    engine = Engine.for_requests(model, options, [request])
    return list(engine.run([request])[0].token_ids)


def test_what_the_published_configuration_adds() -> None:
    text, seeing = ModelConfig.from_dict(FLASH_0731), ModelConfig.from_dict(FLASH_VISION)
    assert (text.rms_norm_eps, seeing.rms_norm_eps) == (1e-6, 1e-20)
    assert text.dspark == seeing.dspark
    assert text.image_token_ids == ()
    assert seeing.image_token_ids == (*range(129257, 129262), 129264)
    assert ModelConfig.from_dict(FLASH_VISION | {"vision_n_layers": 0}).image_token_ids == ()
    # Ids that a smaller vocabulary has not cannot be in a prompt.
    small = {"vocab_size": 1000, "dspark_noise_token_id": 999}
    assert ModelConfig.from_dict(FLASH_VISION | small).image_token_ids == ()
    named = {"image_token_id": 5}
    assert ModelConfig.from_dict(FLASH_VISION | small | named).image_token_ids == (5,)


@pytest.mark.parametrize("drafts", ["auto", "off"])
def test_the_text_model_is_the_one_without_a_tower(text: Path, seeing: Path, drafts: Any) -> None:
    assert generate(seeing, drafts=drafts) == generate(text, drafts=drafts)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        LLM(seeing, drafts=drafts, device="cpu").generate("hello", max_new_tokens=3)
    named = "vision.*, aligner.*, image_*, *.ffn.gate.bias_vl, layers.0.ffn.gate.bias, "
    assert said.getvalue() == (
        f"{seeing}: 15 vision tensors ({named}layers.1.ffn.gate.bias) are not read\n"
    )


def test_inspect_names_them_and_finds_nothing_wrong(seeing: Path) -> None:
    report = checkpoint_report(seeing, "fp8")
    assert report["ok"]
    assert len(report["unread"]) == 1
    assert not any("bias_vl" in name for name in report["parts"])


def with_image(directory: Path, target: Path, token: int) -> Path:
    target.mkdir()
    for file in directory.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text()) | {"image_token_id": token}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_prompt_with_an_image_is_refused(seeing: Path, tmp_path: Path) -> None:
    directory = with_image(seeing, tmp_path / "named", PROMPT[3])
    message = rf"token id {PROMPT[3]} stands for an image .*, and images are not read$"
    with pytest.raises(ValueError, match=message):
        generate(directory)


def best(directory: Path) -> list[int]:
    return generate(directory)


def sampled(directory: Path) -> list[int]:
    return generate(directory, Sampling(temperature=1.0, seed=3, top_k=2))


def drafted(directory: Path) -> list[int]:
    return generate(directory, drafts="dspark")


@pytest.mark.parametrize("run", [best, sampled, drafted])
def test_no_image_is_generated(
    seeing: Path, tmp_path: Path, run: Callable[[Path], list[int]]
) -> None:
    """Its logit is no candidate, whatever it is: the text goes on with another token."""
    free = run(seeing)
    directory = with_image(seeing, tmp_path / "named", free[2])
    found = run(directory)
    assert found[:2] == free[:2]
    assert len(found) == len(free)
    assert free[2] not in found
