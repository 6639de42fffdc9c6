"""Where a run's weights come from: random numbers, a published checkpoint, or one of these with an adapter.

Under `lora.rank` what is trained, saved and restored is the adapter alone; the weights it adapts are loaded once, layer
by layer in the compute dtype, and shared by trainer and sampler.
"""

from functools import partial

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params
from grpo_roc_jax.model.lora import LoraConfig, attach
from grpo_roc_jax.model.transformer import Params, compute_dtype, init_params
from grpo_roc_jax.rollout.weights import unstack
from grpo_roc_jax.sharding import Mesh, param_shardings, replicated
from grpo_roc_jax.update import TrainState, init_train_state, init_trained, start_train_state, trained_shardings


def frozen_weights(config: Config, model: ModelConfig, mesh: Mesh) -> Params | None:
    """The weights that an adapter belongs to, in the compute dtype, as a tuple of layers; None without one."""
    if not config.lora.rank:
        return None
    shardings = param_shardings(model, mesh)
    if config.model.path:
        folder = find_model(config.model.path)
        return load_params(folder, model, shardings, dtype=compute_dtype(model), stacked=False)
    key = jax.device_put(jax.random.key(config.seed), replicated(mesh))
    stacked = jax.jit(partial(init_params, config=model), out_shardings=shardings)(key)
    return jax.jit(partial(unstack, config=model))(stacked)


def initial_state(config: Config, model: ModelConfig, mesh: Mesh) -> TrainState:
    """The training state at step 0: the published parameters at `model.path`, or random ones, or a fresh adapter."""
    if config.model.path and not config.lora.rank:
        params = load_params(find_model(config.model.path), model, param_shardings(model, mesh))
        return start_train_state(params, model, config.optim, mesh, donate=True)
    return init_train_state(jax.random.key(config.seed), model, config.optim, mesh, config.lora)


def full_params(base: Params | None, trained: Params, lora: LoraConfig) -> Params:
    """The parameters of the policy: what is trained, beside the weights it adapts where there are any."""
    return trained if base is None else attach(base, trained, lora)


def abstract_trained(model: ModelConfig, mesh: Mesh, lora: LoraConfig) -> Params:
    """Shapes, dtypes and shardings of what is trained, for restoring it."""
    shapes = jax.eval_shape(lambda: init_trained(jax.random.key(0), model, lora))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        trained_shardings(model, mesh, lora),
    )
