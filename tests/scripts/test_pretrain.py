"""train_pretrain.py against float64: every token that follows another one, once, with the same weight."""

import math
from types import SimpleNamespace

from common.errors import UserError
from common.evaluate import bytes_per_token
import numpy as np
import pytest
import tokenizers
import torch
from torch.nn.functional import cross_entropy, silu
import transformers

from tests.conftest import read_rows, write_rows
from tests.scripts.one_step import (
    assert_gradient,
    assert_metrics,
    assert_nll_evaluations,
    assert_nll_step,
    gradient_of,
    make_model,
    nll_window,
    watched,
)
from tests.scripts.texts import BASE, ids_of, tokenizer
import train_pretrain

DOCUMENTS = [
    "Question: What is 10+5?\nAnswer: 15",
    "5-1=4. 1+3=4. 12+1=13. 15-3=12.",
    "Today is Monday. Mia sees Zoe. Tomorrow is Tuesday. Then Zoe sees Mia. And so they go on, from day to day.",
    "15-6-1: 15-6=9. 9-1=8. So 15-6-1 is 8.",
    "A pond has 3 ducks.",
    "Eva has 19 balls. Mia has 4 balls. Eva has more. 6+6 is 12. 8-6 is 2. 12+3 is 15. 8+8 is 16.",
]
HELD_OUT = [
    "12-5+6+4: 12-5=7. 7+6=13. 13+4=17. The answer is 17.",
    "3+1=4. 13-7=6.",
    "Find 12-4, and say why it is so.",
]
L = 20  # max_length of the runs


def documents(texts):
    """Each document as ids that end on the end-of-text token."""
    return [[*ids_of(text), tokenizer().eos_token_id] for text in texts]


def rows_of(texts, packing, length=L):
    """What the tokens of a row can see, as (ids, mask): pieces of one long stream, or of each document by
    itself."""
    streams = documents(texts) if packing == "bfd" else [sum(documents(texts), [])]
    pieces = [stream[at : at + length] for stream in streams for at in range(0, len(stream), length)]
    return [(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for name, texts in (("documents", DOCUMENTS), ("held_out", HELD_OUT)):
        write_rows(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    return folder


def pretrain(launch, data, *flags, model=BASE, batch=50, output="out"):
    names = [
        "--dataset_name",
        data / "documents.jsonl",
        "--per_device_train_batch_size",
        batch,
        "--max_length",
        L,
    ]
    return watched(launch, "pretrain", model, *names, "--learning_rate", "1e-3", *flags, output=output)


@pytest.mark.parametrize("packing", ["wrapped", "bfd"])
def test_every_token_that_follows_another_is_trained(packing, launch, data, base):
    """All documents as one step: loss, accuracy, entropy and gradient, whether rows cross the documents or
    hold them whole."""
    run = pretrain(launch, data, "--packing_strategy", packing, "--num_train_epochs", 1)
    sequences = rows_of(DOCUMENTS, packing)
    assert len(run.rows) == 1
    assert_nll_step(run, base, sequences, num_tokens=sum(len(ids) for ids, _ in sequences))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--model_name_or_path m", "m"),
        ("--model_name_or_path m --tokenizer_name t", "t"),
        ("--config_name c", "c"),
        ("--config_name c --tokenizer_name t", "t"),
    ],
)
def test_of_two_names_of_a_tokenizer_its_own_counts(words, named, launch, monkeypatch):
    def load(args, source):
        raise UserError(f"loaded: {source}")

    monkeypatch.setattr("train_pretrain.load_tokenizer", load)
    with pytest.raises(UserError, match=f"loaded: {named}$"):
        launch("pretrain", *words.split())


def test_experts_of_a_new_model_are_balanced_unless_that_is_switched_off():
    given = [train_pretrain.Args(num_experts=4, router_aux_loss_coef=coef) for coef in (None, 0.0, 0.5)]
    assert [args.router_aux_loss_coef for args in given] == [0.01, 0.0, 0.5]
    assert train_pretrain.Args().router_aux_loss_coef is None


@pytest.mark.parametrize(("packing", "size"), [("wrapped", 2), ("bfd", 1)])
def test_the_evaluation_is_the_mean_over_all_held_out_tokens(packing, size, launch, data, base):
    """Rows of different length in batches of any size, before and after a step."""
    flags = [
        "--eval_dataset_name",
        data / "held_out.jsonl",
        "--per_device_eval_batch_size",
        size,
        "--eval_steps",
        1,
    ]
    flags += ["--packing_strategy", packing, "--max_steps", 2, "--learning_rate", "1e-2"]
    run = pretrain(launch, data, *flags)
    assert_nll_evaluations(run, base, rows_of(HELD_OUT, packing))


def test_dropout_is_on_in_training(launch, data, tmp_path):
    """On the same row and weights the loss differs from step to step, and is the same when the run is
    repeated."""
    one_row = write_rows(tmp_path / "one.jsonl", [{"text": DOCUMENTS[2]}])
    flags = ["--dataset_name", one_row, "--max_length", 128, "--learning_rate", 0, "--max_steps", 3]
    model = make_model(tmp_path / "model", "gpt2")
    one, again = (
        [row["loss"] for row in pretrain(launch, data, *flags, model=model, output=o).rows] for o in "ab"
    )
    assert len(set(one)) == 3 and one == pytest.approx(again, rel=1e-6)


SIZES = dict(
    hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40
)


def test_a_new_model_has_the_sizes_that_were_asked_for(launch, data, tmp_path):
    """By flags, or by the configuration of another model; the vocabulary is the tokenizer's."""
    flags = [
        "--dataset_name",
        data / "documents.jsonl",
        "--tokenizer_name",
        BASE,
        "--max_steps",
        1,
        "--eval_steps",
        0,
    ]
    flags += ["--save_steps", 0, "--per_device_train_batch_size", 2]
    names = ["hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"]
    sizes = [word for name, size in zip(names, SIZES.values(), strict=True) for word in (f"--{name}", size)]
    sizes += ["--max_length", 600, "--initializer_range", 0.5, "--tie_word_embeddings", "false"]
    for output, more in (
        ("flags", sizes),
        ("config", ["--config_name", tmp_path / "flags", "--max_length", 32]),
    ):
        folder = launch("pretrain", *flags, *more, "--learning_rate", 0, output=output)
        config = transformers.AutoConfig.from_pretrained(folder)
        assert {name: getattr(config, name) for name in SIZES} == SIZES
        assert config.vocab_size == len(tokenizer()) and config.tie_word_embeddings is False
        assert config.max_position_embeddings == 600 and config.eos_token_id == tokenizer().eos_token_id
    weights = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "flags")
        .model.layers[0]
        .mlp.up_proj.weight
    )
    assert weights.std().item() == pytest.approx(0.5, rel=0.1)


