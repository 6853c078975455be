"""Tokens in files other than tokenizer.json: the behaviour of transformers, and contradicting ids."""

from __future__ import annotations

import json

import pytest
import tokenizers

from sao_jax.tokenizers import Chat, HFTokenizer
from sao_jax.tokenizers.added_tokens import read, special_tokens

STOP = "<|end|>"
"""The only added token of tokenizer.json, with id 256."""


@pytest.fixture
def directory(tmp_path):
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([tokenizers.AddedToken(STOP, special=True, normalized=False)])
  backend.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def write(directory, **files):
  for name, content in files.items():
    (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def load(directory):
  return HFTokenizer.load(directory, stop_tokens=[STOP])


def decoder(*tokens, start=257, **flags):
  return {str(start + i): {"content": token, "special": True, **flags} for i, token in enumerate(tokens)}


def test_tokens_of_added_tokens_decoder(directory):
  more = decoder("<think>", start=259, special=False)
  write(directory, tokenizer_config={"added_tokens_decoder": more | decoder("<|im_start|>", "<|im_end|>")})
  tokenizer = load(directory)
  assert tokenizer.encode("<|im_start|>a<think><|im_end|><|end|>") == [257, 64, 259, 258, 256]
  assert tokenizer.decode([257, 64, 259, 258, 256]) == "<|im_start|>a<think><|im_end|><|end|>"
  assert set(tokenizer.control_tokens) == {STOP, "<|im_start|>", "<|im_end|>", "<think>"}
  assert tokenizer.vocab_size == 260


def test_tokens_of_added_tokens_json(directory):
  write(directory, added_tokens={"<b>": 258, "<a>": 257, STOP: 256})
  assert load(directory).encode("<a><b><|end|>") == [257, 258, 256]


@pytest.mark.parametrize("file", ["special_tokens_map", "tokenizer_config"])
def test_named_special_tokens_without_ids_come_last_in_order(file, directory):
  named = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}, "additional_special_tokens": ["<x>", "<s>"]}
  write(directory, added_tokens={"<a>": 257}, **{file: named | {"eos_token": None}})
  assert load(directory).encode("<s><pad><x><a>") == [258, 259, 260, 257]


def test_order_of_tokens_without_ids_over_both_files(directory):
  settings = {"pad_token": "<pad>", "additional_special_tokens": ["<x>"]}
  write(directory, tokenizer_config=settings, special_tokens_map={"bos_token": "<s>", "mask_token": "<m>"})
  assert load(directory).encode("<s><pad><m><x>") == [257, 258, 259, 260]
  write(directory, tokenizer_config=settings | {"added_tokens_decoder": {}})
  assert load(directory).encode("<pad><x>") == [257, 258]
  assert load(directory).vocab_size == 259


def test_extra_special_tokens_may_be_an_object(directory):
  write(directory, tokenizer_config={"extra_special_tokens": {"image_token": "<image>"}})
  assert load(directory).encode("<image>") == [257]


def test_a_token_of_the_vocabulary_keeps_its_id(directory):
  write(directory, special_tokens_map={"bos_token": "a"})
  tokenizer = load(directory)
  assert tokenizer.encode("bab") == [65, 64, 65]
  assert set(tokenizer.control_tokens) == {STOP, "a"} and tokenizer.vocab_size == 257


def test_flags_of_added_tokens_decoder_count_more_than_those_of_the_tokenizer(directory):
  write(directory, tokenizer_config={"added_tokens_decoder": decoder(STOP, start=256, rstrip=True)})
  assert load(directory).encode("<|end|> \na") == [256, 64]  # the space belongs to the token


