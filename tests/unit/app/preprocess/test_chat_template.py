"""Tests of chat templates: the conventions of Hugging Face, and nothing else reachable."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt
from kvlane.app.preprocess.text import template_sandbox
from kvlane.app.preprocess.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
LOOP = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


class TickingClock:
    """A clock on which looking costs time."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self._now, self._tick_s = 0.0, tick_s

    def now(self) -> float:
        self._now += self._tick_s
        return self._now

    def wall_ms(self) -> int:
        return 1_700_000_000_000

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, TickingClock()).render(messages or [USER], **options)


# --- what a template is given ---------------------------------------------------------------------


def test_messages_are_rendered() -> None:
    assert render(LOOP, USER, {"role": "assistant", "content": "yes"}) == "[user:hi][assistant:yes]"


def test_generation_prompt_is_added_by_default() -> None:
    source = "{{ add_generation_prompt }}"
    assert render(source) == "True"
    assert render(source, add_generation_prompt=False) == "False"


def test_tools_are_rendered_as_they_came() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert render("{{ tools[0].function.name }}", tools=[tool]) == "f"


def test_documents_are_rendered_as_they_came() -> None:
    assert render("{{ documents[0].text }}", documents=[{"text": "x"}]) == "x"


def test_special_tokens_have_their_names() -> None:
    made = ChatTemplate("{{ bos_token }}|{{ eos_token }}", TickingClock(), {"bos_token": "<s>"})
    assert made.render([USER]) == "<s>|"


def test_template_has_variables_of_its_own() -> None:
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"


def test_variables_do_not_replace_the_messages() -> None:
    assert render(LOOP, variables={"messages": []}) == "[user:hi]"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ strftime_now('%Y-%m-%d %H:%M') }}", "2023-11-14 22:13"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ messages[0].name }}.", "."),
    ],
    ids=[
        "no tools and documents", "the time in UTC", "JSON without escapes", "indented JSON",
        "marks for training", "lines of statements", "a missing field",
    ],
)  # fmt: skip
def test_template_environment_has_the_functions_of_hugging_face(source: str, text: str) -> None:
    assert render(source) == text


def test_loops_may_break() -> None:
    source = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    assert render(source, USER, USER) == "hi"


# --- how messages are worded ----------------------------------------------------------------------

PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


def test_text_parts_are_joined_for_a_template_without_parts() -> None:
    assert render(LOOP, PARTS) == "[user:a\nb]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}",
        "{% for m in messages %}{% for p in m['content'] %}({{ p.text }}){% endfor %}{% endfor %}",
        "{% for p in messages[0].content | list %}({{ p.text }}){% endfor %}",
        "{% set content = messages[0].content %}{% for p in content %}({{ p.text }}){% endfor %}",
        "{% set c = messages[0].content %}{% for p in c %}({{ p.text }}){% endfor %}",
        "{% set a = messages[0].content %}{% set b = a %}{% for p in b %}({{p.text}}){% endfor %}",
        "{% for p in messages[0].content or [] %}({{ p.text }}){% endfor %}",
        "{% for p in messages[0].get('content', []) %}({{ p.text }}){% endfor %}",
        "{% for p in (messages[0].content if messages else []) %}({{ p.text }}){% endfor %}",
    ],
)
def test_parts_stay_parts_for_a_template_that_goes_through_them(source: str) -> None:
    assert render(source, PARTS) == "(a)(b)"


@pytest.mark.parametrize(
    "source",
    [
        "{% set c = messages[0].content %}{% for p in c %}({{ p.text }}){% endfor %}",
        "{% for p in messages[0].get('content', []) %}({{ p.text }}){% endfor %}",
    ],
)
def test_text_is_a_part_for_a_template_that_goes_through_parts(source: str) -> None:
    assert render(source, {"role": "user", "content": "a"}) == "(a)"


def test_text_stays_text_for_a_template_that_goes_through_its_lines() -> None:
    source = "{% set c = messages[0].content | list %}{% for p in c %}({{ p }}){% endfor %}"
    assert render(source, {"role": "user", "content": "ab"}) == "(a)(b)"


def test_parts_and_calls_have_no_keys_with_null() -> None:
    part = {"type": "text", "text": "a", "image_url": None}
    looped = "{% for p in messages[0].content %}{{ 'image_url' in p }}{% endfor %}"
    assert render(looped, {"role": "user", "content": [part]}) == "False"
    call = {"id": None, "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ 'id' in messages[0].tool_calls[0] }}", message) == "False"


@pytest.mark.parametrize(("content", "shown"), [(None, "no"), ("", ""), ("yes", "yes")])
def test_refusal_in_a_field_of_its_own_is_the_content(content: str | None, shown: str) -> None:
    message = {"role": "assistant", "content": content, "refusal": "no"}
    assert render("{{ messages[0].content }}", message) == shown
    looped = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    assert render(looped, message) == shown
    assert render("{{ messages[0].content }}", message | {"refusal": None}) == (content or "")


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


