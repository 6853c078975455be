"""The tokenizer of a GGUF file against a reference of byte-pair encoding."""

from __future__ import annotations

import itertools
import re

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.tokenizers import Chat, load_gguf_tokenizer
from sao_jax.tokenizers.gguf_tokenizer import hf_files

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ 1", "i n", "in g", "Ċ Ċ"]
BYTES = [chr(b) for b in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = [*CONTROL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# GPT-2's split of ASCII text into words.
WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def write_file(path, *, split="smollm", model="gpt2", eos=2, types=None, leave_out=(), template=TEMPLATE):
  writer = gguf.GGUFWriter(path, "llama")
  fields = {
    "model": lambda: writer.add_tokenizer_model(model),
    "pre": lambda: writer.add_tokenizer_pre(split),
    "tokens": lambda: writer.add_token_list(TOKENS),
    "types": lambda: writer.add_token_types(types or [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL))),
    "merges": lambda: writer.add_token_merges(MERGES),
    "bos": lambda: writer.add_bos_token_id(1),
    "eos": lambda: writer.add_eos_token_id(eos),
    "template": lambda: writer.add_chat_template(template),
  }
  for name, add in fields.items():
    if name not in leave_out:
      add()
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  folder = tmp_path_factory.mktemp("gguf")
  files = {split: write_file(folder / f"{split}.gguf", split=split) for split in ("smollm", "gpt-2")}
  return {split: load_gguf_tokenizer(path) for split, path in files.items()}


def encode_slowly(text, split):
  """Splits words, then repeats the earliest merge of the list."""
  parts = re.split(r"([0-9])", text) if split == "smollm" else [text]
  ids = []
  for word in (word for part in parts for word in WORDS.findall(part)):
    pieces = list(word.replace(" ", "Ġ").replace("\n", "Ċ"))
    while True:
      ranks = [
        (MERGES.index(f"{a} {b}"), i) for i, (a, b) in enumerate(itertools.pairwise(pieces))
        if f"{a} {b}" in MERGES
      ]  # fmt: skip
      if not ranks:
        break
      _, i = min(ranks)
      pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids += [TOKENS.index(piece) for piece in pieces]
  return ids


@pytest.mark.parametrize("split", ["smollm", "gpt-2"])
@given(text=st.text(alphabet=" the ing12'sTx.,\n", max_size=40))
def test_encoding(loaded, split, text):
  tokenizer, _ = loaded[split]
  assert tokenizer.encode(text) == encode_slowly(text, split)
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_only_where_the_split_says_so(loaded):
  assert len(loaded["smollm"][0].encode("12")) == 2 and len(loaded["gpt-2"][0].encode("12")) == 1


def test_stop_token_and_template(loaded):
  tokenizer, template = loaded["smollm"]
  assert tokenizer.stop_ids == (2,) and tokenizer.vocab_size == len(TOKENS)
  ids = tokenizer.encode(template.render([{"role": "user", "content": "the <|im_end|>"}]))
  assert ids[0] == 1 and ids.count(2) == 1


def test_templates_by_name(tmp_path):
  named = [{"name": name, "template": f"{name}:{TEMPLATE}"} for name in ("default", "tool_use")]
  _, template = load_gguf_tokenizer(write_file(tmp_path / "x.gguf", template=named))
  assert template.render([]) == "default:"
  assert template.render([], tools=[{"type": "function", "function": {"name": "f"}}]) == "tool_use:"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"split": "qwen2"}, "received 'gpt2' with 'qwen2'"),
    ({"model": "llama"}, "received 'llama' with 'smollm'"),
    ({"leave_out": ("template",)}, "lacks tokenizer.chat_template"),
    ({"eos": 10_000}, r"eos_token_id must be in \[0, \d+\); received 10000"),
    ({"types": [1, 2]}, "a type for each token; received 2"),
    ({"leave_out": ("merges",)}, "lacks tokenizer.ggml.merges"),
  ],
)
def test_what_cannot_be_read_is_named(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    load_gguf_tokenizer(write_file(tmp_path / "x.gguf", **change))


def test_it_is_written_as_the_files_of_a_hugging_face_directory(loaded, tmp_path):
  template = TEMPLATE + "{% if tools %}<tool_call>{% endif %}"
  for name, text in hf_files(write_file(tmp_path / "x.gguf", template=template)).items():
    (tmp_path / name).write_text(text)
  chat = Chat.load(tmp_path)
  text = "The king<|im_end|>\n\n12 in 112"
  assert chat.tokenizer.encode(text) == loaded["smollm"][0].encode(text)
  assert chat.tokenizer.stop_tokens == ("<|im_end|>",) and chat.template.source == template
