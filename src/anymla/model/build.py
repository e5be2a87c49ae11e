"""Construction of modules from a checkpoint's tensors, where both naming schemes meet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.layers.attention import AttentionLayer
from anymla.layers.compressor import Compressor, LatentCompressor, merge_kv_gate
from anymla.layers.decoder import DecoderLayer
from anymla.layers.dspark import BlockDrafter, MarkovHead
from anymla.layers.engram import Engram, EngramTable, NgramHash
from anymla.layers.hyper_connection import (
    DelayedHead,
    HyperConnection,
    HyperConnectionHead,
    HyperConnectionOptions,
)
from anymla.layers.indexer import Indexer, LatentKeys
from anymla.layers.linear import PackedWeight
from anymla.layers.moe import ExpertWeights, MixtureOfExperts, Router, SharedExpert
from anymla.layers.mtp import DraftLayer
from anymla.layers.output_projection import OutputProjection
from anymla.layers.ranks import ALONE, Ranks
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import LayerSpec
from anymla.model.config import ConfigError, DSparkConfig, EngramConfig, ModelConfig
from anymla.model.layer_specs import layer_specs
from anymla.model.transformer import Transformer
from anymla.model.weights import ReadLinear, ReadTensor, Weights


@dataclasses.dataclass(frozen=True)
class Ngrams:
    """Inputs to layers with a memory of n-grams.

    Attributes:
        token_map: int64 [vocab], normalised token ids, see ``token_map.token_map``.
        read_table: function from a table's prefix to the table and its scales or None.
    """

    token_map: Tensor
    read_table: Callable[[str], tuple[Tensor, Tensor | None]]


class Builder:
    """Builds the network from two reader functions, independent of the weights' source.

    Attributes:
        weights: weights of the checkpoint, in the modules' form.
        dtype: dtype of the activations.
        ranks: ranks that share the network.
        ngrams: further inputs to a memory of n-grams, or None.
        share_channels: True if each rank has some channels of every routed expert (tensor
            parallel), False if it has some experts whole (expert parallel).
    """

    def __init__(
        self,
        config: ModelConfig,
        read: ReadTensor,
        read_linear: ReadLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: str | None,
        ranks: Ranks = ALONE,
        ngrams: Ngrams | None = None,
        share_channels: bool | None = None,
    ) -> None:
        self.config = config
        if share_channels is None:
            share_channels = shares_channels(config, ranks, device)
        self.share_channels = share_channels
        self.ngrams = ngrams
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.ranks = ranks
        _require_shares(config, ranks)
        scheme = config.quantization.activation_scheme if config.quantization else None
        self.weights = Weights(
            read,
            read_linear,
            dtype=dtype,
            device=device,
            quantize_activations=scheme == "dynamic" and dtype != torch.float32,
            ranks=ranks,
            rank_counts=rank_counts(config),
            backend=backend,
        )
        self.options = HyperConnectionOptions(
            config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters, config.family.delayed
        )
        rope_dim = config.qk_rope_head_dim
        self.plain_rope = RopeTable(rope_dim, config.rope_theta, None, device)
        self.compressed_rope = RopeTable(rope_dim, config.compress_rope_theta, config.yarn, device)

    def transformer(self) -> Transformer:
        """Build the whole network."""
        config = self.config
        specs = layer_specs(config)
        return Transformer(
            config=config,
            layer_specs=specs,
            dtype=self.dtype,
            embedding=self.weights.vocabulary("embed").to(self.dtype),
            layers=[
                self.decoder(f"layers.{spec.index}.", spec)
                for spec in specs
                if spec.role == "backbone"
            ],
            head=self.leaving_head(""),
            lm_head=self.weights.logits_weight("head", self.vocabulary()),
            ranks=self.ranks,
            drafts=[
                self.draft(f"mtp.{spec.index - config.num_hidden_layers}.", spec)
                for spec in specs
                if spec.role == "mtp"
            ],
            dspark=None if config.dspark is None else self.dspark(config.dspark, specs),
            backend=self.backend,
        )

    def vocabulary(self) -> range:
        """Tokens whose lm head rows this rank has; all tokens if they do not divide evenly."""
        vocab = self.config.vocab_size
        return range(vocab) if vocab % self.ranks.size else self.ranks.share(vocab)

    def decoder(self, prefix: str, spec: LayerSpec) -> DecoderLayer:
        """Build one decoder layer."""
        return DecoderLayer(
            attention_site=self.site(prefix, "attn"),
            attention=self.attention(prefix + "attn.", spec),
            ffn_site=self.site(prefix, "ffn"),
            ffn=self.experts(prefix + "ffn.", spec),
            engram=self.engram(prefix + "engram.", spec),
        )

    def engram(self, prefix: str, spec: LayerSpec) -> Engram | None:
        """Build the layer's memory of n-grams, if it has one."""
        config = self.config.engram
        if config is None or spec.index not in config.layer_ids:
            return None
        if self.ngrams is None:
            raise ConfigError(f"layer {spec.index} reads n-grams, which needs the token map")
        read = self.weights.float32
        table = EngramTable(*self.ngrams.read_table(prefix + "embed"))
        return Engram(
            layer=spec.index,
            ngrams=ngram_hash(config, spec.index, self.ngrams.token_map, table.weight.device),
            table=table,
            wkv=self.weights.linear(prefix + "wkv"),
            weight=read(prefix + "q_weight") * read(prefix + "k_weight"),
            eps=self.config.rms_norm_eps,
            backend=self.backend,
        )

    def draft(self, prefix: str, spec: LayerSpec) -> DraftLayer:
        """Build one MTP layer."""
        return DraftLayer(
            e_proj=self.weights.linear(prefix + "e_proj"),
            h_proj=self.weights.linear(prefix + "h_proj"),
            e_norm=self.weights.float32(prefix + "enorm.weight"),
            h_norm=self.weights.float32(prefix + "hnorm.weight"),
            block=self.decoder(prefix, spec),
            head=self.head(prefix, prefix + "norm.weight"),
            eps=self.config.rms_norm_eps,
            backend=self.backend,
        )

    def dspark(self, config: DSparkConfig, specs: Sequence[LayerSpec]) -> BlockDrafter:
        """Build the DSpark drafter."""
        stages = [spec for spec in specs if spec.role == "dspark"]
        last = f"mtp.{len(stages) - 1}."
        confidence = f"{last}confidence_head.proj.weight"
        w1, w2 = (f"{last}markov_head.{name}" for name in self.config.family.markov_tables)
        return BlockDrafter(
            main_proj=self.weights.linear("mtp.0.main_proj"),
            main_norm=self.weights.float32("mtp.0.main_norm.weight"),
            stages=[self.decoder(f"mtp.{i}.", spec) for i, spec in enumerate(stages)],
            head=self.leaving_head(last),
            markov=MarkovHead(
                w1=self.weights.read(f"{w1}.weight").to(self.dtype),
                w2=self.weights.logits_weight(w2, self.vocabulary()),
                confidence=self.weights.float32(confidence) if config.confidence else None,
                backend=self.backend,
            ),
            block_size=config.block_size,
            noise_token_id=config.noise_token_id,
            tapped=config.tapped,
            streams=self.config.hc_mult,
            eps=self.config.rms_norm_eps,
            backend=self.backend,
        )

    def attention(self, prefix: str, spec: LayerSpec) -> AttentionLayer:
        """Build the attention of one layer."""
        rope = self.compressed_rope if spec.ratio else self.plain_rope
        config = self.config
        heads = self.ranks.share(config.num_attention_heads)
        groups = self.ranks.share(config.o_groups)
        return AttentionLayer(
            spec=spec,
            wq_a=self.weights.linear(prefix + "wq_a"),
            wq_b=self.weights.linear(prefix + "wq_b", rows=_times(heads, config.head_dim)),
            wkv=self.weights.linear(prefix + "wkv"),
            q_norm=self.weights.float32(prefix + "q_norm.weight"),
            kv_norm=self.weights.float32(prefix + "kv_norm.weight"),
            sink=self.weights.float32(prefix + "attn_sink")[heads.start : heads.stop],
            compressor=(
                self.compressor(prefix + "compressor.", spec, rope) if spec.compresses else None
            ),
            indexer=self.indexer(prefix + "indexer.", spec, rope) if spec.selects else None,
            output=self.output(prefix, len(groups), _times(groups, config.o_lora_rank)),
            rope=rope,
            eps=self.config.rms_norm_eps,
            backend=self.backend,
        )

    def output(self, prefix: str, groups: int, inner: range) -> OutputProjection:
        """Build the output projection of this rank's groups, whose channels are ``inner``."""
        wo_a = self.weights.packed(prefix + "wo_a", rows=inner)
        # Products with quantised heads need whole blocks of the weight.
        whole = self.config.o_lora_rank % FP8_BLOCK == 0 and wo_a.block == FP8_BLOCK
        on_device = self.device.type != "cpu"
        if on_device and (wo_a.kind != "fp8" or wo_a.block != FP8_BLOCK):
            # Decoding takes as long as the product does, so it is done once.
            wo_a = PackedWeight("plain", wo_a.dense(self.dtype))
        return OutputProjection(
            wo_a=wo_a,
            wo_b=self.weights.linear(prefix + "wo_b", columns=inner),
            groups=groups,
            quantize_heads=(
                on_device and self.weights.quantize_activations and wo_a.kind == "fp8" and whole
            ),
            ranks=self.ranks,
            backend=self.backend,
        )

    def compressor(self, prefix: str, spec: LayerSpec, rope: RopeTable) -> Compressor:
        """Build the main compressor, or the one inside an indexer."""
        norm = self.weights.float32(prefix + "norm.weight")
        gate = self.weights.as_stored(prefix + "wgate") if spec.keeps_states else None
        if spec.position_bias:
            ape = self.weights.float32(prefix + "ape")
        else:
            ape = norm.new_zeros(spec.ratio, len(norm))
        kind = LatentCompressor if spec.latent_keys else Compressor
        return kind(
            kv_gate=merge_kv_gate(self.weights.as_stored(prefix + "wkv"), gate, self.dtype),
            ape=ape,
            norm=norm,
            eps=self.config.rms_norm_eps,
            rope=rope,
            overlap=spec.overlap,
            backend=self.backend,
        )

    def indexer(self, prefix: str, spec: LayerSpec, rope: RopeTable) -> Indexer:
        """Build the lightning indexer of a layer."""
        pools = spec.keeps_keys and not spec.latent_keys
        keys = None
        if spec.keeps_keys and spec.latent_keys:
            keys = LatentKeys(
                self.weights.linear(prefix + "wk"),
                self.weights.float32(prefix + "k_norm.weight"),
                self.config.rms_norm_eps,
            )
        return Indexer(
            wq_b=self.weights.linear(prefix + "wq_b"),
            weights_proj=self.weights.linear(prefix + "weights_proj"),
            spec=spec,
            compressor=self.compressor(prefix + "compressor.", spec, rope) if pools else None,
            keys=keys,
            heads=self.config.index_n_heads,
            rope=rope,
            quantize_q=self.dtype != torch.float32,
            backend=self.backend,
        )

    def site(self, prefix: str, kind: str) -> HyperConnection:
        """Build the hyper-connection around a sub-layer, with its norm."""
        return HyperConnection(
            fn=self.weights.float32(f"{prefix}hc_{kind}_fn"),
            base=self.weights.float32(f"{prefix}hc_{kind}_base"),
            scale=self.weights.float32(f"{prefix}hc_{kind}_scale"),
            norm=self.weights.float32(f"{prefix}{kind}_norm.weight"),
            options=self.options,
            backend=self.backend,
        )

    def leaving_head(self, prefix: str) -> HyperConnectionHead | DelayedHead:
        """Build the head that collapses the streams after the last of some layers."""
        if not self.config.family.delayed:
            return self.head(prefix, f"{prefix}norm.weight")
        norm = self.weights.float32(f"{prefix}norm.weight")
        return DelayedHead(norm=norm, options=self.options, backend=self.backend)

    def head(self, prefix: str, norm: str) -> HyperConnectionHead:
        """Build the collapse of the streams through gates of the head's own."""
        return HyperConnectionHead(
            fn=self.weights.float32(prefix + "hc_head_fn"),
            base=self.weights.float32(prefix + "hc_head_base"),
            scale=self.weights.float32(prefix + "hc_head_scale"),
            norm=self.weights.float32(norm),
            options=self.options,
            backend=self.backend,
        )

    def experts(self, prefix: str, spec: LayerSpec) -> MixtureOfExperts:
        """Build the mixture of experts; the first layers route by token id."""
        config = self.config
        experts, active = config.experts_of(spec.role)
        hashed = spec.index < config.num_hash_layers
        router = Router(
            gate=self.weights.gate(prefix + "gate.weight"),
            scale=config.routed_scaling_factor,
            experts_per_token=active,
            bias=None if hashed else self.weights.float32(prefix + "gate.bias"),
            token_experts=self.weights.read(prefix + "gate.tid2eid") if hashed else None,
        )
        # Kept as stored even in float32: the experts are nearly all of a checkpoint, and only the
        # few that a token visits are worth a conversion.
        here, inner = self.ranks.share(experts), None
        if self.share_channels:
            here, inner = range(experts), self.ranks.share(config.moe_intermediate_size)
        names = [f"{prefix}experts.{expert}." for expert in here]

        def weights(of: str, **part: range | None) -> ExpertWeights:
            return ExpertWeights.of([self.weights.of_expert(name + of, **part) for name in names])

        return MixtureOfExperts(
            index=spec.index,
            router=router,
            w1=weights("w1", rows=inner),
            w2=weights("w2", columns=inner),
            w3=weights("w3", rows=inner),
            shared=self.shared_expert(prefix + "shared_experts."),
            limit=config.swiglu_limit,
            quantize_activations=self.weights.quantize_activations,
            expert_offset=here.start,
            ranks=self.ranks,
            backend=self.backend,
        )

    def shared_expert(self, prefix: str) -> SharedExpert | None:
        """Build the shared expert, or this rank's channels of it, if the model has one.

        If its channels do not divide evenly, the first rank has all of them.
        """
        if not self.config.n_shared_experts:
            return None
        width = self.config.moe_intermediate_size * self.config.n_shared_experts
        here = self.ranks.share(width)
        if width % (self.ranks.size * self.config.family.weight_block):
            if self.ranks.rank:
                return None
            here = range(width)
        return SharedExpert(
            w1=self.weights.linear(prefix + "w1", rows=here),
            w2=self.weights.linear(prefix + "w2", columns=here),
            w3=self.weights.linear(prefix + "w3", rows=here),
            limit=self.config.swiglu_limit,
            backend=self.backend,
        )


