"""Chats: each answer is trained after the prompt from which it would be sampled, and up to the token that stops it.

The checks use plain transformers: `apply_chat_template` of the messages before an answer, with the answer's
header, is the prompt; `apply_chat_template` of the messages up to the answer is what the model has to write.
"""

import copy
import importlib.util
import json
from pathlib import Path
import re

from common.data.chat import SWITCHES, prompt_text, stop_token_ids
from common.data.chat_template import needs_of, set_defaults
from common.data.formats import as_chat, as_preference, as_prompt
from common.data.tokens import (
    tokenize_chat,
    tokenize_messages,
    tokenize_pair,
    tokenize_prompt,
    tokenize_row,
)
from common.data.types import BadRow, notes
from common.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
from transformers import GenerationConfig

from tests.data.templates import (
    CHAT,
    CHATML,
    CLOSED_AFTER,
    CLOSED_HEADER,
    DROPS_LATER,
    EVERY_KIND,
    GEMMA,
    NEXT_MARK,
    NO_END,
    OPENED,
    OTHER_LAST_END,
    QWEN3,
    R1,
    STRICT_CALLS,
    SYSTEM,
    THINKS_ALWAYS,
    WRITES_CALLS,
    decode,
    make_tokenizer,
    trained,
)

U, A = CHAT[:2]
THOUGHT = "two and two"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_7",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 17, "who": "José"}},
        }
    ],
}
OUTPUT = {"role": "tool", "content": '{"x": "2"}', "tool_call_id": "call_7", "name": "add"}


def thinking(message, thought=THOUGHT):
    return message | dict.fromkeys(("reasoning_content", "thinking", "reasoning", "tool_plan"), thought)


def apply(messages, tokenizer, **options):
    """The text of plain transformers."""
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def check_as_sampled(messages, tokenizer, tools=None):
    """Every answer of the chat is trained once, after the prompt tokens of plain transformers, with what the
    template writes there, up to a token that stops sampling."""
    stops = stop_token_ids(tokenizer, GenerationConfig())
    found = []
    for sequence in tokenize_messages(messages, tokenizer, tools=tools):
        ids, mask = sequence["input_ids"].tolist(), sequence["loss_mask"].tolist()
        starts = [i for i in range(len(mask)) if mask[i] and not mask[i - 1]]
        ends = [i + 1 for i in range(len(mask)) if mask[i] and not (mask + [0])[i + 1]]
        found += [(ids[:start], ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(found) == len(turns)
    for turn, (prompt, answer) in zip(turns, found, strict=True):
        matching = []
        for switches in SWITCHES:
            given = {"tools": tools} | switches
            context = apply(messages[:turn], tokenizer, add_generation_prompt=True, **given)
            if tokenizer(context, add_special_tokens=False).input_ids == prompt:
                matching.append((context, apply(messages[: turn + 1], tokenizer, **given)))
        assert matching, f"no prompt of plain transformers: {decode(prompt, tokenizer)!r}"
        written = decode(answer, tokenizer)
        followed = any(text.startswith(context + written.rstrip()) for context, text in matching)
        borrowed = any(text.rstrip().endswith(written[: written.rfind("<|")]) for _, text in matching)
        assert followed or borrowed  # without an end of its own, up to the mark of the next turn
        assert answer[-1] in stops and not set(answer[:-2]) & set(stops)
        assert messages[turn]["content"].strip() in written
        assert (messages[turn].get("thinking") or "").strip() in written
    return [decode(answer, tokenizer) for _, answer in found]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_answer_is_trained_as_it_is_sampled(name):
    tokenizer = make_tokenizer(EVERY_KIND[name])
    chats = [CHAT[:2], CHAT, [*CHAT, U, A]]
    if name != "gemma":
        chats.append([SYSTEM, *CHAT])
    if name == "parts":  # plain transformers takes them as they are read
        return
    if needs_of(tokenizer).thoughts:
        chats += [[U, thinking(A)], [U, thinking(A), *CHAT[2:]], [*CHAT[:3], thinking(CHAT[3])]]
        chats.append([U, thinking(A), CHAT[2], thinking(CHAT[3])])
    for chat in chats:
        check_as_sampled(chat, tokenizer)


TEXT = st.text(st.sampled_from(" \n\taé你🙂.=/-"), max_size=10)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4),
    name=st.sampled_from([name for name in EVERY_KIND if name not in ("parts", "llama2")]),
)
def test_any_answer_is_trained_as_it_is_sampled(turns, name):
    """With white space at every border, and thoughts in some turns. (Llama 2's template trims its answers.)"""
    tokenizer, chat = make_tokenizer(EVERY_KIND[name]), []
    for question, answer, thinks in turns:
        message = {"role": "assistant", "content": answer or "x"}
        chat += [{"role": "user", "content": question}]
        chat += [thinking(message) if thinks and needs_of(tokenizer).thoughts else message]
    check_as_sampled(chat, tokenizer)


