"""Scaf-GRPO and Guide-GRPO: hinted successes replace failures. Sources: arXiv:2510.19807, arXiv:2506.13923."""

from grpo_roc_jax.contrib.methods.hints import Hinted
from grpo_roc_jax.method.edit import replace_failures
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Group, RolloutRequest


@kind("scaffold")
class Scaffold(Hinted):
    """Rising hints until one succeeds, which replaces failures (Scaf-GRPO, arXiv:2510.19807)."""

    replace: AtLeast1 = 1
    """Failures of a group that hinted successes replace."""

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return replace_failures(group, result, self.replace)


@kind("guide")
class Guide(Scaffold):
    """`scaffold`, trained under the plain prompt (Guide-GRPO, arXiv:2506.13923)."""

    trains_plain = other_prompts = True
