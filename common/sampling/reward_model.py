"""Reward models: an AutoModelForSequenceClassification with one label scores the whole text, prompt and
completion."""

from collections.abc import Callable
from typing import Any

from common.errors import UserError
from common.sampling.rewards import Completion
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def load(name: str, device: torch.device) -> Callable[..., list[float]]:
    """The reward function of a model. Raises UserError if it cannot be loaded."""
    transformers.utils.logging.disable_progress_bar()
    try:
        # False rather than unset: transformers would prompt for running the model's own code.
        load = AutoModelForSequenceClassification.from_pretrained
        model, found = load(name, num_labels=1, trust_remote_code=False, output_loading_info=True)
        # Of an adapter, the keys are its own: it brings a head, or its base has one.
        outside = [name for name, _ in model.named_modules() if not name.startswith(model.base_model_prefix)]
        headed = "modules_to_save" in str(outside) or "SequenceClassification" in str(
            model.config.architectures
        )
        if found["missing_keys"] or (hasattr(model, "peft_config") and not headed):
            raise ValueError(
                "it has no head for scores (experiments/train_reward.py writes one to OUTPUT_DIR/classifier)"
            )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        known = "exact_number, regex:PATTERN, length:N, file.py:function, or the name of a reward model"
        raise UserError(f"neither a known function nor a reward model ({known}): {reason}") from None

    model = model.to(device).eval()

    @torch.no_grad()
    def reward_model(prompts: list, completions: list[Completion], **columns: Any) -> list[float]:
        scores = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if isinstance(prompt, str):
                ids = tokenizer(prompt + completion, return_tensors="pt").input_ids
            else:
                text = tokenizer.apply_chat_template(prompt + completion, tokenize=False)
                ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            scores.append(model(input_ids=ids.to(device)).logits[0, 0].item())
        return scores

    return reward_model
