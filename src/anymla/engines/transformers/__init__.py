"""DeepSeek-V4 in Hugging Face transformers with ``attn_implementation="anymla"``.

Importing this package makes the name known to transformers. Models that are built afterwards, by
``from_pretrained`` or ``from_config``, compute as before unless they are given the name; models
that were built before are changed by ``install``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4PreTrainedModel,
)
from transformers.monkey_patching import register_patch_mapping

from anymla.engines.transformers.attention import NAME, AnymlaDeepseekV4Attention
from anymla.engines.transformers.batch import Batch

__all__ = ["AnymlaDeepseekV4Attention", "install", "uninstall"]


def install(model: nn.Module) -> None:
    """Let a DeepSeek-V4 of transformers that is already built attend by anymla.

    Args:
        model: model of transformers, or a wrapper of one, such as PEFT's. Its parameters, their
            names and its structure stay.

    Raises:
        ValueError: no DeepSeek-V4 of transformers is in the model.
    """
    _replace(model, DeepseekV4Attention, AnymlaDeepseekV4Attention, NAME)


def uninstall(model: nn.Module) -> None:
    """Undo ``install``: the model attends by transformers' "eager".

    Args:
        model: model of transformers, or a wrapper of one.

    Raises:
        ValueError: no DeepSeek-V4 of transformers is in the model.
    """
    _replace(model, AnymlaDeepseekV4Attention, DeepseekV4Attention, "eager")


def _replace(model: nn.Module, old: type[nn.Module], new: type[nn.Module], name: str) -> None:
    models = [m for m in model.modules() if isinstance(m, DeepseekV4PreTrainedModel)]
    if not models:
        raise ValueError(f"no DeepSeek-V4 of transformers in this {type(model).__name__}")
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new
    for one in models:
        one.set_attn_implementation(name)


def _mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Batch:
    """Return what the layers learn of the mask [B, tokens so far], without a matrix of S x S."""
    return Batch(attention_mask)


def _too_late(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Raise: a layer that is not anymla's has already prepared dense scores."""
    raise ValueError(
        f'attn_implementation="{NAME}" is for DeepSeek-V4 alone, and this {type(module).__name__} '
        "is another layer, or was built before anymla.engines.transformers was imported: "
        "anymla.engines.transformers.install(model)"
    )


register_patch_mapping({"DeepseekV4Attention": AnymlaDeepseekV4Attention}, overwrite=True)
AttentionInterface.register(NAME, _too_late)
AttentionMaskInterface.register(NAME, _mask)
