"""Settings of the method that belong to no axis: the user's files, edits, the memory of the success table."""

from grpo_roc_jax.settings.options import PositiveShare, settings


@settings
class MethodConfig:
    """The user's parts, and the memory of the success table."""

    files: tuple[str, ...] = ()
    """Python files (or importable modules) with further kinds, imported before the configuration is read; a kind
    defined there is chosen like any other."""
    edit_groups: str = ""
    """Function of a scored group -> group, applied when all waves are in and before selection, such as the repair of
    failed calls in `examples/plugins`: `package.module:function`, or a name passed to `train(functions=...)`."""
    edit_rows: str = ""
    """Function of (rows, groups, policy) -> rows, after everything else: the last word on advantages and weights of
    tokens, with the policy at hand for passes of its own (`learner.group_learner.Policy`)."""
    tracker_decay: PositiveShare = 0.875
    """Memory of the success tracker of each problem: the share of past counts kept at each visit, unless
    `advantage.baseline tracker` adapts it (SPO, arXiv:2509.13232, whose fastest forgetting this is)."""
