"""Flags of TRL, transformers, LLaMA-Factory and unsloth, and what says the same here: for the line about an unknown flag.

docs/from_trl.md shows the same table.
"""

ALWAYS = "done without a flag"
NOT_OFFERED = "not offered: copy the script and edit it"

# What to write here: the names that others have for it.
HERE = {
    "--max_length": "max_seq_length cutoff_len max_prompt_length",
    "--dtype": "torch_dtype",
    "--use_peft": "finetuning_type",
    "--lora_r": "lora_rank r",
    "--lora_target_modules": "lora_target target_modules",
    "--load_in_4bit (NF4)": "quantization_bit bnb_4bit_quant_type use_bnb_nested_quant",
    "--dataset_name": "dataset",
    "--dataset_eval_split": "dataset_test_split",
    "--dataset_streaming": "streaming",
    "--dataset_num_proc": "preprocessing_num_workers",
    "--columns text=NAME": "dataset_text_field",
    "--eval_fraction": "val_size",
    "--max_train_samples": "max_samples",
    "--chat_template": "template chat_template_path",
    "--train_on: what the assistant says, unless it is everything": "assistant_only_loss completion_only_loss "
    "train_on_responses_only train_on_prompt",
    "--train_on last_turn": "mask_history",
    "--packing (best fit)": "packing_strategy neat_packing",
    "--seed": "data_seed random_state",
    "--eval_steps; 0: never; else also before the first step": "eval_strategy evaluation_strategy eval_on_start",
    "--save_steps; 0: only the final model": "save_strategy",
    "--logging_steps": "logging_strategy logging_first_step",
    "--warmup_steps; below 1 it is a share of the run": "warmup_ratio",
    "--save_best eval_loss, or min: or max: and a metric": "load_best_model_at_end metric_for_best_model greater_is_better",
    "--auto_micro_batch; out of memory, a step is split in any case": "auto_find_batch_size",
    "--gradient_checkpointing": "gradient_checkpointing_kwargs use_gradient_checkpointing activation_checkpointing",
    "--empty_cache_above": "torch_empty_cache_steps",
    "--eval_prompts": "generate_during_eval num_generations_eval",
    "--num_samples": "num_completions_to_print",
    "--sft_weight": "rpo_alpha pref_ftx",
    "--beta": "pref_beta",
    "--loss_type": "pref_loss",
    "--loss_type simpo or orpo": "reference_free",
    "--model_name_or_path: the reference is the model at the start": "ref_model ref_model_name_or_path",
    "--reward_funcs FOLDER": "reward_model_name_or_path reward_model",
    "--rollout_server: a vLLM server": "use_vllm vllm_mode vllm_server_host vllm_server_base_url",
    "accelerate launch --mixed_precision bf16 (or fp16)": "bf16 fp16 pure_bf16",
    "accelerate launch --config_file accelerate_configs/...": "deepspeed fsdp fsdp_config local_rank use_cpu ddp_timeout",
    "experiments/train_grpo_ahead.py": "delta top_entropy_quantile vllm_importance_sampling_correction",
    "experiments/train_label_smoothing.py": "label_smoothing_factor",
    "what the script does": "do_train stage",
    "--output_dir: logs, completions.jsonl and report.html are in it": "logging_dir log_completions plot_loss",
    ALWAYS: "padding_free group_by_length remove_unused_columns average_tokens_across_devices pad_to_multiple_of "
    "use_liger_kernel attn_implementation flash_attn use_logits_to_keep shuffle_dataset dataloader_num_workers "
    "ddp_find_unused_parameters include_num_input_tokens_seen ignore_data_skip",
    NOT_OFFERED: "neftune_noise_alpha min_p repetition_penalty sync_ref_model ld_alpha f_divergence_type use_weighting "
    "rope_scaling freeze_trainable_layers use_galore use_badam lora_modules_to_save generation_kwargs chat_template_kwargs "
    "enable_thinking eos_token pad_token lr_scheduler_kwargs truncation_mode off_policy_mask_threshold rollout_func",
}


def said_here(name: str) -> str | None:
    """What to write instead of another tool's flag; None for a name that no tool has."""
    return next((here for here, names in HERE.items() if name in names.split()), None)
