"""A causal language model's body with a linear head on the last token of a text, like transformers'
classifiers."""

from pathlib import Path

from common.errors import UserError
from common.model.flat_model import FlatModel
from safetensors.torch import load_file
import torch
from torch import nn

HEADS = ("score", "classifier")  # transformers' names of the head


def score_head(model: FlatModel, labels: int = 1) -> nn.Linear:
    """A zero-initialised head (D -> labels) for model.extra: on hidden states (T, D) it returns a
    classifier's scores.

    Raises UserError if transformers has no classifier for the model's architecture to save it as.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as known

    if type(model.config) not in known:
        raise UserError(
            f"transformers has no AutoModelForSequenceClassification for a {model.config.model_type}"
        )
    head = nn.Linear(model.config.get_text_config().hidden_size, labels, bias=False)
    nn.init.zeros_(head.weight)
    return head


def save_classifier(folder: str | Path, name: str, target: str | Path) -> None:
    """Write the model and tokenizer of an output folder as an AutoModelForSequenceClassification whose head
    is the saved model.extra[name].

    It scores the last token that is not the tokenizer's padding.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    weight = load_file(Path(folder, "extra.safetensors"))[f"{name}.weight"]
    tokenizer, verbosity = (
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        logging.get_verbosity(),
    )
    logging.set_verbosity_error()  # hides the warning that the head is new
    try:
        options = {"num_labels": len(weight), "dtype": "auto", "trust_remote_code": False}
        model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    finally:
        logging.set_verbosity(verbosity)
    head = next(
        getattr(model, place) for place in HEADS if isinstance(getattr(model, place, None), nn.Linear)
    )
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.weight.copy_(weight)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
