from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.envs import Tag
from sao_jax.tokenizers import MathTokenizer, math_tokenizer
from sao_jax.types import Tokenizer

TOKENIZERS = {k: MathTokenizer(digits_per_token=k) for k in (1, 3)}
PIECES = st.sampled_from(
  [*math_tokenizer.PHRASES, *math_tokenizer.SPECIAL_TOKENS, "0", "007", "12345", "-", " ", "<", "|>"]
)
TEXT = st.lists(st.one_of(PIECES, st.text(alphabet=math_tokenizer.CHARACTERS, max_size=6)), max_size=12).map("".join)


@pytest.mark.parametrize("digits", [1, 3])
@given(text=TEXT)
def test_round_trip_of_every_printable_text(digits: int, text: str) -> None:
  tokenizer = TOKENIZERS[digits]
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("digits", [1, 3])
@given(data=st.data())
def test_every_id_has_a_text_that_encodes_to_it(digits: int, data: st.DataObject) -> None:
  tokenizer = TOKENIZERS[digits]
  i = data.draw(st.integers(0, tokenizer.vocab_size - 1))
  assert tokenizer.encode(tokenizer.decode([i])) == [i]


@given(text=st.text(max_size=20))
def test_characters_outside_the_vocabulary_become_unknown_one_each(text: str) -> None:
  tokenizer = TOKENIZERS[3]
  unknown = tokenizer.encode(math_tokenizer.UNKNOWN)[0]
  expected = "".join(c if c in math_tokenizer.CHARACTERS else math_tokenizer.UNKNOWN for c in text)
  assert tokenizer.decode(tokenizer.encode(text)) == expected
  assert tokenizer.encode("π\t₂") == [unknown] * 3


def test_numbers_are_split_from_the_left() -> None:
  assert TOKENIZERS[3].tokens("1234567") == ["123", "456", "7"]
  assert TOKENIZERS[3].tokens("007") == ["007"]
  assert TOKENIZERS[1].tokens("1234") == ["1", "2", "3", "4"]
  assert TOKENIZERS[3].tokens("٣") == ["٣"]  # Digits of other scripts are not numbers here.
  assert TOKENIZERS[3].vocab_size - TOKENIZERS[1].vocab_size == 1_100


def test_special_ids() -> None:
  tokenizer: Tokenizer = TOKENIZERS[3]
  assert tokenizer.decode(tokenizer.stop_ids) == "<|end|>"
  assert TOKENIZERS[3].pad_id == 0 and TOKENIZERS[3].pad_id not in tokenizer.stop_ids
  for tag in (value for name, value in vars(Tag).items() if name.isupper()):
    assert tag in math_tokenizer.SPECIAL_TOKENS


def test_bad_input_is_refused() -> None:
  with pytest.raises(ValueError, match="digits_per_token must be 1 or 3; received 2"):
    MathTokenizer(digits_per_token=2)
  for phrase in ("", "a", "x1", "<|user|>", "été"):
    with pytest.raises(ValueError, match="phrases must be distinct"):
      MathTokenizer(phrases=[phrase])
  with pytest.raises(ValueError, match="phrases must be distinct"):
    MathTokenizer(phrases=["ab", "ab"])
  for i in (-1, TOKENIZERS[3].vocab_size):
    with pytest.raises(ValueError, match="ids must be in"):
      TOKENIZERS[3].decode([i])


def test_examples() -> None:
  results = doctest.testmod(math_tokenizer)
  assert results.attempted and not results.failed
