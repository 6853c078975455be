"""A check that a checkpoint's stop tokens end an action where its chat template ends a turn."""

from __future__ import annotations

import logging
import pathlib

from sao_jax.tokenizers.chat_template import ChatTemplate
from sao_jax.tokenizers.hf_tokenizer import HFTokenizer


def report(checkpoint: pathlib.Path, tokenizer: HFTokenizer, template: ChatTemplate) -> None:
  """Warns of a template that ends the assistant's turns with a control token that is no stop token.

  Base models are published so: their files name the end of a document, and the template is that of a chat model. A
  policy that ends its turn as the template does then goes on, and writes the user's turn as well.
  """
  try:
    rest = template.between([{"role": "user", "content": "."}], ended_with="").lstrip()
  except ValueError as error:
    logging.warning("%s: whether its stop tokens end a turn cannot be told: %s", checkpoint, error)
    return
  end = max((token for token in tokenizer.control_tokens if token and rest.startswith(token)), key=len, default=None)
  if end is not None and end not in tokenizer.stop_tokens:
    logging.warning(
      "%s: its chat template ends a turn with %r, which is none of the stop tokens %s (eos_token_id of "
      "generation_config.json or config.json, or eos_token): an action does not end there. Add its id to eos_token_id.",
      checkpoint, end, list(tokenizer.stop_tokens),
    )  # fmt: skip
