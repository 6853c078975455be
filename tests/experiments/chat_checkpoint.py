"""The tokenizer files of a tiny checkpoint: bytes, a few control tokens and a chat template."""

from __future__ import annotations

import json
import pathlib

import tokenizers

TEMPLATE = (
  "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
  "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
  "{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", "
  "\"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<end>{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(directory: pathlib.Path) -> None:
  """Writes `tokenizer.json` and `tokenizer_config.json` with 261 tokens."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(["<end>", "<user>", "<assistant>", "<system>", "<tool>"])
  backend.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
