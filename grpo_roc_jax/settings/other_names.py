"""What settings of other projects are called here: one table for messages and for the page docs/coming_from.md.

It is data and imports nothing. `tests/test_coming_from.py` checks every name on its right side against the
configuration.
"""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
CONFIG_DIR = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""Where the recipes are: inside the package when installed from a wheel, next to it in a checkout. Bare names such as
`toy.yaml` are looked up here too."""
CONTRIB_METHODS = _PACKAGE / "contrib" / "methods"
"""Recipes of methods that the core does not name. They are read, and named, as if they were in `methods/` of
`CONFIG_DIR`."""
CLOSE = 0.66
"""Least similarity (`difflib`) of a suggestion: `toi` and `toy` have 0.67, `learning_rate` and `final_ratio` 0.58. A
wrong suggestion costs more than none."""
CLOSE_ELSEWHERE = 0.8
"""The same for a name of another section than the key was written in: `foo` and `floor` have 0.75."""
CLOSE_ALONE = 0.75
"""The same for a key without a section: `hlep` and `help` have 0.75, `hello` and `tell` 0.67."""
SHORT = 4
"""Letters of a short word. One wrong letter makes another word of it (`tool` and `pool` have 0.75), so that it must be
closer; and at least so many letters make a beginning that stands for a whole name."""
MISSPELT = 0.9
"""The same for settings of other projects: `learnig_rate` and `learning_rate` have 0.96."""
# fmt: off
GENERIC = frozenset([
    "address", "alpha", "batch", "buffer", "by", "cache", "clean", "column", "command", "count", "data", "decay",
    "draw", "drop", "enable", "enabled", "eps", "epsilon", "epochs", "every", "factor", "file", "files", "filter",
    "floor", "form", "format", "function", "functions", "gamma", "groups", "high", "host", "id", "interval", "items",
    "keep", "length", "level", "limit", "log", "low", "masks", "max", "min", "mode", "model", "n", "name", "path",
    "penalty", "pool", "port", "problems", "process", "processes", "project", "rank", "ratio", "replace", "retries",
    "rules", "samples", "scale", "seconds", "settings", "shape", "share", "shuffle", "size", "source", "sources",
    "start", "state", "step", "steps", "stop", "strategy", "target", "targets", "tasks", "teacher", "threads",
    "threshold", "timeout", "type", "url", "value", "weight", "weights", "workers",
])
# fmt: on
"""Last parts of keys that mean nothing without their section: `renderer.name` is not `name`."""
METHOD = "a recipe"
"""Marks a setting of another project that chooses a method."""
ELSEWHERE = "elsewhere"
"""Stands for a project where a name is common in scripts of several."""
FLAGS = ("help", "dry-run", "preflight", "profile", "force")
"""Words of the command line that are no settings."""


@dataclass(frozen=True)
class OtherName:
    """A setting of another project."""

    project: str
    theirs: str
    ours: str
    """A setting of this project, `METHOD`, or empty if nothing corresponds."""
    note: str = ""
    """What differs, for readers of the page and of a message."""


def _rows(project: str, *rows: tuple[str, ...]) -> tuple[OtherName, ...]:
    return tuple(OtherName(project, *row) for row in rows)


OTHER_NAMES = (
    *_rows(
        "TRL",
        ("learning_rate", "optim.lr"),
        ("max_steps", "steps"),
        ("num_train_epochs", "steps", "problems divided by group.problems are the steps of an epoch"),
        ("output_dir", "run_dir"),
        ("run_name", "name"),
        ("num_generations", "group.size", "the group that trains; resample roc samples twice as many"),
        ("generation_batch_size", "group.problems", "problems of a step, not rollouts"),
        ("per_device_train_batch_size", "batch.rows", "packed rows of batch.row_length tokens at a time"),
        ("gradient_accumulation_steps", "batch.rows", "micro-batches follow from the tokens of a step; nothing to set"),
        ("num_iterations", "batch.updates.epochs", "of batch.updates several"),
        ("steps_per_generation", "batch.updates.parts", "of batch.updates several"),
        ("max_completion_length", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("max_prompt_length", "rollout.max_prompt_tokens", "longer prompts are left out, never cut"),
        ("vllm_max_model_length", "rollout.max_response_tokens", "prompt and response have limits of their own"),
        ("max_tool_calling_iterations", "rollout.max_turns"),
        ("temperature", "sampling.temperature"),
        ("top_p", "sampling.top_p"),
        ("top_k", "sampling.top_k"),
        ("min_p", "sampling.min_p"),
        ("beta", "surrogate.kl.coef", "with surrogate.kl k3; without a divergence by default"),
        ("epsilon", "surrogate.clip_low"),
        ("epsilon_high", "surrogate.clip_high"),
        ("delta", "surrogate.delta", "of surrogate delta"),
        ("importance_sampling_level", "surrogate.level"),
        ("loss_type", METHOD),
        ("scale_rewards", "advantage.scale"),
        ("reward_funcs", "reward.functions"),
        ("reward_weights", "reward.functions.answer.weight", "a weight belongs to its function"),
        ("mask_truncated_completions", "reward.truncated"),
        ("sync_ref_model", "surrogate.kl.sync_every", "of a kind of surrogate.kl"),
        ("ref_model_sync_steps", "surrogate.kl.sync_every"),
        ("ref_model_mixup_alpha", "surrogate.kl.sync_mix"),
        ("top_entropy_quantile", METHOD, "methods/top_entropy.yaml"),
        ("vllm_importance_sampling_correction", "weights.factors", "truncated_is or masked_is"),
        ("vllm_importance_sampling_mode", "weights.factors", "truncated_is or masked_is"),
        ("off_policy_mask_threshold", METHOD, "methods/drift_mask.yaml"),
        ("max_grad_norm", "optim.max_grad_norm"),
        ("weight_decay", "optim.weight_decay"),
        ("adam_beta1", "optim.beta1"),
        ("adam_beta2", "optim.beta2"),
        ("warmup_steps", "optim.warmup_steps"),
        ("warmup_ratio", "optim.warmup_steps", "steps, not a share"),
        ("lr_scheduler_type", "optim.schedule"),
        ("gradient_checkpointing", "update.remat"),
        ("bf16", "model.compute_dtype", "bfloat16 on accelerators by default"),
        ("save_steps", "checkpoint.every"),
        ("save_total_limit", "checkpoint.keep"),
        ("eval_steps", "eval.every"),
        ("resume_from_checkpoint", "resume", "--resume auto starts a run and continues it"),
        ("report_to", "log.wandb", "or log.tensorboard"),
        ("log_completions", "log.traces", "every rollout is recorded; grpo-roc view shows them"),
        ("model_name_or_path", "model.path"),
        ("dataset_name", "data.sources", "hub:OWNER/NAME@REVISION"),
        ("chat_template_kwargs", "text.template"),
        ("environment_factory", "environment"),
        ("use_vllm", "", "the engine is part of the run"),
        ("vllm_mode", "", "the engine is part of the run"),
        ("vllm_gpu_memory_utilization", "rollout.kv_tokens", "the cache in tokens"),
        ("vllm_tensor_parallel_size", "sharding.tensor"),
        ("lora_r", "lora.rank"),
        ("lora_alpha", "lora.alpha"),
        ("lora_target_modules", "lora.targets"),
        ("train_dataset", "data.sources"),
        ("eval_dataset", "data.eval_sources"),
        ("max_length", "rollout.max_response_tokens", "prompt and response have limits of their own"),
        ("logging_steps", "", "every step is logged"),
        ("disable_dropout", "", "no model has dropout here"),
        ("lora_dropout", "", "adapters have no dropout"),
        ("use_peft", "lora", "lora low_rank trains an adapter"),
        ("dtype", "model.compute_dtype"),
        ("attn_implementation", "update.attention"),
        ("packing", "", "rows are always packed"),
        ("repetition_penalty", "", "tokens are drawn from the probabilities that are trained"),
        ("adam_epsilon", "optim.eps"),
        ("logging_strategy", "", "every step is logged"),
        ("logging_dir", "run_dir"),
        ("save_strategy", "checkpoint.every"),
        ("eval_strategy", "eval.every"),
        ("per_device_eval_batch_size", "rollout.slots", "rows that are sampled at a time"),
        ("num_generations_eval", "eval.samples"),
        ("entropy_coef", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("use_adaptive_entropy", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("entropy_coef_min", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("entropy_coef_max", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("entropy_coef_delta", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("entropy_target", "advantage.adjust.entropy_bonus.target"),
        ("vllm_importance_sampling_clip_max", "weights.factors", "high of truncated_is or masked_is"),
        ("vllm_importance_sampling_clip_min", "weights.factors", "low of masked_is"),
        ("vllm_importance_sampling_cap", "weights.factors", "high of truncated_is or masked_is"),
        ("use_bias_correction_kl", METHOD, "methods/kl_corrected.yaml"),
        ("multi_objective_aggregation", METHOD, "methods/gdpo.yaml normalizes each reward by itself"),
        ("sapo_temperature_pos", "surrogate.positive", "of surrogate sapo"),
        ("sapo_temperature_neg", "surrogate.negative", "of surrogate sapo"),
        ("vespo_k_pos", METHOD, "methods/vespo.yaml"),
        ("vespo_lambda_pos", METHOD, "methods/vespo.yaml"),
        ("vespo_k_neg", METHOD, "methods/vespo.yaml"),
        ("vespo_lambda_neg", METHOD, "methods/vespo.yaml"),
        ("shuffle_dataset", "data.shuffle"),
        ("num_completions_to_print", "log.samples", "one rollout every so many steps"),
        ("push_to_hub", "", "`grpo-roc export RUN TARGET` writes a folder that can be uploaded"),
        ("hub_model_id", "", "`grpo-roc export RUN TARGET` writes a folder that can be uploaded"),
        ("peft_config", "lora", "lora low_rank trains an adapter"),
        ("quantization_config", "lora.base_bits", "of lora low_rank"),
        ("rollout_func", "environment", "a class that answers turns"),
        ("processing_class", "text.tokenizer"),
        ("trust_remote_code", "", "code that comes with a checkpoint is never run"),
        ("fp16", "model.compute_dtype"),
        ("use_liger_kernel", "update.vocab_chunk", "logits of so many columns exist at a time"),
        ("deepspeed", "sharding.fsdp", "devices that share one copy of the state"),
        ("fsdp", "sharding.fsdp", "devices that share one copy of the state"),
        ("ds3_gather_for_generation", "", "the engine is part of the run"),
        ("cache_implementation", "", "the engine is part of the run"),
        ("use_transformers_paged", "", "the engine is part of the run"),
        ("use_transformers_continuous_batching", "", "the engine is part of the run"),
        ("transformers_continuous_batching_config", "", "the engine is part of the run"),
        ("generation_kwargs", "sampling.temperature", "and the other settings of the section sampling"),
        ("remove_unused_columns", "", "reward functions read every column, as problem.extra"),
        ("log_unique_prompts", "log.traces", "every rollout is recorded; grpo-roc view shows them"),
        ("max_staleness", "rollout.step_limit.lag", "of rollout.step_limit stream"),
        ("max_inflight_tasks", "rollout.slots"),
        ("vllm_*", "", "the engine is part of the run"),
    ),
    *_rows(
        "verl",
        ("data.train_files", "data.sources"),
        ("data.val_files", "data.eval_sources"),
        ("data.train_batch_size", "group.problems"),
        ("data.max_prompt_length", "rollout.max_prompt_tokens"),
        ("data.max_response_length", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("data.prompt_key", "data.prompt_column"),
        ("data.filter_overlong_prompts", "data.bad_rows", "over-long prompts are left out by default"),
        ("data.shuffle", "data.shuffle"),
        ("actor_rollout_ref.model.path", "model.path"),
        ("actor_rollout_ref.model.lora_rank", "lora.rank"),
        ("actor_rollout_ref.actor.optim.lr", "optim.lr"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "batch.updates", "in parts of the step's groups"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "batch.rows"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "batch.row_length"),
        ("actor_rollout_ref.actor.ppo_epochs", "batch.updates.epochs", "of batch.updates several"),
        ("actor_rollout_ref.actor.clip_ratio", "surrogate.clip_high", "and surrogate.clip_low"),
        ("actor_rollout_ref.actor.clip_ratio_low", "surrogate.clip_low"),
        ("actor_rollout_ref.actor.clip_ratio_high", "surrogate.clip_high"),
        ("actor_rollout_ref.actor.use_kl_loss", "surrogate.kl"),
        ("actor_rollout_ref.actor.kl_loss_coef", "surrogate.kl.coef", "with surrogate.kl k3"),
        ("actor_rollout_ref.actor.kl_loss_type", "surrogate.kl"),
        ("actor_rollout_ref.actor.entropy_coeff", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("actor_rollout_ref.actor.loss_agg_mode", "weights.normalizer"),
        ("actor_rollout_ref.actor.grad_clip", "optim.max_grad_norm"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "sharding.sequence"),
        ("actor_rollout_ref.rollout.n", "group.size", "the group that trains; resample roc samples twice as many"),
        ("actor_rollout_ref.rollout.temperature", "sampling.temperature"),
        ("actor_rollout_ref.rollout.name", "", "the engine is part of the run"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.kv_tokens", "the cache in tokens"),
        ("actor_rollout_ref.rollout.max_num_seqs", "rollout.slots"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "sharding.tensor"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "rollout.max_turns"),
        ("actor_rollout_ref.rollout.multi_turn.max_tool_response_length", "text.observation_tokens", "tokens"),
        ("algorithm.adv_estimator", METHOD),
        ("algorithm.norm_adv_by_std_in_grpo", "advantage.scale"),
        ("algorithm.kl_ctrl.kl_coef", "shaping.kl.coef", "of shaping kl"),
        ("algorithm.use_kl_in_reward", "shaping"),
        ("algorithm.filter_groups.enable", "resample.drop"),
        ("algorithm.filter_groups.max_num_gen_batches", "group.dynamic_sampling_rounds"),
        ("custom_reward_function.path", "reward.functions", "file.py:function"),
        ("trainer.total_training_steps", "steps"),
        ("trainer.total_epochs", "steps"),
        ("trainer.experiment_name", "name"),
        ("trainer.default_local_dir", "run_dir"),
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.test_freq", "eval.every"),
        ("trainer.resume_mode", "resume"),
        ("trainer.logger", "log.wandb", "or log.tensorboard"),
        ("trainer.n_gpus_per_node", "sharding.data", "all devices are used"),
        ("trainer.nnodes", "distributed", "the same command on every host"),
        ("data.shuffle_seed", "seed"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "update.remat"),
        ("actor_rollout_ref.rollout.top_p", "sampling.top_p"),
        ("actor_rollout_ref.rollout.top_k", "sampling.top_k"),
        ("actor_rollout_ref.rollout.response_length", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("actor_rollout_ref.rollout.prompt_length", "rollout.max_prompt_tokens"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", METHOD),
        ("actor_rollout_ref.actor.clip_ratio_c", "surrogate.dual", "of surrogate capped_clip"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "", "rows are always packed"),
        ("actor_rollout_ref.model.use_remove_padding", "", "rows are always packed"),
        ("actor_rollout_ref.model.target_modules", "lora.targets"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "optim.warmup_steps"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "optim.warmup_steps", "steps, not a share"),
        ("actor_rollout_ref.actor.entropy_from_logits_with_chunking", "update.vocab_chunk"),
        ("fsdp_config.fsdp_size", "sharding.fsdp"),
        ("fsdp_config.optimizer_offload", "optim.offload"),
        ("fsdp_config.param_offload", "optim.offload", "moves the moments; parameters stay on the devices"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples"),
        ("actor_rollout_ref.actor.strategy", "sharding.fsdp", "devices that share one copy of the state"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", "batch.rows"),
        ("actor_rollout_ref.actor.optim.betas", "optim.beta1", "and optim.beta2"),
        ("actor_rollout_ref.actor.optim.clip_grad", "optim.max_grad_norm"),
        ("actor_rollout_ref.actor.optim.total_training_steps", "optim.schedule.total_steps"),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", "optim.schedule.final_ratio"),
        ("actor_rollout_ref.actor.optim.warmup_style", "optim.schedule"),
        ("actor_rollout_ref.actor.use_torch_compile", "", "XLA compiles every program"),
        ("actor_rollout_ref.actor.use_fused_kernels", "", "XLA compiles every program"),
        ("profiler.*", "", "`--profile 3:5` writes a trace of steps 3 to 5"),
        ("global_profiler.*", "", "`--profile 3:5` writes a trace of steps 3 to 5"),
        ("clip_cov_ratio", METHOD, "methods/clip_cov.yaml"),
        ("kl_cov_ratio", METHOD, "methods/kl_cov.yaml"),
        ("ppo_kl_coef", METHOD, "methods/kl_cov.yaml"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("actor_rollout_ref.rollout.val_kwargs.*", "", "evaluation has settings of its own in the section eval"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "tools.enabled"),
        ("actor_rollout_ref.rollout.multi_turn.format", "text.calls"),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns", "rollout.max_turns"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "environment", "its public methods are the tools"),
        ("actor_rollout_ref.rollout.*", "", "the engine is part of the run"),
        ("actor_rollout_ref.ref.*", "", "the reference takes the settings of the policy"),
        ("actor_rollout_ref.hybrid_engine", "", "the engine is part of the run"),
        ("actor_rollout_ref.model.custom_chat_template", "text.template.file", "of text.template file"),
        ("apply_chat_template_kwargs", "text.template"),
        ("data.val_batch_size", "rollout.slots", "rows that are sampled at a time"),
        ("data.val_max_samples", "data.eval_problems"),
        ("data.video_key", "", "problems are text"),
        ("reward_model.*", "reward.functions", "a function may ask a judge"),
        ("custom_reward_function.name", "reward.functions", "file.py:function"),
        ("algorithm.gamma", "", "no method here has a critic"),
        ("algorithm.kl_penalty", "shaping", "kl"),
        ("algorithm.kl_ctrl.*", "shaping", "kl"),
        ("algorithm.filter_groups.metric", "resample.drop", "groups of equal rewards"),
        ("rollout_correction.*", "weights.factors", "truncated_is or masked_is"),
        ("rollout_is_threshold", "weights.factors", "high of truncated_is or masked_is"),
        ("distillation.*", METHOD, "methods/opd.yaml"),
        ("algorithm.lam", "", "no method here has a critic"),
        ("critic.*", "", "no method here has a critic"),
        ("trainer.critic_warmup", "", "no method here has a critic"),
        ("data.gen_batch_size", "group.dynamic_sampling_rounds", "batches are sampled until enough groups remain"),
        ("data.truncation", "data.bad_rows", "nothing is cut"),
        ("data.image_key", "", "problems are text"),
        ("data.custom_cls.*", "", "a file of problems is JSONL or Parquet"),
        ("reward_model.overlong_buffer.*", "shaping", "overlong"),
        ("trainer.project_name", "log.wandb.project"),
        ("trainer.val_before_train", "eval.every", "a run is evaluated before and after"),
        ("trainer.balance_batch", "", "rows are always packed"),
        ("trainer.log_val_generations", "log.samples"),
        ("trainer.rollout_data_dir", "log.traces"),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
        ("trainer.resume_from_path", "resume", "--resume auto starts a run and continues it"),
        ("trainer.default_hdfs_dir", "run_dir", "also gs://BUCKET/RUN"),
        ("trainer.val_only", "", "`grpo-roc evaluate RUN` evaluates a run or a model"),
        ("trainer.device", "", "JAX_PLATFORMS chooses the devices"),
        ("async_training.staleness_threshold", "rollout.step_limit.lag", "of rollout.step_limit stream"),
        ("async_training.*", "rollout.step_limit", "of step_limit stream"),
        ("ray_kwargs.*", "", "a run needs no Ray"),
    ),
    *_rows(
        "tunix",
        ("num_generations", "group.size"),
        ("num_iterations", "batch.updates.epochs", "of batch.updates several"),
        ("beta", "surrogate.kl.coef", "with surrogate.kl k3"),
        ("epsilon", "surrogate.clip_low"),
        ("epsilon_high", "surrogate.clip_high"),
        ("loss_algo", METHOD),
        ("policy_loss_fn", METHOD),
        ("advantage_estimator", METHOD),
        ("loss_agg_mode", "weights.normalizer"),
        ("max_tokens_to_generate", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("max_prompt_length", "rollout.max_prompt_tokens"),
        ("kv_cache_size", "rollout.kv_tokens"),
        ("max_concurrency", "rollout.slots"),
        ("off_policy_steps", "rollout.step_limit", "of step_limit stream"),
        ("mini_batch_size", "batch.updates"),
        ("train_micro_batch_size", "batch.rows"),
        ("eval_every_n_steps", "eval.every"),
        ("checkpoint_root_directory", "run_dir"),
        ("reward_fns", "reward.functions"),
        ("system_prompt", "text.system"),
        ("model_config.model_id", "model.path"),
        ("model_config.model_name", "model.path"),
        ("model_config.model_source", "model.path", "a directory, a hub id or package:NAME"),
        ("model_config.use_flash_attention", "update.attention"),
        ("model_config.remat_config", "update.remat"),
        ("model_config.rng_seed", "seed"),
        ("mesh.shape", "sharding.fsdp", "and sharding.tensor"),
        ("mesh.axis_names", "sharding.fsdp", "and sharding.tensor"),
        ("lora_config.module_path", "lora.targets"),
        ("tokenizer_config.tokenizer_path", "text.tokenizer"),
        ("num_batches", "steps"),
        ("num_test_batches", "data.eval_problems"),
        ("train_fraction", "data.eval_sources", "a file of its own"),
        ("actor_optimizer_config.opt_type", "", "the optimizer is AdamW; its settings are in the section optim"),
        ("actor_optimizer_config.peak_value", "optim.lr"),
        ("actor_optimizer_config.schedule_type", "optim.schedule"),
        ("actor_optimizer_config.decay_steps", "optim.schedule.total_steps"),
        ("actor_optimizer_config.end_value", "optim.schedule.final_ratio", "a share of the peak"),
        ("actor_optimizer_config.init_value", "", "the warm-up begins at 0"),
        ("actor_optimizer_config.b1", "optim.beta1"),
        ("actor_optimizer_config.b2", "optim.beta2"),
        ("metrics_logging_options.log_dir", "run_dir"),
        ("checkpointing_options.save_interval_steps", "checkpoint.every"),
        ("checkpointing_options.max_to_keep", "checkpoint.keep"),
        ("total_generation_steps", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("offload_to_cpu", "optim.offload"),
        ("kl_loss_mode", "surrogate.kl"),
        ("sampler_is", "weights.factors", "truncated_is or masked_is"),
        ("sampler_is_threshold", "weights.factors", "high of truncated_is or masked_is"),
        ("env_class_path", "environment", "file.py:Class"),
        ("agent_class_path", "environment", "file.py:Class"),
        ("enable_thinking", "text.template.variables", "enable_thinking=false"),
        ("data_module", "data.sources"),
        ("rollout_engine", "", "the engine is part of the run"),
        ("env_kwargs.*", "environment", "a class reads its own settings"),
        ("vllm_config.*", "", "the engine is part of the run"),
        ("rollout_vllm_*", "", "the engine is part of the run"),
        ("rollout_sglang_*", "", "the engine is part of the run"),
        ("sglang_jax_config.*", "", "the engine is part of the run"),
        ("algo_variant", METHOD),
        ("ent_coef", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("episode_max_turns", "rollout.max_turns"),
        ("overlong_buffer.*", "shaping", "overlong"),
        ("degenerate_group_masking", "resample.drop", "groups of equal rewards"),
        ("actor_optimizer_config.eps", "optim.eps"),
        ("rollout_micro_batch_size", "rollout.slots"),
        ("profiler_options.*", "", "`--profile 3:5` writes a trace of steps 3 to 5"),
        ("eos_tokens", "text.tokenizer.eos_token"),
        ("lora_config.rank", "lora.rank"),
        ("lora_config.alpha", "lora.alpha"),
        ("lora_config.weight_qtype", "lora.base_bits", "of lora low_rank"),
        ("tokenizer_config.tokenizer_type", "text.tokenizer"),
        ("chat_parser_config.*", "text.template", "how roles are written"),
        ("num_epochs", "steps", "problems divided by group.problems are the steps of an epoch"),
    ),
    *_rows(
        "prime-rl",
        ("max_steps", "steps"),
        ("seq_len", "batch.row_length"),
        ("group_size", "group.size"),
        ("rollouts_per_example", "group.size"),
        ("trainer.optim.lr", "optim.lr"),
        ("trainer.model.lora.rank", "lora.rank"),
        ("trainer.loss.type", METHOD, "methods/dppo.yaml is near to its default"),
        ("trainer.loss.ratio_low", "weights.factors.masked_is.low", "of weights.factors masked_is"),
        ("trainer.loss.ratio_high", "weights.factors.masked_is.high", "of weights.factors masked_is"),
        ("algo.type", METHOD),
        ("orchestrator.algorithms.id", METHOD),
        ("orchestrator.train.group_size", "group.size"),
        ("orchestrator.max_off_policy_steps", "rollout.step_limit.lag", "of rollout.step_limit stream"),
        ("orchestrator.train.source", "data.sources"),
        ("orchestrator.buffer.online_difficulty_filtering", "resample.drop"),
        ("model.name", "model.path"),
        ("batch_size", "group.problems", "problems, not rollouts"),
        ("sampling.max_tokens", "rollout.max_response_tokens"),
        ("max_async_level", "rollout.step_limit", "of step_limit stream"),
        ("ckpt.interval", "checkpoint.every"),
        ("env.id", "environment", "environment verifiers"),
        ("trainer.model.ac", "update.remat"),
        ("trainer.loss.dppo_mask_low", "surrogate.low", "of surrogate dppo"),
        ("trainer.loss.dppo_mask_high", "surrogate.high", "of surrogate dppo"),
        ("trainer.loss.kl_tau", "surrogate.penalty", "of surrogate dppo"),
        ("trainer.optim.type", "", "the optimizer is AdamW; its settings are in the section optim"),
        ("trainer.model.lora.target_modules", "lora.targets"),
        ("trainer.model.lora.dropout", "", "adapters have no dropout"),
        ("trainer.model.attn", "update.attention"),
        ("trainer.model.cp", "sharding.sequence"),
        ("algo.teacher.*", METHOD, "methods/opd.yaml"),
        ("algo.length_penalty.*", "shaping"),
        ("sampling.max_completion_tokens", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("eval.interval", "eval.every"),
        ("eval.num_examples", "data.eval_problems"),
        ("eval.group_size", "eval.samples"),
        ("concurrency.max_inflight", "rollout.slots"),
        ("max_inflight_rollouts", "rollout.slots"),
        ("oversampling_factor", "resample.oversample", "of resample roc"),
        ("run.name", "name"),
        ("trainer.optim.max_norm", "optim.max_grad_norm"),
        ("trainer.optim.betas1", "optim.beta1"),
        ("trainer.optim.betas2", "optim.beta2"),
        ("trainer.scheduler.type", "optim.schedule"),
        ("trainer.loss.token_mask_low", "weights.factors", "low of masked_is"),
        ("trainer.loss.token_mask_high", "weights.factors", "high of masked_is"),
        ("trainer.model.lora.alpha", "lora.alpha"),
        ("trainer.model.compile", "", "XLA compiles every program"),
        ("orchestrator.tokenizer.name", "text.tokenizer"),
        ("orchestrator.teacher_model.*", METHOD, "methods/opd.yaml"),
        ("orchestrator.advantage.type", METHOD),
        ("orchestrator.train.env.*", "environment", "environment verifiers"),
        ("orchestrator.eval.env.*", "environment", "environment verifiers"),
        ("orchestrator.env.args", "environment", "environment verifiers"),
        ("orchestrator.client.*", "", "the engine is part of the run"),
        ("orchestrator.buffer.*", "resample.drop", "groups of equal rewards; the command difficulty chooses problems"),
        ("ckpt.resume_step", "resume", "--resume auto starts a run and continues it"),
        ("inference_gpu_ids", "", "the engine is part of the run"),
        ("trainer_gpu_ids", "", "the section sharding divides the devices"),
        ("ckpt.keep_last", "checkpoint.keep"),
        ("monitors.wandb.project", "log.wandb.project"),
        ("monitors.wandb.name", "name"),
        ("env.taskset.*", "environment", "environment verifiers"),
        ("orchestrator.train.source.*", "environment", "environment verifiers"),
        ("renderer.*", "text.template", "how roles are written"),
        ("inference.*", "", "the engine is part of the run"),
        ("weight_broadcast.*", "", "the engine is part of the run"),
        ("deployment.*", "", "every host runs the same command; the section sharding divides the devices"),
        ("slurm.*", "", "every host runs the same command; docs/launch.md has a script"),
    ),
    *_rows(
        "OpenRLHF",
        ("pretrain", "model.path"),
        ("reward_pretrain", "reward.functions", "a function may ask a judge"),
        ("remote_rm_url", "reward.functions", "file.py:function"),
        ("agent_func_path", "environment", "file.py:Class"),
        ("critic_pretrain", "", "no method here has a critic"),
        ("critic_learning_rate", "", "no method here has a critic"),
        ("value_clip", "", "no method here has a critic"),
        ("lambd", "", "no method here has a critic"),
        ("prompt_data", "data.sources"),
        ("prompt_data_probs", "data.weights"),
        ("input_key", "data.prompt_column"),
        ("label_key", "data.answer_column"),
        ("input_template", "text.template"),
        ("apply_chat_template", "text.template"),
        ("prompt_max_len", "rollout.max_prompt_tokens", "longer prompts are left out, never cut"),
        ("generate_max_len", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("max_len", "rollout.max_response_tokens", "prompt and response have limits of their own"),
        ("n_samples_per_prompt", "group.size", "the group that trains; resample roc samples twice as many"),
        ("eval_n_samples_per_prompt", "eval.samples"),
        ("rollout_batch_size", "group.problems", "problems of a step, not rollouts"),
        ("micro_rollout_batch_size", "rollout.slots"),
        ("micro_train_batch_size", "batch.rows"),
        ("train_max_tokens_per_gpu", "batch.row_length"),
        ("num_episodes", "steps", "problems divided by group.problems are the steps of an epoch"),
        ("max_epochs", "batch.updates.epochs", "of batch.updates several"),
        ("actor_learning_rate", "optim.lr"),
        ("lr_warmup_ratio", "optim.warmup_steps", "steps, not a share"),
        ("lr_scheduler", "optim.schedule"),
        ("adam_betas", "optim.beta1", "and optim.beta2"),
        ("l2", "optim.weight_decay"),
        ("max_norm", "optim.max_grad_norm"),
        ("eps_clip", "surrogate.clip_high", "and surrogate.clip_low"),
        ("eps_clip_low_high", "surrogate.clip_low", "and surrogate.clip_high"),
        ("dual_clip", "surrogate.dual", "of surrogate capped_clip"),
        ("policy_loss_type", METHOD),
        ("normalize_reward", "advantage.scale"),
        ("no_advantage_std_norm", "advantage.scale"),
        ("init_kl_coef", "surrogate.kl.coef", "with surrogate.kl k3"),
        ("kl_estimator", "surrogate.kl"),
        ("kl_target", "", "the coefficient of a divergence is constant"),
        ("kl_horizon", "", "the coefficient of a divergence is constant"),
        ("entropy_loss_coef", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("overlong_buffer_len", "shaping", "overlong"),
        ("overlong_penalty_factor", "shaping", "overlong"),
        ("dynamic_filtering", "resample.drop", "groups of equal rewards"),
        ("dynamic_filtering_reward_range", "resample.drop", "groups of equal rewards"),
        ("ring_attn_size", "sharding.sequence"),
        ("zero_stage", "sharding.fsdp", "devices that share one copy of the state"),
        ("adam_offload", "optim.offload"),
        ("packing_samples", "", "rows are always packed"),
        ("use_dynamic_batch", "", "rows are always packed"),
        ("colocate_all_models", "", "the engine is part of the run"),
        ("enforce_eager", "", "the engine is part of the run"),
        ("enable_prefix_caching", "", "the engine is part of the run"),
        ("vllm_is_truncated_threshold", "weights.factors", "high of truncated_is"),
        ("enable_vllm_is_correction", "weights.factors", "truncated_is or masked_is"),
        ("async_train", "rollout.step_limit", "of step_limit stream"),
        ("async_queue_size", "rollout.step_limit.lag", "of rollout.step_limit stream"),
        ("save_path", "run_dir"),
        ("ckpt_path", "run_dir"),
        ("max_ckpt_num", "checkpoint.keep"),
        ("load_checkpoint", "resume", "--resume auto starts a run and continues it"),
        ("use_wandb", "log.wandb"),
        ("wandb_project", "log.wandb.project"),
        ("wandb_run_name", "name"),
        ("use_tensorboard", "log.tensorboard"),
    ),
    *_rows(
        "SkyRL",
        ("data.train_data", "data.sources"),
        ("data.val_data", "data.eval_sources"),
        ("trainer.policy.model.path", "model.path"),
        ("trainer.policy.model.lora.rank", "lora.rank"),
        ("trainer.policy.model.lora.alpha", "lora.alpha"),
        ("trainer.policy.optimizer_config.lr", "optim.lr"),
        ("trainer.policy.optimizer_config.num_warmup_steps", "optim.warmup_steps"),
        ("trainer.policy.optimizer_config.scheduler", "optim.schedule"),
        ("trainer.policy.optimizer_config.offload_after_step", "optim.offload"),
        ("trainer.policy.sequence_parallel_size", "sharding.sequence"),
        ("trainer.ref.*", "", "the reference takes the settings of the policy"),
        ("trainer.placement.*", "", "every host runs the same command; the section sharding divides the devices"),
        ("trainer.strategy", "sharding.fsdp", "devices that share one copy of the state"),
        ("cpu_offload", "optim.offload", "moves the moments; parameters stay on the devices"),
        ("trainer.algorithm.eps_clip_low", "surrogate.clip_low"),
        ("trainer.algorithm.eps_clip_high", "surrogate.clip_high"),
        ("trainer.algorithm.loss_reduction", "weights.normalizer"),
        ("trainer.algorithm.grpo_norm_by_std", "advantage.scale"),
        ("trainer.algorithm.zero_variance_filter", "resample.drop", "groups of equal rewards"),
        ("trainer.algorithm.kl_estimator_type", "surrogate.kl"),
        ("trainer.algorithm.use_entropy_loss", "advantage.adjust", "entropy_bonus, which follows a target"),
        ("trainer.algorithm.use_tis", "weights.factors", "truncated_is or masked_is"),
        ("trainer.algorithm.tis_imp_ratio_cap", "weights.factors", "high of truncated_is or masked_is"),
        ("off_policy_correction.*", "weights.factors", "truncated_is or masked_is"),
        ("dynamic_sampling.*", "group.dynamic_sampling_rounds", "batches are sampled until enough groups remain"),
        ("sapo.tau_pos", "surrogate.positive", "of surrogate sapo"),
        ("sapo.tau_neg", "surrogate.negative", "of surrogate sapo"),
        ("clip_cov.*", METHOD, "methods/clip_cov.yaml"),
        ("kl_cov.*", METHOD, "methods/kl_cov.yaml"),
        ("cispo.*", METHOD, "methods/cispo.yaml"),
        ("fully_async.max_staleness_steps", "rollout.step_limit.lag", "of rollout.step_limit stream"),
        ("fully_async.num_parallel_generation_workers", "rollout.slots"),
        ("trainer.epochs", "steps", "problems divided by group.problems are the steps of an epoch"),
        ("trainer.update_epochs_per_batch", "batch.updates.epochs", "of batch.updates several"),
        ("trainer.policy_mini_batch_size", "batch.updates", "in parts of the step's groups"),
        ("trainer.micro_train_batch_size_per_gpu", "batch.rows"),
        ("trainer.use_sample_packing", "", "rows are always packed"),
        ("trainer.flash_attn", "update.attention"),
        ("trainer.eval_interval", "eval.every"),
        ("trainer.eval_batch_size", "rollout.slots", "rows that are sampled at a time"),
        ("trainer.ckpt_interval", "checkpoint.every"),
        ("trainer.max_ckpts_to_keep", "checkpoint.keep"),
        ("trainer.hf_save_interval", "", "`grpo-roc export RUN TARGET` writes a folder for transformers"),
        ("trainer.resume_path", "resume", "--resume auto starts a run and continues it"),
        ("generator.n_samples_per_prompt", "group.size", "the group that trains; resample roc samples twice as many"),
        ("generator.max_input_length", "rollout.max_prompt_tokens", "longer prompts are left out, never cut"),
        ("sampling_params.max_generate_length", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("eval_sampling_params.temperature", "eval.temperature"),
        ("eval_sampling_params.*", "", "evaluation has settings of its own in the section eval"),
        ("generator.apply_overlong_filtering", "reward.truncated"),
        ("generator.num_inference_engines", "", "the engine is part of the run"),
        ("generator.backend", "", "the engine is part of the run"),
        ("inference_engine_tensor_parallel_size", "sharding.tensor"),
        ("environment.env_class", "environment", "file.py:Class"),
    ),
    *_rows(
        ELSEWHERE,
        ("num_steps", "steps"),
        ("train_steps", "steps"),
        ("num_train_steps", "steps"),
        ("max_train_steps", "steps"),
        ("epsilon_low", "surrogate.clip_low"),
        ("kl_coef", "surrogate.kl.coef", "with surrogate.kl k3"),
        ("max_new_tokens", "rollout.max_response_tokens", "counts the outputs of tools too"),
        ("max_seq_length", "batch.row_length"),
        ("torch_dtype", "model.compute_dtype"),
        ("load_in_4bit", "lora.base_bits", "4, of lora low_rank"),
        ("load_in_8bit", "lora.base_bits", "8, of lora low_rank"),
        ("cliprange", "surrogate.clip_high", "and surrogate.clip_low"),
        ("clip_range", "surrogate.clip_high", "and surrogate.clip_low"),
        ("dataset", "data.sources"),
        ("optimizer", "", "the optimizer is AdamW; its settings are in the section optim"),
        ("do_sample", "", "rollouts are always sampled; sampling.temperature says how"),
        ("tensor_parallel_size", "sharding.tensor"),
        ("tp", "sharding.tensor"),
        ("num_mini_batches", "batch.updates"),
        ("async_level", "rollout.step_limit", "of step_limit stream"),
    ),
)
"""From TRL 1.16 (`GRPOConfig`), verl 0.9, google-tunix 0.1.7, prime-rl, OpenRLHF and SkyRL in November 2026; last,
names that are common in scripts of transformers, vLLM and others."""
OTHER_KINDS = {
    "low_var_kl": "k3",
    "mse": "k2",
    "seq_mean_token_mean": "sequence_mean",
    "seq_mean_token_sum": "sequence_sum",
    "constant_with_warmup": "constant",
}
"""Kind of a section in another project -> the one here."""

METHOD_NAMES = {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_passk": "pass_at_k",
    "pass_k": "pass_at_k",
    "drgrpo": "dr_grpo",
    "reinforce++": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "agentic_grpo": "grpo",
    "gspo_token": "gspo",
    "roc": "grpo_roc",
    "grporoc": "grpo_roc",
}
"""Name of a method in another project -> its recipe."""
COMMAND_NAMES = {"rl": "train", "grpo": "train", "run": "train", "inference": "serve", "vllm_serve": "serve"}
COMMAND_NAMES |= {"eval": "evaluate", "generate": "chat", "init": "new", "env": "doctor", "convert": "export"}
"""Command of another project -> the one here."""


def other_name(key: str) -> OtherName | None:
    """The setting of another project that matches a key, written in full, with a section before it, or
    without its own.

    Of several names that the key may stand for, the longest is meant; of several that end in the key, the shortest.
    """
    matches = [row for row in OTHER_NAMES if _stands_for(row.theirs, key)]
    if matches:
        return max(matches, key=lambda row: len(row.theirs))
    tails = [row for row in OTHER_NAMES if row.theirs.endswith(f".{key}")]
    return min(tails, key=lambda row: len(row.theirs), default=None)


def _stands_for(theirs: str, key: str) -> bool:
    """Whether a row's name is that of a key, after any sections; `section.*` is every key of a section."""
    if theirs.endswith("*"):
        return f".{theirs[:-1]}" in f".{key}"
    return key == theirs or key.endswith(f".{theirs}")