def test_files_without_flags_leave_those_of_the_tokenizer(directory):
  values = json.loads((directory / "tokenizer.json").read_text())
  values["added_tokens"][0]["rstrip"] = True
  write(directory, tokenizer=values, added_tokens={STOP: 256}, special_tokens_map={"eos_token": STOP})
  assert load(directory).encode("<|end|> \na") == [256, 64]


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({"tokenizer_config": {"added_tokens_decoder": decoder("<x>", start=256)}}, "'<x>' must be 256.*, and 256 is"),
    ({"tokenizer_config": {"added_tokens_decoder": decoder("<x>", start=300)}}, "'<x>' must be 300; it is 257"),
    ({"tokenizer_config": {"added_tokens_decoder": decoder(STOP, start=257)}}, r"'<\|end\|>' must be 257; it is 256"),
    ({"tokenizer_config": {"added_tokens_decoder": decoder("a", start=257)}}, "'a' must be 257; it is 64$"),
    ({"added_tokens": {"<x>": 257, "<y>": 257}}, r"added_tokens\.json: .* received 257 for '<y>'.* 257 for '<x>'"),
    (
      {"tokenizer_config": {"added_tokens_decoder": decoder("<x>")}, "added_tokens": {"<x>": 258}},
      r"added_tokens\.json: .* received 258 for '<x>', and before 257 for '<x>'",
    ),
    (
      {"tokenizer_config": {"added_tokens_decoder": decoder("<x>", "<x>")}},
      "received 258 for '<x>', and before 257 for '<x>'",
    ),
    ({"tokenizer_config": {"added_tokens_decoder": {"-1": {"content": "<x>"}}}}, "the id of '<x>' must be an int"),
    ({"tokenizer_config": {"added_tokens_decoder": {"1e3": {"content": "<x>"}}}}, "the id of '<x>' must be an int"),
    ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}}, "must be an int"),
    ({"tokenizer_config": {"added_tokens_decoder": {"257": {}}}}, r"added_tokens_decoder\['257'\] must be a token"),
    ({"tokenizer_config": {"added_tokens_decoder": ["<x>"]}}, "added_tokens_decoder must be an object"),
    ({"tokenizer_config": {"added_tokens_decoder": decoder("<x>", lstrip=1)}}, "flags of '<x>' must be true or false"),
    ({"added_tokens": {"<x>": "257"}}, r"the id of '<x>' must be an int in \[0, 2147483648\); received '257'"),
    ({"added_tokens": {"<x>": 2**31}}, "the id of '<x>' must be an int"),
    ({"special_tokens_map": {"bos_token": 5}}, r"special_tokens_map\.json: bos_token must be a token; received 5"),
    ({"special_tokens_map": {"additional_special_tokens": [5]}}, "additional_special_tokens must be a token"),
    ({"special_tokens_map": []}, r"special_tokens_map\.json must be a JSON object"),
  ],
)  # fmt: skip
def test_what_contradicts_or_is_no_token_is_named(files, message, directory):
  write(directory, **files)
  with pytest.raises(ValueError, match=message):
    load(directory)


def test_ids_that_tokenizer_json_says_and_does_not_give(directory):
  """The package gives an added token the next id and ignores the id in the file."""
  values = json.loads((directory / "tokenizer.json").read_text())
  values["added_tokens"][0]["id"] = 300
  write(directory, tokenizer=values)
  with pytest.raises(ValueError, match=r"tokenizer\.json: .*'<\|end\|>' must be 300; it is 256"):
    load(directory)


def test_names_come_from_both_files(directory, caplog):
  write(directory, tokenizer_config={"eos_token": "<e>"}, special_tokens_map={"bos_token": "<s>", "eos_token": "<e>"})
  assert special_tokens(directory) == {"bos_token": "<s>", "eos_token": "<e>"}
  assert caplog.records == []
  write(directory, special_tokens_map={"eos_token": "<o>"})
  assert special_tokens(directory) == {"eos_token": "<o>"}
  expected = "eos_token is '<e>' in tokenizer_config.json and '<o>' in special_tokens_map.json; using '<o>'"
  assert expected in caplog.text
  write(directory, tokenizer_config={"eos_token": "<e>", "added_tokens_decoder": {}},
        special_tokens_map={"bos_token": "<s>"})  # fmt: skip
  assert special_tokens(directory) == {"eos_token": "<e>"}
  assert "bos_token is None in tokenizer_config.json and '<s>' in special_tokens_map.json; using None" in caplog.text


def test_the_template_and_the_stop_tokens_have_the_names(directory):
  template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
  write(directory, tokenizer_config={"chat_template": template},
        special_tokens_map={"bos_token": "<s>", "eos_token": STOP})  # fmt: skip
  chat = Chat.load(directory)
  assert chat.tokenizer.stop_tokens == (STOP,)
  assert chat.tokenizer.encode(chat.prompt([{"role": "user", "content": "a"}])) == [257, 64, 256]


def test_no_files_name_no_tokens(directory):
  assert read(directory) == [] and special_tokens(directory) == {}
