"""Talk to a model: `python -m tools.chat outputs/sft`.

The model is the folder of a run, one of its checkpoints, an adapter, or a name on the Hub. Answers appear as
they are generated; Ctrl-C stops one early, and leaves at the prompt. The arrow keys bring earlier lines back;
lines that are pasted together are one message (where Python has GNU readline). A line that begins with a
slash is a command:

    /system TEXT        start over, with this system message (without TEXT: with none)
    /retry              generate the last answer again
    /temperature T      0 always takes the most probable token
    /save FILE          append the chat to FILE, as a row for train_sft.py
    /help               this page
    /quit               exit, as do exit, quit and the end of the input (Ctrl-D)

With --prompt, prints only the text of one answer, and exits. With --web, the chat is a page for the browser,
at the address that is printed (needs gradio).
"""

import argparse
import contextlib
import json
import math
import os
from pathlib import Path
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any
import unicodedata

from common.data.chat_template import set_defaults
from common.data.tokens import tokenize_prompt
from common.data.types import BadRow
from common.errors import UserError, printable
from common.memory import is_oom
from common.model.files import hub_errors
from common.model.load import check_weights
from common.model.lora import import_peft
import torch

from tools import as_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COMMANDS = ("/system", "/retry", "/temperature", "/save", "/help", "/quit")


def load(name: str, *, trust_remote_code: bool = False) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A model and its tokenizer, in the dtype of its files, on the GPU if there is one. Raises UserError."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": "auto", "trust_remote_code": trust_remote_code}
    with hub_errors("model", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        if Path(name, "adapter_config.json").exists():
            peft = import_peft(f"the adapter {name}")
            # peft would use the base's, which has other stop tokens
            if Path(name, "generation_config.json").exists():
                options["generation_config"] = transformers.GenerationConfig.from_pretrained(name)
            model = peft.AutoPeftModelForCausalLM.from_pretrained(name, **options)
        else:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                name, **options, output_loading_info=True
            )
            check_weights(name, model, info)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.eval().to(device), tokenizer


