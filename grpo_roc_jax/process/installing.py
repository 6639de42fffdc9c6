"""The command that installs the packages of an extra."""

import re
from importlib import metadata

DISTRIBUTION = "grpo-roc-jax"


def install_command(extra: str) -> str:
    """`pip install 'jax[cuda12]'` for the extra `gpu`: the packages themselves, as the package's metadata lists them.

    This works for a checkout, a wheel and a copy without an address to install from. For an extra that the metadata
    does not list it names the address of the project, and without metadata the checkout.
    """
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    parts = [line.partition(";") for line in required]
    marker_pattern = re.compile(rf"extra *== *['\"]{re.escape(extra)}['\"]")
    names = [name.strip() for name, _, marker in parts if marker_pattern.search(marker)]
    address = project_address()
    project = f"{DISTRIBUTION}[{extra}] @ git+{address}" if address else f".[{extra}]"
    return "pip install " + " ".join(f"'{name}'" for name in names or [project])


def project_address() -> str:
    """Where the project is, by the `Source` among the addresses of its metadata; empty without them."""
    try:
        lines = metadata.metadata(DISTRIBUTION).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    return dict(line.split(", ", 1) for line in lines).get("Source", "")
