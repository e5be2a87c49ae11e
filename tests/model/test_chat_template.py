"""Chat templates are rendered as transformers renders them, and within bounds."""

import dataclasses
import enum
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anymla.model.chat_template import _PROCESS, ChatTemplate
from anymla.model.config_fields import ConfigError
from anymla.testing.tiny_tokenizer import BOS, EOS, write_tokenizer

Messages = list[dict[str, Any]]
MESSAGES: Messages = [
    {"role": "system", "content": "S <b>&é'\""},
    {"role": "user", "content": "hi\n\tthere 😀", "name": None},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": [1.5, None]}}}
        ],
    },
    {"role": "tool", "content": '{"t": 1}'},
    {"role": "user", "content": [{"type": "text", "text": "and? "}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
DOCUMENTS = [{"title": "T", "text": "x"}]

# What public templates are made of.
TEMPLATES = {
    "json": "{{ '<tool>' + (messages[0] | tojson) + '</tool>' }}",
    "json with arguments": (
        "{{ messages[2] | tojson(indent=2) }}{{ messages[2].tool_calls | tojson(ensure_ascii=True, "
        "separators=(',', ':'), sort_keys=true) }}{{ tools | tojson(indent='\t') }}"
    ),
    "namespace": (
        "{% set ns = namespace(sys='', first=true) %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.sys = m['content'] %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ ns.sys }}{% for m in messages if m['role'] == 'user' %}<U>"
        "{{ m.content }}{% set ns.first = false %}{% endfor %}<A>{{ ns.first }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}"
        "{{ m.reasoning_content }}\n{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "helpers": (
        "{% set c = cycler('a', 'b') %}{% set j = joiner(', ') %}{% for i in range(3) %}"
        "{{ j() }}{{ c.next() }}{{ i }}{% endfor %}{{ dict(a=1, b='x') }}{{ dict.fromkeys('ab') }}"
    ),
    "macro": (
        "{%- macro say(m, end='') %}<{{ m.role }}>{{ caller() if caller else '' }}{{ end }}"
        "{% endmacro -%}\n{%- for m in messages %}{{ say(m, end='\n') }}{% endfor %}"
        "{% call say(messages[0]) %}!{% endcall %}"
    ),
    "blanks": "  {% if true %}\n    x  \n  {%- endif %}\n{# no #}\n  {{ 'y' }}  \n\n",
    "strings": (
        "{{ messages[1].content.split('\n')[-1].strip() | upper | trim }}"
        "{{ messages[0].content[::-1] }}{{ messages[1].content.startswith('hi') }}"
        "{{ '%s-%05.2f' % ('a', 2) }}{{ '{:>5}'.format('b') }}"
        "{{ ['b', 'a'] | sort | join('+') }}{{ messages | map(attribute='role') | list }}"
    ),
    "tests": (
        "{{ x is defined }}{{ messages is iterable }}{{ messages[2].content is none }}"
        "{{ messages[2].content is defined }}{{ messages[4].content is string }}"
        "{{ tools is not none }}"
        "{{ 'name' in messages[1] }}{{ messages[0] is mapping }}{{ x or 'y' }}"
    ),
    "reasoning": (
        "{{ messages[2].thinking }}{{ messages[2].reasoning_content }}{{ messages[2].reasoning }}"
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{{ tool | tojson }}"
        "{% endfor %}{% else %}none{% endif %}{% if documents %}{{ documents | length }}{% endif %}"
    ),
    "prompt": "{% if add_generation_prompt %}<A>{% endif %}{{ enable_thinking }}{{ pad_token }}",
    "blocks and filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% filter upper %}abc{% endfilter %}{% raw %}{{ x }}{% endraw %}"
        "{{ messages | tojson | length }}"
    ),
}


def rendered_by_transformers(source: str, **given: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    from anymla.testing.tiny_tokenizer import tiny_tokenizer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(260), bos_token=BOS, eos_token=EOS
    )
    given = {"add_generation_prompt": True} | given
    return tokenizer.apply_chat_template(
        given.pop("messages", MESSAGES), chat_template=source, tokenize=False, **given
    )


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_transformers(name: str) -> None:
    source = TEMPLATES[name]
    for given in (
        {},
        {"tools": TOOLS, "documents": DOCUMENTS},
        {"add_generation_prompt": False, "enable_thinking": False},
    ):
        want = rendered_by_transformers(source, **given)
        assert template(source).render(MESSAGES, **given) == want
        assert want or name == "tools"


def test_the_json_of_the_report() -> None:
    got = template(TEMPLATES["json"]).render([{"role": "user", "content": "hi <b>é"}])
    assert got == '<tool>{"role": "user", "content": "hi <b>é"}</tool>'


def test_the_clock() -> None:
    assert template("{{ strftime_now('%Y') }}").render(MESSAGES) == time.strftime("%Y")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
        "{% for m in messages %}{{ m.content.split('|')[-1] }}{{ eos_token }}{% endfor %}",
    ],
)
def test_a_message_that_is_to_be_continued(source: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I know: "},
    ]
    given = {"continue_final_message": True, "add_generation_prompt": False}
    want = rendered_by_transformers(source, messages=messages, **given)
    assert template(source).render(messages, continue_final_message=True) == want
    assert messages[1]["content"] == "I know: "


