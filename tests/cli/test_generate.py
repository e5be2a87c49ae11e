import json
import re
import shutil

import pytest
import torch
from click.testing import CliRunner

from anymla.cli.main import main
from anymla.formats.cache_dump import load_cache
from anymla.model.tokenizer import Tokenizer


def _run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _generate(tiny, *arguments):
    return _run("generate", "--checkpoint", tiny, "--dtype", "fp32", *arguments)


def _lines(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


def test_text_is_streamed_and_reported(tiny, tmp_path):
    out = tmp_path / "out.json"
    result = _generate(
        tiny, "--prompt", "Ünïcödé 你好", "--max-new-tokens", 9, "--ignore-eos", "--json", out
    )
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    (entry,) = report["results"]
    tokenizer = Tokenizer.from_dir(tiny)
    assert entry["prompt_tokens"] == len(tokenizer.encode("Ünïcödé 你好"))
    assert len(entry["token_ids"]) == len(entry["logprobs"]) == 9
    assert entry["finish_reason"] == "length"
    assert entry["text"] == tokenizer.decode(entry["token_ids"])
    assert result.stdout == entry["text"] + "\n"
    # Progress bars are for terminals.
    assert re.fullmatch(
        r"9 tokens, \d+\.\d tokens/s \(prompt: (\d+) new of \1, \d+\.\d tokens/s\)\n", result.stderr
    )
    assert set(entry["timings"]) == {"waiting_s", "prefill_s", "decode_s", "total_s"}
    assert set(report["timings"]) == {"load_s", "run_s"}
    assert report["acceptance_rate"] is None
    assert report["cache_bytes"] > 0
    assert report["options"]["kv_cache"] == "fp8"
    assert all(logprob < 0 for logprob in entry["logprobs"])


def test_a_prompt_file_and_speculation_give_the_same_tokens(tiny, tmp_path):
    text = "The file's text. " * 12
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    reports = []
    for number, how in enumerate(
        [
            ["--prompt", text],
            ["--prompt-file", path, "--chunk-size", 33],
            ["--prompt-file", path, "--speculate", "--draft-tokens", 3],
        ]
    ):
        out = tmp_path / f"{number}.json"
        options = ["--max-new-tokens", 12, "--kv-cache", "fp32", "--json", out]
        assert _generate(tiny, *how, *options).exit_code == 0
        reports.append(json.loads(out.read_text()))
    tokens = [report["results"][0]["token_ids"] for report in reports]
    assert tokens[0] == tokens[1] == tokens[2]
    assert 0 <= reports[2]["acceptance_rate"] <= 1
    assert reports[2]["results"][0]["drafted"] > 0
    assert reports[2]["options"]["draft_tokens"] == 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_dspark_checkpoint_with_each_option(tiny_dspark, tmp_path, temperature):
    reports = {}
    for number, (how, drafts, draft_tokens) in enumerate(
        [
            ([], "off", 0),
            (["--drafts", "off"], "off", 0),
            (["--speculate"], "auto", 5),
            (["--drafts", "auto", "--adapt-drafts"], "auto", 5),
            (["--drafts", "dspark", "--draft-tokens", 3], "dspark", 3),
        ]
    ):
        out = tmp_path / f"{number}.json"
        words = ["--max-new-tokens", 12, "--temperature", temperature, "--kv-cache", "fp32"]
        result = _generate(tiny_dspark, "--prompt", "0731", *words, *how, "--json", out)
        assert result.exit_code == 0, result.output
        report = reports[number] = json.loads(out.read_text())
        options = report["options"]
        assert (options["drafts"], options["draft_tokens"]) == (drafts, draft_tokens)
        assert (report["results"][0]["drafted"] > 0) == (draft_tokens > 0)
    texts = [report["results"][0]["token_ids"] for report in reports.values()]
    assert all(text == texts[0] for text in texts)
    result = _generate(tiny_dspark, "--prompt", "a", "--drafts", "mtp")
    _fails(result, "holds a DSpark drafter, asked for: MTP layers")


def test_a_batch(tiny, tmp_path):
    batch = _lines(
        tmp_path / "batch.jsonl",
        {"prompt": "first", "id": "α"},
        {"token_ids": [10, 20, 30], "max_new_tokens": 3},
        {"prompt": "third", "temperature": 1.5, "top_p": 0.8, "seed": 7},
        {"prompt": "third", "temperature": 1.5, "top_p": 0.8, "seed": 7, "id": 99},
    )
    batch.write_text(batch.read_text() + "\n\n", encoding="utf-8")
    out = tmp_path / "out.json"
    options = ["--max-new-tokens", 6, "--ignore-eos", "--max-requests", 2, "--json", out]
    result = _generate(tiny, "--requests-file", batch, *options)
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())["results"]
    assert [entry["id"] for entry in results] == ["α", "2", "3", "99"]
    assert [len(entry["token_ids"]) for entry in results] == [6, 3, 6, 6]
    assert results[1]["prompt_tokens"] == 3
    assert results[2]["token_ids"] == results[3]["token_ids"]
    for entry in results:
        assert f"[{entry['id']}] {entry['text']}\n" in result.stdout


