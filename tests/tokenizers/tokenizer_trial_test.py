"""Tokenizer files that panic, are slow or lengthen texts raise ValueErrors and do not harm this process."""

from __future__ import annotations

import base64
import json

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from sao_jax.tokenizers import HFTokenizer
from sao_jax.tokenizers._tokenizer_trial import MAX_GROWTH, growth

STOP = {
  "id": 3, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
  "special": True,
}  # fmt: skip
MODEL = {"type": "BPE", "vocab": {"x": 0, "a": 1, "b": 2}, "merges": []}
BASE = {
  "version": "1.0", "truncation": None, "padding": None, "added_tokens": [STOP], "normalizer": None,
  "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"}, "model": MODEL,
}  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def load(**parts):
  return HFTokenizer(json.dumps(BASE | parts), stop_tokens=["</s>"])


def replace(old, new, kind="String"):
  return {"type": "Replace", "pattern": {kind: old}, "content": new}


def normalize(*parts):
  return {"normalizer": {"type": "Sequence", "normalizers": list(parts)}}


def split(*patterns):
  parts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
  return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


def decode(*parts):
  return {"decoder": {"type": "Sequence", "decoders": list(parts)}}


def template(copies):
  one = {"Sequence": {"id": "A", "type_id": 0}}
  pair = [one, {"Sequence": {"id": "B", "type_id": 1}}]
  return {"type": "TemplateProcessing", "single": [one] * copies, "pair": pair, "special_tokens": {}}


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "encoding a text .* fails: chunk size must be non-zero"),
    ({"decoder": {"type": "Strip", "content": "x", "start": 1, "stop": 1}}, r"decoding the ids \[0, 1, 2\] fails"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not a tokenizer: Precompiled"),
    (
      {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\4" + b"\0" * 7).decode()}},
      "encoding a text of .* fails: index out of bounds",
    ),
    (split("(a+)+$"), "encoding a text of .* fails: Onig: Regex search error"),
    (split(r"(\w+\s?)+$"), "encoding a text of .* fails: Onig: Regex search error"),
    (split("(.*)*$x"), "encoding a text of .* fails: Onig: Regex search error"),
    (normalize(replace("(a|a)+$", "", "Regex")), "encoding a text of .* fails: Onig: Regex search error"),
    (split(r"[^\x02]*[^\x02]*\x0b(?=\x02)"), r"fails its trial: it takes more than 5\.0 s"),
    (normalize(*[replace("x", "x" * 64)] * 6), r"encoded text may be 1024 times .* it can be 6\.87e\+10 times"),
    (normalize(*[replace("ab", "abab")] * 40), "encoded text may be 1024 times as long"),
    (normalize(*[replace("", "aa")] * 20), "encoded text may be 1024 times as long"),
    (normalize(*[replace(".", "aa", "Regex")] * 60), "encoded text may be 1024 times as long"),
    (normalize({"type": "Prepend", "prepend": "a" * 100_000}), "encoded text may be 1024 times as long"),
    (normalize(*[{"type": "ByteLevel"}] * 40), "encoded text may be 1024 times as long"),
    (normalize(*[replace("(?=a)", "a", "Regex")] * 40), "encoded text may be 1024 times as long"),
    (normalize(replace("a", "x" * 100)), r"encoding a text of 2001 characters, 'aaaaaaaaaa'\.\.\. gives 200000 ids"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}}, "encoded text may be 1024 times"),
    (decode(*[replace("x", "xx")] * 60), "decoded text may be 1024 times as long"),
    (decode(*[BYTE_LEVEL] * 60), "decoded text may be 1024 times as long"),
    ({"added_tokens": [STOP | {"id": 2**32 - 1}]}, "'</s>' must be 4294967295; it is 3"),
    ({"added_tokens": [STOP | {"id": -1}]}, "not a tokenizer: invalid value"),
    ({"model": MODEL | {"vocab": {"x": 2**32 - 1, "a": 1, "b": 2}}}, "below 2147483648; .* the largest is 4294967295"),
    ({"model": MODEL | {"vocab": {"x": 0, "a": 0, "b": 2}}}, "ids must differ .* received 3 for 4 tokens"),
    ({"model": 5}, "not a tokenizer"),
  ],
)  # fmt: skip
def test_what_would_bring_the_process_down_is_refused(parts, message):
  with pytest.raises(ValueError, match=message):
    load(**parts)