def test_documents_are_those_of_the_column_that_is_named(launch, data, base, tmp_path):
    """In training, and in the samples; a new tokenizer knows their words, and a resumed run has the same
    one."""
    rows = [{"text": "zzzz", "story": text} for text in DOCUMENTS]
    flags = ["--dataset_name", write_rows(tmp_path / "rows.jsonl", rows), "--dataset_text_field", "story"]
    run = pretrain(launch, data, *flags, "--num_train_epochs", 1, "--eval_steps", 1, "--num_samples", 1)
    assert_nll_step(run, base, rows_of(DOCUMENTS, "wrapped"))
    assert read_rows(run.output / "samples.jsonl")[0]["prompt"] == " ".join(DOCUMENTS[0].split())
    flags += "--vocab_size 300 --hidden_size 32 --num_layers 1 --num_heads 2 --max_length 32 --eval_steps 0".split()
    new = launch("pretrain", *flags, "--max_steps", 1, "--save_steps", 1, output="new")
    known = (new / "tokenizer.json").read_text()
    assert "zz" not in known
    (tmp_path / "cache").mkdir()
    launch("pretrain", *flags, "--max_steps", 2, "--dataset_cache_dir", tmp_path / "cache", output="new")
    assert (new / "tokenizer.json").read_text() == known and not list((tmp_path / "cache").glob("tokenizer*"))


def test_micro_batches_are_filled_by_tokens_where_that_is_asked_for(launch, data):
    """Three rows of 20 fit into 60 tokens, whatever the batch size says."""
    run = pretrain(launch, data, "--max_tokens_per_batch", 3 * L, "--num_train_epochs", 1, batch=1)
    total = [row["num_tokens"] for row in run.rows]
    sizes = [after - before for before, after in zip([0, *total], total, strict=False)]
    assert all(2 * L < size <= 3 * L for size in sizes[:-1]) and len(sizes) > 2


