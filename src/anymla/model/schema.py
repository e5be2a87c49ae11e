"""The tensors that a configuration requires in a checkpoint: DeepSeek's names, shapes and dtypes.

A linear layer ``prefix`` is stored in one of four kinds, which the file's tensors decide:

=======  =================================  ==========================================
kind     ``prefix.weight`` [N, K]           beside it
=======  =================================  ==========================================
plain    BF16, F16 or F32 [N, K]            nothing
fp8      F8_E4M3 [N, K]                     ``.scale`` F8_E8M0, U8 (its bytes) or F32
                                            [ceil(N/b), ceil(K/b)], b = 128 or, in V4.1, 32
mxfp4    I8 or U8 [N, K/2], low nibble      ``.scale`` F8_E8M0, U8 or F32 [N, K/32]
         first
nvfp4    U8 or I8 [N, K/2], low nibble      ``.weight_scale`` F8_E4M3 [N, K/16],
         first                              ``.weight_scale_2`` F32 [] or [1]
=======  =================================  ==========================================

The first three are DeepSeek's own. The names of the last are those of NVIDIA's Model Optimizer, in
which a weight is ``e2m1 * weight_scale * weight_scale_2``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.layers.linear import WeightKind
from anymla.layers.spec import LayerSpec
from anymla.model.checkpoint import TensorInfo
from anymla.model.config import DSparkConfig, ModelConfig
from anymla.model.layer_specs import layer_specs

FLOAT_DTYPES = ("BF16", "F16", "F32")
PACKED_DTYPES = ("I8", "U8")
SCALE_DTYPES = ("F8_E8M0", "U8", "F32")
INTEGER_DTYPES = ("I64", "I32")

# Kinds of weights that occur in published checkpoints. All other tensors are plain.
ANY_ATTENTION: tuple[WeightKind, ...] = ("plain", "fp8", "nvfp4")
PLAIN_OR_NVFP4: tuple[WeightKind, ...] = ("plain", "nvfp4")
FFN: tuple[WeightKind, ...] = ("plain", "fp8", "mxfp4", "nvfp4")
PROJECTION: tuple[WeightKind, ...] = ("plain", "fp8")


@dataclasses.dataclass(frozen=True)
class Expected:
    """One tensor that must, or may, be present.

    Attributes:
        shape: shape of the tensor; () also allows (1,), as writers of scalars differ.
        dtypes: safetensors' names of the dtypes that can be read.
        optional: True if it may be absent.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False

    def fits(self, info: TensorInfo) -> bool:
        """True if a stored tensor has the expected shape and dtype."""
        shape = () if self.shape == () and info.shape == (1,) else info.shape
        return shape == self.shape and info.dtype in self.dtypes

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """Sizes of a linear layer, independent of its storage.

    Attributes:
        rows: N, number of output features.
        columns: K, number of input features.
        kinds: storage kinds that can be read.
    """

    rows: int
    columns: int
    kinds: tuple[WeightKind, ...]


def weight_kind(tensors: Mapping[str, TensorInfo], prefix: str) -> WeightKind:
    """Return the kind that a linear layer is stored in; plain if it is absent."""
    info = tensors.get(f"{prefix}.weight")
    if info is None or info.dtype in FLOAT_DTYPES:
        return "plain"
    if info.dtype in PACKED_DTYPES:
        return "nvfp4" if f"{prefix}.weight_scale" in tensors else "mxfp4"
    return "fp8"


