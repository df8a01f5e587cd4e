"""Models and rows of the benchmarks, made from seeds: the same for every side, nothing from outside the
repository.

    python benchmarks/prepare.py     # called by the benchmarks where outputs/benchmarks/inputs is not there yet

Chats, pairs and pages have log-normal lengths of 20 to 1,000 tokens (μ 5, σ 0.8: half of them below 148), of
the words of data/pretrain. `*.ordered.jsonl` holds the rows in the order in which our run takes them, for the
peers, which read sequentially; `*.lengths.json` the tokens of each, counted here with the tokenizer alone.
"""

import hashlib
import json
import os
from pathlib import Path
import random
import sys
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "outputs" / "benchmarks" / "inputs"
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

import accelerate  # noqa: E402
from common.data import Shuffled, Tokenizer, chunk, load_data, pack  # noqa: E402
from common.data.order import Order  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import train_pretrain  # noqa: E402

V, SHORTEST, LONGEST = 4096, 20, 1000
SIZES = {
    # 1.3M
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 352},
    # 20.2M
    "20m": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1280},
}
CHATS, PAIRS = 192, 240
TEXT_ROWS = {512: 80, 128: 240}  # of so many tokens: how many
PAGES, PACK, PACKS = 240, 1024, 2  # documents that stay whole; tokens of a pack, packs of a step
# A turn ends on <|im_end|> and nothing after it, so that a preference pair means the same tokens to every
# side.
TEMPLATE = """\
{%- for message in messages -%}
{{ ('' if loop.first else '\n') + '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\n<|im_start|>assistant\n' }}{%- endif -%}"""


class Words:
    """Text of a wanted number of tokens, in order from data/pretrain."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.words = (ROOT / "data" / "pretrain" / "train.txt").read_text(encoding="utf-8").split()
        encoded = tokenizer([" " + word for word in self.words], add_special_tokens=False).input_ids
        self.sizes, self.rng = [len(ids) for ids in encoded], random.Random(seed)

    def text(self, tokens: float) -> str:
        start = at = self.rng.randrange(len(self.words) - 2000)
        size = self.sizes[at]
        while size < tokens:
            at += 1
            size += self.sizes[at]
        return " ".join(self.words[start : at + 1])

    def length(self) -> float:
        return min(max(self.rng.lognormvariate(5.0, 0.8), SHORTEST), LONGEST)


def chat(words: Words) -> dict[str, Any]:
    """One to three exchanges; of the tokens that are not markup, 40 to 80 % are the assistant's."""
    total = words.length()
    turns = 1 if total < 120 else words.rng.choice((1, 2, 3))
    messages = []
    for _ in range(turns):
        room = max(2.0, total / turns - 12)  # <|im_start|>, the role, <|im_end|>
        share = words.rng.uniform(0.4, 0.8)
        messages.append({"role": "user", "content": words.text(room * (1 - share))})
        messages.append({"role": "assistant", "content": words.text(room * share)})
    return {"messages": messages}


def pair(words: Words) -> dict[str, Any]:
    """A prompt of 20 to 60 % of the tokens, and two answers of different length."""
    total, share = words.length(), words.rng.uniform(0.2, 0.6)
    room = max(4.0, total - 12)
    answers = [
        min(max(room * (1 - share) * words.rng.lognormvariate(0, 0.4), 2.0), LONGEST - room * share)
        for _ in range(2)
    ]
    sides = [[{"role": "assistant", "content": words.text(answer)}] for answer in answers]
    return {
        "prompt": [{"role": "user", "content": words.text(room * share)}],
        "chosen": sides[0],
        "rejected": sides[1],
    }