def ngram_hash(
    config: EngramConfig, layer: int, token_map: Tensor, device: torch.device
) -> NgramHash:
    """Build a layer's hash of n-grams, which follows from the configuration and the tokenizer."""
    moduli = torch.tensor(config.primes()[layer])
    return NgramHash(
        token_map=token_map.to(device),
        pad=int(token_map[config.pad_token]),
        multipliers=torch.tensor(config.multipliers(layer), device=device),
        moduli=moduli.view(-1, config.heads).to(device),
        offsets=(moduli.cumsum(0) - moduli).view(-1, config.heads).to(device),
    )


def shares_channels(config: ModelConfig, ranks: Ranks, device: torch.device) -> bool:
    """True if ranks run faster with some channels of every routed expert each.

    All ranks then read equally much, while whole experts leave three ranks waiting for the fourth:
    on four H200s 1, 8 and 11 % of a step of 1, 8 and 32 requests (docs/performance/full_size.md).
    Hopper's grouped GEMM reads an MXFP4 expert's channels in stages of 256.
    """
    whole_stages = config.moe_intermediate_size % (ranks.size * 256) == 0
    on_device = ranks.size > 1 and device.type != "cpu"
    return on_device and config.expert_dtype == "fp4" and whole_stages


def _times(part: range, size: int) -> range:
    """Scale a range of groups to the range of their elements, ``size`` in each."""
    return range(part.start * size, part.stop * size)


def rank_counts(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of ranks that can share the heads, groups and experts."""
    shared = math.gcd(config.num_attention_heads, config.o_groups)
    return tuple(n for n in range(1, _fewest_experts(config) + 1) if shared % n == 0)


def _fewest_experts(config: ModelConfig) -> int:
    return min(config.experts_of(role)[0] for role in ("backbone", "dspark"))


def _require_shares(config: ModelConfig, ranks: Ranks) -> None:
    """Raise ConfigError unless heads and groups divide evenly and every rank gets an expert."""
    possible = ", ".join(map(str, rank_counts(config)))
    for what, count in (
        ("attention heads", config.num_attention_heads),
        ("output groups", config.o_groups),
    ):
        if count % ranks.size:
            raise ConfigError(
                f"{count} {what} cannot be shared evenly by {ranks.size} ranks; possible are "
                f"{possible}"
            )
    if (experts := _fewest_experts(config)) < ranks.size:
        raise ConfigError(
            f"{experts} experts are too few for {ranks.size} ranks; possible are {possible}"
        )
