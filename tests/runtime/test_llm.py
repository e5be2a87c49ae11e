"""``LLM`` on the trained tiny checkpoint of the examples."""

import json
import pathlib
import shutil

import pytest

import anymla
from anymla import LLM
from anymla.model.config_fields import ConfigError
from anymla.model.generation import ChatTemplate, GenerationDefaults

CHECKPOINT = pathlib.Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"
PROMPT = "And the LORD said unto Moses,"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHECKPOINT, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def greedy(llm):
    return llm.generate(PROMPT, max_new_tokens=24, temperature=0)


def test_a_text_is_continued(llm, greedy) -> None:
    assert len(greedy.token_ids) == len(greedy.logprobs) == 24
    assert greedy.finish_reason == "length"
    assert greedy.text == llm.tokenizer.decode(greedy.token_ids)
    assert greedy.prompt_token_ids == tuple(llm.tokenizer.encode(PROMPT))
    assert greedy.drafted > 0


def test_drafts_and_neighbours_change_no_token(llm, greedy) -> None:
    alone = LLM(CHECKPOINT, dtype="fp32", device="cpu", drafts="off")
    assert alone.generate(PROMPT, max_new_tokens=24, temperature=0).token_ids == greedy.token_ids
    batch = llm.generate(
        ["The old man", PROMPT, llm.tokenizer.encode(PROMPT)], max_new_tokens=24, temperature=0
    )
    assert [each.token_ids for each in batch[1:]] == [greedy.token_ids] * 2
    assert batch[0].text != greedy.text


def test_a_prompt_asked_again_by_itself_gives_the_same_bits() -> None:
    """Whatever pages it is given: in bfloat16, where a sum in another order rounds otherwise."""
    alone = LLM(CHECKPOINT, dtype="bf16", device="cpu", drafts="off", max_requests=1)
    ids = alone.tokenizer.encode((CHECKPOINT.parent / "persuasion.txt").read_text("utf-8"))
    prompts = [ids[:300], ids[500:670], ids[:300], ids[700:800], ids[:300]]
    done = alone.generate(prompts, max_new_tokens=8, temperature=0, ignore_eos=True)
    for again in done[2::2]:
        assert again.token_ids == done[0].token_ids
        assert again.logprobs == done[0].logprobs


def test_a_stream_is_the_same_text(llm, greedy) -> None:
    parts = list(llm.stream(PROMPT, max_new_tokens=24, temperature=0))
    assert len(parts) > 8
    assert "".join(parts) == greedy.text


def test_a_stop_string_ends_the_text_before_it(llm, greedy) -> None:
    words = greedy.text.split()
    stop = words[4][-1] + " " + words[5][:2]  # across tokens
    done = llm.generate(PROMPT, max_new_tokens=24, temperature=0, stop=["never", stop])
    assert done.text == greedy.text[: greedy.text.index(stop)]
    assert done.finish_reason == "stop"
    assert done.token_ids == greedy.token_ids[: len(done.token_ids)]
    assert len(done.logprobs) == len(done.token_ids) < 24
    assert "".join(llm.stream(PROMPT, max_new_tokens=24, temperature=0, stop=stop)) == done.text
    with pytest.raises(ValueError, match="must not be empty"):
        llm.generate(PROMPT, stop="")


def test_others_go_on_after_one_has_stopped(llm, greedy) -> None:
    stop = greedy.text[10:16]
    both = llm.generate([PROMPT, "The old man"], max_new_tokens=24, temperature=0, stop=stop)
    assert both[0].finish_reason == "stop"
    assert len(both[1].token_ids) == 24


def test_a_seed_names_a_text(llm) -> None:
    first, same, other = (
        llm.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=seed).token_ids
        for seed in (1, 1, 2)
    )
    assert first == same != other


