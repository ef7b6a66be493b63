"""Names that other trainers have for keys of a job file, and for what hpctrain lacks: a hint is no guess by letters.

The names are those of Megatron-LM, DeepSpeed, torchtitan, NeMo and the Hugging Face Trainer.
"""

UNSUPPORTED = "not supported, see docs/limits.md"
TENSOR, PIPELINE = "set plan.tensor", "set plan.pipeline"
CONTEXT, ULYSSES = "set plan.tensor.c", "set plan.tensor.c and plan.exchange_heads"
EXPERTS_CUT = "set plan.tensor.y, which cuts layers of experts by whole experts"
BATCH, MICROBATCH = "set train.global_batch, in sequences", "set plan.microbatch, in sequences"
WINDOW, ROPE, EPSILON = "set model.window", "set model.rope_base", "set model.norm_epsilon"
BALANCE_LOSS = "set train.balance_loss, a loss of each sequence: one over a micro-batch would depend on the plan"
OTHER_NAMES = {
    **dict.fromkeys(["context_parallel", "context_parallel_size", "context_parallel_degree", "cp"], CONTEXT),
    **dict.fromkeys(["ulysses", "ulysses_degree", "sequence_parallel_size", "cp_comm_type"], ULYSSES),
    **dict.fromkeys(["expert_parallel", "expert_model_parallel_size", "expert_parallel_degree", "ep"], EXPERTS_CUT),
    **dict.fromkeys(["moe", "num_experts", "experts", "num_local_experts"], "set model.num_experts"),
    **dict.fromkeys(["moe_router_topk", "num_experts_per_tok"], "set model.experts_per_token"),
    **dict.fromkeys(["router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha", "aux_loss"], BALANCE_LOSS),
    **dict.fromkeys(["moe_router_load_balancing_type", "load_balancing_loss"], BALANCE_LOSS),
    **dict.fromkeys(["dropout", "attention_dropout", "hidden_dropout", "lora", "peft", "ema"], UNSUPPORTED),
    **dict.fromkeys(["gradient_checkpointing", "activation_checkpoint"], "set plan.recompute"),
    **dict.fromkeys(["recompute_granularity", "activation_checkpointing", "checkpointing"], "set plan.recompute"),
    **dict.fromkeys(["tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tp"], TENSOR),
    **dict.fromkeys(["tensor_model_parallel_size", "model_parallel"], TENSOR),
    **dict.fromkeys(["pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree", "pp"], PIPELINE),
    **dict.fromkeys(["pipeline_model_parallel_size", "num_stages"], PIPELINE),
    **dict.fromkeys(["virtual_pipeline_model_parallel_size", "interleave"], "set plan.virtual_stages"),
    **dict.fromkeys(["data_parallel", "data_parallel_size", "data_parallel_replicate_degree", "dp"], "set plan.data"),
    **dict.fromkeys(["fsdp", "data_parallel_shard_degree", "zero_optimization"], "set plan.zero, or plan.tensor.z"),
    **dict.fromkeys(["zero_stage", "stage", "use_distributed_optimizer"], "set plan.zero"),
    **dict.fromkeys(["cpu_offload", "offload_optimizer"], "set plan.offload"),
    **dict.fromkeys(["batch_size", "global_batch_size", "train_batch_size"], BATCH),
    **dict.fromkeys(["micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"], MICROBATCH),
    **dict.fromkeys(
        ["gradient_accumulation_steps", "gradient_accumulation", "grad_accum"],
        "follows from train.global_batch and plan.microbatch: set these",
    ),
    **dict.fromkeys(["lr", "max_lr"], "set train.learning_rate"),
    **dict.fromkeys(["min_lr", "lr_min"], "set train.min_learning_rate"),
    **dict.fromkeys(["lr_warmup_iters", "warmup", "num_warmup_steps", "warmup_iters"], "set train.warmup_steps"),
    **dict.fromkeys(["max_steps", "train_iters", "num_train_steps", "max_iters"], "set train.steps"),
    **dict.fromkeys(["epochs", "num_train_epochs", "num_epochs"], "set train.steps"),
    **dict.fromkeys(["lr_decay_style", "lr_scheduler_type", "lr_scheduler", "scheduler"], "set train.decay"),
    **dict.fromkeys(["lr_wsd_decay_iters", "num_decay_steps"], "set train.decay_steps"),
    **dict.fromkeys(["adam_beta1", "betas"], "set train.beta1 and train.beta2"),
    **dict.fromkeys(["adam_beta2"], "set train.beta2"),
    **dict.fromkeys(["adam_epsilon", "adam_eps"], "set train.epsilon"),
    **dict.fromkeys(["optim"], "set train.optimizer"),
    **dict.fromkeys(["grad_clip", "clip_grad", "max_grad_norm", "gradient_clipping"], "set train.clip_norm"),
    **dict.fromkeys(["bf16", "fp16", "precision", "mixed_precision", "torch_dtype"], "set train.dtype"),
    **dict.fromkeys(["eval_interval", "eval_steps"], "set train.validate_every"),
    **dict.fromkeys(["save_interval", "save_steps", "checkpoint_interval"], "set checkpoint.every"),
    **dict.fromkeys(["load", "resume_from_checkpoint", "init_from"], "set train.start_from, or continue with --run"),
    **dict.fromkeys(["seq_length", "seq_len", "max_seq_len", "block_size"], "set data.sequence_length"),
    **dict.fromkeys(["data_path", "dataset", "dataset_path", "train_data"], "set data.tokens"),
    **dict.fromkeys(["hidden_dim", "dim", "n_embd", "d_model"], "set model.hidden_size"),
    **dict.fromkeys(["n_layers", "n_layer", "num_hidden_layers"], "set model.num_layers"),
    **dict.fromkeys(["n_heads", "n_head", "num_attention_heads"], "set model.num_heads"),
    **dict.fromkeys(["n_kv_heads", "num_query_groups", "num_key_value_heads"], "set model.num_kv_heads"),
    **dict.fromkeys(["ffn_hidden_size", "intermediate_size", "ffn_dim"], "set model.ffn_size"),
    **dict.fromkeys(["head_dim", "kv_channels"], "set model.head_size"),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], "set model.max_positions"),
    **dict.fromkeys(["tie_word_embeddings", "tie_embeddings"], "set model.tie_head"),
    **dict.fromkeys(["sliding_window", "attention_window"], WINDOW),
    **dict.fromkeys(["rope_theta", "rotary_base"], ROPE),
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "norm_eps", "layernorm_epsilon"], EPSILON),
    **dict.fromkeys(["padded_vocab_size"], "set model.vocab_size"),
    **dict.fromkeys(["compile", "torch_compile"], "set kernels.fused"),
    **dict.fromkeys(["flash_attention", "attn_implementation", "use_flash_attn"], "set kernels.attention"),
    **dict.fromkeys(["log_interval", "logging_steps"], "set observe.log_every"),
}
"""By another trainer's name, in lower case with `_`, what is set here in its place."""