def test_dumped_pages_can_be_inspected(tiny, tmp_path):
    directory = tmp_path / "dumps"
    options = ["--max-new-tokens", 2, "--ignore-eos", "--dump-cache", directory]
    assert _generate(tiny, "--prompt", "x" * 140, *options).exit_code == 0
    names = sorted(path.name for path in directory.iterdir())
    assert names == [
        "request0.layer0.window.safetensors",
        "request0.layer1.compressed.safetensors",
        "request0.layer1.index.safetensors",
        "request0.layer1.window.safetensors",
        "request0.layer2.compressed.safetensors",
        "request0.layer2.window.safetensors",
    ]
    cache, layout_id, meta = load_cache(directory / names[4])
    assert layout_id == "v4_main_fp8"
    assert (meta["layer"], meta["kind"], meta["first"], meta["rows"]) == (2, "compressed", 0, 1)
    assert cache.shape[0] == 1
    result = _run("inspect", "--cache", directory / names[2])
    assert result.exit_code == 0
    assert "v4_index_fp8" in result.stdout


def _fails(result, pattern):
    assert result.exit_code == 2, result.output
    assert re.search(pattern, result.stderr), result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "give exactly one of --prompt, --prompt-file and --requests-file"),
        (["--prompt", "a", "--prompt-file", "b"], "give exactly one of"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--max-new-tokens", 0], "max_new_tokens must be at least 1, got 0"),
        (["--prompt", "a", "--max-new-tokens", -3], "max_new_tokens must be at least 1, got -3"),
        (["--prompt", "a", "--temperature", -1], "temperature must be finite and >= 0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature must be finite"),
        (["--prompt", "a", "--top-p", 0], r"top_p must be in \(0, 1\]"),
        (["--prompt", "a", "--seed", 2**70], "seed must fit in 64 bits"),
        (
            ["--prompt", "a" * 70000],
            "the prompt has 7000[01] tokens, max_position_embeddings is 65",
        ),
        (["--prompt", "a", "--max-new-tokens", 70000], "70000 new ones exceed max_position_emb"),
        (["--prompt-file", "/nonexistent/f"], "/nonexistent/f: No such file or directory"),
        (["--requests-file", "/nonexistent/f"], "/nonexistent/f: No such file or directory"),
        (["--prompt", "a", "--json", "/nonexistent/f"], "there is no directory /nonexistent"),
        (["--prompt", "a", "--draft-tokens", 2], "--draft-tokens needs --speculate or --drafts"),
        (["--prompt", "a", "--draft-tokens", 2, "--drafts", "off"], "--draft-tokens needs"),
        (["--prompt", "a", "--adapt-drafts"], "--adapt-drafts needs --speculate or --drafts"),
        (["--prompt", "a", "--speculate", "--drafts", "off"], "contradict each other"),
        (["--prompt", "a", "--drafts", "dspark"], "holds MTP layers, asked for: a DSpark drafter"),
        (["--prompt", "a", "--backend", "abacus"], "--backend abacus: there are .*torch"),
        (["--prompt", "a\udcff"], "the text is not UTF-8: surrogates not allowed at 1"),
    ],
)
def test_unusable_input(tiny, arguments, pattern):
    _fails(_generate(tiny, *arguments), pattern)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_device_that_is_not_there(tiny, device):
    if getattr(torch, device).is_available():
        pytest.skip(f"this machine has {device}")
    result = _generate(tiny, "--prompt", "a", "--device", device)
    _fails(result, f"--device {device}: torch sees no such device")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--speculate"], "speculation needs a drafter, and this model has none"),
    ],
)
def test_what_shows_once_the_model_is_loaded(tiny_without_mtp, arguments, pattern):
    result = _generate(tiny_without_mtp, "--prompt", "a", *arguments)
    assert result.exit_code == 2
    assert re.match(f"Error: {pattern}", result.stderr.splitlines()[-1])
    assert "Traceback" not in result.output


