"""The tool that the policy may call."""

import grpo_roc_jax as g

PRICES = {str(item): str(item * 7919 % 997) for item in range(1000, 10000)}
"""Item -> price. The policy cannot know a price; it has to ask."""


class Shop(g.Environment):
    """One object is made for each rollout. Its public methods are the tools; their docstrings become the schema."""

    def price(self, item: str) -> str:
        """Says what an item costs.

        Args:
            item: Its number.
        """
        if item not in PRICES:
            raise ValueError(f"no {item}")  # the policy reads this, and the call counts as failed
        return PRICES[item]
