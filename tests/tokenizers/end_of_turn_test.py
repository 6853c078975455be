"""Warnings about stop tokens that do not end the template's turns."""

from __future__ import annotations

import json
import logging

import pytest
import tokenizers

from sao_jax.tokenizers import Chat

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "</s>", "</s>>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
LLAMA = "{% for m in messages %}{{ m.content }} </s>{% endfor %}"


@pytest.fixture(scope="module")
def serialized():
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
  return backend.to_str()


def load(folder, serialized, template, eos):
  (folder / "tokenizer.json").write_text(serialized)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
  ids = [256 + SPECIAL.index(token) for token in eos]
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
  return Chat.load(folder)


@pytest.mark.parametrize(
  ("template", "eos", "end"),
  [
    (CHATML, ["<|endoftext|>"], "<|im_end|>"),
    (GLM, ["<|endoftext|>"], "<|user|>"),
    (LLAMA, ["<|endoftext|>"], "</s>"),
    ("{% for m in messages %}{{ m.content }}</s>>{% endfor %}", ["</s>"], "</s>>"),
  ],
)
def test_an_end_of_turn_that_is_no_stop_token_is_told(template, eos, end, serialized, tmp_path, caplog):
  load(tmp_path, serialized, template, eos)
  message = f"{tmp_path}: its chat template ends a turn with {end!r}, but the stop tokens are {eos}"
  assert [record.levelno for record in caplog.records] == [logging.WARNING]
  assert message in caplog.text


@pytest.mark.parametrize(
  ("template", "eos"),
  [
    (CHATML, ["<|im_end|>"]),
    (CHATML, ["<|endoftext|>", "<|im_end|>"]),
    (GLM, ["<|endoftext|>", "<|user|>"]),
    (LLAMA, ["</s>"]),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ["<|endoftext|>"]),  # no token ends a turn
  ],
)
def test_nothing_is_told_where_they_agree(template, eos, serialized, tmp_path, caplog):
  load(tmp_path, serialized, template, eos)
  assert caplog.records == []


def test_a_template_of_which_it_cannot_be_told(serialized, tmp_path, caplog):
  load(tmp_path, serialized, "{{ messages[0].content }}", ["</s>"])
  assert "cannot check whether its stop tokens end a turn" in caplog.text
