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


def test_repeats_alternate_and_rows_hold_every_one(tmp_path, monkeypatch, urls) -> None:
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
    assert [(row["case"], row["backend"]) for row in found] == [
        ("16 + 4 tokens", "off"), ("16 + 4 tokens", "force"),
        ("32 + 4 tokens", "off"), ("32 + 4 tokens", "force"),
    ]  # fmt: skip
    assert all(row["tpot_ms"] == [1.0, 2.0] for row in found)
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    measured = [(urls.index(url), tokens) for url, tokens, seed in asked if seed != "0"]
    first = [(0, "16"), (1, "16"), (0, "32"), (1, "32")]
    second = [(1, "16"), (0, "16"), (1, "32"), (0, "32")]
    assert measured == first + second


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
