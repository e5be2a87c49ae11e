"""What strangers' tokenizer files hold: read as transformers reads them, and within bounds."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anymla.model.tokenizer import Tokenizer, TokenizerError
from anymla.testing.tiny_tokenizer import BOS, EOS, write_tokenizer

Change = Callable[[dict[str, Any], dict[str, Any]], object]
TEXT = f"the needle is  482193.{EOS} <x> what\n\nis <y> the needle? Größe"


def changed(directory: Path, change: Change) -> Path:
    """A tokenizer of bytes whose two files a function has changed in place."""
    write_tokenizer(directory, 262, 1000)
    paths = [directory / name for name in ("tokenizer.json", "tokenizer_config.json")]
    inner, config = (json.loads(path.read_text()) for path in paths)
    change(inner, config)
    for path, fields in zip(paths, (inner, config), strict=True):
        path.write_text(json.dumps(fields))
    return directory


def theirs(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 1,
    "pad_type_id": 0,
    "pad_token": EOS,
}


def added(content: str, token_id: int, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token_id, "content": content} | dict.fromkeys(names, False) | flags


def rename(inner: dict[str, Any], *names: str) -> None:
    """Give the reserved tokens 258.. these names, in the vocabulary alone."""
    inner["added_tokens"] = inner["added_tokens"][:2]
    vocab = {name: n for name, n in inner["model"]["vocab"].items() if n < 258}
    inner["model"]["vocab"] = vocab | {name: 258 + n for n, name in enumerate(names)}


def replaced(inner: dict[str, Any], config: dict[str, Any], *tokens: dict[str, Any]) -> None:
    rename(inner, "<x>", "<y>", "<|z|>", "<|w|>")
    inner["added_tokens"] += tokens


def listed(inner: dict[str, Any], config: dict[str, Any], **flags: bool) -> None:
    rename(inner, "<x>", "<y>", "<|z|>", "<|w|>")
    tokens = {0: BOS, 1: EOS}
    entries = {n: added(text, n, special=True) for n, text in tokens.items()}
    entries[258] = added("<x>", 258, **flags)
    for entry in entries.values():
        del entry["id"]
    config["added_tokens_decoder"] = {str(n): entry for n, entry in entries.items()}


def regex(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def before(inner: dict[str, Any], first: dict[str, Any]) -> None:
    both = [first, inner["pre_tokenizer"]]
    inner["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}


AS_THEY_DO: dict[str, Change] = {
    "nothing": lambda inner, config: None,
    "truncation": lambda inner, config: inner.update(truncation=TRUNCATION),
    "truncation on the left": lambda inner, config: inner.update(
        truncation=TRUNCATION | {"direction": "Left", "stride": 2, "strategy": "OnlyFirst"}
    ),
    "padding": lambda inner, config: inner.update(padding=PADDING),
    "both": lambda inner, config: inner.update(padding=PADDING, truncation=TRUNCATION),
    "sides and lengths": lambda inner, config: config.update(
        padding_side="left", truncation_side="left", model_max_length=4, max_length=3, stride=1
    ),
    "a length of 10^30": lambda inner, config: config.update(
        model_max_length=1000000000000000019884624838656
    ),
    "no post-processor": lambda inner, config: (
        inner.update(post_processor=None),
        config.pop("add_bos_token"),
    ),
    "eos asked for by a training run": lambda inner, config: config.update(add_eos_token=True),
    "bos not asked for": lambda inner, config: config.update(add_bos_token=False),
    "a token that eats blanks": lambda inner, config: replaced(
        inner, config, added("<x>", 258, lstrip=True, rstrip=True)
    ),
    "a token that is a word": lambda inner, config: replaced(
        inner, config, added("is", 258, single_word=True)
    ),
    "a special token": lambda inner, config: replaced(
        inner, config, added("<x>", 258, special=True), added("<y>", 259)
    ),
    "listed in the configuration": lambda inner, config: listed(inner, config),
    "listed as special": lambda inner, config: listed(inner, config, special=True, lstrip=True),
    "listed against the file": lambda inner, config: (
        listed(inner, config, rstrip=True),
        inner["added_tokens"].append(added("<x>", 258, special=True, lstrip=True)),
    ),
    "named": lambda inner, config: (
        rename(inner, "<x>", "<y>", "<|z|>", "<|w|>"),
        config.update(pad_token="<y>", image_token="<x>"),
    ),
    "further ones": lambda inner, config: (
        rename(inner, "<x>", "<y>", "<|z|>", "<|w|>"),
        config.update(additional_special_tokens=["<x>", "<y>"]),
    ),
    "further ones by name": lambda inner, config: (
        rename(inner, "<x>", "<y>", "<|z|>", "<|w|>"),
        config.update(extra_special_tokens={"image_token": "<x>"}),
    ),
    "a normaliser": lambda inner, config: inner.update(
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "NFKC"},
                {"type": "Replace", "pattern": {"String": "  "}, "content": " "},
                {"type": "Lowercase"},
            ],
        }
    ),
    "a pattern": lambda inner, config: before(inner, regex(r"\p{N}{1,3}|\s+")),
    "byte fallback and fused unknowns": lambda inner, config: inner["model"].update(
        byte_fallback=True, fuse_unk=True, ignore_merges=True
    ),
}


@pytest.mark.parametrize("name", AS_THEY_DO)
def test_texts_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    directory = changed(tmp_path, AS_THEY_DO[name])
    tokenizer, other = Tokenizer.from_dir(directory), theirs(directory)
    for text in (TEXT, "a", f"{BOS}a", " is is"):
        ids = other(text)["input_ids"]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True)
        bare = other(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, leading=False) == bare


def test_truncation_left_by_a_training_run_cuts_nothing(tmp_path: Path) -> None:
    directory = changed(tmp_path, AS_THEY_DO["both"])
    assert len(Tokenizer.from_dir(directory).encode("x" * 500)) == 501
    assert len(Tokenizer.from_dir(directory).encode("x")) == 2


def test_dropout_left_by_a_training_run_does_not_draw(tmp_path: Path) -> None:
    def merge(inner: dict[str, Any], config: dict[str, Any]) -> None:
        rename(inner, "ab", "abab")
        inner["model"].update(merges=[["a", "b"], ["ab", "ab"]], dropout=0.9)

    tokenizer = Tokenizer.from_dir(changed(tmp_path, merge))
    assert tokenizer.encode("abab" * 50) == [0, *[259] * 50]


def test_special_tokens_map_stands_in_for_the_list(tmp_path: Path) -> None:
    def name(inner: dict[str, Any], config: dict[str, Any]) -> None:
        rename(inner, "<x>", "<y>", "<|z|>", "<|w|>")

    directory = changed(tmp_path, name)
    written = {"pad_token": {"content": "<x>", "lstrip": False, "rstrip": True}}
    (directory / "special_tokens_map.json").write_text(json.dumps(written))
    assert Tokenizer.from_dir(directory).encode("<x>") == theirs(directory)("<x>")["input_ids"]


def huge(inner: dict[str, Any], count: int) -> None:
    inner["model"]["vocab"] |= {f"t{n}": 300 + n for n in range(count)}


def around(inner: dict[str, Any], count: int) -> None:
    post = inner["post_processor"]
    name = next(iter(post["special_tokens"]))
    entry = post["special_tokens"][name]
    entry["ids"], entry["tokens"] = entry["ids"] * count, entry["tokens"] * count


def replace(content: int, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": "y" * content}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


BOMBS: dict[str, tuple[Change, str]] = {
    "tokens": (lambda inner, config: huge(inner, 1 << 20), r"its vocab has 1048838 entries, at "),
    "merges": (
        lambda inner, config: inner["model"].update(merges=["a b"] * ((1 << 21) + 1)),
        r"its merges has 2097153 entries",
    ),
    "a long added token": (
        lambda inner, config: inner["added_tokens"].append(added("y" * (1 << 20), 262)),
        r"its 7 added tokens have \d+ bytes",
    ),
    "many added tokens": (
        lambda inner, config: inner["added_tokens"].extend(
            added(f"{n}", 262 + n) for n in range(1 << 16)
        ),
        r"its 65542 added tokens have \d+ bytes, at most 65536",
    ),
    "a long replacement": (
        lambda inner, config: inner.update(normalizer=replace(1 << 20, String="a")),
        r"its normalizer can make 1.04858e\+06 characters of one",
    ),
    "a replacement of nothing": (
        lambda inner, config: inner.update(normalizer=replace(99, Regex="")),
        r"its normalizer can make 100 characters of one",
    ),
    "replacements of replacements": (
        lambda inner, config: inner.update(
            normalizer=sequence(*[replace(2, String="y")] * 30, {"type": "NFC"})
        ),
        r"its normalizer can make 1.07374e\+09 characters of one",
    ),
    "nested sequences": (
        lambda inner, config: inner.update(
            normalizer=sequence(*[sequence(*[replace(8, String="y")] * 2)] * 2)
        ),
        r"its normalizer can make 4096 characters of one",
    ),
    "a table of a normaliser": (
        lambda inner, config: inner.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": ""}
        ),
        r"its normalizer can make inf characters of one",
    ),
    "many tokens around a text": (
        lambda inner, config: around(inner, 1 << 16),
        r"its post-processor puts 65536 tokens around a text",
    ),
    "a pattern that nests deep": (
        lambda inner, config: before(inner, regex("(" * 100_000 + "a" + ")" * 100_000)),
        r"cannot be read: .*parse depth limit over",
    ),
    "depth": (
        lambda inner, config: inner.update(x=json.loads("[" * 100 + "]" * 100)),
        r"nested more than 64 deep",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_are_loaded(name: str, tmp_path: Path) -> None:
    change, message = BOMBS[name]
    directory = changed(tmp_path, change)
    began = time.monotonic()
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_dir(directory)
    assert str(caught.value).startswith(f"{directory}/tokenizer.json: ")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 30  # a second or two on a quiet machine


def test_a_file_of_any_size(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258, 1000)
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: cannot be read: longer than 671088"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pattern", ["(a+)+$", ".*.*.*(?<=\0)"])
def test_a_pattern_without_end(pattern: str, tmp_path: Path, monkeypatch) -> None:
    """Oniguruma gives up on the first, and goes on for minutes with the second."""
    monkeypatch.setattr("anymla.model.tokenizer._SECONDS", 1.0)
    directory = changed(tmp_path, lambda inner, config: before(inner, regex(pattern)))
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.encode("aaa") == [0, *[2 + ord("a")] * 3]
    began = time.monotonic()
    text = (" ".join(["aaaa"] * 40) + "\n") * 4 + "a" * 200 + "b"
    with pytest.raises(TokenizerError, match=r"cannot encode the text: (Onig|its patterns took)"):
        tokenizer.encode(text)
    assert time.monotonic() - began < 30


def test_a_text_far_beyond_the_context_is_not_read_to_its_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258, 1000)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert len(tokenizer.encode("x" * 3000, most=1000)) == 3001
    assert len(tokenizer.encode("x" * 3000, most=100)) == 3001  # which has a message of its own
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"has 20000000 characters, far more than 1000 tokens"):
        tokenizer.encode("x" * 20_000_000, most=1000)
    assert time.monotonic() - began < 20