def test_answers_that_continue_each_other_share_a_sequence():
    one = tokenize_messages([*CHAT, U, A], make_tokenizer(CHATML))
    assert len(one) == 1 and len(trained(one[0], make_tokenizer(CHATML))) == 3
    for template in (QWEN3, OTHER_LAST_END):
        several = tokenize_messages([*CHAT, U, A], make_tokenizer(template))
        assert len(several) == 3 and all(len(trained(one, make_tokenizer(template))) == 1 for one in several)
    # two turns after one question: what was thought stays until the next question
    chat = [U, CALL, OUTPUT, A, CHAT[2], CHAT[3]]
    writes = make_tokenizer(QWEN3.replace("content + '<|im_end|>", "content ~ m.tool_calls ~ '<|im_end|>"))
    assert [len(trained(one, writes)) for one in tokenize_messages(chat[:4], writes)] == [2]


@pytest.mark.parametrize(
    "template, before, written",
    [
        (QWEN3, "<|im_start|>assistant\n", "<think>\ntwo and two\n</think>\n\nIt is 2.<|im_end|>"),
        (
            OTHER_LAST_END,
            "<|assistant|>",
            "analysistwo and two<|end|><|assistant|>finalIt is 2.<|endoftext|>",
        ),
        (NEXT_MARK, "<|assistant|>", "\n<think>two and two</think>\nIt is 2.<|user|>"),
        (OPENED, "assistant\n<think>\n", "two and two\n</think>\n\nIt is 2.<|im_end|>"),
        (CHATML, "assistant\n", "<think>\ntwo and two\n</think>\n\nIt is 2.<|im_end|>"),
    ],
)
def test_a_thought_is_trained_where_the_template_writes_it(template, before, written):
    """And in the answer where it has no place. It may stand in the content."""
    tokenizer = make_tokenizer(template)
    inside = A | {"content": f"<think>\n{THOUGHT}\n</think>\n\n{A['content']}"}
    for answer in (thinking(A), inside):
        (sequence,) = tokenize_messages([U, answer], tokenizer)
        assert trained(sequence, tokenizer) == [written]
        start = int(sequence["loss_mask"].argmax())
        assert decode(sequence["input_ids"][:start], tokenizer).endswith(before)
    notes.clear()
    tokenize_messages([U, thinking(A)], tokenizer)
    assert any("no place for reasoning" in note for note in notes) == (template in (CHATML, QWEN3))