def test_a_named_backend_runs(tiny):
    options = ["--prompt", "abc", "--max-new-tokens", 3, "--ignore-eos"]
    outputs = [
        _generate(tiny, *options, "--backend", backend).stdout for backend in ("torch", "reference")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1


def test_a_directory_that_is_no_checkpoint(tmp_path):
    result = _run("generate", "--checkpoint", tmp_path, "--prompt", "a")
    _fails(result, f"{tmp_path}.*config.json")
    result = _run("generate", "--checkpoint", tmp_path / "absent", "--prompt", "a")
    _fails(result, "absent")


def test_text_that_is_not_utf8(tiny, tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("über".encode("latin-1"))
    _fails(_generate(tiny, "--prompt-file", path), "latin1.txt: not UTF-8: .* at byte 0")


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ('{"prompt": ', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"id": "x"}', 'needs either "prompt" or "token_ids"'),
        ('{"prompt": "a", "token_ids": [1]}', 'needs either "prompt" or "token_ids"'),
        ('{"prompt": 5}', '"prompt" must be a string, got 5'),
        ('{"prompt": ""}', "the prompt is empty"),
        (r'{"prompt": "a\ud800"}', "a string holds half of a surrogate pair"),
        ('{"token_ids": "abc"}', '"token_ids" must be a list of integers, got str'),
        ('{"token_ids": [1, true]}', '"token_ids" must hold integers, got True'),
        ('{"token_ids": [1, 272]}', "unknown token id 272, the vocabulary has 272"),
        ('{"token_ids": [-1]}', "unknown token id -1"),
        ('{"token_ids": []}', "the prompt is empty"),
        ('{"prompt": "a", "best_of": 5}', "unknown key 'best_of', known are frequency_penalty, id"),
        ('{"prompt": "a", "max_new_tokens": 1.5}', '"max_new_tokens" must be an integer'),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens must be at least 1"),
        ('{"prompt": "a", "temperature": "hot"}', '"temperature" must be a number'),
        ('{"prompt": "a", "temperature": NaN}', "NaN is not JSON"),
        ('{"prompt": "a", "temperature": 1e400}', "the number 1e400 is too large"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "does not fit in 64 bits"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"prompt": ' * 100_000, "nested more than 64 deep"),
        ('{"token_ids": [2147483647]}', "unknown token id 2147483647, the vocabulary has 272"),
        ('{"token_ids": [2147483648]}', "unknown token id 2147483648"),
        ('{"token_ids": [4294967296]}', "unknown token id 4294967296"),
        (r'{"prompt": "\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "seed": null}', '"seed" must be an integer, got None'),
        ('{"prompt": "a", "id": [1]}', '"id" must be a string or an integer'),
        ('{"prompt": "a", "id": 1}', "the id '1' is taken by an earlier line"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tiny, tmp_path, line, pattern):
    path = tmp_path / "batch.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    _fails(_generate(tiny, "--requests-file", path), f"batch.jsonl line 3: .*{pattern}")


def test_an_empty_batch(tiny, tmp_path):
    path = tmp_path / "batch.jsonl"
    path.write_text("\n \n")
    _fails(_generate(tiny, "--requests-file", path), "batch.jsonl: no prompt in it")


def test_a_prompt_that_no_context_holds(tiny, tmp_path, monkeypatch):
    """A file's size is asked before it is read; a device's bytes are counted."""
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    _fails(_generate(tiny, "--prompt-file", path), "sparse.txt: larger than 33554432 bytes")
    monkeypatch.setattr("anymla.cli.files.MAX_TEXT_BYTES", 1 << 21)
    _fails(_generate(tiny, "--prompt-file", "/dev/zero"), "/dev/zero: larger than 2097152 bytes")


def test_a_stop_string_ends_a_text_before_it(tiny, tmp_path):
    out = tmp_path / "out.json"
    options = ["--max-new-tokens", 24, "--ignore-eos", "--json", out]
    assert _generate(tiny, "--prompt", "abc", *options).exit_code == 0
    (whole,) = json.loads(out.read_text())["results"]
    stop = whole["text"][5:8]
    result = _generate(tiny, "--prompt", "abc", *options, "--stop", stop, "--speculate")
    (entry,) = json.loads(out.read_text())["results"]
    assert entry["text"] == whole["text"][: whole["text"].index(stop)]
    assert result.stdout == entry["text"] + "\n"
    assert entry["finish_reason"] == "stop"
    assert entry["token_ids"] == whole["token_ids"][: len(entry["token_ids"])]
    assert len(entry["logprobs"]) == len(entry["token_ids"]) < 24
    result = _generate(tiny, "--prompt", "abc", "--stop", "")
    assert result.exit_code == 2
    assert "a stop string must not be empty" in result.stderr


def test_the_old_name_of_the_requests_file(tiny, tmp_path):
    requests = _lines(tmp_path / "requests.jsonl", {"prompt": "abc", "max_new_tokens": 2})
    new, old = (_generate(tiny, name, requests) for name in ("--requests-file", "--batch"))
    assert new.exit_code == old.exit_code == 0, old.output
    assert new.stdout == old.stdout
    said = "--batch is called --requests-file now; the old name goes with the next version"
    assert old.stderr.splitlines()[0] == said
    assert "--batch" not in new.stderr
    both = _generate(tiny, "--requests-file", requests, "--batch", requests)
    assert both.exit_code == 2


def test_lines_of_a_batch_restrict_for_themselves(tiny, tmp_path):
    out, same = tmp_path / "out.json", {"prompt": "abc", "temperature": 2.0}
    batch = _lines(
        tmp_path / "batch",
        {"prompt": "abc"},
        same | {"top_k": 1},
        same | {"min_p": 1.0},
        same | {"seed": 3},
    )
    result = _generate(tiny, "--requests-file", batch, "--max-new-tokens", 8, "--json", out)
    assert result.exit_code == 0, result.output
    greedy, first, second, free = (
        entry["token_ids"] for entry in json.loads(out.read_text())["results"]
    )
    assert greedy == first == second != free


def _short(tiny, tmp_path, **said):
    directory = tmp_path / "short"
    shutil.copytree(tiny, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 160}))
    (directory / "generation_config.json").write_text(json.dumps(said))
    return directory


def test_a_default_length_refuses_no_prompt_that_fits(tiny, tmp_path):
    short, out = _short(tiny, tmp_path), tmp_path / "out.json"
    options = ["--ignore-eos", "--json", out]
    result = _generate(short, "--prompt", "x" * 140, *options)
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(out.read_text())["results"]
    assert len(entry["token_ids"]) == 160 - 141
    batch = _lines(tmp_path / "batch", {"prompt": "x" * 130}, {"prompt": "x", "max_new_tokens": 2})
    result = _generate(short, "--requests-file", batch, *options)
    assert result.exit_code == 0, result.output
    counts = [len(each["token_ids"]) for each in json.loads(out.read_text())["results"]]
    assert counts == [160 - 131, 2]
    result = _generate(short, "--prompt", "x" * 140, "--max-new-tokens", 20)
    _fails(result, "141 prompt tokens and 20 new ones exceed max_position_embeddings of 160")


def test_penalties_of_the_line_and_of_a_batch(tiny, tmp_path):
    directory, out = _short(tiny, tmp_path, num_beams=2), tmp_path / "out.json"
    penalty = {"repetition_penalty": 1.0, "presence_penalty": 100.0, "frequency_penalty": 0}
    batch = _lines(tmp_path / "batch", {"prompt": "a"}, {"prompt": "a"} | penalty)
    options = ["--max-new-tokens", 30, "--ignore-eos", "--json", out]
    result = _generate(directory, "--requests-file", batch, *options)
    assert result.exit_code == 0, result.output
    assert "generation_config.json: not applied: num_beams\n" in result.stderr
    plain, apart = (each["token_ids"] for each in json.loads(out.read_text())["results"])
    assert len(set(plain)) < 30
    assert len(set(apart)) == 30
    result = _generate(directory, "--prompt", "a", "--presence-penalty", 100, *options)
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(out.read_text())["results"]
    assert entry["token_ids"] == apart
    result = _generate(directory, "--prompt", "a", "--repetition-penalty", 0)
    _fails(result, r"repetition_penalty must be in \[0.01, 100\], got 0.0")
