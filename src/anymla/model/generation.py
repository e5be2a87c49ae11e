"""A checkpoint's defaults of generation, ``generation_config.json``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from anymla.formats.untrusted import Refused, read_object
from anymla.model.chat_template import ChatTemplate
from anymla.model.config_fields import MOST_INTEGER, ConfigError, Fields, unsupported

__all__ = ["ChatTemplate", "GenerationDefaults"]
_FILE = "generation_config.json"
_MOST_BYTES = 16 << 20

# Fields of transformers' generation that change the tokens and are not applied here, with the
# values that change nothing. Those of the lower part matter only for sampled tokens.
_UNAPPLIED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "watermarking_config": (),
}
_UNAPPLIED_SAMPLED: dict[str, tuple[object, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (1,),
    "typical_p": (1,),
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Values that apply unless a caller sets them.

    Attributes:
        temperature: divisor of the logits; 0 unless the file asks for sampling (``do_sample``).
        top_p: probability that the kept tokens must reach; 1 if absent.
        top_k: number of kept tokens; 0, all tokens, if absent or -1.
        min_p: least fraction of the best probability; 0 if absent.
        repetition_penalty: factor of repeated tokens; 1 if absent; see
            ``anymla.runtime.sampler.Sampling``.
        presence_penalty: amount subtracted from generated tokens; 0 if absent.
        frequency_penalty: amount subtracted per occurrence; 0 if absent.
        max_new_tokens: most tokens to generate; None if absent.
        eos_token_ids: ids that end a text in addition to those of ``config.json``.
        unapplied: names of fields that would change the text and are not applied.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unapplied: tuple[str, ...] = ()

    @classmethod
    def from_dir(cls, directory: str | Path) -> GenerationDefaults:
        """Read ``generation_config.json``; return the defaults above without one.

        Raises:
            ConfigError: the file cannot be read, or a value is out of range.
        """
        path = Path(directory) / _FILE
        try:
            fields = Fields(read_object(path, _MOST_BYTES, wide=True), _FILE)
        except FileNotFoundError:
            return cls()
        except (OSError, Refused) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        fields.only("do_sample", True, False)
        ends: tuple[int, ...] = ()
        if fields.has("eos_token_id"):
            several = isinstance(fields.values["eos_token_id"], list | tuple)
            ends = fields.integers("eos_token_id") if several else (fields.integer("eos_token_id"),)
        sampled = bool(fields.values.get("do_sample"))
        told = cls(
            repetition_penalty=_between(fields, "repetition_penalty", 1.0, 0.01, 100),
            presence_penalty=_between(fields, "presence_penalty", 0.0, -100, 100),
            frequency_penalty=_between(fields, "frequency_penalty", 0.0, -100, 100),
            max_new_tokens=(
                min(fields.integer("max_new_tokens", minimum=1, maximum=10**100), MOST_INTEGER)
                if fields.has("max_new_tokens")
                else None
            ),
            eos_token_ids=ends,
            unapplied=_unapplied(fields, _UNAPPLIED | (_UNAPPLIED_SAMPLED if sampled else {})),
        )
        if not sampled:
            return told
        return dataclasses.replace(
            told,
            temperature=_share(fields, "temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=max(0, fields.integer("top_k", 0, minimum=-1)),
            min_p=_share(fields, "min_p"),
        )

    @property
    def unapplied_line(self) -> str | None:
        """A line that names fields of the file that are not applied; None without any."""
        if not self.unapplied:
            return None
        return f"{_FILE}: not applied: {', '.join(self.unapplied)}"


def _unapplied(fields: Fields, neutral: dict[str, tuple[object, ...]]) -> tuple[str, ...]:
    """Return names of present fields whose value is not neutral."""
    return tuple(
        name
        for name in sorted(neutral)
        if fields.has(name)
        and fields.values[name] is not False
        and fields.values[name] not in neutral[name]
    )


def _share(fields: Fields, name: str, default: float = 0.0) -> float:
    """Read a number that may be 0."""
    if not fields.has(name):
        return default
    return 0.0 if fields.values[name] == 0 else fields.number(name)


def _between(fields: Fields, name: str, default: float, least: float, most: float) -> float:
    """Read a number within the sampler's bounds."""
    value = fields.values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise unsupported(fields.name(name), value, f"a number from {least:g} to {most:g}")
    return float(value)
