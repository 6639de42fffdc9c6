"""GGUF files as model directories: their configuration, tokenizer and tensors in the published form."""
