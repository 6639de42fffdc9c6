"""Estimates of the divergence between two policies from one token, for NumPy on the host and JAX on the device.

Source: Schulman, "Approximating KL divergence", 2020. With x = q(token) / p(token) for a token drawn from p, the terms
-log x, (log x)^2 / 2 and x - 1 - log x estimate KL(p || q). Here they are functions of m = log x, in nats.
"""

import math
from typing import Any, Literal

import numpy as np

Tail = Literal["flat", "linear"]

MAX_LOGRATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl (`core_algos.py`); the clamped tokens are counted."""
CEILING = 10.0
"""k3 grows exponentially where p has dropped a token that q keeps; verl's bound on the estimate."""
EDGE = 2.610868638149876
"""m at which k3 reaches `CEILING` from below."""


def k2(m: Any) -> Any:
    """m^2 / 2."""
    return 0.5 * m * m


def k3(m: Any, xp: Any = np) -> Any:
    """e^m - 1 - m: unbiased and never negative.

    Args:
        m: Log-ratios, of any shape.
        xp: `numpy`, or `jax.numpy` for arrays of the device.
    """
    return xp.expm1(m) - m


def bounded_k3(m: Any, tail: Tail = "flat", xp: Any = np) -> Any:
    """k3 without its exponential growth: at most 10, so that it has no gradient where it would be more (`flat`), or
    continued along its tangent at 10, whose slope is 12.6 (`linear`)."""
    if tail == "flat":
        return xp.minimum(k3(xp.clip(m, -MAX_LOGRATIO, MAX_LOGRATIO), xp), CEILING)
    near = xp.minimum(m, EDGE)
    return k3(near, xp) + math.expm1(EDGE) * (m - near)
