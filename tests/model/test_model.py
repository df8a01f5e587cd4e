"""What a FlatModel says of a flat row, against transformers' own logits in float64, sequence by sequence."""

import copy
import json

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import flat_batch
from common.model.flat_model import disable_dropout
from common.model.load import (
    enable_gradient_checkpointing,
    load_model,
    load_pretrained,
    load_tokenizer,
    set_stop_tokens,
)
from common.model.wrap import wrap
import numpy as np
import pytest
import torch
import transformers

from tests.tiny import FEW, HEAD, SIZE, V, spread, tiny_family, tiny_lm

LENGTHS = (7, 40, 2, 13, 13, 64, 5, 30)


def examples(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    rows = [
        {"input_ids": rng.integers(3, V, n), "loss_mask": (rng.random(n) < 0.7).astype(np.uint8)}
        for n in lengths
    ]
    for row in rows:
        row["loss_mask"][-1] = 1
    return [[row] for row in rows]


def alone_in_float64(lm, example, temperature=1.0):
    """log-softmax over the full logits of one sequence by itself: (n,), 0 where a token is not trained or is
    the first."""
    experts = getattr(lm.config, "num_local_experts", None)  # grouped matrix products know no float64
    lm = (lm if experts else lm.double()).eval()
    ids = torch.as_tensor(example[0]["input_ids"])[None]
    logps = (lm(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids[0, 1:, None])[:, 0] * torch.as_tensor(example[0]["loss_mask"][1:])
    return torch.cat([torch.zeros(1), chosen])


@pytest.mark.parametrize("name", ["phimoe", "llama4"])
def test_a_window_in_a_mask_only_is_found(name):
    """A flat row has no mask: these go through padded batches, though the tokens of the check are fewer than
    the window."""
    lm = tiny_family(name)
    model, batch = wrap(copy.deepcopy(lm)), flat_batch(examples(), torch.device("cpu"))
    assert model.padded
    with torch.no_grad():
        found = model(batch).logps
        wanted = torch.cat([alone_in_float64(lm, example) for example in examples()])
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    for setting in ("sliding_window", "attention_chunk_size"):
        assert getattr(model.config, setting, None) in (5, None)


def test_loaded_weights_are_aligned_as_new_ones():
    """At multiples of 64 bytes: else MKL rounds otherwise after a run was resumed."""
    args = CommonArgs(model_name_or_path="data/base_model")
    model = load_model(args, Accelerator(cpu=True), load_tokenizer(args))
    assert not [name for name, p in model.named_parameters() if p.data_ptr() % 64]
    lm = transformers.AutoModelForCausalLM.from_pretrained("data/base_model")
    assert all(torch.equal(p, model.lm.get_parameter(name)) for name, p in lm.named_parameters())


# --- what draws at random in training -----------------------------------------------------------------------

RANDOM = {
    "xglm": ("XGLMConfig", {**SIZE, "ffn_dim": 48, "dropout": 0.3, "activation_dropout": 0.3}),
    "seed-oss": ("SeedOssConfig", {**SIZE, **HEAD, "attention_dropout": 0.3, "residual_dropout": 0.3}),
    "phimoe": (
        "PhimoeConfig",
        {
            **SIZE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "input_jitter_noise": 0.3,
            "router_jitter_noise": 0.3,
        },
    ),
    "bloom": ("BloomConfig", {**FEW, "hidden_dropout": 0.3}),
}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", RANDOM)
def test_nothing_is_random_once_dropout_is_disabled(name, recomputed):
    """In training mode: dropout as a module, as a call, with a rate from the config, and the random routing
    of experts."""
    model = wrap(spread(*RANDOM[name]))
    batch = flat_batch(examples(), torch.device("cpu"))
    if recomputed:
        enable_gradient_checkpointing(model)
    disable_dropout(model)
    model.eval()
    wanted = model(batch).logps.detach()
    model.train()
    found = model(batch).logps
    assert model.training and torch.equal(found.detach(), wanted)
    found.sum().backward()
    rates = {n: rate for n, rate in RANDOM[name][1].items() if "drop" in n}
    assert {n: getattr(model.config, n) for n in rates} == rates  # what is saved stays


def test_a_generation_config_never_stops_a_save(tmp_path):
    """What transformers reads, and would not write again, goes, but for the tokens."""
    base, tokenizer = tmp_path / "base", transformers.AutoTokenizer.from_pretrained("data/base_model")
    tokenizer.pad_token = "<|im_end|>"
    tiny_lm("llama").to(torch.bfloat16).save_pretrained(base)
    for settings, kept in (
        ({"top_k": 20}, False),
        ({"early_stopping": True}, False),
        ({"top_k": 20, "do_sample": True}, True),
    ):
        (base / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 2}))
        model = load_pretrained(CommonArgs(), base)
        assert model.lm.dtype == torch.float32  # whatever the file holds
        set_stop_tokens(model, [2], tokenizer)
        model.lm.save_pretrained(tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
        assert saved["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
        assert saved["eos_token_id"] == 2 and (settings.items() <= saved.items()) == kept
    assert load_pretrained(CommonArgs(dtype="bfloat16"), base).lm.dtype == torch.bfloat16
    assert load_pretrained(CommonArgs(dtype="auto"), base).lm.dtype == torch.bfloat16
    tiny_lm("llama").half().save_pretrained(base)
    # float16 gradients would vanish
    assert load_pretrained(CommonArgs(dtype="auto"), base).lm.dtype == torch.float32