def test_the_file_is_named(tmp_path):
  (tmp_path / "tokenizer.json").write_text(json.dumps(BASE | split("(a+)+$")))
  with pytest.raises(ValueError, match=rf"^{tmp_path}/tokenizer\.json: encoding a text of .* Regex search error"):
    HFTokenizer.load(tmp_path, stop_tokens=["</s>"])


@pytest.mark.parametrize(
  "parts",
  [
    {"post_processor": template(100_000)},
    {"padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}},
    {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 10**9}},
  ],
)  # fmt: skip
def test_what_has_no_part_in_encoding_does_no_harm(parts):
  assert load(**parts).encode("xab") == [0, 1, 2]


def test_failures_on_a_text_that_the_trial_does_not_foresee():
  """The error names its cause, and the tokenizer still works."""
  tokenizer = load(**split("([ᚠ-ᚯ]+)+ᛒ"))
  with pytest.raises(ValueError, match="the tokenizer cannot encode a text: Onig: Regex search error"):
    tokenizer.encode("ᚢ" * 60 + "xᛒ")
  assert tokenizer.encode("ab") == [1, 2]


def test_a_vocabulary_that_does_not_cover_a_text():
  tokenizer = load(model={"type": "WordLevel", "vocab": {"x": 0, "xx": 1, "a": 2}, "unk_token": "?"})
  assert tokenizer.encode("a") == [2]
  with pytest.raises(ValueError, match="the tokenizer cannot encode a text: WordLevel error: Missing"):
    tokenizer.encode("b")


def test_errors_of_the_caller_stay_what_they_are():
  with pytest.raises(TypeError):
    load().encode(5)
  with pytest.raises(OverflowError):
    load().decode([-1])


@pytest.mark.parametrize(
  ("pattern", "digits"),
  [
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", 4),
    (
      r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
      r"\s+(?!\S)|\s+",
      4,
    ),
  ],
)
def test_patterns_of_published_tokenizers_pass(pattern, digits):
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), byte_level]
  )
  backend.decoder = decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, show_progress=False, special_tokens=["</s>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  backend.train_from_iterator(["the quick brown fox " * 20], trainer)
  tokenizer = HFTokenizer(backend.to_str(), stop_tokens=["</s>"])
  assert tokenizer.decode(tokenizer.encode("It's 1234 中\n\n x")) == "It's 1234 中\n\n x"
  assert len(tokenizer.encode("1234")) == digits


def test_a_tokenizer_in_the_form_of_llama_2_passes_the_trial():
  """It is refused later, for another reason."""
  parts = normalize({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
  parts |= decode(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                  {"type": "Strip", "content": " ", "start": 1, "stop": 0})  # fmt: skip
  bytes_ = {f"<0x{i:02X}>": 10 + i for i in range(256)}
  model = MODEL | {"vocab": {"x": 0, "▁": 1, "▁x": 2, "</s>": 3, **bytes_}, "byte_fallback": True, "merges": ["▁ x"]}
  with pytest.raises(ValueError, match="adds a space before every text"):
    load(**parts, model=model)


@pytest.mark.parametrize(
  ("part", "text"),
  [
    (normalizers.Sequence([normalizers.Replace("a", "bcd"), normalizers.Prepend("▁")]), "aaaa"),
    (normalizers.Replace("", "xy"), "ab"),
    (normalizers.Replace(tokenizers.Regex("b?"), "xyz"), "ab"),
    (normalizers.BertNormalizer(), "中中"),
    (normalizers.NFC(), "é"),
  ],
)
def test_growth_is_never_less_than_what_happens(part, text):
  grown = len(part.normalize_str(text).encode()) / len(text.encode())
  assert grown <= 2.0 * growth(json.loads(part.__getstate__())) <= MAX_GROWTH
  assert growth(None) == 1.0
