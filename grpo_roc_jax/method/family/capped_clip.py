"""Clipped surrogates with a further cap: dual clip (arXiv:1912.09729) and INTELLECT-2's delta (arXiv:2505.07291)."""

from grpo_roc_jax.method.surrogate import Clip
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("capped_clip")
class CappedClip(Clip):
    """`clip` with a cap on the loss of negative advantages (dual clip, arXiv:1912.09729), on the unclipped ratio
    (INTELLECT-2, arXiv:2505.07291), or both."""

    dual: NotNegative = 0.0
    """Caps the loss of a token with negative advantage at this multiple of -A, above 1 (3 in verl); 0 is off."""
    delta: NotNegative = 0.0
    """Caps the unclipped ratio (4 in INTELLECT-2); 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.dual <= 1:
            raise ValueError(f"surrogate.dual = {self.dual}; must be above 1, or 0 for off")