def _misspelt(key: str) -> OtherName | None:
    """The setting of another project whose last part is spelt nearly like that of `key`."""
    tail = key.rpartition(".")[2]
    if tail in GENERIC:
        return None
    ratio, row = max(
        ((_alike(row.theirs.rpartition(".")[2], tail), row) for row in OTHER_NAMES), key=lambda pair: pair[0]
    )
    return row if ratio >= MISSPELT else None


def recipe_of(name: object) -> str:
    """The recipe of a method, `methods/NAME.yaml`; empty if there is none of that name."""
    plain = str(name).strip().lower().replace("-", "_").replace(" ", "_").removesuffix(".yaml")
    plain = METHOD_NAMES.get(plain, plain)
    folders = (CONFIG_DIR / "methods", CONTRIB_METHODS)
    exists = plain.isidentifier() and any((folder / f"{plain}.yaml").is_file() for folder in folders)
    return f"methods/{plain}.yaml" if exists else ""


def use_recipe(name: object) -> str:
    """Advice to take the recipe of a method; empty if there is none."""
    recipe = recipe_of(name)
    return f"{name} is a recipe: `grpo-roc train {recipe}`, or copy its few settings" if recipe else ""


def advice(key: str, value: object, known: Collection[str]) -> str:
    """What to write instead of an unknown key: the counterpart of another project's setting, else the nearest key;
    empty if there is neither.

    Args:
        key: The key as it was written, `section.field`.
        value: Its value; the name of a method leads to its recipe.
        known: Every setting.
    """
    near = nearest(key, list(known))
    if said := counterpart(key, value, known, misspelt=not near):
        return said
    if near:
        return f"did you mean '{near}'?"
    flags = [flag for flag in FLAGS if _alike(flag, key.replace("_", "-")) >= CLOSE_ALONE]
    return f"did you mean '--{flags[0]}'?" if flags else use_recipe(value)


