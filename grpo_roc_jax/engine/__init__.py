"""The rollout engine: slots that decode while others wait for tools, the blocks of their cache, and its programs."""