def test_an_answer_without_a_thought_follows_a_header_without():
    """And a row, or a run, says which header it wants."""
    tokenizer = copy.deepcopy(make_tokenizer(OPENED))
    notes.clear()
    (sequence,) = tokenize_messages([U, A], tokenizer)
    closed = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert decode(sequence["input_ids"], tokenizer).startswith(closed + "It is 2.")
    assert any("--template_kwargs enable_thinking=false" in note for note in notes)
    row = {"messages": [U, A], "chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(BadRow, match="begins a thought"):
        tokenize_chat(as_chat(row), tokenizer)
    row["chat_template_kwargs"] = '{"enable_thinking": false}'
    assert [one["input_ids"].tolist() for one in tokenize_chat(as_chat(row), tokenizer)] == [
        sequence["input_ids"].tolist()
    ]
    prompt = tokenize_row(
        as_prompt({"prompt": [U], "chat_template_kwargs": {"enable_thinking": False}}), tokenizer
    )
    assert decode(prompt["prompt_ids"], tokenizer) == closed
    set_defaults(tokenizer, ["enable_thinking=false"])
    assert (
        decode(tokenize_prompt([U], tokenizer), tokenizer)
        == closed
        == apply([U], tokenizer, add_generation_prompt=True)
    )
    assert apply([U], tokenizer, add_generation_prompt=True, enable_thinking=True).endswith("<think>\n")
    # this run samples after the closed one
    with pytest.raises(BadRow, match="closes a thought.*--columns unused=reasoning_content"):
        tokenize_messages([U, thinking(A)], tokenizer)
    assert len(check_as_sampled([U, A], tokenizer)) == 1
    for setting in ("enable_thinking", "=1", "a b=1"):
        with pytest.raises(UserError, match="expected name=value"):
            set_defaults(tokenizer, [setting])
    with pytest.raises(
        UserError, match="^--template_kwargs enable_thinkng=false: .* not read enable_thinkng"
    ):
        set_defaults(tokenizer, ["enable_thinkng=false"])


@pytest.mark.parametrize(
    "value, written", [("False", "False"), ("true", "True"), ("-1", "-1"), ("2.5", "2.5"), ("low", "low")]
)
def test_variables_of_a_template_are_numbers_and_truths_where_they_look_so(value, written):
    tokenizer = copy.deepcopy(make_tokenizer("{{ level }}{{ 'text' if level is string }}"))
    set_defaults(tokenizer, [f"level={value}"])
    assert apply([U], tokenizer) == written + ("text" if value == "low" else "")


def test_thinking_opened_for_samples_only_is_refused():
    """Its answers would be trained after another header than they are sampled after; the remedies work."""
    tokenizer = copy.deepcopy(make_tokenizer(R1))
    with pytest.raises(BadRow, match="generation prompt begins a thought.*--chat_template chatml"):
        tokenize_messages(CHAT, tokenizer)
    tokenizer.chat_template = CHATML
    assert len(check_as_sampled(CHAT, tokenizer)) == 2


@pytest.mark.parametrize("template", [CLOSED_HEADER, CLOSED_AFTER])
def test_no_answer_has_two_thoughts(template):
    """The template writes an empty thought of its own: an empty one in the answer goes, another one is refused."""
    tokenizer = make_tokenizer(template)
    empty = [CHAT[0], A | {"content": "<think>\n\n</think>\n\nIt is 2."}, CHAT[2], CHAT[3]]
    (sequence,) = tokenize_messages(empty[:2], tokenizer)
    assert decode(sequence["input_ids"], tokenizer) == apply(CHAT[:2], tokenizer)
    (sequence,) = tokenize_messages([*empty[:3], empty[1]], tokenizer)
    assert decode(sequence["input_ids"], tokenizer) == apply([*CHAT[:3], A], tokenizer)
    assert len(trained(sequence, tokenizer)) == 2
    inside = A | {"content": f"<think>{THOUGHT}</think>It is 2."}
    for answer in (thinking(A), inside):
        with pytest.raises(
            BadRow, match="a thought of its own.*--columns unused=reasoning_content, or .*chatml"
        ):
            tokenize_messages([U, answer], tokenizer)
    assert tokenize_messages([U, inside], make_tokenizer(CHATML))
    assert len(check_as_sampled([U, A], tokenizer)) == 1
    # in a field and in the content
    with pytest.raises(BadRow, match="a thought of its own"):
        tokenize_messages([U, thinking(inside)], make_tokenizer(NEXT_MARK))
    assert THOUGHT in trained(tokenize_messages([U, inside], make_tokenizer(NEXT_MARK))[0], tokenizer)[0]


def test_an_empty_thought_is_none():
    """Where the template would write an empty field, and where not."""
    inside = A | {"content": "<think>\n\n</think>\n\nIt is 2."}
    for template in (DROPS_LATER, OTHER_LAST_END, NEXT_MARK):
        tokenizer = make_tokenizer(template)
        (sequence,) = tokenize_messages([U, inside], tokenizer)
        (without,) = tokenize_messages([U, A], tokenizer)
        assert sequence["input_ids"].tolist() == without["input_ids"].tolist()
        assert trained(sequence, tokenizer) == trained(without, tokenizer)
    assert trained(without, tokenizer)[0].startswith("\n<think></think>")  # NEXT_MARK writes it itself


def test_an_answer_is_trained_after_thoughts_that_the_template_drops_with_it():
    """As gpt-oss's: sampling has the thought before the call; the text with the answer does not."""
    tokenizer = make_tokenizer(DROPS_LATER)
    beside = CALL | {"content": "Let me see."}
    for before in (
        [U, thinking(CALL), OUTPUT],
        [U, beside, OUTPUT],
        [U, thinking(CALL), OUTPUT, beside, OUTPUT],
    ):
        context = apply(before, tokenizer, add_generation_prompt=True)
        text = apply([*before, A], tokenizer)
        assert not text.startswith(context) and text.endswith("<|assistant|>finalIt is 2.<|endoftext|>")
        (sequence,) = tokenize_messages([*before, A], tokenizer)
        assert trained(sequence, tokenizer)[-1] == "finalIt is 2.<|endoftext|>"
        assert decode(sequence["input_ids"], tokenizer) == context + "finalIt is 2.<|endoftext|>"
        assert len(trained(sequence, tokenizer)) == len(before) // 2 + 1
        notes.clear()
        assert len(tokenize_messages([*before, A, CHAT[2], CHAT[3]], tokenizer)) == 2 and not notes
    row = {"prompt": before, "chosen": [A], "rejected": [A | {"content": "3"}]}
    pair = tokenize_pair(as_preference(row), tokenizer, 512)
    assert trained(pair[1], tokenizer) == ["final3<|endoftext|>"]
    # what is written otherwise for another reason is still refused
    with pytest.raises(BadRow, match="rewrites the text before an answer"):
        counts = make_tokenizer("{{ messages | length }}" + DROPS_LATER)
        tokenize_messages([*before, A], counts, train_on="last_turn")


# --- templates of released models ---------------------------------------------------------------------------

# Marks and ends of templates that TRL ships, as far as they are not told by the template's text
MARK = re.compile(
    r"<\|[^|>\s'\"]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|</?(?:start_of_turn|end_of_turn|s|end_of_utterance)>|\[gMASK\]"
)
END = re.compile(
    "<\\|(?:im_end|eot_id|return|END_OF_TURN_TOKEN)\\|>|<end_of_turn>|<turn\\|>|<end_of_utterance>|<｜end▁of▁sentence｜>"
)
TRL = importlib.util.find_spec("trl")
FOLDER = Path(TRL.origin).parent / "chat_templates" if TRL else Path("none")
SHIPPED = [path for path in sorted(FOLDER.glob("*.jinja")) if not path.stem.endswith("_training")]
LEFT_OUT = "no place for|refuses it|generation prompt (begins|closes) a thought"


@pytest.mark.skipif(not SHIPPED, reason="the templates that TRL ships: pip install --no-deps trl==1.16.0")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_templates_of_released_models(path):
    """What a template can write is trained as it is sampled; DeepSeek's begin a thought that they do not write."""
    text = path.read_text()
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(MARK.findall(text)))})
    if ends := END.findall(text):
        tokenizer.eos_token = ends[-1]
    tokenizer.chat_template = text
    needs, count = needs_of(tokenizer), 0
    chats = [
        CHAT[:2],
        CHAT,
        [SYSTEM, *CHAT],
        [U, CALL, OUTPUT, A],
        [U, CALL, OUTPUT, A, CHAT[2], CALL, OUTPUT, A],
    ]
    if needs.thoughts:
        chats += [
            [U, thinking(A)],
            [U, thinking(A), CHAT[2], thinking(CHAT[3])],
            [*CHAT[:3], thinking(CHAT[3])],
        ]
    for chat in chats:
        tools = TOOLS if CALL in chat else None
        try:
            tokenize_messages(chat, tokenizer, tools=tools)
        except BadRow as reason:
            assert re.search(LEFT_OUT, str(reason)), reason
            continue
        count += 1
        if not needs.parts:
            check_as_sampled(chat, tokenizer, tools=tools)
    assert count >= 2 or path.stem.startswith("deepseek")