class Chat:
    """The messages so far, and the generation of answers."""

    def __init__(self, model: Any, tokenizer: Any, *, system: str, temperature: float, max_new_tokens: int):
        self.model = model
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.begin(system)

    def begin(self, system: str) -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> None:
        self.answer([*self.messages, {"role": "user", "content": question}])

    def answer(self, messages: list[dict[str, str]]) -> None:
        """Print the answer; the chat then consists of these messages and the answer. Ctrl-C truncates it.

        Raises UserError if there can be none, KeyboardInterrupt if it had not begun; the chat is unchanged
        then.
        """
        from transformers import TextStreamer

        written: list[str] = []

        lines = Lines()

        class Screen(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                written.append(text)
                print(lines.add(printable(text)), end="\n" if stream_end else "", flush=True)

        inputs = self.tokens(messages)
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        most = (
            self.max_new_tokens
            if room is None
            else min(self.max_new_tokens, room - inputs["input_ids"].shape[1])
        )
        if most < 1:
            raise UserError(f"the chat fills the {room} positions of the model: /system begins anew")
        drawn = (
            {"do_sample": True, "temperature": self.temperature}
            if self.temperature > 0
            else {"do_sample": False}
        )
        screen = Screen(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            with torch.inference_mode():
                inputs = {
                    name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")
                }
                self.model.generate(
                    **inputs, max_new_tokens=most, streamer=screen, top_k=0, top_p=1.0, **drawn
                )
        except KeyboardInterrupt:
            screen.end()
            if not "".join(written).strip():
                raise
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            raise UserError("out of memory: /system begins anew") from None
        self.messages = [*messages, {"role": "assistant", "content": "".join(written).strip()}]

    def tokens(self, messages: list[dict[str, str]]) -> Any:
        """The model's input, {"input_ids", "attention_mask"} of shape (1, length); for a base model without a
        template, plain text. Raises UserError."""
        prompt: Any = messages
        if not self.tokenizer.chat_template:
            prompt = "".join(message["content"] for message in messages)
        try:
            ids = tokenize_prompt(prompt, self.tokenizer)
        except BadRow as reason:  # some templates reject system messages
            raise UserError(str(reason)) from None
        if not ids:
            raise UserError("there is no text that the model could go on with")
        input_ids = torch.tensor([ids])
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    def command(self, line: str) -> None:
        """Run one of COMMANDS except /quit. Raises UserError for invalid arguments."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/system":
            self.begin(rest)
        elif name == "/retry":
            if not self.messages or self.messages[-1]["role"] != "assistant":
                raise UserError("/retry: there is no answer yet")
            self.answer(self.messages[:-1])
        elif name == "/help":
            print(__doc__)
        elif name == "/temperature":
            self.temperature = as_temperature(rest)
        elif name == "/save":
            if not rest or not any(message["role"] == "assistant" for message in self.messages):
                raise UserError("/save FILE, after an answer")
            try:
                with open(os.path.expanduser(rest), "a", encoding="utf-8") as file:
                    file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
            except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
                raise UserError(f"/save {rest}: {error}") from None
            print(f"saved to {printable(rest)}")
        else:
            raise UserError(f"{name}: one of {', '.join(COMMANDS)}")


class Lines:
    """Text that arrives in parts, broken between words where a terminal would break within one."""

    def __init__(self) -> None:
        self.width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        self.column = 0

    def add(self, text: str) -> str:
        """The text, whose words are whole, with line breaks."""
        broken = ""
        for part in re.findall(
            r"\n|[^\S\n]+|[\u2e80-\uffef]|[^\s\u2e80-\uffef]+", text
        ):  # Chinese breaks anywhere
            columns = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in part)
            if part == "\n":
                self.column = 0
            elif self.column + columns <= self.width:
                self.column += columns
            elif part.isspace():
                self.column = self.width  # the line ends here
                continue
            else:
                broken += "\n" if self.column else ""
                self.column = columns
            broken += part
        return broken


def serve(chat: Chat) -> None:
    """The chat as a page on this machine; every window of a browser has a chat of its own. Raises
    UserError."""
    try:
        import gradio
    except ImportError:
        raise UserError("--web needs gradio: pip install gradio") from None
    start = chat.messages  # the system message, if there is one

    def answer(question: str, history: list[dict[str, Any]]) -> str:
        texts = [
            turn["content"] if isinstance(turn["content"], str) else turn["content"][0]["text"]
            for turn in history
        ]
        turns = [{"role": turn["role"], "content": text} for turn, text in zip(history, texts, strict=True)]
        try:
            chat.answer([*start, *turns, {"role": "user", "content": question}])
        except UserError as error:
            raise gradio.Error(str(error)) from None
        return chat.messages[-1]["content"]

    gradio.ChatInterface(answer).launch()


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
    parser.add_argument("--prompt", help="one question; prints the answer and exits")
    parser.add_argument("--web", action="store_true", help="chat in a browser (needs gradio)")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument(
        "--template_kwargs",
        nargs="+",
        default=[],
        help="variables of the chat template, for instance enable_thinking=false",
    )
    parser.add_argument(
        "--temperature", default="0.7", help="0: the most probable token always (default: 0.7)"
    )
    parser.add_argument("--max_new_tokens", type=int, default=512, help="longest answer (default: 512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the model"
    )
    args = parser.parse_args(argv)
    temperature = as_temperature(args.temperature)
    if args.max_new_tokens < 1:
        raise UserError("--max_new_tokens: at least 1")
    model, tokenizer = load(args.model, trust_remote_code=args.trust_remote_code)
    if args.template_kwargs:
        set_defaults(tokenizer, args.template_kwargs)
    torch.manual_seed(args.seed)
    chat = Chat(
        model, tokenizer, system=args.system, temperature=temperature, max_new_tokens=args.max_new_tokens
    )
    if args.prompt is not None:
        chat.ask(args.prompt)
        return
    if args.web:
        return serve(chat)
    print(f"{args.model}: write, and press Enter. {' '.join(COMMANDS)}")
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # input() reads by it from here on, with a history

        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/quit", "exit", "quit"):
            return
        try:
            if line.startswith("/"):
                chat.command(line)
            elif line:
                chat.ask(line)
        except UserError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
        except KeyboardInterrupt:  # before the answer began
            print()


if __name__ == "__main__":
    as_command(main)
