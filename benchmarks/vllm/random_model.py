"""vLLM's engine on a random model with V4-Flash's layer sizes, in this process."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)  # of V4-Flash's 43 layers
VOCABULARY = 32768
V4, V41 = "v4", "v4.1"
_BUCKETS = 20_000  # rows of a table of n-grams for each hash, where V4.1-Flash has 16 million
FORMAT = "anymla_random"


def config(experts: int, layers: int, share: int = 1, model: str = V4) -> dict[str, Any]:
    """As in a checkpoint's config.json.

    Args:
        experts: of each layer.
        layers: the first so many of V4-Flash, or of V4.1-Flash; of this its pattern in small where
            they do not reach the layer that keeps candidates.
        share: one GPU gets what each of so many would get (its kernels are the same).
        model: ``V4`` or ``V41``.
    """
    if model == V41:
        return _v41_config(experts, layers)
    yarn = {"beta_fast": 32, "beta_slow": 1, "factor": 16, "type": "yarn"}
    quantised = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "compress_ratios": list(FLASH_RATIOS[:layers]),
        "num_attention_heads": 64 // share,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8 // share,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "sliding_window": 128,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": yarn | {"original_max_position_embeddings": 65536},
        "max_position_embeddings": 1048576,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048 // share,
        "num_hash_layers": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "quantization_config": quantised | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    }


def _v41_config(experts: int, layers: int) -> dict[str, Any]:
    """V4.1-Flash with fewer experts, tables and tokens."""
    from anymla.model.config_engram import EngramConfig
    from anymla.testing.published import FLASH_41
    from anymla.testing.tiny_options import TinySharing, default_shared_ratios

    text = FLASH_41["text_config"] | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "vocab_size": VOCABULARY,
        "n_routed_experts": experts,
    }
    text = {name: value for name, value in text.items() if not name.startswith("dspark_")}
    if layers > text["candidate_source_layer_id"]:
        text["compress_ratios"] = text["compress_ratios"][:layers]
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            text[name] = [layer for layer in text[name] if layer < layers]
    else:
        ratios = default_shared_ratios(layers)
        sharing = TinySharing.of(ratios)
        text |= {
            "compress_ratios": list(ratios),
            "kv_source_layer_ids": list(sharing.kv_sources),
            "index_source_layer_ids": list(sharing.index_sources),
            "candidate_source_layer_id": sharing.candidate_source,
            "engram_layer_ids": list(sharing.engram_layers),
        }
    tables = EngramConfig(
        layer_ids=tuple(text["engram_layer_ids"]),
        rows=(),
        max_ngram=text["engram_max_ngram_size"],
        buckets=_BUCKETS,
        heads=text["engram_n_heads"],
        head_dim=text["engram_head_dim"],
        pad_token=text["engram_pad_token_id"],
        tokens=VOCABULARY,  # no two of its tokens' texts are the same when normalised
    )
    text |= {
        "engram_num_embeddings": list(tables.filled_rows),
        "engram_vocab_size": tables.buckets,
        "engram_compressed_vocab_size": tables.tokens,
    }
    return FLASH_41 | {"text_config": text, "torch_dtype": "bfloat16"}


def save(directory: Path, experts: int, layers: int, share: int = 1, model: str = V4) -> None:
    """Write a checkpoint without weights; its tokenizer knows one word for each token.

    Args:
        directory: folder that is there already.
        experts: as in ``config``.
        layers: likewise.
        share: likewise.
        model: likewise.
    """
    # vLLM refuses a text of more characters than its longest word times the tokens that it may
    # have, in which spaces count: one word is longer than each other with its space.
    ends, unknown = ["<s>", "</s>"], "<unknown>"
    words = [*ends, *(f"w{number}" for number in range(len(ends), VOCABULARY - 1)), unknown]
    added = [{"id": number, "content": word, "special": True} for number, word in enumerate(ends)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [each | flags for each in added],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": unknown,
        },
    }
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ends[0],
        "eos_token": ends[1],
    }
    (directory / "config.json").write_text(json.dumps(config(experts, layers, share, model)))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def register_loader() -> None:
    """Give vLLM the loader of random weights, in this process."""
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing is read."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            fill(model)

    if FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(FORMAT)(RandomLoader)


def engine(
    experts: int = 64, layers: int = 8, *, share: int = 1, model: str = V4, **options: Any
) -> Any:
    """The model in an ``LLM`` of vLLM's; further options as that takes them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    register_loader()
    directory = Path(tempfile.mkdtemp())
    save(directory, experts, layers, share, model)
    settings: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0}} if model == V41 else {}
    settings |= {
        "skip_tokenizer_init": True,
        "load_format": FORMAT,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.5,
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "seed": 0,
        "kernel_config": {"enable_jit_warmup": False},
        "worker_extension_cls": "in_worker.InWorker",  # the loader, in workers of their own
    }
    return LLM(str(directory), **(settings | options))


