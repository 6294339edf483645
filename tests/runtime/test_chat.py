"""Chat templates render as transformers renders them, and reach nothing that they should not."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from forerun.errors import ForerunError
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.chat import encode_prompt, render_chat

USER = [{"role": "user", "content": 'Is 1 < 2 & 3 > 2, "café"?\n'}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "世界 \U0001f600"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "description": '<b>it\'s & "that"</b>',
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}},
        },
    }
]

TEMPLATES = {
    "headers": """{{- bos_token }}
{%- for message in messages %}
    {{- '[' + message['role'] + ']\\n' + message['content'] | trim + '[/]' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n' }}
{%- endif %}""",
    "blocks": """{% for message in messages %}
    {% if message.role == 'system' %}
<<{{ message.content }}>>
    {% elif loop.last and not loop.first %}
        {{ loop.index }}/{{ loop.length }} {{ message.content }}{{ eos_token }}
    {% else %}
        {{ message.content | upper }}
    {% endif %}
{% endfor %}
""",
    "tools": """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{{ tool.function | tojson(separators=(',', ':'), sort_keys=True) }}
{{ tool.function.name | tojson(ensure_ascii=True) }}{% endfor %}{% else %}no tools{% endif %}
{{ messages | map(attribute='role') | join(',') }}""",
    "loops": """{% set ns = namespace(seen=0) %}
{% for message in messages[::-1] if message.role != 'system' %}
{% set ns.seen = ns.seen + 1 %}
{% if ns.seen > 2 %}{% break %}{% endif %}
{% if message.role == 'assistant' %}{% continue %}{% endif %}
{{ loop.revindex0 }}{{ loop.previtem.role if loop.previtem is defined }}{{ message.content }}
{% else %}nobody{% endfor %}
{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}
{{ '-' * 3 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ missing is defined }}""",
    "generation": """{% set mark = 'out' %}{% for message in messages %}
{% if message.role == 'assistant' %}{% generation %}{% set mark = 'in' %}{{ message.content }}
{% endgeneration %}{% endif %}{{ mark }}{% endfor %}""",
    "macro": """{% macro turn(message) %}<{{ message.role }}>{{ caller() }}{% endmacro %}
{% for message in messages %}{% call turn(message) %}{{ message.content }}{% endcall %}{% endfor %}
{% for item in [[1, [2, 3]], [4]] recursive %}
{{- loop(item) if item is iterable else item }},{% endfor %}""",
}


def both(template: str, messages: Any, **options: Any) -> tuple[str, str]:
    """What forerun renders, and what transformers renders."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, _ = utilities.render_jinja_template(
        [messages], chat_template=template, **options, **tokens
    )
    return render_chat(template, messages, **options, **tokens), theirs[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [USER, CHAT])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("more", [True, False])
def test_parity_with_transformers(name: str, messages: Any, tools: Any, more: bool) -> None:
    ours, theirs = both(TEMPLATES[name], messages, tools=tools, add_generation_prompt=more)
    assert ours == theirs
    assert ours.strip()


@pytest.mark.parametrize("messages", [USER, CHAT])
def test_parity_on_smollm2(smollm2: tuple[Tokenizer, str], messages: Any) -> None:
    ours, theirs = both(smollm2[1], messages, add_generation_prompt=True)
    assert ours == theirs
    assert ours.endswith("<|im_start|>assistant\n") and messages[-1]["content"] in ours


def test_a_missing_token_prints_nothing() -> None:
    assert render_chat("{{ bos_token }}|{{ eos_token }}", USER, None, None) == "|"


def test_the_date_is_today() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", USER, None, None) == f"{datetime.now():%Y}"


def refused(template: str, messages: Any = USER) -> str:
    start = time.perf_counter()
    with pytest.raises(ForerunError) as caught:
        render_chat(template, messages, "<s>", "</s>")
    assert time.perf_counter() - start < 30
    message = str(caught.value)
    assert "chat template" in message and "\n" not in message and len(message) < 500
    return message


ATTACKS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ ('{0.__class__}' | format(1)).format(1) }}",
    "{{ messages[0].pop.__self__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ namespace.__init__.__globals__['__builtins__'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ joiner.__call__.__func__ }}",
    "{% macro f() %}{% endmacro %}{{ f.__init__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'base' %}",
    "{{ open('/etc/passwd') }}",
    "{{ messages | tojson(cls=cycler) }}",
    "{{ messages | tojson(default=raise_exception) }}",
]


@pytest.mark.parametrize("template", ATTACKS)
def test_attacks_are_refused(template: str) -> None:
    refused(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * [1] }}",
        "{{ (10 ** (10 ** 10)) % 7 }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{{ '(' * 5000 }}{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_endless_work_is_refused(template: str) -> None:
    refused(template)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "line 1: "),
        ("\n{% if %}", "line 2: "),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ raise_exception('only\n users') }}", "only users"),
        ("{{ messages | unheard }}", "unheard"),
    ],
)
def test_a_failing_template_says_why(template: str, said: str) -> None:
    assert said in refused(template)


@pytest.fixture
def bundle(bundle_folder: Path) -> Bundle:
    return load_bundle(bundle_folder)


def with_facts(bundle: Bundle, template: str | None = None, **changes: Any) -> Bundle:
    """The bundle with another chat template (none by default) and other facts of the target."""
    target = replace(bundle.manifest.target, **changes)
    return replace(bundle, manifest=replace(bundle.manifest, target=target), chat_template=template)


def test_a_plain_prompt_becomes_one_user_turn(bundle: Bundle) -> None:
    chat = with_facts(bundle, "{{ bos_token }}{{ messages | tojson }}</s>")
    ids = encode_prompt(chat, "hello")
    text = '<s>[{"role": "user", "content": "hello"}]</s>'
    assert bundle.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids == encode_prompt(chat, [{"role": "user", "content": "hello"}])


def test_there_is_one_bos_whoever_adds_it(bundle: Bundle) -> None:
    bos = bundle.tokenizer.token_to_id("<s>")
    # As in Llama's tokenizer.json, which adds one of its own.
    bundle.tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    chat = with_facts(bundle, "{{ bos_token }}{{ messages[0].content }}")
    for ids in (
        encode_prompt(chat, "hello"),
        encode_prompt(with_facts(bundle), "hello"),
        encode_prompt(with_facts(bundle), "<s>hello"),
    ):
        assert ids[0] == bos and ids.count(bos) == 1
        assert bundle.tokenizer.decode(ids) == "hello"
    assert bos not in encode_prompt(with_facts(bundle, add_bos=False), "hello")
    assert bos not in encode_prompt(with_facts(bundle, bos_token=None), "hello")


def test_an_empty_prompt(bundle: Bundle) -> None:
    assert encode_prompt(with_facts(bundle), "") == [bundle.tokenizer.token_to_id("<s>")]
    assert encode_prompt(with_facts(bundle, "Q: {{ messages[0].content }}"), "")
    for silent in (with_facts(bundle, add_bos=False), with_facts(bundle, "{{ '' }}")):
        with pytest.raises(ForerunError, match="the prompt is empty"):
            encode_prompt(silent, "")


def test_prompts_that_can_not_be_encoded(bundle: Bundle) -> None:
    with pytest.raises(ForerunError, match="no chat template"):
        encode_prompt(with_facts(bundle), USER)
    with pytest.raises(ForerunError, match="surrogate"):
        encode_prompt(with_facts(bundle), "half \ud83d")
    with pytest.raises(ForerunError, match="lacks the target's bos token '<none>'"):
        encode_prompt(with_facts(bundle, bos_token="<none>"), "hello")
