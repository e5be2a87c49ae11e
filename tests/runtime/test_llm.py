"""``LLM`` on the trained tiny checkpoint of the examples."""

import inspect
import json
import pathlib
import shutil
from typing import get_type_hints

import numpy as np
import pytest
import torch

import anymla
from anymla import LLM
from anymla.model.config_fields import ConfigError
from anymla.model.generation import ChatTemplate, GenerationDefaults
from anymla.model.load import activation_dtype, dtype_name
from anymla.runtime.generation_options import GenerationOptions
from anymla.runtime.sampler import DEFAULTED, Sampling

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
        ("a", {"top_k": -2}, "top_k must be at least 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(llm, prompt, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, **options)


def test_no_prompts_give_no_texts(llm) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize("dtype", ["fp16", "half", torch.float16, torch.int8, None])
def test_a_dtype_that_there_is_not_is_refused(dtype) -> None:
    with pytest.raises(ValueError, match=r"dtype must be bf16 \(bfloat16\), fp32"):
        LLM(CHECKPOINT, dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp32", "float32", "torch.float32", torch.float32, torch.float])
def test_a_dtype_has_many_names(dtype, tmp_path) -> None:
    assert activation_dtype(dtype, tmp_path) == torch.float32
    assert dtype_name(dtype) == "fp32"


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_auto_is_what_the_checkpoint_says_of_what_there_is(said, dtype, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert activation_dtype("auto", tmp_path) == dtype
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        activation_dtype("auto", tmp_path)


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "one",
    [
        IDS,
        tuple(IDS),
        range(5, 8),
        np.array(IDS),
        np.array(IDS, dtype=np.uint16),
        [np.int64(5), 6, torch.tensor(7)],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_prompt_is_a_text_or_token_ids_of_any_kind(llm, one) -> None:
    wanted = llm.generate([IDS], max_new_tokens=3, temperature=0)
    assert [each.prompt_token_ids for each in wanted] == [(5, 6, 7)]
    assert llm.generate(one, max_new_tokens=3, temperature=0) == wanted[0]
    both = llm.generate([one, "In the"], max_new_tokens=3, temperature=0)
    assert both[0].token_ids == wanted[0].token_ids
    assert "".join(llm.stream(one, max_new_tokens=3, temperature=0)) == wanted[0].text


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_rows_of_an_array_are_prompts(llm, array) -> None:
    done = llm.generate(array([IDS, IDS]), max_new_tokens=2, temperature=0)
    assert [each.prompt_token_ids for each in done] == [(5, 6, 7)] * 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "got NoneType"),
        (5, "got int"),
        (b"text", "got bytes"),
        ([5.0], "got float"),
        ([True, False], "got bool"),
        (["a", 5], "a prompt must be a text, token ids"),
        ([[5, "a"]], "token ids must be integers, got str"),
        (torch.zeros(3), "got float"),
        (torch.zeros(1, 1, 1), r"must be \[T\] or \[prompts, T\], got \[1, 1, 1\]"),
        ({"input_ids": IDS}, "give what is under 'input_ids'"),
        ([{"prompt": "a"}], "give what is under 'prompt'"),
        ([{"role": "user", "content": "a"}], "messages go to LLM.chat"),
    ],
)
def test_what_is_no_prompt_is_named(llm, prompt, message) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(prompt)


def test_one_prompt_is_streamed(llm) -> None:
    with pytest.raises(TypeError, match=r"streams one prompt; LLM\.generate takes several"):
        llm.stream(["a", "b"])


class SamplingParams:
    """Another library's."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("a", max_tokens=3), "did you mean max_new_tokens?"),
        (lambda llm: llm.generate("a", max_lenght=3), "max_new_tokens does not"),
        (lambda llm: llm.generate("a", top_K=3), "did you mean top_k?"),
        (lambda llm: llm.generate("a", tempreature=3), "did you mean temperature?"),
        (lambda llm: llm.generate("a", do_sample=True), "temperature 0 takes the best token"),
        (lambda llm: llm.generate("a", sampling_params=SamplingParams()), "max_new_tokens, temp"),
        (lambda llm: llm.generate("a", SamplingParams()), "got SamplingParams by position"),
        (lambda llm: llm.generate(prompt="a"), "the first argument takes a text"),
        (lambda llm: llm.generate("a", zzz=1), "there are max_new_tokens, temperature"),
        (lambda llm: llm.stream("a", max_tokens=3), "LLM.stream: no option 'max_tokens'"),
        (lambda llm: llm.chat("a", max_tokens=3), "LLM.chat: no option 'max_tokens'"),
        (lambda llm: LLM("x", torch_dtype="auto"), "did you mean dtype?"),
        (lambda llm: LLM("x", tensor_parallel_size=2), "torchrun --nproc-per-node N"),
        (lambda llm: LLM("x", trust_remote_code=True), "a checkpoint's code is never run"),
        (lambda llm: LLM("x", "cuda"), "options are keywords, got str by position"),
    ],
)
def test_a_wrong_option_is_refused_with_the_right_one(llm, call, message) -> None:
    with pytest.raises(TypeError) as caught:
        call(llm)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": "3"}, "max_new_tokens must be an integer, got '3'"),
        ({"max_new_tokens": 3.0}, "max_new_tokens must be an integer, got 3.0"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"stop": 5}, "stop must be a string or strings, got 5"),
        ({"stop": ["a", 5]}, "stop must be a string or strings"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_an_option_of_another_type_is_named(llm, options, message) -> None:
    with pytest.raises(TypeError) as caught:
        llm.generate("a", **options)
    assert message in str(caught.value)


def test_none_is_as_if_left_out_and_numbers_may_be_numpys(llm) -> None:
    nothing = dict.fromkeys(GenerationOptions.__annotations__)
    options = {"max_new_tokens": np.int32(3), "temperature": np.float32(0)}
    done = llm.generate("a", **(nothing | options))
    assert done == llm.generate("a", max_new_tokens=3, temperature=0)


@pytest.mark.parametrize("method", [LLM.generate, LLM.stream, LLM.chat])
def test_a_signature_shows_every_option_with_its_default(method) -> None:
    shown = inspect.signature(method).parameters
    own = inspect.signature(LLM._asked).parameters.values()
    taken = {each.name: each.default for each in own if each.kind is each.KEYWORD_ONLY}
    # Values of a sampling that are not given are the checkpoint's, but the seed.
    taken |= dict.fromkeys(DEFAULTED) | {"seed": Sampling().seed}
    for name, hint in get_type_hints(GenerationOptions).items():
        assert shown[name].default == taken[name]
        assert shown[name].annotation == hint
    assert taken.keys() == GenerationOptions.__annotations__.keys() <= shown.keys()


def test_a_text_is_a_message_of_the_users(llm) -> None:
    text = "The passkey is 482193. What is the passkey?"
    said = llm.chat(text, max_new_tokens=12, temperature=0)
    messages = [{"role": "user", "content": text}]
    assert said == llm.chat(messages, max_new_tokens=12, temperature=0)
    assert "482193" in said.text
    for wrong in (messages[0], ["a"], 5):
        with pytest.raises(TypeError, match="messages must be a text or a list of"):
            llm.chat(wrong)


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
    endless = _with(tmp_path, max_new_tokens=10**30, max_length=10**30)
    assert GenerationDefaults.from_dir(endless) == GenerationDefaults(max_new_tokens=2**31 - 1)
    for top_k in (-1, 0, None):
        said = GenerationDefaults.from_dir(_with(tmp_path, do_sample=True, top_k=top_k))
        assert said == GenerationDefaults(temperature=1.0)
    with pytest.raises(ConfigError, match=r"generation_config\.json\.top_k is -2"):
        GenerationDefaults.from_dir(_with(tmp_path, do_sample=True, top_k=-2))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read"):
        GenerationDefaults.from_dir(tmp_path)


def test_generation_defaults_of_penalties(tmp_path) -> None:
    said = GenerationDefaults.from_dir(
        _with(tmp_path, repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0)
    )
    assert said == GenerationDefaults(repetition_penalty=1.1, presence_penalty=-0.5)
    assert said.unapplied_line is None
    for name, value in (
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e9),
        ("repetition_penalty", True),
        ("presence_penalty", "high"),
        ("frequency_penalty", 101),
    ):
        with pytest.raises(
            ConfigError, match=f"generation_config.json.{name} is .*, supported: a "
        ):
            GenerationDefaults.from_dir(_with(tmp_path, **{name: value}))


NEUTRAL = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "suppress_tokens": None,
    "bad_words_ids": [],
    "guidance_scale": 1,
    "min_new_tokens": 0,
    "early_stopping": False,
    "output_scores": True,
    "transformers_version": "4.57.0",
}


def test_what_changes_a_text_and_is_not_applied_is_said(tmp_path) -> None:
    assert GenerationDefaults.from_dir(_with(tmp_path, **NEUTRAL)).unapplied_line is None
    fields = {"num_beams": 4, "no_repeat_ngram_size": 1, "suppress_tokens": [3], "typical_p": 0.9}
    quiet = GenerationDefaults.from_dir(_with(tmp_path, **NEUTRAL | fields))
    line = "generation_config.json: not applied: no_repeat_ngram_size, num_beams, suppress_tokens"
    assert quiet.unapplied_line == line
    loud = GenerationDefaults.from_dir(_with(tmp_path, do_sample=True, **NEUTRAL | fields))
    assert loud.unapplied_line == f"{line}, typical_p"


@pytest.fixture
def short(tmp_path) -> pathlib.Path:
    """The checkpoint with a context of 160 tokens."""
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 160}))
    return tmp_path


def test_a_default_length_refuses_no_prompt_that_fits(short) -> None:
    llm = LLM(short, device="cpu", drafts="off")
    prompts = [[300] * 155, [300] * 100, [300] * 159]
    done = llm.generate(prompts, ignore_eos=True, temperature=0)
    assert [len(each.token_ids) for each in done] == [5, 60, 1]
    assert len("".join(llm.stream([300] * 158, ignore_eos=True))) > 0
    with pytest.raises(ValueError, match="155 prompt tokens and 6 new ones exceed"):
        llm.generate([[300] * 155], max_new_tokens=6)
    with pytest.raises(ValueError, match="160 prompt tokens and 1 new ones exceed"):
        llm.generate([[300] * 160])
    (short / "generation_config.json").write_text(json.dumps({"max_new_tokens": 500}))
    llm = LLM(short, device="cpu", drafts="off")
    (again,) = llm.generate([[300] * 155], ignore_eos=True, temperature=0)
    assert again.token_ids == done[0].token_ids


def test_generation_config_is_applied(short, capsys) -> None:
    plain = LLM(short, device="cpu").generate("And the", max_new_tokens=40, temperature=0)
    fields = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}
    (short / "generation_config.json").write_text(json.dumps(fields))
    capsys.readouterr()
    llm = LLM(short, device="cpu")
    line = "generation_config.json: not applied: no_repeat_ngram_size\n"
    assert capsys.readouterr().err == line
    penalised = llm.generate("And the", max_new_tokens=40, temperature=0)
    assert penalised.token_ids != plain.token_ids
    assert len(set(penalised.token_ids)) > len(set(plain.token_ids))
    # Drafts are verified under the same penalties.
    assert penalised.drafted > 0
    free = llm.generate("And the", max_new_tokens=40, temperature=0, repetition_penalty=1.0)
    assert free.token_ids == plain.token_ids


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