ARGUMENTS = "{{ messages[0].tool_calls[0].function.arguments.x }}"


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    assert render(ARGUMENTS, called('{"x": 7}')) == "7"
    assert render(ARGUMENTS, called({"x": 7})) == "7"


def test_arguments_that_are_no_json_stay_text() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(source, called('{"x": ')) == '{"x": '


def test_messages_are_not_changed() -> None:
    message = called('{"x": 7}')
    render(ARGUMENTS, message)
    assert message == called('{"x": 7}')


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% if x %}", "{{ x | nonsense }}"])
def test_invalid_template_is_a_bad_model(source: str) -> None:
    with pytest.raises(BadModel, match="chat template"):
        ChatTemplate(source, TickingClock())


def test_template_may_refuse_messages_with_its_own_message() -> None:
    with pytest.raises(InvalidPrompt, match="roles must alternate") as raised:
        render("{{ raise_exception('roles must alternate') }}")
    assert raised.value.field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].a.b }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"]
)
def test_template_error_names_the_messages(source: str) -> None:
    with pytest.raises(InvalidPrompt, match="cannot take") as raised:
        render(source)
    assert raised.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ 'x' * 1000000000000 }}",
        "{{ 1000000000000 * [1] }}",
        "{{ 9 ** 999999999 }}",
    ],
)
def test_sandbox_allows_no_escape(source: str) -> None:
    with pytest.raises(InvalidPrompt, match="cannot take"):
        render(source)


DOUBLED = "{% set ns = namespace(x='aaaa', l=[1]) %}{% for i in range(60) %}"
"""Begins a template that doubles something sixty times."""
KEPT = "{% set x = 'a' * 30000000 %}{% set l = namespace(l=[]) %}"
NESTED = DOUBLED + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%900000000d' % 1 }}",
        "{{ '%*d' % (900000000, 1) }}",
        "{{ '%.900000000f' | format(1) }}",
        "{{ '{:>900000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 900000000) }}",
        "{{ '{a:>900000000}'.format_map({'a': 1}) }}",
        "{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format('a' * 30000000) }}",
        "{{ 'a'.ljust(900000000) }}",
        "{{ 'a'.zfill(900000000) }}",
        "{{ '\t'.expandtabs(900000000) }}",
        "{{ 'a' | center(900000000) }}",
        "{{ 'a' | center(width=900000000) }}",
        "{% filter center(900000000) %}a{% endfilter %}",
        "{{ ('a\n' * 100000) | indent(9000) }}",
        "{{ ('a' * 30000) | replace('a', 'b' * 30000) }}",
        "{{ ('a' * 30000).replace('', 'b' * 30000) }}",
        "{{ ('a' * 30000).translate({97: 'b' * 30000}) }}",
        "{{ range(90000) | list | join('x' * 9000) }}",
        "{{ ('x' * 900000).join(range(900) | map('string')) }}",
        "{{ {'a': 'x' * 9000000}.values() | join('y') | replace('x', 'y' * 9) }}",
        "{{ [1] | slice(90000000) | list }}",
        "{{ [1] | batch(90000000, 'x') | list }}",
        "{{ [0] * 30000000 }}",
        "{{ ('a' * 60000000) | list }}",
        "{{ ('a ' * 30000000).split() }}",
        "{{ (range(99999) | list) | tojson(indent=1000) }}",
        "{{ (5).to_bytes(900000000, 'big') }}",
        "{{ 1.5 | round(99999999) }}",
        "{{ strftime_now('%900000000Y') }}",
        "{{ lipsum(n=20000) }}",
        "{% for c in 'x' * 30000000 %}{{ loop.length }}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop('x' * 30000000) }}{% endfor %}",
        KEPT + "{% for i in range(99) %}{% set l.l = l.l + [x[1:]] %}{% endfor %}",
        KEPT + "{% for i in range(99) %}{% set l.l = l.l + [x.partition('a')] %}{% endfor %}",
        DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        DOUBLED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLED + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
        DOUBLED + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
        + DOUBLED
        + "{% set ns.x = m(ns.x) %}{% endfor %}",
        DOUBLED + "{% set ns.n = (ns.n or 9) * (ns.n or 9) %}{% endfor %}",
    ],
)
def test_rendering_has_a_bound_on_its_memory(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((InvalidPrompt, BadModel)):
            render(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * template_sandbox.MAX_MADE_BYTES


@pytest.mark.parametrize(
    "source",
    [
        NESTED + "{{ ns.l }}",
        NESTED + "{{ ns.l == [ns.l] }}",
        DOUBLED + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
        DOUBLED + "{% set ns.l = (ns.l * 2) | batch(2) | list %}{% endfor %}{{ ns.l ~ '' }}",
    ],
)
def test_items_of_nested_lists_are_counted_as_often_as_they_are_written(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_ITEMS", 10_000)
    with pytest.raises(InvalidPrompt, match="10000 items"):
        render(source)


@pytest.mark.parametrize("source", ["{{ " + "(" * 9000, "{{ a" + "+a" * 9000 + " }}"])
def test_source_nested_too_deep_is_a_bad_model(source: str) -> None:
    with pytest.raises(BadModel):
        ChatTemplate(source, TickingClock())


def test_template_without_loops_has_a_bound_on_its_time() -> None:
    busy = TickingClock(0.01)
    slow = ChatTemplate("{{ messages | tojson }}" * 500, busy, timeout_s=1.0, cpu_time=busy.now)
    with pytest.raises(InvalidPrompt, match="more than 1 s of processor time"):
        slow.render([USER])


def test_stopped_process_makes_no_prompt_invalid() -> None:
    """Of the clock, a rendering and a compilation take hours; of the processor, less than 1 ms."""
    stopped = TickingClock(3600.0)
    paused = ChatTemplate("{{ messages | tojson }}" * 5, stopped, cpu_time=TickingClock(1e-6).now)
    assert paused.render([USER])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' * 3 ~ 1 ~ none }}", "aaa1None"),
        ("{{ '%5d|%s' % (7, 'x') }}", "    7|x"),
        ("{{ '{:>5}|{}'.format(7, 1700000000) }}", "    7|1700000000"),
        ("{{ 'a b  c'.split() | join('-') }}", "a-b-c"),
        ("{{ 'a,b'.split(',')[-1] }}", "b"),
        ("{{ ', '.join(['a', 'b']) }}", "a, b"),
        ("{{ [1, 2, 3][1:] + [4] }}", "[2, 3, 4]"),
        ("{{ ['b', 'a'] | sort | map('upper') | join }}", "AB"),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ [1, 2, 3] | batch(2) | list }}", "[[1, 2], [3]]"),
        ("{{ 1700000000 | string ~ 1700000000 | int }}", "17000000001700000000"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "x1"),
        ("{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}", "aba"),
        (
            "{% macro m(x) %}[{{ x }}]{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}",
            "[1]c",
        ),
        ("{{ messages | map(attribute='content') | select('string') | list | length }}", "1"),
    ],
)
def test_usual_operations_are_available(source: str, text: str) -> None:
    assert render(source) == text


ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