@pytest.mark.parametrize("strict", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_the_strictest_sampling_is_greedy(llm, greedy, strict) -> None:
    options = {"temperature": 1.5, "top_p": 1.0} | strict
    done = llm.generate(PROMPT, max_new_tokens=24, **options)
    assert done.token_ids == greedy.token_ids


def test_what_the_checkpoint_says_holds_where_the_caller_says_nothing(llm) -> None:
    said = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert llm.defaults.temperature == said["temperature"] > 0
    explicit = llm.generate(
        PROMPT, max_new_tokens=16, temperature=said["temperature"], top_p=said["top_p"]
    )
    assert llm.generate(PROMPT, max_new_tokens=16).token_ids == explicit.token_ids


def test_a_dialogue_is_answered(llm) -> None:
    text = "The ship came home. The passkey is 482193. Nobody saw her again. What is the passkey?"
    messages = [{"role": "user", "content": text}]
    done = llm.chat(messages, max_new_tokens=20, temperature=0)
    assert "482193" in done.text
    assert done.finish_reason == "stop"
    ids = llm.chat_prompt(messages)
    assert ids[0] == 0
    assert ids.count(0) == 1
    going_on = llm.chat(messages, max_new_tokens=20, temperature=0, ignore_eos=True)
    assert going_on.finish_reason == "length"
    assert going_on.token_ids[: len(done.token_ids)] == done.token_ids
    assert (done.reasoning, done.tool_calls) == ("", ())
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    assert llm.chat(parts, max_new_tokens=20, temperature=0) == done
    assert llm.chat(text, max_new_tokens=20, temperature=0) == done
    streamed = llm.stream_chat(messages, max_new_tokens=20, temperature=0)
    with pytest.raises(RuntimeError, match="the answer has not ended"):
        streamed.result  # noqa: B018
    assert "".join(part.text for part in streamed) == done.text
    assert streamed.result == done
    begun = [*messages, {"role": "assistant", "content": "4821"}]
    assert llm.chat(begun, max_new_tokens=20, temperature=0).text == done.text[4:] == "93."


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([[9999]], {}, "unknown token id 9999"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("a", {"top_k": -1}, "top_k must be at least 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(llm, prompt, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, **options)


def test_no_prompts_give_no_texts(llm) -> None:
    assert llm.generate([]) == []


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be bf16 or fp32, got 'fp16'"):
        LLM(CHECKPOINT, dtype="fp16")


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        anymla.LMM  # noqa: B018


def _with(tmp_path, **fields) -> pathlib.Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    return tmp_path


def test_generation_defaults(tmp_path) -> None:
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults()
    quiet = _with(tmp_path, temperature=0.7, eos_token_id=[1, 5], max_new_tokens=9)
    assert GenerationDefaults.from_dir(quiet) == GenerationDefaults(
        max_new_tokens=9, eos_token_ids=(1, 5)
    )
    loud = _with(tmp_path, do_sample=True, top_k=5, min_p=0, eos_token_id=1)
    assert GenerationDefaults.from_dir(loud) == GenerationDefaults(
        temperature=1.0, top_k=5, eos_token_ids=(1,)
    )
    with pytest.raises(ConfigError, match=r"generation_config\.json\.top_k is -1"):
        GenerationDefaults.from_dir(_with(tmp_path, do_sample=True, top_k=-1))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read"):
        GenerationDefaults.from_dir(tmp_path)


def test_chat_templates(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.from_dir(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    hello = [{"role": "user", "content": "hello"}]
    assert ChatTemplate.from_dir(tmp_path).render(hello) == "<s>old"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ChatTemplate.from_dir(tmp_path).render(hello) == "hello"
    with pytest.raises(ValueError, match='a message needs "role" and "content"'):
        ChatTemplate.from_dir(tmp_path).render([{"role": "user"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{", "the chat template cannot be read"),
        ("{{ raise_exception('no tools here') }}", "refuses the messages: no tools here"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
    ],
)
def test_a_template_is_a_program_of_strangers(source, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hello"}])


def test_a_checkpoint_without_a_template_generates_all_the_same(tmp_path) -> None:
    for path in CHECKPOINT.iterdir():
        if path.name not in ("tokenizer_config.json", "generation_config.json"):
            shutil.copy(path, tmp_path)
    plain = LLM(tmp_path, dtype="fp32", device="cpu")
    assert len(plain.generate(PROMPT, max_new_tokens=3).token_ids) == 3
    # It was trained with a template of its own, and has no tokens for thinking.
    lacking = "has no chat template, and its tokenizer lacks .*: <think>, </think>$"
    with pytest.raises(ConfigError, match=lacking):
        plain.chat([{"role": "user", "content": "hello"}])
