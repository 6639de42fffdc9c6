"""Token ids and text: tokenizers behind one protocol, and the chat format of turns, tool calls and observations."""
