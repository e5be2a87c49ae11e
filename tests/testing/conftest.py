import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 12,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class RandomTensors:
    """Random tensors of a checkpoint, large enough that every part of the network matters."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.tensors: dict[str, Tensor] = {}

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = gain * torch.randn(rows, columns) / columns**0.5

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(width)

    def site(self, name: str, gates: int) -> None:
        c = self.config
        width = c["hc_mult"] * c["hidden_size"]
        self.tensors[f"{name}_fn"] = torch.randn(gates, width) / width**0.5
        self.tensors[f"{name}_base"] = 0.5 * torch.randn(gates)
        self.tensors[f"{name}_scale"] = 1 + 0.2 * torch.randn(1 if gates == c["hc_mult"] else 3)

    def compressor(self, name: str, dim: int, ratio: int) -> None:
        width = dim * (2 if ratio == 4 else 1)
        self.linear(f"{name}.wkv", width, self.config["hidden_size"])
        self.linear(f"{name}.wgate", width, self.config["hidden_size"])
        self.tensors[f"{name}.ape"] = torch.randn(ratio, width)
        self.norm(f"{name}.norm", dim)

    def expert(self, name: str) -> None:
        hidden, inner = self.config["hidden_size"], self.config["moe_intermediate_size"]
        self.linear(f"{name}.w1", inner, hidden, gain=2.0)
        self.linear(f"{name}.w3", inner, hidden, gain=2.0)
        self.linear(f"{name}.w2", hidden, inner)

    def block(self, prefix: str, ratio: int, hashed: bool) -> None:
        c = self.config
        hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        attn = f"{prefix}.attn"
        self.linear(f"{attn}.wq_a", c["q_lora_rank"], hidden)
        self.norm(f"{attn}.q_norm", c["q_lora_rank"])
        self.linear(f"{attn}.wq_b", heads * dim, c["q_lora_rank"])
        self.linear(f"{attn}.wkv", dim, hidden)
        self.norm(f"{attn}.kv_norm", dim)
        self.linear(f"{attn}.wo_a", c["o_groups"] * c["o_lora_rank"], heads * dim // c["o_groups"])
        self.linear(f"{attn}.wo_b", hidden, c["o_groups"] * c["o_lora_rank"])
        self.tensors[f"{attn}.attn_sink"] = torch.randn(heads)
        if ratio:
            self.compressor(f"{attn}.compressor", dim, ratio)
        if ratio == 4:
            index_dim = c["index_head_dim"]
            self.linear(f"{attn}.indexer.wq_b", c["index_n_heads"] * index_dim, c["q_lora_rank"])
            self.linear(f"{attn}.indexer.weights_proj", c["index_n_heads"], hidden)
            self.compressor(f"{attn}.indexer.compressor", index_dim, ratio)
        self.norm(f"{prefix}.attn_norm", hidden)
        self.norm(f"{prefix}.ffn_norm", hidden)
        gates = c["hc_mult"] * (2 + c["hc_mult"])
        self.site(f"{prefix}.hc_attn", gates)
        self.site(f"{prefix}.hc_ffn", gates)
        experts, k = c["n_routed_experts"], c["num_experts_per_tok"]
        self.linear(f"{prefix}.ffn.gate", experts, hidden)
        if hashed:
            table = torch.rand(c["vocab_size"], experts).argsort(1)[:, :k]
            self.tensors[f"{prefix}.ffn.gate.tid2eid"] = table.contiguous()
        else:
            self.tensors[f"{prefix}.ffn.gate.bias"] = 0.1 * torch.randn(experts)
        for expert in range(experts):
            self.expert(f"{prefix}.ffn.experts.{expert}")
        self.expert(f"{prefix}.ffn.shared_experts")

    def network(self) -> dict[str, Tensor]:
        c = self.config
        hidden, layers = c["hidden_size"], c["num_hidden_layers"]
        self.tensors["embed.weight"] = torch.randn(c["vocab_size"], hidden)
        self.linear("head", c["vocab_size"], hidden, gain=2.0)
        self.norm("norm", hidden)
        self.site("hc_head", c["hc_mult"])
        for layer in range(layers):
            ratio = c["compress_ratios"][layer]
            self.block(f"layers.{layer}", ratio, layer < c["num_hash_layers"])
        for draft in range(c["num_nextn_predict_layers"]):
            prefix = f"mtp.{draft}"
            self.block(prefix, 0, hashed=False)
            self.linear(f"{prefix}.e_proj", hidden, hidden)
            self.linear(f"{prefix}.h_proj", hidden, hidden)
            for name in ("enorm", "hnorm", "norm"):
                self.norm(f"{prefix}.{name}", hidden)
            self.site(f"{prefix}.hc_head", c["hc_mult"])
        return self.tensors


@pytest.fixture
def random_checkpoint(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Writes a float32 checkpoint in DeepSeek's layout; keywords change the configuration."""

    def write(**changes: Any) -> pathlib.Path:
        config = {**CONFIG, **changes}
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
        save_file(RandomTensors(config).network(), tmp_path / "model.safetensors")
        return tmp_path

    return write
