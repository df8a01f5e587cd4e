"""Talking to a model, as on a terminal."""

import json
import os
import shutil
import subprocess
import sys

import train_sft
from common.errors import UserError
from tests.conftest import ROOT
from tools import chat

import pytest
import transformers

MODEL = "data/base_model"


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(*lines, *flags): the conversation of these lines with the model; (what was printed, the errors)."""

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
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, do_sample=False, max_new_tokens=most)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True).strip()


def test_a_classifier_is_no_model_to_talk_to(talk, tmp_path):
    """Its files have no head for tokens: transformers would make up one."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"its files lack 1 tensors \(lm_head.weight\)"):
        talk("Hello", model=tmp_path)


def test_answers_are_the_models_over_several_turns_and_a_saved_chat_is_a_row(talk, tmp_path):
    questions = ["What is 3+4?", "And 2+2?"]
    file = tmp_path / "chats.jsonl"
    out, err = talk(questions[0], questions[1], f"/save {file}", "/system Be brief.", "What is 1+1?", f"/save {file}")
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": greedy(messages)})
    first, second = (json.loads(line)["messages"] for line in file.read_text().splitlines())
    assert first == messages and all(message["content"] in out for message in messages[1::2]) and err == ""
    assert second[:2] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
    args = train_sft.Args(dataset_name=[str(file)], max_length=1024)
    (sequence,) = train_sft.encode({"messages": first}, transformers.AutoTokenizer.from_pretrained(MODEL), args)
    trained = transformers.AutoTokenizer.from_pretrained(MODEL).decode(sequence["input_ids"][sequence["loss_mask"] == 1])
    assert all(message["content"] in trained for message in first[1::2]) and questions[1] not in trained


def test_an_answer_may_be_drawn_again_and_the_temperature_changed(talk, tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = ["What is 3+4?", "/temperature 1.5", "/retry", f"/save {file}", "/temperature 0", "/retry", f"/save {file}"]
    talk(*lines)
    drawn, greedy_one = (json.loads(line)["messages"] for line in file.read_text().splitlines())
    assert len(drawn) == len(greedy_one) == 2
    assert greedy_one[1]["content"] == greedy(greedy_one[:1]) != drawn[1]["content"]


def test_mistakes_are_a_line_and_the_chat_goes_on(talk, tmp_path):
    long = " ".join(["number"] * 600)
    out, err = talk(
        "/retry", "/nosuch", "/temperature hot", f"/save {tmp_path}", long, "What is 3+4?", "/quit", "never read"
    )
    assert [line.split(":")[1].strip().split(" ")[0] for line in err.splitlines()] == [
        *("/retry", "/nosuch", "temperature", "/save", "the")
    ]
    assert greedy([{"role": "user", "content": "What is 3+4?"}]) in out
    with pytest.raises(UserError, match="cannot load the model nosuch .not a local folder"):
        chat.main(["nosuch"])
    with pytest.raises(UserError, match="temperature -1"):
        chat.main([MODEL, "--temperature", "-1"])


def test_what_no_model_can_be_given_is_a_line_and_the_chat_is_as_before(talk, tmp_path):
    """A template that knows no system message, bytes that are no text, a name with a zero byte; a base model without text."""
    shutil.copytree(MODEL, tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    lines = (
        "one",
        "/save a\0b",
        "two \udcff",
        "/system Be brief.",
        "three",
        "/system",
        "four",
        f"/save {tmp_path / 'kept'}",
    )
    _, err = talk(*lines, flags=("--temperature", "0", "--max_new_tokens", "2"), model=tmp_path / "strict")
    said = err.splitlines()
    assert (
        len(said) == 3 and "embedded null byte" in said[0] and "not valid UTF-8" in said[1] and "no system here" in said[2]
    )
    assert [m["content"] for m in json.loads((tmp_path / "kept").read_text())["messages"]][:1] == ["four"]
    (tmp_path / "strict" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no text that the model could go on with"):
        chat.main([str(tmp_path / "strict"), "--prompt", ""])


def test_an_answer_that_cannot_be_drawn_again_stays(talk, tmp_path, monkeypatch):
    """Ctrl-C before the new one has begun."""
    real, calls = transformers.LlamaForCausalLM.generate, []

    def generate(self, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    talk("What is 3+4?", "/retry", f"/save {tmp_path / 'kept'}")
    assert [m["role"] for m in json.loads((tmp_path / "kept").read_text())["messages"]] == ["user", "assistant"]


def test_the_folder_of_a_run_that_has_not_ended_names_its_newest_checkpoint(tmp_path):
    for step in (9, 10):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    with pytest.raises(UserError, match="not come to its end, .* its newest checkpoint is .*checkpoint-10$"):
        chat.main([str(tmp_path / "run")])
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no config.json in it: it is not the folder of a model"):
        chat.main([str(tmp_path / "none")])


def test_at_the_prompt_it_takes_two_ctrl_c_to_leave(monkeypatch, capsys):
    keys = iter([KeyboardInterrupt, "/retry", KeyboardInterrupt, KeyboardInterrupt, "never read"])

    def read(prompt=""):
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", read)
    chat.main([MODEL])
    assert next(keys) == "never read" and capsys.readouterr().out.count("once more Ctrl-C") == 2


@pytest.mark.slow
def test_as_a_program_a_reader_that_leaves_and_bytes_that_are_no_text_are_no_traceback():
    command = [sys.executable, "-m", "tools.chat", MODEL, "--temperature", "0", "--max_new_tokens", "8"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    begun = {"cwd": ROOT, "env": environ, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **begun) as process:
        process.stdout.close()
        process.stdin.write(b"What is 3+4?\n\xff\n")
        process.stdin.close()
        said = process.stderr.read().decode()
        assert process.wait() == 0 and said == "error: what was written is not valid UTF-8\n", said


def test_ctrl_c_cuts_an_answer_short_and_control_characters_are_spelled_out(talk, monkeypatch):
    def generate(self, *, streamer, **options):
        streamer.put(options["input_ids"][0])
        streamer.on_finalized_text("one \x1b[2J")
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    out, _ = talk("Hi")
    assert "one \\x1b[2J\n" in out


def test_one_answer_is_all_that_is_printed(capsys):
    chat.main([MODEL, "--prompt", "What is 3+4?", "--temperature", "0"])
    assert capsys.readouterr().out.strip() == greedy([{"role": "user", "content": "What is 3+4?"}])


def test_an_adapter_stops_where_its_own_settings_say(tmp_path):
    """Not where its base's do."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    base.generation_config.eos_token_id = 0
    base.save_pretrained(tmp_path / "base")
    lm = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=1))
    lm.save_pretrained(tmp_path / "adapter")
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "adapter")
    transformers.GenerationConfig(eos_token_id=[0, 7]).save_pretrained(tmp_path / "adapter")
    model, _ = chat.load(str(tmp_path / "adapter"))
    assert model.generation_config.eos_token_id == [0, 7]