def write_rows(folder: Path, name: str, rows: list[dict], order: Order, lengths: list[Any] | None) -> None:
    def dump(path: Path, these: list[dict]) -> None:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in these), encoding="utf-8"
        )

    in_order = [order[position] for position in range(len(rows))]
    dump(folder / f"{name}.jsonl", rows)
    dump(folder / f"{name}.ordered.jsonl", [rows[i] for i in in_order])
    if lengths:
        (folder / f"{name}.lengths.json").write_text(json.dumps([lengths[i] for i in in_order]))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained("data/base_model")
    tokenizer.chat_template = TEMPLATE
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for name, size in SIZES.items():
        config = transformers.LlamaConfig(
            vocab_size=V, max_position_embeddings=2048, tie_word_embeddings=True, num_key_value_heads=size["num_attention_heads"],
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **size,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, end_of_turn]
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def tokens(messages: list[dict]) -> list[int]:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True).input_ids

    words = Words(tokenizer, 0)
    chats = [chat(words) for _ in range(CHATS)]
    write_rows(folder, "chats", chats, Order([CHATS], 0), [len(tokens(row["messages"])) for row in chats])
    pairs = [pair(words) for _ in range(PAIRS)]
    sizes = [[len(tokens(row["prompt"] + row[side])) for side in ("chosen", "rejected")] for row in pairs]
    write_rows(folder, "pairs", pairs, Order([PAIRS], 0), sizes)
    grpo = [json.loads(line) for line in open("data/grpo/train.jsonl", encoding="utf-8")]
    write_rows(folder, "prompts", grpo, Order([len(grpo)], 0), None)

    # Text: documents, and the rows that our run cuts from their stream, as token ids for the peers.
    documents = [{"text": words.text(words.rng.uniform(50, 1500))} for _ in range(200)]
    # 1: end of text
    sizes_of = [len(tokenizer(row["text"], add_special_tokens=False).input_ids) + 1 for row in documents]
    last = next(  # a last document that makes all rows full
        text
        for text in (" ".join(["1"] * n) for n in range(1, 2000))
        if (sum(sizes_of) + len(tokenizer(text, add_special_tokens=False).input_ids) + 1) % max(TEXT_ROWS)
        == 0
    )
    documents.append({"text": last})
    write_rows(folder, "text", documents, Order([len(documents)], 0), None)
    pages = [{"text": words.text(words.length())} for _ in range(PAGES)]
    write_rows(folder, "pages", pages, Order([PAGES], 0), None)

    def documents_in_order(name: str) -> Shuffled:
        args = train_pretrain.Args(
            dataset_name=[str(folder / f"{name}.jsonl")],
            dataset_cache_dir=str(folder.parent / "cache"),
            dataset_num_proc=1,
        )
        train, _ = load_data(args, accelerate.Accelerator(cpu=True), train_pretrain.encode, tokenizer)
        return train

    stream = documents_in_order("text")
    for length, many in TEXT_ROWS.items():
        rows = chunk(stream, length)
        full = [rows[i][0]["input_ids"] for i in range(many)]
        np.save(folder / f"text{length}.ordered.npy", np.stack(full).astype(np.int64))
        print(f"text: {len(rows)} rows of {length}")
    packs = pack(documents_in_order("pages"), PACK)
    documents_of = [[sequence["input_ids"].tolist() for sequence in packs[i]] for i in range(len(packs))]
    steps = [documents_of[i] + documents_of[i + 1] for i in range(0, len(packs) - 1, PACKS)]
    (folder / "pages.steps.json").write_text(json.dumps(steps))  # of each step, the documents
    print(f"pages: {len(steps)} steps of {np.mean([len(step) for step in steps]):.1f} documents")
    lengths = [int(n) for row in sizes for n in row]
    print(
        f"chats: mean {np.mean([len(tokens(c['messages'])) for c in chats]):.0f} tokens; sides of pairs: mean {np.mean(lengths):.0f},"
    )
    print(f"longest {max(lengths)}")
    (folder / "done").write_text(hashlib.sha256(Path(__file__).read_bytes()).hexdigest())


if __name__ == "__main__":
    main(FOLDER)
