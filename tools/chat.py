"""Talk to a model: `python -m tools.chat outputs/sft`.

The folder of a run, one of its checkpoints, an adapter, or a name on the Hub. Answers appear as they are written; Ctrl-C
cuts one short. A line that begins with a slash is a command:

    /system TEXT        begin anew, with this system message (without TEXT: with none)
    /retry              the last answer again, drawn anew
    /temperature T      0 takes the most probable token always
    /save FILE          add the chat to FILE, as a row that train_sft.py reads
    /quit               as the end of the input (Ctrl-D)

With --prompt, one answer, and the end: its text is all that is printed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, printable, show_and_exit
from common.model.lora import import_peft
from common.model.shards import refuse_shards

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COMMANDS = ("/system", "/retry", "/temperature", "/save", "/quit")


def load(name: str, *, trust_remote_code: bool = False) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A model and its tokenizer, in the precision of its files, on the GPU if there is one. Raises UserError."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    refuse_shards(name)
    options = {"dtype": "auto", "trust_remote_code": trust_remote_code}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        if Path(name, "adapter_config.json").exists():
            peft = import_peft(f"the adapter {name}")
            if Path(name, "generation_config.json").exists():  # peft would take the base's, which stops elsewhere
                options["generation_config"] = transformers.GenerationConfig.from_pretrained(name)
            model = peft.AutoPeftModelForCausalLM.from_pretrained(name, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    except UserError:
        raise
    except Exception as error:  # what lies in a folder may be anything
        hint = "" if Path(name).exists() else " (no such folder; is it a Hub name, and the Hub reachable?)"
        raise UserError(f"cannot load {name}{hint}: {type(error).__name__}: {error}"[:400]) from None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.eval().to(device), tokenizer


class Chat:
    """The messages so far, and how they go on."""

    def __init__(self, model: Any, tokenizer: Any, *, system: str, temperature: float, max_new_tokens: int):
        self.model, self.tokenizer, self.temperature, self.max_new_tokens = model, tokenizer, temperature, max_new_tokens
        self.begin(system)

    def begin(self, system: str) -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> None:
        before = [*self.messages]
        self.messages.append({"role": "user", "content": question})
        try:
            self.answer()
        except UserError:
            self.messages = before
            raise

    def answer(self) -> None:
        """Write the next answer to the screen and to the messages. Ctrl-C ends it where it is."""
        from transformers import TextStreamer

        written: list[str] = []

        class Screen(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                written.append(text)
                print(printable(text), end="\n" if stream_end else "", flush=True)

        if self.tokenizer.chat_template:
            inputs = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:  # a base model goes on with the text
            inputs = self.tokenizer("".join(message["content"] for message in self.messages), return_tensors="pt")
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        most = self.max_new_tokens if room is None else min(self.max_new_tokens, room - inputs["input_ids"].shape[1])
        if most < 1:
            raise UserError(f"the chat fills the {room} positions of the model: /system begins anew")
        drawn = {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {"do_sample": False}
        screen = Screen(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            with torch.inference_mode():
                inputs = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
                self.model.generate(**inputs, max_new_tokens=most, streamer=screen, top_k=0, top_p=1.0, **drawn)
        except KeyboardInterrupt:
            screen.end()
        self.messages.append({"role": "assistant", "content": "".join(written).strip()})

    def command(self, line: str) -> None:
        """One of COMMANDS but /quit. Raises UserError where it makes no sense."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/system":
            self.begin(rest)
        elif name == "/retry":
            if not self.messages or self.messages[-1]["role"] != "assistant":
                raise UserError("/retry: there is no answer yet")
            self.messages.pop()
            self.answer()
        elif name == "/temperature":
            self.temperature = as_temperature(rest)
        elif name == "/save":
            if not rest or not any(message["role"] == "assistant" for message in self.messages):
                raise UserError("/save FILE, after an answer")
            try:
                with open(rest, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
            except OSError as error:
                raise UserError(f"/save {rest}: {error}") from None
            print(f"saved to {printable(rest)}")
        else:
            raise UserError(f"{name}: one of {', '.join(COMMANDS)}")


def as_temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"temperature {text}: a number from 0 on")
    return value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.chat", description="talk to a model")
    parser.add_argument("model", help="output folder of a run, checkpoint, adapter, or Hub name")
    parser.add_argument("--prompt", help="one question; prints the answer and ends")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--temperature", default="0.7", help="0: the most probable token always (default: 0.7)")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="longest answer (default: 512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that the model brings along")
    args = parser.parse_args(argv)
    temperature = as_temperature(args.temperature)
    if args.max_new_tokens < 1:
        raise UserError("--max_new_tokens: at least 1")
    model, tokenizer = load(args.model, trust_remote_code=args.trust_remote_code)
    torch.manual_seed(args.seed)
    chat = Chat(model, tokenizer, system=args.system, temperature=temperature, max_new_tokens=args.max_new_tokens)
    if args.prompt is not None:
        chat.ask(args.prompt)
        return
    print(f"{args.model}: write, and press Enter. {' '.join(COMMANDS)}")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                chat.command(line)
            else:
                chat.ask(line)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        show_and_exit(error)
