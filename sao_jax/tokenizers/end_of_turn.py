"""A check that a checkpoint's stop tokens end an action where its chat template ends a turn."""

from __future__ import annotations

import logging
import pathlib

from sao_jax.tokenizers.chat_template import ChatTemplate
from sao_jax.tokenizers.hf_tokenizer import HFTokenizer


def report(checkpoint: pathlib.Path, tokenizer: HFTokenizer, template: ChatTemplate) -> None:
  """Warns if a template ends the assistant's turns with a control token that is not a stop token.

  Base models are often published like this, with the end of a document as stop token and the template of a chat model.
  A policy that ends its turn as the template does would then go on and write the user's turn as well.
  """
  try:
    rest = template.between([{"role": "user", "content": "."}], ended_with="").lstrip()
  except ValueError as error:
    logging.warning("%s: cannot check whether its stop tokens end a turn: %s", checkpoint, error)
    return
  end = max((token for token in tokenizer.control_tokens if token and rest.startswith(token)), key=len, default=None)
  if end is not None and end not in tokenizer.stop_tokens:
    logging.warning(
      "%s: its chat template ends a turn with %r, but the stop tokens are %s (eos_token_id of generation_config.json "
      "or config.json, or eos_token), so actions do not end there. Add the id of that token to eos_token_id.",
      checkpoint, end, list(tokenizer.stop_tokens),
    )  # fmt: skip
