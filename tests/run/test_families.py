"""What a family has of its own does not end a run: sizes by layer, shared weights."""

from types import SimpleNamespace

from common.errors import UserError
from common.model.wrap import wrap
from common.run.parts.mfu import flops_per_token, mfu_per_token
import pytest
import torch
import transformers

from tests.conftest import demo
from tests.tiny import V, tiny_family

pytestmark = pytest.mark.slow
SIZE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def lm_of(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_flops_of_a_model_whose_heads_differ_by_layer_are_counted(monkeypatch):
    config = transformers.Gemma4TextConfig(
        **SIZE, num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=8
    )
    model = wrap(lm_of(config))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters < (flops := flops_per_token(model, 64)) < 100 * parameters
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    two = SimpleNamespace(device=torch.device("cuda"), num_processes=2)
    assert mfu_per_token(model, 64, two) == pytest.approx(flops / (2 * 989e12))


@pytest.fixture
def base(tmp_path):
    """base(config): words that train an adapter of a model of it for a step, from a folder."""
    pytest.importorskip("peft")

    def save(config):
        lm_of(config).save_pretrained(tmp_path / "base")
        transformers.AutoTokenizer.from_pretrained("data/base_model").save_pretrained(tmp_path / "base")
        words = ["--config", demo("sft"), "--model_name_or_path", str(tmp_path / "base"), "--use_peft"]
        return ["sft", *words, *"--max_steps 1 --eval_steps 0 --per_device_train_batch_size 2".split()]

    return save


@pytest.mark.parametrize(
    "family, modules", [("zamba2", ["all-linear"]), ("qwen3", ["q_proj", "embed_tokens"])]
)
def test_adapters_on_shared_weights_are_not_merged(family, modules, base, launch):
    """Blocks that are used twice, an embedding tied to the head."""
    config = tiny_family(family).config
    config.vocab_size, config.tie_word_embeddings = 1024, True
    words, adapted = [*base(config), "--max_length", "96"], ["--lora_target_modules", *modules]
    refused = "shares its weight with another layer: its adapter cannot be merged"
    with pytest.raises(UserError, match=refused):
        launch(*words, *adapted, "--merge_lora", output="merged")
    with pytest.raises(UserError, match=refused):  # without --use_peft a run starts with the adapter merged
        whole = [word for word in words if word != "--use_peft"]
        launch(*whole, "--model_name_or_path", launch(*words, *adapted), output="next")


def test_rows_of_new_tokens_are_trained_where_the_base_has_no_tokenizer(base, launch, tmp_path, capsys):
    words = base(transformers.LlamaConfig(**SIZE | {"vocab_size": 512}))
    tokenizer = transformers.AutoTokenizer.from_pretrained("data/base_model")
    for file in (tmp_path / "base").glob("*token*"):
        file.unlink()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>", "<|newer|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    launch(*words, "--tokenizer_name", str(tmp_path / "tokenizer"))
    said = capsys.readouterr().out
    assert "rows of new tokens are trained: <|newer|>, <|new|>" in said and said.rstrip().endswith(
        " --use_peft"
    )
