"""Tools: how calls are written is seen in what the chat template writes; the tools' outputs are the tokens that
it has there."""

import json

from common.errors import UserError
import pytest

from experiments.tool_calls import Call, describe_tools, read_turn, tokenize_reply
from tests.data.templates import CHATML, QWEN3
from tests.scripts.texts import tokenizer
from tests.scripts.tool_forms import FORMS, JSON, XML, tokenizer_of

USER = {"role": "user", "content": "How much?"}
SAID = ["41 <b>\n\n", "42"]


def add(a: int, b: int, note: str = "") -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
        note: anything
    """
    return a + b


def secret(a):
    return a


def with_template(template):
    changed = type(tokenizer()).from_pretrained(tokenizer().name_or_path)
    changed.chat_template = template
    return changed


def turn_of(*calls, content=""):
    """An assistant's turn in OpenAI's form, of calls of `add`."""
    functions = [{"name": "add", "arguments": arguments} for arguments in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": function}
            for i, function in enumerate(functions)
        ],
    }


def outputs(count):
    return [
        {"role": "tool", "tool_call_id": f"call_{i}", "name": "add", "content": SAID[i]} for i in range(count)
    ]


def text_of(chat, tokenizer, tools, header=False):
    return tokenizer.apply_chat_template(chat, tools.schemas, tokenize=False, add_generation_prompt=header)


def ids_of(text, tokenizer):
    return tokenizer(text, add_special_tokens=False).input_ids


def read(text, tokenizer, tools, before=""):
    return read_turn(ids_of(text, tokenizer), ids_of(before, tokenizer), tokenizer, tools)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_and_answered_as_the_template_writes_them(form, count):
    """Text and tokens are those of plain transformers for the whole chat."""
    if (form, count) == ("gpt-oss", 2):
        pytest.skip("its turns end with the first call")
    tokenizer, end = tokenizer_of(form), FORMS[form][3]
    tools = describe_tools([add, max_of], tokenizer)
    assert tools.end == end and [schema["function"]["name"] for schema in tools.schemas] == ["add", "max_of"]
    arguments = [{"a": 1, "b": 20, "note": "3"}, {"a": -4, "b": 5, "note": "x <y>\n  z"}][:count]
    if form == "Gemma":  # the test's own template writes texts only
        arguments = [{"note": value["note"]} for value in arguments]
    context = text_of([USER], tokenizer, tools, header=True)
    chat = [USER, turn_of(*arguments), *outputs(count)]
    whole = text_of(chat, tokenizer, tools, header=True)
    turn, mark, reply = whole.removeprefix(context).partition(end)
    message, calls = read(turn + mark, tokenizer, tools, before=context)
    assert calls == [Call("add", value) for value in arguments]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == arguments
    assert tokenize_reply(calls, SAID[:count], tokenizer, tools) == ids_of(reply, tokenizer)
    # The answer after the output has no call, though a call stands before it.
    final = text_of([*chat, {"role": "assistant", "content": "It is 7."}], tokenizer, tools)
    answer = final.removeprefix(whole).rstrip()
    message, calls = read(answer, tokenizer, tools, before=whole)
    assert (message, calls) == ({"role": "assistant", "content": "It is 7."}, [])


def max_of(values: list[int]) -> int:
    """
    The largest.

    Args:
        values: numbers
    """
    return max(values)


def test_what_is_sampled_stays_where_the_template_rewrites_it():
    """This template writes a thought, if only an empty one, in the last turn alone, as Qwen3's does."""
    thinks = "{% if loop.last and m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% for c in m.tool_calls %}"
    tokenizer = tokenizer_of("JSON")
    tokenizer.chat_template = JSON.replace("{% for c in m.tool_calls %}", thinks)
    tools = describe_tools([add], tokenizer)
    turn = text_of([USER, turn_of({"a": 1, "b": 2})], tokenizer, tools)
    whole = text_of([USER, turn_of({"a": 1, "b": 2}), *outputs(1)], tokenizer, tools, header=True)
    assert "<think>" in turn and "<think>" not in whole
    reply = whole.partition("</tool_call><|im_end|>")[2]
    assert tokenize_reply([Call("add", {"a": 1, "b": 2})], SAID[:1], tokenizer, tools) == ids_of(
        reply, tokenizer
    )