@pytest.mark.parametrize("packing", ["wrapped", "bfd"])
def test_a_second_head_looks_further_ahead(packing, launch, tmp_path, base):
    """experiments/mtp.diff: it predicts each token from the state two tokens before it in its row. Some
    documents begin alike, and their beginning is computed once."""
    texts = [*DOCUMENTS, DOCUMENTS[0] + "?", DOCUMENTS[0] + "!"]
    words = [
        "--dataset_name",
        write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts]),
        "--max_length",
        64,
    ]
    words += ["--per_device_train_batch_size", 50, "--packing_strategy", packing, "--num_train_epochs", 1]
    run = watched(launch, "mtp", BASE, *words, "--ahead_weight", 0.7, extra=4)
    assert len(run.rows) == 1
    shapes = {(96, 96): "w1", (512, 96): "w2", (96,): "b1", (512,): "b2"}
    places = {shapes[tuple(w.shape)]: name for name, w in run.weights[0].items() if name.startswith("extra")}
    head = {name: run.weights[0][place].double().requires_grad_() for name, place in places.items()}
    rows, ahead = rows_of(texts, packing, 64), 0.0
    for ids, _ in rows:
        states = base.model(input_ids=torch.tensor([ids])).last_hidden_state[0]  # the LM head's input
        logits = silu(states @ head["w1"].T + head["b1"]) @ head["w2"].T + head["b2"]
        ahead = ahead + cross_entropy(logits[:-2], torch.tensor(ids[2:]), reduction="sum")
    ahead = ahead / sum(len(ids) - 1 for ids, _ in rows)
    loss, values = nll_window(base, rows)
    assert_metrics(run.rows[0], values | {"ahead_loss": ahead.item()})
    wanted = torch.autograd.grad(0.7 * ahead, list(head.values()), retain_graph=True)
    wanted = dict(zip(map(places.get, head), wanted, strict=True)) | gradient_of(base, loss + 0.7 * ahead)
    assert_gradient(run.grads[0], wanted)


@pytest.mark.parametrize("packing, length", [("wrapped", L), ("bfd", 256), ("wrapped", 5)])
def test_bits_per_byte_are_of_the_text(packing, length, launch, data, tmp_path):
    """All nats of the held-out tokens by the bytes that they stand for; what nothing predicts, the first
    token of a row, is not among them. The end of a text costs bits, and has no bytes."""
    texts = [*HELD_OUT, "Zoë übt: 7 € ≥ 5 €, 3+4=7 🦆🦆", "猫が三匹います。"]
    file = write_rows(tmp_path / "held_out.jsonl", [{"text": text} for text in texts])
    flags = ["--eval_dataset_name", file, "--packing_strategy", packing, "--max_length", length]
    run = pretrain(launch, data, *flags, "--eval_steps", 1, "--max_steps", 1)
    rows = [ids for ids, _ in rows_of(texts, packing, length)]
    letters = [
        tokenizer().convert_ids_to_tokens(i) for ids in rows for i in ids[1:] if i != tokenizer().eos_token_id
    ]
    size = sum(map(len, letters))  # in a byte-level vocabulary each byte is written as one letter
    tokens = sum(len(ids) - 1 for ids in rows)
    for row in run.evals:
        assert row["eval_bits_per_byte"] == pytest.approx(
            row["eval_loss"] * tokens / (math.log(2) * size), rel=1e-6
        )


class Rows(list):
    """Held-out rows of several sources."""


def test_bytes_are_counted_where_characters_are_cut():
    """A vocabulary of pieces, which writes what it lacks byte by byte: é is two bytes, 猫 is three."""
    pieces = ["</s>", "a", "▁b", "<0xC3>", "<0xA9>", "<0xE7>", "<0x8C>", "<0xAB>"]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    engine = tokenizers.Tokenizer(model)
    parts = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ]
    engine.decoder = tokenizers.decoders.Sequence(parts)
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="</s>")
    rows = [[1, 3, 4, 2, 0], [4, 5, 6], [7, 1, 5], [3, 4, 1]]  # aé b, ..é 猫, .. a, é a
    held_out = Rows([[{"input_ids": np.array(row)}] for row in rows])
    held_out.counts, held_out.sources = [3, 1], [SimpleNamespace(weight=None)] * 2
    assert bytes_per_token(held_out, own) == pytest.approx((1 + 1 + 2 + 1 + 1 + 1 + 1 + 1 + 1) / 10)
    # of sources with weights each has its share, whatever its size: " b b", a five times
    held_out = Rows([[{"input_ids": np.array(row)}] for row in ([1, 2, 2], [1, 1, 1, 1, 1, 1])])
    held_out.counts, held_out.sources = [1, 1], [SimpleNamespace(weight=weight) for weight in (0.9, 0.1)]
    assert bytes_per_token(held_out, own) == pytest.approx(0.9 * 2 + 0.1 * 1)
