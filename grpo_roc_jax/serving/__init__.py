"""The policy over HTTP: requests of OpenAI's clients and of token-level ones become rows of the rollout engine."""
