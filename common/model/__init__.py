"""A causal language model called on flat rows: loading it, and everything that makes it fast."""

from common.model.create import create_model, llama_config, load_config
from common.model.flat_model import FlatModel, Output, disable_dropout
from common.model.load import load_model, load_tokenizer
from common.model.optimizer import make_optimizer, schedule, set_lr
