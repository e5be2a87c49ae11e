import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inputs import prompt_of
from servers import needs_worker, serve

pytestmark = needs_worker

SECONDS = 60  # for a server of tiny layers to do anything


@pytest.fixture(scope="module")
def address(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with serve(checkpoint, log, "--max-model-len", "4096", "--max-num-seqs", "4") as served:
        yield served


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS, max_retries=0)


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    (listed,) = client.models.list().data
    return listed.id


def gauges(address: str) -> dict[str, float]:
    """Requests and pages in use, from the server's metrics."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=SECONDS).read().decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {}
    for line in text.splitlines():
        for name in names:
            if line.startswith(f"vllm:{name}{{"):
                found[name] = float(line.rsplit(" ", 1)[1])
    assert set(found) == set(names), text[:2000]
    return found


def wait_for(address: str, holds: Any) -> dict[str, float]:
    for _ in range(SECONDS * 5):
        now = gauges(address)
        if holds(now):
            return now
        time.sleep(0.2)
    raise AssertionError(f"still {now} after {SECONDS} s")


def test_a_completion(client: Any, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=prompt_of(50), max_tokens=8, temperature=0
    )
    assert answer.usage.prompt_tokens == 50
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_chat(client: Any, model: str) -> None:
    messages = [{"role": "user", "content": "How many sinks has a head?"}]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0
    )
    assert answer.usage.completion_tokens > 0
    assert answer.choices[0].message.role == "assistant"


def test_a_stream_gives_the_tokens_of_the_whole_answer(client: Any, model: str) -> None:
    asked = {
        "model": model,
        "prompt": prompt_of(60),
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked)]
    assert len(pieces) > 2
    assert "".join(pieces) == whole


def test_several_at_once_answer_each_as_alone(client: Any, model: str) -> None:
    def ask(length: int) -> str:
        answer = client.completions.create(
            model=model,
            prompt=prompt_of(length),
            max_tokens=16,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage.completion_tokens == 16
        return answer.choices[0].text

    lengths = [20, 90, 300, 700, 40, 130]
    with ThreadPoolExecutor(len(lengths)) as pool:
        together = list(pool.map(ask, lengths))
    # Tokens may differ from those alone: vLLM's linear layers round by batch size.
    assert all(together)


def test_a_cancelled_request_frees_its_pages(address: str, client: Any, model: str) -> None:
    wait_for(address, lambda now: not now["num_requests_running"])
    idle = gauges(address)["kv_cache_usage_perc"]
    stream = client.completions.create(
        model=model,
        prompt=prompt_of(1500),
        max_tokens=2500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    busy = wait_for(address, lambda now: now["kv_cache_usage_perc"] > idle)
    assert busy["num_requests_running"] == 1
    stream.close()
    free = wait_for(address, lambda now: not now["num_requests_running"])
    assert free["kv_cache_usage_perc"] == idle
    assert free["num_requests_waiting"] == 0


def test_a_bad_request_is_refused_and_the_next_one_served(address: str, client: Any) -> None:
    body = json.dumps({"model": "nothing", "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=SECONDS)
    assert refused.value.code == 404
    refused.value.close()
    assert client.models.list().data