def model_of(llm: Any) -> Any:
    """The model inside."""
    return llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    """Random token ids."""
    numbers = random.Random(f"{seed} {length}")
    return {"prompt_token_ids": [numbers.randrange(2, VOCABULARY) for _ in range(length)]}


@torch.no_grad()
def fill(model: Any) -> None:
    """The same weights whoever builds the layers: drawn by each parameter's name.

    Linear layers keep the size of what they are given, norms are near one, the head is peaked.
    """
    for prefix, layer in model.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        for name, parameter in own.items():
            if parameter.is_meta:
                continue  # of the tower for images, which are switched off
            if not name.endswith("weight_scale") and not name.endswith("weight_scale_inv"):
                full = f"{prefix}.{name}".removeprefix("language_model.")  # beside images
                _draw(full, parameter.data, own, model.config.n_routed_experts)


def _draw(name: str, data: torch.Tensor, own: dict[str, Any], experts: int) -> None:
    last, width = name.rpartition(".")[2], data.shape[-1] if data.ndim else 1
    generator = torch.Generator(device=data.device).manual_seed(zlib.crc32(name.encode()))

    def normal(size: float, *shape: int) -> torch.Tensor:
        made = torch.randn(shape or data.shape, device=data.device, generator=generator)
        return made * size

    if data.dtype == torch.float8_e4m3fn:
        for rows in data.split(4096):
            rows.copy_(normal(64.0, *rows.shape).clamp(-440, 440).to(data.dtype))
        gain = 2.0 if ".wo_" in name else 1.0
        scale = own.get("weight_scale_inv", own.get("weight_scale"))
        _scale(scale, gain / math.sqrt(width) / 64)
    elif data.dtype == torch.uint8:  # pairs of e2m1 of each expert
        for expert in data:
            expert.random_(0, 256, generator=generator)
        _scale(own[f"{last}_scale"], 1.5 / math.sqrt(2 * width) / 2.8)
    elif last == "tid2eid":
        draws = torch.rand(len(data), experts, device=data.device, generator=generator)
        data.copy_(draws.topk(width).indices)
    elif last == "attn_sink":
        data.copy_(normal(1.0))
    elif last.endswith(("_base", "ape")):
        data.copy_(normal(0.5))
    elif last.endswith("_scale"):
        data.copy_(0.5 + normal(0.1).abs())
    elif last == "e_score_correction_bias":
        data.copy_(normal(0.05))
    elif data.ndim == 1:
        data.copy_(1 + normal(0.1))
    elif "embed_tokens" in name:
        data.copy_(normal(1.0))
    else:
        data.copy_(normal((4.0 if "lm_head" in name else 1.0) / math.sqrt(width)))


def _scale(scale: Any, value: float) -> None:
    """All scales the nearest power of two."""
    exponent = round(math.log2(value))
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale.data.view(torch.uint8).fill_(127 + exponent)
    else:
        scale.data.fill_(2.0**exponent)