def linear_tensors(
    prefix: str, shape: LinearShape, kind: WeightKind, block: int = FP8_BLOCK
) -> dict[str, Expected]:
    """Return the tensors of a linear layer of that kind; FP8 weights in blocks of ``block``."""
    n, k = shape.rows, shape.columns
    weight, scale = f"{prefix}.weight", f"{prefix}.scale"
    if kind == "plain":
        return {weight: Expected((n, k), FLOAT_DTYPES)}
    if kind == "fp8":
        blocks = (-(-n // block), -(-k // block))
        return {
            weight: Expected((n, k), ("F8_E4M3",)),
            scale: Expected(blocks, SCALE_DTYPES),
        }
    if kind == "mxfp4":
        return {
            weight: Expected((n, k // 2), PACKED_DTYPES),
            scale: Expected((n, k // MXFP4_BLOCK), SCALE_DTYPES),
        }
    return {
        weight: Expected((n, k // 2), PACKED_DTYPES),
        f"{prefix}.weight_scale": Expected((n, k // NVFP4_BLOCK), ("F8_E4M3",)),
        f"{prefix}.weight_scale_2": Expected((), ("F32",)),
    }


def expected_linears(config: ModelConfig) -> dict[str, LinearShape]:
    """Return every linear layer by its prefix."""
    out: dict[str, LinearShape] = {}
    for prefix, spec in _blocks(config):
        for name, shape in _block_linears(config, spec, config.experts_of(spec.role)[0]):
            out[prefix + name] = shape
    return out | _dspark_linears(config)


def quantised_tables(
    config: ModelConfig, tensors: Mapping[str, TensorInfo] | None
) -> dict[str, LinearShape]:
    """Return the embedding and the head if they are stored quantised, like a linear."""
    shape = LinearShape(config.vocab_size, config.hidden_size, PROJECTION)
    return {
        prefix: shape
        for prefix in ("embed", "head")
        if weight_kind(tensors or {}, prefix) != "plain"
    }


def expected_tables(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shape of every table whose rows are read one by one, by its prefix."""
    if config.engram is None:
        return {}
    width = config.engram.head_dim
    return {
        f"layers.{layer}.engram.embed": (rows, width)
        for layer, rows in zip(config.engram.layer_ids, config.engram.rows, strict=True)
    }


def table_tensors(
    prefix: str, shape: tuple[int, int], tensors: Mapping[str, TensorInfo]
) -> dict[str, Expected]:
    """Return a table's tensors: plain, or e4m3 with a power of two for 32 channels of a row."""
    info = tensors.get(f"{prefix}.weight")
    if info is None or info.dtype in FLOAT_DTYPES:
        return {f"{prefix}.weight": Expected(shape, FLOAT_DTYPES)}
    rows, width = shape
    return {
        f"{prefix}.weight": Expected(shape, ("F8_E4M3",)),
        f"{prefix}.scale": Expected((rows, -(-width // MXFP4_BLOCK)), ("F8_E8M0", "U8")),
    }


def expected_plain(config: ModelConfig) -> dict[str, Expected]:
    """Return every tensor that is no table and not part of a linear layer."""
    d, streams = config.hidden_size, config.hc_mult
    table = Expected((config.vocab_size, d), FLOAT_DTYPES)
    out = {
        "embed.weight": table,
        "head.weight": dataclasses.replace(table, optional=config.tie_word_embeddings),
        "norm.weight": Expected((d,), FLOAT_DTYPES),
    }
    if not config.family.delayed:
        out |= _head_gates("", d, streams)
    for prefix, spec in _blocks(config):
        for name, expected in _block_plain(config, spec):
            out[prefix + name] = expected
        if spec.role == "mtp":
            out |= {f"{prefix}{n}.weight": Expected((d,), FLOAT_DTYPES) for n in _MTP_NORMS}
            out |= _head_gates(prefix, d, streams)
    if config.draft_layers and config.dspark is not None:
        out |= _dspark_plain(config, config.dspark)
    return out


def expected_tensors(
    config: ModelConfig, tensors: Mapping[str, TensorInfo] | None = None
) -> dict[str, Expected]:
    """Return every tensor, with linear layers in the kind that they are stored in.

    Args:
        config: configuration of the model.
        tensors: tensors in the files; None for an unquantised checkpoint.
    """
    out = expected_plain(config)
    for prefix, shape in (expected_linears(config) | quantised_tables(config, tensors)).items():
        kind = weight_kind(tensors or {}, prefix)
        out |= linear_tensors(prefix, shape, kind, config.family.weight_block)
    for prefix, size in expected_tables(config).items():
        out |= table_tensors(prefix, size, tensors or {})
    return out


def is_float32(name: str) -> bool:
    """True for a plain tensor that DeepSeek stores in float32; the others are bfloat16."""
    leaf = name.rpartition(".")[2]
    return leaf in ("attn_sink", "ape", "bias") or leaf.startswith("hc_")


def least_tensors(config: ModelConfig) -> int:
    """Return a lower bound of the number of tensors, counting the experts' without naming them."""
    experts = sum(config.experts_of(spec.role)[0] for spec in layer_specs(config))
    return experts * len(("w1", "w2", "w3"))


def count_values(config: ModelConfig) -> int:
    """Count the elements of all tensors without scales; experts are not named one by one."""
    total = sum(math.prod(expected.shape) for expected in expected_plain(config).values())
    for spec in layer_specs(config):
        experts = config.experts_of(spec.role)[0]
        for name, shape in _block_linears(config, spec, experts=1):
            copies = experts if name.startswith("ffn.experts.") else 1
            total += copies * shape.rows * shape.columns
    total += sum(shape.rows * shape.columns for shape in _dspark_linears(config).values())
    return total + sum(map(math.prod, expected_tables(config).values()))


_MTP_NORMS = ("enorm", "hnorm", "norm")


def _blocks(config: ModelConfig) -> Iterator[tuple[str, LayerSpec]]:
    for spec in layer_specs(config):
        draft = spec.index - config.num_hidden_layers
        yield (f"layers.{spec.index}." if draft < 0 else f"mtp.{draft}."), spec


def _dspark_linears(config: ModelConfig) -> dict[str, LinearShape]:
    """Return linear layers of the first stage in addition to a decoder layer's."""
    if config.dspark is None or not config.draft_layers:
        return {}
    d, taps = config.hidden_size, len(config.dspark.target_layer_ids)
    return {"mtp.0.main_proj": LinearShape(d, taps * d, PROJECTION)}


def _block_linears(
    config: ModelConfig, spec: LayerSpec, experts: int
) -> Iterator[tuple[str, LinearShape]]:
    d, inner = config.hidden_size, config.moe_intermediate_size
    head_dim, heads, groups = config.head_dim, config.num_attention_heads, config.o_groups
    rank = config.q_lora_rank
    yield "attn.wq_a", LinearShape(rank, d, ANY_ATTENTION)
    yield "attn.wq_b", LinearShape(heads * head_dim, rank, ANY_ATTENTION)
    yield "attn.wkv", LinearShape(head_dim, d, ANY_ATTENTION)
    latent = groups * config.o_lora_rank
    yield "attn.wo_a", LinearShape(latent, heads // groups * head_dim, ANY_ATTENTION)
    yield "attn.wo_b", LinearShape(d, latent, ANY_ATTENTION)
    if spec.compresses:
        width = head_dim * (2 if spec.overlap else 1)
        yield "attn.compressor.wkv", LinearShape(width, d, PLAIN_OR_NVFP4)
        if spec.keeps_states:
            yield "attn.compressor.wgate", LinearShape(width, d, PLAIN_OR_NVFP4)
    index_dim, index_heads = config.index_head_dim, config.index_n_heads
    if spec.selects:
        yield "attn.indexer.wq_b", LinearShape(index_heads * index_dim, rank, ANY_ATTENTION)
        yield "attn.indexer.weights_proj", LinearShape(index_heads, d, PLAIN_OR_NVFP4)
    if spec.keeps_keys and spec.latent_keys:
        yield "attn.indexer.wk", LinearShape(index_dim, head_dim, PLAIN_OR_NVFP4)
    elif spec.keeps_keys:
        width = index_dim * (2 if spec.overlap else 1)
        yield "attn.indexer.compressor.wkv", LinearShape(width, d, PLAIN_OR_NVFP4)
        yield "attn.indexer.compressor.wgate", LinearShape(width, d, PLAIN_OR_NVFP4)
    for expert in [*(f"ffn.experts.{e}" for e in range(experts)), "ffn.shared_experts"]:
        yield f"{expert}.w1", LinearShape(inner, d, FFN)
        yield f"{expert}.w2", LinearShape(d, inner, FFN)
        yield f"{expert}.w3", LinearShape(inner, d, FFN)
    if config.engram is not None and spec.index in config.engram.layer_ids:
        read = config.engram.columns * config.engram.head_dim
        yield "engram.wkv", LinearShape((config.hc_mult + 1) * d, read, PROJECTION)
    if spec.role == "mtp":
        yield "e_proj", LinearShape(d, d, PROJECTION)
        yield "h_proj", LinearShape(d, d, PROJECTION)


def _block_plain(config: ModelConfig, spec: LayerSpec) -> Iterator[tuple[str, Expected]]:
    d, streams, head_dim = config.hidden_size, config.hc_mult, config.head_dim
    yield "attn.q_norm.weight", Expected((config.q_lora_rank,), FLOAT_DTYPES)
    yield "attn.kv_norm.weight", Expected((head_dim,), FLOAT_DTYPES)
    yield "attn.attn_sink", Expected((config.num_attention_heads,), FLOAT_DTYPES)
    compressors = {}
    if spec.compresses:
        compressors["attn.compressor"] = head_dim
    if spec.keeps_keys and spec.latent_keys:
        yield "attn.indexer.k_norm.weight", Expected((config.index_head_dim,), FLOAT_DTYPES)
    elif spec.keeps_keys:
        compressors["attn.indexer.compressor"] = config.index_head_dim
    for name, width in compressors.items():
        wide = width * (2 if spec.overlap else 1)
        if spec.position_bias:
            yield f"{name}.ape", Expected((spec.ratio, wide), FLOAT_DTYPES)
        yield f"{name}.norm.weight", Expected((width,), FLOAT_DTYPES)
    yield "attn_norm.weight", Expected((d,), FLOAT_DTYPES)
    yield "ffn_norm.weight", Expected((d,), FLOAT_DTYPES)
    mixes = (2 + streams) * streams
    for site in ("attn", "ffn"):
        yield f"hc_{site}_fn", Expected((mixes, streams * d), FLOAT_DTYPES)
        yield f"hc_{site}_base", Expected((mixes,), FLOAT_DTYPES)
        yield f"hc_{site}_scale", Expected((3,), FLOAT_DTYPES)
    experts, active = config.experts_of(spec.role)
    yield "ffn.gate.weight", Expected((experts, d), FLOAT_DTYPES)
    if spec.index < config.num_hash_layers:
        shape = (config.vocab_size, active)
        yield "ffn.gate.tid2eid", Expected(shape, INTEGER_DTYPES)
    else:
        yield "ffn.gate.bias", Expected((experts,), FLOAT_DTYPES)
    if config.engram is not None and spec.index in config.engram.layer_ids:
        for name in ("q_weight", "k_weight"):
            yield f"engram.{name}", Expected((streams, d), FLOAT_DTYPES)


def _dspark_plain(config: ModelConfig, dspark: DSparkConfig) -> dict[str, Expected]:
    """Return tensors of the first and the last stage in addition to a decoder layer's."""
    d, rank = config.hidden_size, dspark.markov_rank
    last = f"mtp.{dspark.stages - 1}."
    table = Expected((config.vocab_size, rank), FLOAT_DTYPES)
    out = {
        "mtp.0.main_norm.weight": Expected((d,), FLOAT_DTYPES),
        f"{last}norm.weight": Expected((d,), FLOAT_DTYPES),
        **{f"{last}markov_head.{name}.weight": table for name in config.family.markov_tables},
    }
    if not config.family.delayed:
        out |= _head_gates(last, d, config.hc_mult)
    if dspark.confidence:
        out[f"{last}confidence_head.proj.weight"] = Expected((1, d + rank), FLOAT_DTYPES)
    return out


def _head_gates(prefix: str, d: int, streams: int) -> dict[str, Expected]:
    return {
        f"{prefix}hc_head_fn": Expected((streams, streams * d), FLOAT_DTYPES),
        f"{prefix}hc_head_base": Expected((streams,), FLOAT_DTYPES),
        f"{prefix}hc_head_scale": Expected((1,), FLOAT_DTYPES),
    }