# --- tools --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, call",
    [
        (WRITES_CALLS, '<tool_call>{"name": "add", "arguments": {"a": 17, "who": "José"}}<|im_end|>'),
        (OTHER_LAST_END, 'to=add {"a": 17, "who": "José"}<|eot_id|>'),
    ],
)
def test_calls_are_trained_with_the_token_that_ends_them(template, call):
    tokenizer = make_tokenizer(template)
    found = check_as_sampled([U, CALL, OUTPUT, A, CHAT[2], CALL, OUTPUT, CHAT[3]], tokenizer)
    assert [found[0], found[2]] == [call, call] and "It is 2." in found[1]


def test_calls_take_the_form_that_a_template_reads():
    """Ids of nine characters, the same in call and output; arguments as text; no content."""
    tokenizer = make_tokenizer(STRICT_CALLS)
    forms = [{"a": 17, "who": "José"}, '{"a": 17, "who": "José"}', json.dumps('{"a": 17, "who": "José"}')]
    seen = set()
    for arguments in forms:
        call = copy.deepcopy(CALL)
        call["tool_calls"][0]["function"]["arguments"] = arguments
        call["tool_calls"][0]["id"] = "0f3a9c2b11de"  # its first nine would do, and might be another call's
        output = OUTPUT | {"tool_call_id": "0f3a9c2b11de"}
        chat = as_chat({"messages": [U, call, output, A], "tools": TOOLS})
        (sequence,) = tokenize_chat(chat, tokenizer)
        text = decode(sequence["input_ids"], tokenizer)
        call_text = trained(sequence, tokenizer)[0]
        assert call_text.startswith("[CALL]add") and '[ARGS]{"a": 17, "who": "José"}<|im_end|>' in call_text
        number = call_text.removeprefix("[CALL]add").partition("[ARGS]")[0]
        assert len(number) == 9 and f"<|im_start|>tool\n{number}" in text
        seen.add(text)
    assert len(seen) == 1
    for arguments in ("Rome", "[1]", 3, '"\\"Rome\\""'):
        call["tool_calls"][0]["function"]["arguments"] = arguments
        with pytest.raises(
            BadRow, match="arguments of a tool call are ('Rome'|.1.|3|'\"Rome\"');|JSONDecodeError"
        ):
            as_chat({"messages": [U, call]})
    for arguments in ("", None, {}):
        call["tool_calls"][0]["function"]["arguments"] = arguments
        assert as_chat({"messages": [U, call]})["messages"][1]["tool_calls"][0]["function"]["arguments"] == {}


