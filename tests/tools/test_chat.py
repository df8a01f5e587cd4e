"""Talking to a model, as on a terminal."""

import json
import re
import shutil
import sys
import types

from common.errors import UserError
import pytest
import transformers

from tests.conftest import read_rows
from tools import chat
import train_sft

MODEL = "data/base_model"


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(*lines, *flags): the conversation of these lines with the model; (what was printed, the
    errors)."""

    def converse(*lines, flags=("--temperature", "0"), model=MODEL):
        left = iter(lines)

        def read(prompt=""):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        chat.main([str(model), *flags])
        said = capsys.readouterr()
        return said.out, said.err

    return converse


def greedy(messages, most=512):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, do_sample=False, max_new_tokens=most)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True).strip()


def test_on_the_web_each_window_has_its_own_chat(monkeypatch):
    """gradio hands over a window's turns, with contents in parts, as its version 6 does."""
    served = []
    page = types.SimpleNamespace(
        Error=ValueError, ChatInterface=lambda answer: served.append(answer) or page, launch=list
    )
    monkeypatch.setitem(sys.modules, "gradio", page)
    chat.main([MODEL, *"--web --temperature 0 --system".split(), "Be brief."])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3+4?"}]
    first = served[0](messages[-1]["content"], [])
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And 2+2?"}]
    turns = [
        {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
        for turn in messages[1:3]
    ]
    served[0]("What is 9-1?", [])  # another window
    assert served[0]("And 2+2?", turns) == greedy(messages)


def test_a_chat_is_a_row_to_train_on(talk, tmp_path):
    questions = ["What is 3+4?", "And 2+2?"]
    file = tmp_path / "chats.jsonl"
    out, err = talk(
        questions[0], questions[1], f"/save {file}", "/system Be brief.", "What is 1+1?", f"/save {file}"
    )
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": greedy(messages)})
    first, second = (row["messages"] for row in read_rows(file))
    assert first == messages and all(message["content"] in out for message in messages[1::2]) and err == ""
    assert second[:2] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
    ]
    args = train_sft.Args(dataset_name=[str(file)], max_length=1024)
    (sequence,) = train_sft.encode(
        {"messages": first}, transformers.AutoTokenizer.from_pretrained(MODEL), args
    )
    trained = transformers.AutoTokenizer.from_pretrained(MODEL).decode(
        sequence["input_ids"][sequence["loss_mask"] == 1]
    )
    assert all(message["content"] in trained for message in first[1::2]) and questions[1] not in trained


def test_an_answer_may_be_drawn_again(talk, tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = [
        "What is 3+4?",
        "/temperature 1.5",
        "/retry",
        f"/save {file}",
        "/temperature 0",
        "/retry",
        f"/save {file}",
    ]
    talk(*lines)
    drawn, greedy_one = (row["messages"] for row in read_rows(file))
    assert len(drawn) == len(greedy_one) == 2
    assert greedy_one[1]["content"] == greedy(greedy_one[:1]) != drawn[1]["content"]


def test_after_a_mistake_the_chat_goes_on(talk, tmp_path):
    """A template that knows no system message, bytes that are no text, a name with a zero byte, a chat that
    is too long."""
    shutil.copytree(MODEL, tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    mistakes = {
        "/retry": "/retry",
        "/nosuch": "/nosuch: one of /system, /retry, /temperature, /save, /help, /quit",
        "/temperature hot": "temperature hot",
        f"/save {tmp_path}": "/save FILE, after an answer",
        "two \udcff": "",
        " ".join(["number"] * 600): "positions",
        "/system Be brief.": None,
        "three": "no system here",
        "/system": None,
    }
    lines = [*mistakes, "four", "/save a\0b", f"/save {tmp_path / 'kept'}", "/quit", "never read"]
    out, err = talk(*lines, flags=("--temperature", "0", "--max_new_tokens", "2"), model=tmp_path / "strict")
    assert out.startswith(f"{tmp_path}/strict: write, and press Enter. /system /retry ")
    assert f"saved to {tmp_path}/kept\n" in out
    named = [name for name in mistakes.values() if name is not None] + [r"/save a\x00b: embedded null byte"]
    said = err.splitlines()
    assert len(said) == len(named) and all(name in line for name, line in zip(named, said, strict=True)), said
    assert [m["content"] for m in json.loads((tmp_path / "kept").read_text())["messages"]][:1] == ["four"]


def test_what_cannot_be_talked_to_is_one_line(tmp_path):
    """No model, another sampling, a folder without a model, and a classifier, whose missing head transformers
    would make up."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "judge")
    (tmp_path / "none").mkdir()
    for words, named in [
        (["nosuch"], "nosuch"),
        ([MODEL, "--temperature", "-1"], "temperature -1"),
        ([str(tmp_path / "none")], "none"),
        ([str(tmp_path / "judge")], "lm_head.weight"),
        ([MODEL, "--prompt", "two \udcff"], "Error|refuses"),
    ]:
        with pytest.raises(UserError, match=named) as error:
            chat.main(words)
        assert "\n" not in str(error.value)


def test_one_answer_is_all_that_is_printed(capsys):
    chat.main([MODEL, "--prompt", "What is 3+4?", "--temperature", "0"])
    assert capsys.readouterr().out.strip() == greedy([{"role": "user", "content": "What is 3+4?"}])


def test_an_adapter_stops_where_its_own_settings_say(tmp_path):
    """Not where its base's do."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    base.generation_config.eos_token_id = 0
    base.save_pretrained(tmp_path / "base")
    lm = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=1)
    )
    lm.save_pretrained(tmp_path / "adapter")
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "adapter")
    transformers.GenerationConfig(eos_token_id=[0, 7]).save_pretrained(tmp_path / "adapter")
    model, _ = chat.load(str(tmp_path / "adapter"))
    assert model.generation_config.eos_token_id == [0, 7]


@pytest.mark.parametrize("width", [7, 10, 23, 80])
def test_a_terminal_gets_lines_that_end_between_words(width, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    text = "One is a word.\n\n  Two  of them make a much longer incomprehensibility, and 中文可以在任何字之间换行 it goes on."
    lines = chat.Lines()
    shown = "".join(lines.add(part) for part in re.findall(r"\S*\s?", text))  # as they are generated
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        columns = sum(2 if letter > "\u2e80" else 1 for letter in line)
        assert columns <= width or " " not in line.strip()
    words = re.findall("[a-zA-Z]+", text)
    assert re.findall("[a-zA-Z]+", shown) == words  # none is broken


def test_a_file_gets_the_text_as_it_is():
    assert chat.Lines().add("a  b " * 100) == "a  b " * 100
