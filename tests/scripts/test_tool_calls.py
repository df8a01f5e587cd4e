"""Tools: what a template says of them decides how calls are read; what cannot be read says so."""

from common.data.tokens import tokenize_prompt
from common.errors import UserError
import pytest

from experiments.tool_calls import Tools, describe_tools, read_calls, tokenize_reply
from tests.data.templates import ALL, CHAT, decode, make_tokenizer
from tests.scripts.texts import tokenizer

HERMES = """{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def secret(a):
    return a


def with_template(template):
    changed = type(tokenizer()).from_pretrained(tokenizer().name_or_path)
    changed.chat_template = template
    return changed


def test_the_template_decides_how_calls_are_read():
    short, long = describe_tools([add], tokenizer()), describe_tools([add], with_template(HERMES))
    assert (short.as_json, long.as_json) == (False, True)
    assert short.arguments == long.arguments == {"add": ["a", "b"]}
    assert short.schemas[0]["function"]["parameters"]["properties"]["b"] == {
        "type": "integer",
        "description": "the second",
    }
    other = HERMES.replace("<tool_call>", "<call>")
    for template in (other, HERMES.replace('{"name": ...', "<function=...")):
        with pytest.raises(UserError, match="in a form that is not known here"):
            describe_tools([add], with_template(template))
    with pytest.raises(UserError, match="leaves out a tool message"):
        describe_tools(
            [add], with_template(HERMES.replace("for m in messages", "for m in messages if m.role != 'tool'"))
        )
    with pytest.raises(UserError, match="secret cannot be described to a model"):
        describe_tools([secret], tokenizer())


def test_json_calls():
    tools = Tools(describe_tools([add], tokenizer()).schemas, as_json=True)
    one, two = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "other"}'
    text = f"<think>first <tool_call>{two}</tool_call>?</think>Well: <tool_call>\n{one}\n</tool_call><tool_call>{two}</tool_call>"
    assert read_calls(text, tools) == [
        {"name": "add", "arguments": {"a": 1, "b": 2}},
        {"name": "other", "arguments": {}},
    ]
    no_arguments = ('{"name": "add", "arguments": [1, 2]}', '{"name": "add", "arguments": "x"}')
    for wrong in ("{", "7", "[1]", "[" * 100_000, '{"arguments": {}}', *no_arguments):
        (call,) = read_calls(f"<tool_call>{wrong}</tool_call>", tools)
        assert "in JSON" in call["error"] and call["arguments"] == {}
    assert read_calls(f"<tool_call>{one}", tools) == read_calls("[add 1]", tools) == []


def test_short_calls_are_those_of_tools():
    tools = describe_tools([add], tokenizer())
    assert read_calls("see [note 1]: [add 12+3] [add  x][add] [add [y]] [7 8]", tools) == [
        {"name": "add", "arguments": {"a": "12+3"}},
        {"name": "add", "arguments": {"a": " x"}},
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_chat_goes_on_after_its_own_tokens_as_the_template_writes_it_whole(name):
    """What was sampled stays; what follows it are the tokens that the whole chat has there."""
    template, end, _ = ALL[name]
    tokenizer = make_tokenizer(template)
    reply = [{"role": "user", "content": "Are you sure?\n Say so. <|im_end|>"}]
    found = tokenize_reply(reply, tokenizer)
    whole = tokenize_prompt([*CHAT[:2], *reply], tokenizer)
    assert whole[-len(found) :] == found and whole[-len(found) - 1] == tokenizer.convert_tokens_to_ids(
        end.strip()
    )
    assert decode(found, tokenizer).count("Are you sure") == 1


def test_a_reply_that_the_template_leaves_out_or_refuses_is_named():
    silent = (
        "{% for m in messages if m.role != 'tool' %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    strict = silent + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    cases = (
        (silent, "leaves out a tool message"),
        (strict, "refuses it: no"),
        ("{{ 'x' }}", "no special token"),
    )
    for template, line in cases:
        with pytest.raises(UserError, match=line):
            tokenize_reply([{"role": "tool", "name": "add", "content": "7"}], make_tokenizer(template))