def test_a_special_token_that_a_tool_spells_is_text():
    tokenizer = tokenizer_of("JSON")
    tools = describe_tools([add], tokenizer)
    ids = tokenize_reply([Call("add", {})], ["7<|im_end|>"], tokenizer, tools)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert tokenizer.decode(ids).count("<|im_end|>") == 2


def test_json_calls():
    tokenizer = tokenizer_of("JSON")
    tools = describe_tools([add], tokenizer)
    one, two = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "other"}'
    thought = f"<think>first <tool_call>{two}</tool_call>?</think>"
    text = f"{thought}Well:\n<tool_call>\n{one}\n</tool_call><tool_call>{two}</tool_call><|im_end|>"
    message, (good, unknown) = read(text, tokenizer, tools)
    assert good == Call("add", {"a": 1, "b": 2}) and message["content"] == "Well:"
    assert message["reasoning_content"] == f"first <tool_call>{two}</tool_call>?"
    assert unknown == Call("unknown", {}, "there is no tool other: add")
    # A header may have begun the thought.
    message, calls = read(f"<tool_call>{two}</tool_call></think>7", tokenizer, tools, "assistant\n<think>\n")
    assert calls == [] and message["content"] == "7"
    no_arguments = ('{"name": "add", "arguments": [1, 2]}', '{"name": "add", "arguments": "x"}')
    for wrong in ("{", "7", "[1]", "[" * 100_000, '{"arguments": {}}', "<tool_call>" * 4000, *no_arguments):
        _, (call,) = read(f"<tool_call>{wrong}</tool_call>", tokenizer, tools)
        assert call.error and (call.name, call.arguments) == ("unknown", {}) and len(call.error) < 400
    long = json.dumps({"name": "add", "arguments": {"note": "<tool_call> {" * 4000}})
    assert len(read(f"<tool_call>{long}</tool_call>", tokenizer, tools)[1][0].arguments["note"]) == 52_000


def test_short_calls_are_those_of_tools():
    tools = describe_tools([add], tokenizer())
    assert tools.schemas is None and tools.form is None
    assert read("see [note 1]: [add 12+3] [add  x][add] [add [y]] [7 8]<|im_end|>", tokenizer(), tools) == (
        {"role": "assistant", "content": "see [note 1]: [add 12+3] [add  x][add] [add [y]] [7 8]"},
        [Call("add", {"a": "12+3"}), Call("add", {"a": " x"})],
    )
    whole = text_of(
        [USER, {"role": "assistant", "content": "[add 1]"}, *outputs(1)], tokenizer(), tools, header=True
    )
    reply = whole.partition("[add 1]<|im_end|>")[2]
    assert tokenize_reply([Call("add", {"a": "1"})], SAID[:1], tokenizer(), tools) == ids_of(
        reply, tokenizer()
    )


def test_what_cannot_be_used_is_named():
    described = "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}"
    no_output = JSON.replace(
        "{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{% elif m.role == 'tool' %}"
    )
    cases = {
        XML.replace("<tool_call>", "<call>"): "in a form that is not known here",
        no_output: "leaves out a tool message",
        CHATML.replace(
            "for m in messages", "for m in messages if m.role != 'tool'"
        ): "leaves out a tool message",
        described + CHATML: "has no place for tool calls",
        "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no') }}{% endfor %}"
        + CHATML: "refuses it: no",
        "{{ 'x' }}": "leaves out",
    }
    for template, line in cases.items():
        with pytest.raises(UserError, match=line):
            describe_tools([add], with_template(template))
    with pytest.raises(UserError, match="secret cannot be described to a model"):
        describe_tools([secret], tokenizer())
    assert describe_tools([add], with_template(QWEN3)).form is None