def test_calls_and_tools_of_other_forms_are_read():
    """Llama 3's name of arguments; a function without its wrapper; calls as JSON text."""
    call = {"name": "add", "parameters": {"a": 17}}
    messages = [U, {"from": "function_call", "value": json.dumps(call)}]
    chat = as_chat({"messages": messages, "tools": [TOOLS[0]["function"]]})
    assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 17}}
    assert chat["tools"] == TOOLS
    text = json.dumps(CALL["tool_calls"])
    assert (
        as_chat({"messages": [U, CALL | {"tool_calls": text}]})["messages"][1]["tool_calls"]
        == CALL["tool_calls"]
    )
    with pytest.raises(BadRow, match="has input and no arguments"):
        as_chat({"messages": [U, CALL | {"tool_calls": [{"name": "add", "input": {"a": 1}}]}]})


def test_a_thought_before_a_call_has_a_place_of_its_own():
    """As in Gemma 4, which writes thoughts of calls only."""
    template = WRITES_CALLS.replace(
        "m.content +", "(m.thinking if m.tool_calls and m.thinking else '') + m.content +"
    )
    tokenizer = make_tokenizer(template)
    (sequence,) = tokenize_messages([U, thinking(CALL), OUTPUT, thinking(A)], tokenizer)
    first, second = trained(sequence, tokenizer)
    assert first.startswith(THOUGHT + "<tool_call>") and second.startswith(f"<think>\n{THOUGHT}\n</think>")


def test_a_plan_before_a_call_is_a_thought():
    """Cohere's tool_plan: in its template, in others, and other names in its template."""
    cohere = make_tokenizer(WRITES_CALLS.replace("m.content +", "(m.tool_plan or '') + m.content +"))
    for name in ("tool_plan", "reasoning_content"):
        messages = [U, CALL | {name: THOUGHT}, OUTPUT, A]
        (sequence,) = tokenize_chat(as_chat({"messages": messages}), cohere)
        written = apply([U, CALL | {"tool_plan": THOUGHT}, OUTPUT, A], cohere)
        assert decode(sequence["input_ids"], cohere) == written
        assert trained(sequence, cohere)[0].startswith(THOUGHT + "<tool_call>")


