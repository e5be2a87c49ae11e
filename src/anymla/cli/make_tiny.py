"""``anymla make-tiny``: write a small random checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.numbers import Finite, count
from anymla.layers.spec import Candidates
from anymla.model.checkpoint import Checkpoint
from anymla.testing.tiny_checkpoint import write_tiny_checkpoint
from anymla.testing.tiny_options import (
    DRAFTERS,
    MAX_LAYERS,
    SCALE_FORMATS,
    WEIGHTS,
    TinyOptions,
    TinySharing,
    default_ratios,
    default_shared_ratios,
)

_DEFAULTS = TinyOptions()
# Two layers of each role.
_SHARING_LAYERS = 8


def _size(
    name: str, help_text: str, *, least: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make an integer option of a field of ``TinyOptions``, with the field's default."""
    default = getattr(_DEFAULTS, name)
    return count(f"--{name.replace('_', '-')}", name, least=least, default=default, help=help_text)


def _ratios(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(item) for item in value.split(","))
    except ValueError:
        raise click.BadParameter(f"must be integers with commas between, got {value!r}") from None


def _shared_sizes(ratios: tuple[int, ...], sizes: dict[str, Any]) -> dict[str, Any]:
    """Apply ``--model v4.1`` to the options: V4.1's own layers and sharing.

    Raises:
        BadInput: an option does not exist for such a model.
    """
    given = click.get_current_context().get_parameter_source
    changes: dict[str, Any] = {}
    for name, said in (
        ("hash_layers", "no such layers, so 0"),
        ("mtp", "no MTP layers, so 0 or --drafter dspark"),
    ):
        # the default belongs to another model
        if given(name) is click.core.ParameterSource.DEFAULT:
            changes[name] = 0
        elif sizes[name] and (name, sizes["drafter"]) != ("mtp", "dspark"):
            option = name.replace("_", "-")
            raise BadInput(f"--{option} {sizes[name]}: --model v4.1 has {said}")
    compress = [layer for layer, ratio in enumerate(ratios) if ratio]
    for before, layer in itertools.pairwise(compress):
        first = ratios.index(ratios[layer])
        if ratios[before] != ratios[layer] and first < layer:
            raise BadInput(
                f"--ratios {','.join(map(str, ratios))}: with --model v4.1 layers of one ratio "
                f"stand together, those of 0 aside; layer {layer} is apart from layer {first}"
            )
    sharing = TinySharing.of(ratios)
    most = Candidates(
        sharing.candidate_source, sharing.candidate_blocks, sharing.candidate_block_size
    ).least_entries
    if compress and sizes["index_topk"] > most:
        raise BadInput(
            f"--index-topk {sizes['index_topk']}: with --model v4.1 at most {most}, which the "
            "blocks that layers select within always hold"
        )
    return changes | {"sharing": sharing}


@commands.command(
    examples=["anymla make-tiny tiny", "anymla make-tiny tiny41 --model v4.1 --experts 8"]
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default=_DEFAULTS.weights,
    show_default=True,
    help="fp4: FP4 experts and FP8 linear layers; nvfp4: experts as in NVIDIA's releases; fp8: FP8 "
    "experts too; bf16: not quantised.",
)
@click.option(
    "--twin",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write the bf16 checkpoint of exactly the dequantised values.",
)
@click.option(
    "--model",
    type=click.Choice(("v4", "v4.1")),
    default="v4",
    show_default=True,
    help="v4.1: layers that share entries and selections, n-grams, no hash routing, no MTP layers.",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1, max=MAX_LAYERS),
    help="Layers, if --ratios is not given.",
)
@click.option(
    "--ratios",
    callback=_ratios,
    metavar="LIST",
    help="Compress ratio of each layer; 0: window only.  [default: 0,4,128,4]",
)
@_size("hidden", "Hidden size.")
@_size("heads", "Query heads.")
@_size("o_groups", "Groups of the output projection.")
@_size("o_lora", "Rank of a group's output projection.")
@_size("q_lora", "Rank of the query projection.")
@_size("index_topk", "Entries the indexer selects.")
@_size("index_heads", "Heads of the indexer.")
@_size("experts", "Routed experts.")
@_size("experts_per_token", "Experts a token is sent to.")
@_size("moe_size", "Inner size of an expert.")
@_size("hash_layers", "Leading layers that route by token id.", least=0)
@_size("window", "Tokens of the sliding window.")
@click.option(
    "--rope-factor",
    type=Finite(min=1),
    default=_DEFAULTS.rope_factor,
    show_default=True,
    help="YaRN's factor; the longest position is 65536 times that.",
)
@click.option(
    "--drafter",
    type=click.Choice(DRAFTERS),
    default=_DEFAULTS.drafter,
    show_default=True,
    help="What mtp.* holds: MTP layers, or a DSpark drafter.",
)
@_size("mtp", "MTP layers, with --drafter mtp.", least=0)
@_size("stages", "Layers of the DSpark drafter.")
@_size("block", "Tokens that it guesses at once.")
@_size("markov_rank", "Width of its Markov tables.")
@_size("draft_experts", "Routed experts of its layers; 0: as many as others.", least=0)
@_size("draft_experts_per_token", "Experts a token is sent to there; 0: as elsewhere.", least=0)
@_size("vocab", "Vocabulary.")
@click.option(
    "--nvfp4-attention", is_flag=True, help="All linear layers of the attention in NVFP4."
)
@click.option(
    "--scale-format",
    type=click.Choice(SCALE_FORMATS),
    default=_DEFAULTS.scale_format,
    show_default=True,
    help="Scales of FP8 weights; those in fp32 are not powers of two.",
)
@_size("shards", "Files the tensors are spread over.")
@_size("seed", "Seed of all values.", least=0)
def command(
    directory: Path,
    twin: Path | None,
    model: str,
    layers: int | None,
    ratios: tuple[int, ...] | None,
    **sizes: Any,
) -> None:
    """Write a small random DeepSeek-V4 or V4.1 checkpoint to DIRECTORY, in DeepSeek's own layout.

    The same options give the same bytes. An earlier tiny checkpoint there is replaced.
    """
    if layers is not None and layers > MAX_LAYERS:
        raise BadInput(f"--layers must be at most {MAX_LAYERS}, got {layers}")
    shares = model == "v4.1"
    if ratios is None and shares:
        ratios = default_shared_ratios(layers or _SHARING_LAYERS)
    elif ratios is None:
        ratios = default_ratios(layers) if layers else _DEFAULTS.ratios
    elif layers is not None and layers != len(ratios):
        raise BadInput(f"--layers {layers} contradicts --ratios, which has {len(ratios)} entries")
    with bad_input():
        if shares:
            sizes |= _shared_sizes(ratios, sizes)
        write_tiny_checkpoint(directory, TinyOptions(ratios=ratios, **sizes), twin=twin)
    for target in (directory, twin):
        if target is not None:
            checkpoint = Checkpoint.open(target)
            click.echo(f"{target}: {len(checkpoint)} tensors, {checkpoint.nbytes / 1e6:.1f} MB")