def counterpart(key: str, value: object, known: Collection[str], misspelt: bool = False) -> str:
    """What another project's setting is called here, as a part of a message; empty if no project has it.

    Args:
        key: The key as it was written.
        value: Its value; the name of a method leads to its recipe.
        known: Every setting.
        misspelt: Whether a name of another project may be misspelt.
    """
    row = other_name(key) or (_misspelt(key) if misspelt else None)
    if row is None or (row.ours not in known and row.ours and row.ours != METHOD):
        return ""
    note = f" ({row.note})" if row.note else ""
    beside = f"{key.rpartition('.')[0]}.{row.ours.rpartition('.')[2]}"
    if (
        row.ours and beside in known and beside != row.ours
    ):  # the section that was written has one of this name: `sft.lr`
        return f"did you mean '{beside}'?"
    if row.ours == METHOD:
        return use_recipe(value) or f"a method is a recipe here: {row.note or 'configs/methods/NAME.yaml'}"
    if not row.ours:
        theirs = row.theirs if row.project == ELSEWHERE else f"{row.project}'s {row.theirs}"
        return f"{theirs} has no counterpart: {row.note}"
    return f"did you mean '{row.ours}'{note}?"


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that was most likely meant by `key`; empty if none is close.

    A similar spelling in the section that was written comes first, then the beginning of one name there
    (`sampling.temp`), a name elsewhere that begins with the section (`eval.problems`, `data.eval_problems`), the right
    name in another section, the key without its separators (`groupsize`), and a very similar spelling elsewhere.
    """
    section, _, tail = key.rpartition(".")
    vague = section and tail in GENERIC
    near = [name.rpartition(".")[2] for name in known if section and name.rpartition(".")[0] == section]
    if close := close_to(tail, [name for name in near if _same_words(name, tail) or _same_words(tail, name)]):
        return f"{section}.{close}"
    begun = [other for other in dict.fromkeys(near) if len(tail) >= SHORT and other.startswith(tail)]
    if len(begun) == 1:
        return f"{section}.{begun[0]}"
    if at := [name for name in known if section and name.endswith(f".{section.rpartition('.')[2]}_{tail}")]:
        return at[0]
    same = [name for name in known if name.rpartition(".")[2] == tail]
    if same and (len(same) == 1 or len(tail) > 3) and not vague:
        return min(same, key=lambda name: (name.count("."), known.index(name)))
    if joined := [name for name in known if _joined(name) == _joined(key)]:
        return joined[0]
    alike = {
        name: _alike(name.rpartition(".")[2], tail) for name in known if _same_words(tail, name.rpartition(".")[2])
    }
    here = [name for name in alike if section and _alike(name.rpartition(".")[0], section) >= CLOSE <= alike[name]]
    ours = not section or section.partition(".")[0] in {name.partition(".")[0] for name in known}
    least = 1.0 if not ours else CLOSE_ELSEWHERE if section or len(tail) <= SHORT else CLOSE_ALONE
    elsewhere = [name for name in alike if alike[name] >= least and not vague]
    return max(here or elsewhere, key=lambda name: (alike[name], _alike(name, key), -name.count(".")), default="")


def _same_words(typed: str, name: str) -> bool:
    """Whether `typed` is `name` with its words misspelt, or with some of several words left out.

    A further word changes the meaning (`max_samples` is not `samples`), and so does another one (`eos_tokens` is not
    `kv_tokens`), however similar the letters.
    """
    left, right = typed.replace("-", "_").split("_"), name.split("_")
    if len(left) == len(right):
        return all(_alike(a, b) >= CLOSE for a, b in zip(left, right, strict=True))
    return (len(left) > 1 and set(left) < set(right)) or _joined(typed) == _joined(name)


def _joined(name: str) -> str:
    return name.replace(".", "").replace("_", "").replace("-", "").lower()


def _alike(left: str, right: str) -> float:
    return 1.0 if left == right else difflib.SequenceMatcher(None, left, right).ratio()


def close_to(name: str, names: Collection[str], cutoff: float = CLOSE) -> str:
    """The name with the most similar spelling; empty if none is close."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return near[0] if near else ""