def test_tools_are_written_as_the_template_has_them():
    """As SmolLM3's: an object as Python prints it. A call in that form is none."""
    tokenizer = make_tokenizer("{{ tools | string if tools else '' }}" + CHATML)
    (sequence,) = tokenize_messages([U, A], tokenizer, tools=TOOLS)
    assert decode(sequence["input_ids"], tokenizer) == apply([U, A], tokenizer, tools=TOOLS)
    # in a call it would be none: the template gets the arguments as text
    printed = WRITES_CALLS.replace("function | tojson", "function.name ~ m.tool_calls[0].function.arguments")
    (sequence,) = tokenize_messages([U, CALL, OUTPUT, A], make_tokenizer(printed))
    assert trained(sequence, tokenizer)[0] == '<tool_call>add{"a": 17, "who": "José"}<|im_end|>'


def test_what_stops_in_the_middle_of_an_answer_is_refused():
    """Two calls, each with the token that ends one: the second could never be sampled."""
    each = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{{ '<|eot_id|>' }}{% endfor %}"
    template = CHATML.replace(
        "m.content + '<|im_end|>", "m.content }}" + each + "{{ '' if m.tool_calls else '<|im_end|>"
    )
    tokenizer = make_tokenizer(template)
    check_as_sampled([U, CALL, OUTPUT, A], tokenizer)
    with pytest.raises(BadRow, match="more than once"):
        tokenize_messages([U, CALL | {"tool_calls": CALL["tool_calls"] * 2}], tokenizer)


def test_an_answer_that_cannot_be_continued_is_left_out_alone():
    """Its row is kept, and says so."""
    notes.clear()
    tokenizer = make_tokenizer(OPENED.replace("enable_thinking is false", "false"))
    (sequence,) = tokenize_messages([U, A, CHAT[2], thinking(CHAT[3])], tokenizer)
    assert trained(sequence, tokenizer) == [f"{THOUGHT}\n</think>\n\n4\n\nYes, 4.<|im_end|>"]
    assert any(note.startswith("an answer of the chat is not trained: the ") for note in notes)
    (sequence,) = tokenize_messages([U, thinking(A), *CHAT[2:]], tokenizer)  # here it is the last one
    assert trained(sequence, tokenizer) == [f"{THOUGHT}\n</think>\n\nIt is 2.<|im_end|>"]


def test_pairs_may_have_tools():
    row = {"prompt": [U], "chosen": [CALL], "rejected": [A], "tools": json.dumps(TOOLS)}
    tokenizer = make_tokenizer("{{ tools | tojson if tools else '' }}" + WRITES_CALLS)
    pair = tokenize_pair(as_preference(row), tokenizer, 512)
    prompt = tokenizer(apply([U], tokenizer, tools=TOOLS, add_generation_prompt=True)).input_ids
    assert [side["input_ids"][: len(prompt)].tolist() for side in pair] == [prompt, prompt]
    assert [int(side["loss_mask"].argmax()) for side in pair] == [len(prompt)] * 2


def test_both_answers_of_a_pair_follow_one_header():
    """One of them has a thought: both are written after the header that begins one, or neither."""
    row = {"prompt": [U], "chosen": [thinking(A)], "rejected": [A | {"content": "3"}]}
    tokenizer = make_tokenizer(QWEN3)
    pair = tokenize_pair(as_preference(row), tokenizer, 512)
    prompt = tokenize_prompt([U], tokenizer)
    assert [side["input_ids"][: len(prompt)].tolist() for side in pair] == [prompt, prompt]
    assert trained(pair[1], tokenizer) == ["<think>\n\n</think>\n\n3<|im_end|>"]
    with pytest.raises(BadRow, match="begins a thought|leaves out"):
        tokenize_pair(as_preference(row), make_tokenizer(OPENED), 512)
    half = {"prompt": [U], "chosen": [A, CHAT[2], thinking(CHAT[3])], "rejected": [thinking(CHAT[3])]}
    with pytest.raises(BadRow, match="begins a thought"):  # one of its answers alone would be summed
        tokenize_pair(as_preference(half), make_tokenizer(OPENED), 512)
    several = {"prompt": [U], "chosen": [A, CHAT[2], CHAT[3]], "rejected": [CHAT[3]]}
    with pytest.raises(BadRow, match="rewrites the earlier ones"):
        tokenize_pair(as_preference(several), tokenizer, 512)
    tokenize_pair(as_preference(several), make_tokenizer(CHATML), 512)


