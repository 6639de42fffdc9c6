"""The command that installs the packages of an extra."""

import re
from importlib import metadata

DISTRIBUTION = "grpo-roc-jax"


def install_command(extra: str) -> str:
    """`pip install 'jax[cuda12]'` for the extra `gpu`: the packages themselves, as the package's metadata lists them.

    This works for a checkout, a wheel and a copy without an address to install from. Without metadata it names the
    extra.
    """
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    parts = [line.partition(";") for line in required]
    marker_pattern = re.compile(rf"extra *== *['\"]{re.escape(extra)}['\"]")
    names = [name.strip() for name, _, marker in parts if marker_pattern.search(marker)]
    return "pip install " + " ".join(f"'{name}'" for name in names or [f"{DISTRIBUTION}[{extra}]"])
