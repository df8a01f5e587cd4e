"""What a run is given to read cannot take over: code of model folders, templates."""

import json
import shutil

from common.errors import UserError
import pytest

from tests.conftest import SFT

CUSTOM = """
from pathlib import Path
Path({marker!r}).write_text("it ran")
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "custom"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def custom(tmp_path):
    """A model folder that brings Python code for its config, model and tokenizer, and the file that shows
    that it ran."""
    folder, marker = tmp_path / "custom", tmp_path / "marker"
    shutil.copytree("data/base_model", folder)
    (folder / "custom.py").write_text(CUSTOM.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    models = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    config |= {
        "model_type": "custom",
        "auto_map": {"AutoConfig": "custom.Config"} | dict.fromkeys(models, "custom.Model"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, marker


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The questions of transformers to whoever sits before the terminal, which should be none."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "n")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return questions


@pytest.mark.parametrize("what", ["model", "adapter", "tokenizer", "config", "reward"])
def test_code_of_a_model_folder_is_not_run_unless_asked(what, custom, asked, launch, tmp_path):
    folder, marker = custom
    flag = {"tokenizer": "--tokenizer_name", "config": "--config_name", "reward": "--reward_funcs"}
    words, flag = [*SFT, "--model_name_or_path", "data/base_model"], flag.get(what, "--model_name_or_path")
    stage, named = {"config": "pretrain", "reward": "grpo"}.get(what, "sft"), folder
    if what == "tokenizer":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Tokenizer"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    elif what == "adapter":
        peft = pytest.importorskip("peft")
        named = tmp_path / "adapter"
        peft.LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=str(folder)).save_pretrained(named)
        words += ["--tokenizer_name", "data/base_model"]
    elif what == "config":
        words = ["--config", "data/configs/pretrain.yaml"]
    elif what == "reward":
        words = (
            "--config data/configs/grpo.yaml --model_name_or_path data/base_model --reward_weights 1".split()
        )
    with pytest.raises(UserError, match="custom code") as refused:
        launch(stage, *words, flag, named)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)
    assert not marker.exists() and not asked
    if what in ("model", "adapter"):
        with pytest.raises(Exception):  # noqa: B017  (it is no model that could be trained)
            launch(stage, *words, flag, named, "--trust_remote_code")
        assert marker.exists() and not asked


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
        "{{ cycler.__init__.__globals__.os.popen('touch MARKER').read() }}",
        "{% set _ = messages.append({'role': 'user', 'content': 'more'}) %}",
    ],
)
def test_a_chat_template_renders_in_a_sandbox(attack, launch, tmp_path):
    """From the model's folder, with and without the markers that are rendered in another way."""
    shutil.copytree("data/base_model", tmp_path / "m")
    template = tmp_path / "m" / "chat_template.jinja"
    marker, whole = tmp_path / "marker", template.read_text()
    for text in (
        attack + whole,
        attack + "{% generation %}{{ messages[1].content }}{% endgeneration %}<|im_end|>",
    ):
        template.write_text(text.replace("MARKER", str(marker)))
        with pytest.raises(UserError) as refused:
            launch("sft", *SFT, "--model_name_or_path", tmp_path / "m")
        assert "unsafe" in str(refused.value) and "\n" not in str(refused.value)
    assert not marker.exists()