# --- what does not fit, what is left out --------------------------------------------------------------------


def test_an_answer_that_does_not_fit_is_left_out_alone():
    tokenizer = make_tokenizer(QWEN3)
    whole = tokenize_chat(as_chat({"messages": CHAT}), tokenizer)
    most = len(whole[0]["input_ids"])
    notes.clear()
    (first,) = tokenize_chat(as_chat({"messages": CHAT}), tokenizer, max_length=most)
    assert f"cut at max_length {most}" in notes
    assert first["input_ids"].tolist() == whole[0]["input_ids"].tolist()
    with pytest.raises(BadRow, match="no trained token within max_length 3"):
        tokenize_chat(as_chat({"messages": CHAT}), tokenizer, max_length=3)


def test_turns_that_are_not_trained_are_context():
    tokenizer = make_tokenizer(QWEN3)
    for chat, options in (
        ([U, A | {"train": False}, *CHAT[2:]], {}),
        (CHAT, {"train_on": "last_turn"}),
        (CHAT, {"first_trained_turn": 2}),
    ):
        (sequence,) = tokenize_messages(chat, tokenizer, **options)
        assert trained(sequence, tokenizer) == ["<think>\n\n</think>\n\n4\n\nYes, 4.<|im_end|>"]
    with pytest.raises(
        BadRow, match="other tokens in the whole chat than on its own: use --train_on all_turns"
    ):
        tokenize_messages([U, A | {"train": False}, *CHAT[2:]], tokenizer, train_on="everything")


def test_a_greeting_is_trained_if_the_template_has_a_header_for_it():
    (sequence,) = tokenize_messages(CHAT[1:], make_tokenizer())
    assert trained(sequence, make_tokenizer())[0] == "It is 2.<|im_end|>"
    refuses = "{% if not messages or messages[-1].role == 'assistant' and messages | length == 1 %}"
    tokenizer = make_tokenizer(refuses + "{{ raise_exception('No user query found') }}{% endif %}" + CHATML)
    notes.clear()
    (sequence,) = tokenize_messages(CHAT[1:], tokenizer)
    assert trained(sequence, tokenizer) == ["4\n\nYes, 4.<|im_end|>"]
    assert "It is 2." in decode(sequence["input_ids"], tokenizer) and len(notes) == 1
    with pytest.raises(BadRow, match="No user query found"):
        tokenize_messages([A], tokenizer)
    with pytest.raises(BadRow, match="No user query found"):
        tokenize_messages([A | {"train": False}, *CHAT[2:]], tokenizer, train_on="everything")


@pytest.mark.parametrize(
    "template, error, line",
    [
        (None, UserError, "--chat_template chatml, plain, or a .jinja file"),
        (NO_END, BadRow, "ends this answer with no special token.*--chat_template chatml"),
        (
            CHATML.replace("m.content", "m.content | upper"),
            BadRow,
            "leaves out or changes the text of an answer",
        ),
        ("{{ messages | length }}" + CHATML, BadRow, r"before an answer \(use another template"),
        ("{{ messages[9].content.x }}", BadRow, "refuses it"),
        ("{{ raise_exception('roles must alternate') }}", BadRow, "refuses it: roles must alternate"),
    ],
)
def test_a_template_that_cannot_be_sampled_from_is_refused_with_a_remedy(template, error, line):
    with pytest.raises(error, match=line) as caught:
        tokenize_messages(CHAT, make_tokenizer(template))
    assert "\n" not in str(caught.value)


def test_other_messages_that_a_template_changes_are_noted():
    """The model is sampled after the same text: as with SmolLM3's /no_think, which its template takes out."""
    flag = SYSTEM | {"content": "Be brief. /no_think"}
    cut = CHATML.replace("m.content +", "m.content | replace(' /no_think', '') +")
    for template, role in (
        (cut, "system"),
        (CHATML.replace("messages %}", "messages if m.role != 'user' %}"), "user"),
    ):
        tokenizer = make_tokenizer(template)
        notes.clear()
        assert len(check_as_sampled([flag, *CHAT], tokenizer)) == 2
        assert f"the chat template leaves out or changes a {role} message" in notes
    with pytest.raises(BadRow, match=r"leaves out or changes an answer \(use another template"):
        upper = make_tokenizer(CHATML.replace("m.content", "m.content | upper"))
        tokenize_messages(CHAT, upper, train_on="everything")


