"""The fields of a ``config.json`` that describe a DSpark drafter."""

from __future__ import annotations

import dataclasses

from anymla.model.config_family import Family
from anymla.model.config_fields import Fields, unsupported

# A limit far above any model, see ``config.MOST_LAYERS``.
MOST_DRAFT_LAYERS = 64
MOST_EXPERTS = 65536
_MOST_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """A DSpark drafter: a few window-only layers that guess a block of tokens at once.

    Attributes:
        stages: number of its layers as in ``compress_ratios``, 0 if that lists the backbone alone.
            The tensors have the last word (``drafts.present_config``).
        block_size: number of tokens in a block, as trained.
        noise_token_id: id that stands in a block for tokens that are not known yet.
        target_layer_ids: backbone layers whose streams its context is computed from.
        taps_at_entry: True to tap the inputs of those layers, False to tap their outputs.
        markov_rank: width of the tables from which the token before biases a guess.
        experts: number of routed experts in a stage.
        experts_per_token: number of experts that a token is sent to.
        confidence: True if there is a confidence head; not in the file, see ``stages``.
    """

    stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    taps_at_entry: bool
    markov_rank: int
    experts: int
    experts_per_token: int
    confidence: bool = True

    @property
    def tapped(self) -> tuple[int, ...]:
        """Layers whose input is tapped; one past the last layer stands for its output."""
        return tuple(layer + (not self.taps_at_entry) for layer in self.target_layer_ids)


def dspark_config(fields: Fields, layers: int, family: Family) -> DSparkConfig | None:
    """Read the drafter; None if the configuration has no ``dspark_block_size``.

    ``num_nextn_predict_layers`` does not count its stages: published files hold 1 with three
    stages.

    Args:
        fields: fields of the configuration.
        layers: number of backbone layers.
        family: mathematics that the model's type implies.

    Raises:
        ConfigError: a field is missing, or has a value that no drafter can have.
    """
    if not fields.has("dspark_block_size"):
        return None
    vocab = fields.integer("vocab_size", minimum=1)
    experts, active = (
        fields.integer(
            f"dspark_{name}", fields.integer(name, minimum=1), minimum=1, maximum=MOST_EXPERTS
        )
        for name in ("n_routed_experts", "num_experts_per_tok")
    )
    if active > experts:
        raise unsupported(
            "dspark_num_experts_per_tok", active, f"at most dspark_n_routed_experts = {experts}"
        )
    noise = fields.integer("dspark_noise_token_id")
    if noise >= vocab:
        raise unsupported("dspark_noise_token_id", noise, f"below vocab_size = {vocab}")
    targets = fields.integers("dspark_target_layer_ids")
    if not targets or max(targets) >= layers or len(set(targets)) < len(targets):
        raise unsupported(
            "dspark_target_layer_ids", list(targets), f"different layers from 0 to {layers - 1}"
        )
    listed = len(fields.integers("compress_ratios")) if fields.has("compress_ratios") else 0
    stages = max(0, listed - layers)
    if stages > MOST_DRAFT_LAYERS:
        raise unsupported(
            "compress_ratios", f"{listed} entries", f"at most {layers + MOST_DRAFT_LAYERS} entries"
        )
    return DSparkConfig(
        stages=stages,
        block_size=fields.integer("dspark_block_size", minimum=1, maximum=_MOST_BLOCK),
        noise_token_id=noise,
        target_layer_ids=targets,
        taps_at_entry=family.taps_at_entry,
        markov_rank=fields.integer("dspark_markov_rank", minimum=1),
        experts=experts,
        experts_per_token=active,
    )
