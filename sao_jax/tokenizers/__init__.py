"""Text to token ids and back."""

from __future__ import annotations

from sao_jax.tokenizers.math_tokenizer import MathTokenizer as MathTokenizer

__all__ = ["MathTokenizer"]