def test_what_a_template_has_no_place_for_is_refused():
    with pytest.raises(BadRow, match="System role not supported"):
        tokenize_messages([SYSTEM, *CHAT], make_tokenizer(GEMMA))
    with pytest.raises(BadRow, match="no place for tools .*--columns unused=tools"):
        tokenize_messages(CHAT, make_tokenizer(CHATML), tools=TOOLS)
    with pytest.raises(BadRow, match="no place for tool calls"):
        tokenize_messages([U, CALL, OUTPUT, A], make_tokenizer(CHATML))
    drops = WRITES_CALLS.replace("m.tool_calls[0].function | tojson", "m.tool_calls[0].function.name")
    with pytest.raises(BadRow, match="no place for tool calls|an argument of a tool call"):
        tokenize_messages([U, CALL, OUTPUT, A], make_tokenizer(drops))
    first_only = CHATML.replace(
        "m.content +", "(m.thinking if m.thinking and loop.index < 3 else '') + m.content +"
    )
    with pytest.raises(BadRow, match="leaves out or changes reasoning_content"):
        tokenize_messages([*CHAT[:3], thinking(CHAT[3])], make_tokenizer(first_only))


def test_no_template_sees_the_flag():
    template = "{% for m in messages if 'train' in m %}{{ raise_exception('it sees the flag') }}{% endfor %}"
    tokenizer = make_tokenizer(template + CHATML)
    flagged = [message | {"train": i != 1} for i, message in enumerate(CHAT)]
    (sequence,) = tokenize_messages(flagged, tokenizer)
    assert sequence["input_ids"].tolist() == tokenize_messages(CHAT, tokenizer)[0]["input_ids"].tolist()
    assert tokenize_prompt(flagged[:3], tokenizer) == tokenize_prompt(CHAT[:3], tokenizer)


def test_parts_are_one_text():
    tokenizer = make_tokenizer(EVERY_KIND["parts"])
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": " 2."}]
    chat = as_chat({"messages": [U, A | {"content": parts}]})
    (sequence,) = tokenize_chat(chat, tokenizer)
    expected = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in (U, A)]
    assert decode(sequence["input_ids"], tokenizer) == apply(expected, tokenizer)
    assert trained(sequence, tokenizer) == ["It is 2.<|im_end|>"]
    with pytest.raises(BadRow, match="no assistant turn that is trained"):
        untrained = [part | {"weight": 0} for part in parts]
        tokenize_chat(as_chat({"messages": [U, A | {"content": untrained}]}), tokenizer)
    with pytest.raises(BadRow, match="parts of a message differ"):
        as_chat({"messages": [U, A | {"content": [parts[0], parts[1] | {"train": False}]}]})


def test_prompts_are_those_of_plain_transformers():
    for template in (CHATML, QWEN3, OPENED, THINKS_ALWAYS, OTHER_LAST_END):
        tokenizer = make_tokenizer(template)
        text = apply(CHAT[:3], tokenizer, add_generation_prompt=True)
        assert prompt_text(CHAT[:3], tokenizer) == text
        assert tokenize_prompt(CHAT[:3], tokenizer) == tokenizer(text, add_special_tokens=False).input_ids


def test_stop_tokens_are_those_that_end_answers_and_calls():
    names = lambda ids, tokenizer: tokenizer.convert_ids_to_tokens(ids)  # noqa: E731
    for template, ends in (
        (OTHER_LAST_END, {"<|endoftext|>", "<|eot_id|>"}),
        (NEXT_MARK, {"<|endoftext|>", "<|user|>"}),
        (EVERY_KIND["two end marks"], {"<|endoftext|>", "<|im_end|>"}),
    ):
        tokenizer = make_tokenizer(template)
        assert set(names(stop_token_ids(tokenizer, GenerationConfig()), tokenizer)) == ends
