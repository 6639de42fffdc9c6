"""`grpo-roc serve-tools`: the sandbox for other trainers, with the interface of SandboxFusion's `/run_code`.

Listens on loopback by default, since anyone who can reach the port can run programs, within the limits of the sandbox.
The environment variable `GRPO_TOOLS_TOKEN` holds the bearer token that requests must carry; any other address needs
one. Connections are not encrypted.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from grpo_roc_jax.commands.run_tools import add_limits, config_of
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable
from grpo_roc_jax.sandbox.server import TOKEN_VARIABLE, make_server
from grpo_roc_jax.tools.executor import settings_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted; returns the exit status, 5 if the executor or the server cannot start."""
    parser = argparse.ArgumentParser(prog="grpo-roc serve-tools", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8080, help="port; 0 takes a free one")
    add_limits(parser)
    options = parser.parse_args(arguments)
    show_log("%(message)s", info=("grpo_roc_jax",))
    try:
        settings, token = settings_of(config_of(options)), os.environ.get(TOKEN_VARIABLE, "")
        server, _ = make_server(settings, options.host, options.port, token)
    except (IsolationUnavailable, ExecutorFailed, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 5
    print(f"http://{options.host}:{server.server_address[1]}/run_code", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0
