"""Published checkpoints: Hugging Face directories and GGUF files."""
