"""Logits of whole rows by the package, to be compared with those of other implementations, and layers one by one."""

from functools import partial

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.transformer import forward, take_layer, unembed


@partial(jax.jit, static_argnames="model")
def row_logits(params, tokens, model):
    """[B,T] -> [B,T,V]; every row is one segment without padding."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return unembed(params, forward(params, tokens, positions, jnp.ones_like(tokens), model), model)


def layers_apart(params, model):
    """The same parameters with a tuple of layers; slices of NumPy arrays compile nothing."""
    params = jax.device_get(params)
    return params | {"layers": tuple(take_layer(params["layers"], i, model) for i in range(model.layers))}