def test_parts_of_a_message_that_is_to_be_continued() -> None:
    source = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    parts = [{"text": "a"}, {"text": "b"}]
    got = template(source).render(
        [{"role": "assistant", "content": parts}], continue_final_message=True
    )
    assert got == "<a><b"
    for source in ("x", "{{ messages[0].content[1:] }}"):
        with pytest.raises(ConfigError, match="leaves out some of the message that is to be conti"):
            template(source).render([{"role": "user", "content": "a"}], continue_final_message=True)
    with pytest.raises(ValueError, match="the last message has no text"):
        template("x").render([{"role": "user", "content": []}], continue_final_message=True)


def test_objects_reach_a_template_as_plain_values() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    @dataclasses.dataclass
    class Part:
        type: str
        number: Any

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"a": (1, True)}

    content = [Part("text", np.float32(1.5)), Model(), np.zeros(2), {"b": np.int64(3)}, object()]
    got = template("{{ messages[0].role }}{{ messages[0].content }}").render(
        [{"role": Role.USER, "content": content}]
    )
    assert got == (
        "user[{'type': 'text', 'number': 1.5}, {'a': (1, True)}, '<ndarray>', {'b': 3}, '<object>']"
    )
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested too deeply"):
        template("x").render([{"role": "user", "content": loop}])


