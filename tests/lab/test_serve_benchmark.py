"""Repeats of ``benchmarks/vllm/serve.py`` alternate among its servers; a stand-in is the client."""

import argparse
import http.server
import json
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "vllm"

CLIENT = """
import json, pathlib, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
with open(pathlib.Path(__file__).parent / "asked", "a") as file:
    print(value("--base-url"), value("--random-input-len"), value("--seed"), file=file)
result = {
    "median_ttft_ms": 5, "p90_ttft_ms": 6, "median_tpot_ms": float(value("--seed")),
    "p90_tpot_ms": 4, "output_throughput": 100, "duration": 1, "completed": 16,
}
(pathlib.Path(value("--result-dir")) / value("--result-filename")).write_text(json.dumps(result))
"""


class Models(http.server.BaseHTTPRequestHandler):
    """The one answer that a running server is asked for."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def urls():
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_repeats_alternate_and_each_is_a_row(tmp_path, monkeypatch, urls) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("serve", None)
    import serve

    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    serve.main(
        [
            str(rows), "--urls", f"off={urls[0]} force={urls[1]}", "--model", str(tmp_path),
            "--client", f"{sys.executable} {tmp_path / 'client.py'}", "--points", "16x4,32x4",
            "--repeats", "2",
        ]
    )  # fmt: skip
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    small, large = "16 + 4 tokens", "32 + 4 tokens"
    assert [(row["repeat"], row["case"], row["backend"]) for row in found] == [
        (0, small, "off"), (0, small, "force"), (0, large, "off"), (0, large, "force"),
        (1, small, "force"), (1, small, "off"), (1, large, "force"), (1, large, "off"),
    ]  # fmt: skip
    assert all(row["tpot_ms"] == row["repeat"] + 1 for row in found)
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    measured = [(urls.index(url), tokens) for url, tokens, seed in asked if seed != "0"]
    first = [(0, "16"), (1, "16"), (0, "32"), (1, "32")]
    second = [(1, "16"), (0, "16"), (1, "32"), (0, "32")]
    assert measured == first + second


def options(rows: Path, **given: object) -> argparse.Namespace:
    common = {"layers": 1, "experts": 1, "label": "", "concurrency": 1, "prompts": 16, "beside": ""}
    common |= {"urls": None, "caches": None, "end": 0, "budget": 0}
    return argparse.Namespace(rows=rows, **common | given)


def test_a_repeat_that_would_end_too_late_is_left_out(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve

    now = 0.0

    def bench(_: object, point: tuple[int, int]) -> dict[str, float]:
        nonlocal now
        now += 1 if point[0] == 16 else 10
        return dict.fromkeys(serve._KEPT, 1.0)

    monkeypatch.setattr(serve.time, "monotonic", lambda: now)
    monkeypatch.setattr(serve, "bench", bench)
    monkeypatch.setattr(serve, "client_options", lambda _, point, *more: point)
    asked = options(tmp_path / "rows", points=[(16, 4), (32, 4)], repeats=5)
    servers = [serve.Server("off"), serve.Server("force")]
    # 22 s of a repeat, then 4 of a second one's short point and of two more.
    serve.measure(servers, tmp_path, asked, serve.Report(asked), 30)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    short = [row["backend"] for row in rows if row["case"] == "16 + 4 tokens"]
    assert short == ["off", "force", "force", "off", "off", "force", "force", "off", "off", "force"]
    assert [row["backend"] for row in rows if row["case"] == "32 + 4 tokens"] == ["off", "force"]


def test_a_server_that_does_not_start_has_a_row(tmp_path, monkeypatch, urls) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve

    def start(server: serve.Server, *_: object) -> None:
        server.url = urls[0] if server.mode == "force" else "http://127.0.0.1:9"

    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "client.py").write_text(CLIENT)
    full = tmp_path / "caches" / "force" / "triton" / "kernel"
    full.parent.mkdir(parents=True)
    full.touch()
    monkeypatch.setattr(serve.Server, "start", start)
    monkeypatch.setattr(serve.Server, "first_token", lambda *_: 1.0)
    asked = options(
        tmp_path / "rows", points=[(16, 4)], repeats=1, seconds=0.5, unmeasured=1,
        caches=tmp_path / "caches", client=f"{sys.executable} {tmp_path / 'client.py'}",
    )  # fmt: skip
    servers = [serve.Server("off"), serve.Server("force")]
    serve.run_all(servers, tmp_path, asked, serve.Report(asked))
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    found = {(row["case"], row["backend"]): row for row in rows}
    assert set(found) == {
        ("a server, not ready", "off"), ("a server", "force"), ("16 + 4 tokens", "force")
    }  # fmt: skip
    assert found["a server", "force"]["caches"] == ["triton"]
    assert found["a server, not ready", "off"]["caches"] == []
    assert found["a server, not ready", "off"]["waited_s"] >= 0.5


def test_no_text_of_the_random_model_looks_longer_than_its_tokens(tmp_path, monkeypatch) -> None:
    """vLLM counts characters: no more than a text's tokens times the longest word."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import random_model

    random_model.save(tmp_path, experts=64, layers=4)
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(random_model.VOCABULARY))
    *others, longest = sorted(map(len, words))
    assert others[-1] + len(" ") < longest


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('broken client')", "broken client"),
        (CLIENT.replace('"completed": 16', '"completed": 9'), "9 of 16 requests were answered"),
    ],
)
def test_a_run_that_lacks_answers_is_none(tmp_path, monkeypatch, program, words) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve

    (tmp_path / "client.py").write_text(program)
    asked = argparse.Namespace(client=f"{sys.executable} {tmp_path / 'client.py'}", prompts=16)
    given = ["--base-url", "none", "--random-input-len", "16", "--seed", "1"]
    with pytest.raises(RuntimeError, match=words):
        serve.bench(asked, given)