def test_slow_rendering_is_aborted() -> None:
    busy = TickingClock(0.01)
    slow = ChatTemplate(ENDLESS, busy, timeout_s=1.0, cpu_time=busy.now)
    with pytest.raises(InvalidPrompt, match="more than 1 s of processor time"):
        slow.render([USER])


def test_rendering_with_too_many_rounds_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_LOOP_ROUNDS", 1000)
    with pytest.raises(InvalidPrompt, match="1000 rounds"):
        render(ENDLESS)


def test_rounds_are_counted_separately_for_each_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_LOOP_ROUNDS", 10)
    made = ChatTemplate(LOOP, TickingClock())
    for _ in range(5):
        assert made.render([USER] * 3)


def test_recursive_macro_is_aborted() -> None:
    with pytest.raises(InvalidPrompt, match="never ends"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_rounds_of_macros_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_LOOP_ROUNDS", 3)
    with pytest.raises(InvalidPrompt, match="3 rounds"):
        render("{% macro f() %}{% endmacro %}{{ f() }}{{ f() }}{{ f() }}{{ f() }}")


def test_rendering_that_grows_too_long_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDERED_CHARS", 100)
    with pytest.raises(InvalidPrompt, match="100 characters"):
        render(LOOP, {"role": "user", "content": "x" * 101})


# --- the demo model's -----------------------------------------------------------------------------


def demo(*messages: dict[str, Any], **options: Any) -> str:
    source = read_folder(DEMO_MODEL_FOLDER).template
    assert source is not None
    return render(source, *messages, **options)


SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_demo_model_marks_turns_by_special_tokens() -> None:
    assert demo(SYSTEM, USER) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"


def test_demo_model_takes_the_newer_name_of_the_system() -> None:
    assert demo(SYSTEM | {"role": "developer"}, USER) == demo(SYSTEM, USER)


def test_demo_template_renders_tools_in_the_system_turn() -> None:
    got = demo(SYSTEM, USER, tools=[TOOL])
    assert got.startswith("<|system|>be brief\n")
    assert got.count('{"type": "function", "function": {"name": "f", ') == 1


def test_demo_template_renders_tools_without_a_system_turn() -> None:
    assert demo(USER, tools=[TOOL]).startswith("<|system|>You may call")


def test_demo_model_gets_documents() -> None:
    assert '{"text": "x"}<|end|>' in demo(USER, documents=[{"text": "x"}])


def test_demo_model_gets_calls_and_their_results() -> None:
    text = demo(USER, called('{"x": 7}'), {"role": "tool", "content": "49"})
    assert '<|assistant|><tool_call>{"name": "f", "arguments": {"x": 7}}</tool_call><|end|>' in text
    assert "<|user|><tool_response>49</tool_response><|end|>" in text


def test_demo_template_refuses_other_roles() -> None:
    with pytest.raises(InvalidPrompt, match="no role poet"):
        demo({"role": "poet", "content": ""})