@pytest.mark.parametrize(
    ("messages", "given", "message"),
    [
        ([], {}, "at least one message"),
        ([{"role": "user"}], {}, 'needs "role" and "content"'),
        ([{"content": "a"}], {}, 'needs "role" and "content"'),
        (["hi"], {}, "a message must be an object, got str"),
        ([{"role": "user", "content": "a"}], {"tools": [len]}, "tools must hold JSON objects"),
        ([{"role": "user", "content": "a"}], {"tools": {"a": 1}}, "tools must be a list"),
        ([{"role": "user", "content": "a"}], {"documents": ["x"]}, "documents must hold JSON"),
    ],
)
def test_dialogues_that_are_none(messages: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        template("x").render(messages, **given)
    assert "\n" not in str(caught.value)


# Files.


def written(directory: Path, config: dict[str, Any], **files: str) -> Path:
    write_tokenizer(directory, 262, 1000)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    for name, text in files.items():
        file = directory / f"{name.replace('__', '/')}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode())
    return directory


NAMED = [
    {"name": "default", "template": "D{{ bos_token }}"},
    {"name": "tool_use", "template": "T{{ tools | length }}"},
]
FILES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "in the configuration": ({"chat_template": "C{{ eos_token }}"}, {}),
    "by name": ({"chat_template": NAMED}, {}),
    "only the default": ({"chat_template": NAMED[:1]}, {}),
    "a file goes before it": ({"chat_template": NAMED}, {"chat_template": "F\r\n\n"}),
    "further files": (
        {"chat_template": "C"},
        {"chat_template": "F", "additional_chat_templates__tool_use": "FT"},
    ),
    "tokens": (
        {
            "chat_template": "{{ pad_token }}{{ image_token }}{{ unk_token }}{{ x_token }}",
            "pad_token": {"content": "<pad>", "lstrip": True, "__type": "AddedToken"},
            "image_token": "<image>",
            "unk_token": None,
            "extra_special_tokens": {"x_token": "<x>"},
        },
        {},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_templates_and_tokens_of_files(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config, files = FILES[name]
    directory = written(tmp_path, config, **files)
    other = AutoTokenizer.from_pretrained(directory)
    ours = ChatTemplate.from_dir(directory)
    for tools in (None, TOOLS):
        want = other.apply_chat_template(
            MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(MESSAGES, tools=tools) == want


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    directory = written(tmp_path, {"chat_template": NAMED[1:]})
    with pytest.raises(ConfigError, match="there is no default one, but tool_use"):
        ChatTemplate.from_dir(directory).render(MESSAGES)
    file = directory / "chat_template.jinja"
    for held, message in (
        (b"\xff\xfe{{x}}", r"chat_template.jinja: cannot be read: not UTF-8: invalid start byte"),
        (b"x" * ((1 << 20) + 1), r"chat_template.jinja: cannot be read: longer than 1048576"),
    ):
        file.write_bytes(held)
        with pytest.raises(ConfigError, match=message) as caught:
            ChatTemplate.from_dir(directory)
        assert "\n" not in str(caught.value)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"chat_template.jinja: cannot be read: not a file, but"):
        ChatTemplate.from_dir(directory)


# Strangers.

BOMBS = {
    "a long loop": "{% for i in range(10**9) %}x{% endfor %}",
    "loops within loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "a loop whose items are left out": (
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}"
    ),
    "a product of a string": "{{ 'x' * 10**9 }}",
    "a product of a list": "{{ ([0] * 10**9) | length }}",
    "in parts": "{% set x = 'x' * 10**8 %}{{ x }}{{ x }}{{ x }}",
    "center": "{{ 'x'.center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}{{ 'x' | center(10**9) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a format": "{{ '{:1000000000}'.format(1) }}",
    "replace": "{{ ('x' * 99999).replace('x', 'y' * 99999) | length }}",
    "join": "{{ (['x'] * 99999) | join('y' * 99999) | length }}",
    "a doubling string": (
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}{{ ns.x | length }}"
    ),
    "a doubling list": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "a macro of itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "two macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "a power": "{{ (10 ** (10 ** 8)) % 7 }}",
    "powers": "{{ (7 ** (7 ** (7 ** 7))) % 3 }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "indented JSON": "{{ messages | tojson(indent=10**9) }}",
    "separated JSON": "{{ messages | tojson(separators=('x' * 10**9, ':')) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**9, 0) | list | length }}",
    "wordwrap": "{{ 'a b' | wordwrap(1, wrapstring='x' * 10**9) | length }}",
    "lipsum": "{{ lipsum(10**6) | length }}",
    "an old range": "{{ range(99999) | list | product(range(99999)) }}",
    "deep parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a long sum": "{{ 1" + "+1" * 200_000 + " }}",
    "much text": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "a constant": "{% set x = ('x' * 10**5) * 10**5 %}",
    "an attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "a format of an attribute": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "a change": "{{ messages.append(1) }}",
    "an import": "{% include 'config.json' %}{% import 'x' as y %}",
    "a private name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a type error": "{{ messages[0].content + 1 }}",
    "a division": "{{ 1 // 0 }}",
    "a name": "{{ nothing.at.all }}",
    "a key": "{{ {}['a'].b }}",
    "a syntax": "{{",
    "a tag": "{% nothing %}",
    "an exception": "{{ raise_exception('no\ntools ' ~ 'here' * 999) }}",
    "a date": "{{ strftime_now(5) }}",
    "JSON of what is none": "{{ range(3) | tojson }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_has_bounds_and_its_faults_are_a_line(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^the chat template") as caught:
        template(BOMBS[name]).render(MESSAGES)
    assert time.monotonic() - began < 20  # a second on a quiet machine
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    # What comes next is rendered as ever.
    assert template("{{ bos_token }}").render(MESSAGES) == BOS


def test_faults_say_where_they_are() -> None:
    for source, message in (
        ("\n\n{{ 1 + 'a' }}", r"refuses the messages: TypeError: unsupported .* \(line 3\)$"),
        ("\n{% x %}", r"cannot be read: Encountered unknown tag 'x'. \(line 2\)$"),
        ("{{ raise_exception('no tools here') }}", r"refuses the messages: no tools here \("),
        ("{{ a.b }}", r"refuses the messages: 'a' is undefined \(line 1\)$"),
    ):
        with pytest.raises(ConfigError, match=message):
            template(source).render(MESSAGES)


def test_a_long_dialogue_is_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "x" * 400}] * 10_000
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ m | tojson }}{% endfor %}"
    )
    assert len(template(source).render(messages)) > 8_000_000


def test_halves_of_characters_come_through() -> None:
    assert template("{{ messages[0].content }}").render(
        [{"role": "user", "content": "a\ud800"}]
    ) == ("a\ud800")


def test_threads_share_the_process() -> None:
    got: dict[int, str] = {}

    def render(n: int) -> None:
        got[n] = template(f"{n} {{{{ messages[0].content }}}}").render(
            [{"role": "user", "content": str(n) * 1000}]
        )

    threads = [threading.Thread(target=render, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert got == {n: f"{n} {str(n) * 1000}" for n in range(8)}


def test_a_process_that_was_ended_is_started_again() -> None:
    template("x").render(MESSAGES)
    process = _PROCESS._process
    assert process is not None
    process.kill()
    process.wait()
    assert template("x").render(MESSAGES) == "x"
    _PROCESS.close()
    assert template("y").render(MESSAGES) == "y"
