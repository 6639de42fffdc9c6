"""Token ids and text: tokenizers under one protocol, and the chat format of turns, tool calls and observations."""
