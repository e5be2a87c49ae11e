import json
import re

import pytest
from click.testing import CliRunner

from anymla.cli.main import main
from anymla.model.tokenizer import Tokenizer


def _score(tiny, out, *arguments):
    command = ["score", "--checkpoint", tiny, "--dtype", "fp32", "--json", out, *arguments]
    return CliRunner().invoke(main, [str(argument) for argument in command])


def test_text_and_its_tokens_score_alike(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Every token is scored, ünd jeder nur einmal. " * 5, encoding="utf-8")
    result = _score(tiny, tmp_path / "a.json", "--prompt-file", text)
    assert result.exit_code == 0, result.output
    first = json.loads((tmp_path / "a.json").read_text())
    assert list(first) == ["token_ids", "logprobs"]
    assert first["token_ids"] == Tokenizer.from_dir(tiny).encode(text.read_text(encoding="utf-8"))
    assert first["logprobs"][0] is None
    assert len(first["logprobs"]) == len(first["token_ids"])
    known = first["logprobs"][1:]
    assert all(logprob < 0 for logprob in known)
    assert f"{-sum(known) / len(known):.6f} nats each" in result.stdout

    for number, value in enumerate([first["token_ids"], first]):
        tokens = tmp_path / f"tokens{number}.json"
        tokens.write_text(json.dumps(value))
        out = tmp_path / f"b{number}.json"
        assert _score(tiny, out, "--token-ids", tokens).exit_code == 0
        assert json.loads(out.read_text()) == first


def test_chunks_do_not_change_the_score(tiny, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([(31 * n) % 250 for n in range(200)]))
    scores = []
    for chunk_size in (512, 37):
        out = tmp_path / f"{chunk_size}.json"
        options = ["--chunk-size", chunk_size, "--kv-cache", "fp32"]
        assert _score(tiny, out, "--token-ids", tokens, *options).exit_code == 0
        scores.append(json.loads(out.read_text())["logprobs"][1:])
    # The same float32 sums in another order, through three layers.
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_one_token_has_no_score(tiny, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[7]")
    result = _score(tiny, tmp_path / "out.json", "--token-ids", tokens)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report == {"token_ids": [7], "logprobs": [None]}


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("[1, 2", "tokens.json: not JSON"),
        ('{"tokens": [1]}', 'tokens.json: "token_ids" must be a list of integers, got NoneType'),
        ("[1, 2.5]", 'tokens.json: "token_ids" must hold integers, got 2.5'),
        ("[]", "the prompt is empty"),
        ("[1, 99999]", "unknown token id 99999, the vocabulary has 272"),
        (json.dumps([1] * 65537), "the prompt has 65537 tokens, max_position_embeddings is 65536"),
        (None, "tokens.json: No such file or directory"),
    ],
)
def test_unusable_tokens(tiny, tmp_path, content, pattern):
    tokens = tmp_path / "tokens.json"
    if content is not None:
        tokens.write_text(content)
    result = _score(tiny, tmp_path / "out.json", "--token-ids", tokens)
    assert result.exit_code == 2, result.output
    assert re.search(pattern, result.stderr), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()


def test_exactly_one_source(tiny, tmp_path):
    result = _score(tiny, tmp_path / "out.json")
    assert result.exit_code == 2
    assert result.stderr == "Error: give exactly one of --prompt-file and --token-ids\n"
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    result = _score(tiny, tmp_path / "out.json", "--prompt-file", empty)
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_json_is_required(tiny):
    result = CliRunner().invoke(main, ["score", "--checkpoint", str(tiny), "--token-ids", "x"])
    assert result.exit_code == 2
    assert "Missing option '--json'" in result.stderr
