"""Tools of an MCP server; a server of its own for each rollout. Needs the extra `mcp`.

python examples/environments/mcp_server.py
"""

import sys

from mcp.server.mcpserver import MCPServer

import grpo_roc_jax as g

server = MCPServer("calculator")


@server.tool()
def power(base: int, exponent: int, modulus: int) -> int:
    """Computes base ** exponent modulo modulus."""
    return pow(base, exponent, modulus)


def main(words: list[str]) -> dict:
    """Trains with its tools; a server that runs already is named by `--environment.url`."""
    command = ["--environment.kind=mcp", f"--environment.command=[{sys.executable}, {__file__}, serve]"]
    return g.train_policy(g.read_config("toy.yaml", *command, "--data.sources=world:powmod:1", *words))


if __name__ == "__main__":
    server.run("stdio") if sys.argv[1:] == ["serve"] else main(sys.argv[1:])
