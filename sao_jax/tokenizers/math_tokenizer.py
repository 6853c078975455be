"""A small reversible tokenizer for mathematics with a tool: tags, numbers, phrases and single characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PAD = "<|pad|>"
UNKNOWN = "<|unk|>"
END = "<|end|>"

SPECIAL_TOKENS = (
  PAD,
  UNKNOWN,
  END,
  "<|system|>",
  "<|user|>",
  "<|assistant|>",
  "<|python|>",
  "<|output|>",
  "<|answer|>",
)
"""Tags, in the order of their ids: padding is 0, the unknown character 1, the end of an action 2."""

PHRASES = (
  # Fixed phrases of the task sets' questions. With one token for each, most tokens of a prompt are its numbers.
  "Calculate ",
  "State the final answer to the following arithmetic problem: ",
  "Solve the following multiplication: ",
  ". Give only the result as your final answer.",
  "Solve for ",
  "Find the value of ",
  " in the equation: ",
  "Determine the value of ",
  " that satisfies: ",
  "Find the Least Common Multiple (LCM) of these numbers: ",
  "Find the Greatest Common Divisor (GCD) of these numbers: ",
  ". Give only the GCD as your final answer.",
  # Arithmetic, with its usual spaces.
  " + ",
  " - ",
  " * ",
  " / ",
  " // ",
  " % ",
  " ** ",
  " = ",
  " =",
  ", ",
  ": ",
  "( ",
  " )",
  "gcd(",
  "lcm(",
  "print(",
  "import ",
  # Replies of the tool when a call fails.
  "error: ",
  "malformed action",
  "too many operations",
  "SyntaxError",
  "NameError",
  "TypeError",
  "ValueError",
  "ZeroDivisionError",
  "OverflowError",
  "MemoryError",
  "TimeoutError",
  "ImportError",
  "AttributeError",
  "IndexError",
)
"""Strings that are one token each; the longest match wins. None may hold a digit."""

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""Newline and the printable ASCII characters, used where nothing longer matches."""


class MathTokenizer:
  """A tokenizer of tags, groups of digits, known phrases and single characters, in this order of precedence.

  A run of digits is split from the left into groups of `digits_per_token` digits. With 3 (as in Llama 3) every string
  of 1 to 3 digits, including leading zeros, is a token (1,110 of them), so a number of up to three digits is copied in
  one step. With 1 every digit is a token. `decode(encode(text)) == text` for every text of printable ASCII and
  newlines. Any other character becomes the token `<|unk|>` and decodes to those seven characters.

  Tags are recognised anywhere in the text. Code that puts untrusted text, such as a tool's output, into a prompt must
  break up the tags in it first, as the environments here do.

  Args:
    digits_per_token: 1 or 3.
    phrases: strings that become one token each.

  Raises:
    ValueError: `digits_per_token` is neither 1 nor 3; or a phrase is shorter than two characters, repeated, not
      printable ASCII, or holds a digit or a tag.

  >>> tokenizer = MathTokenizer()
  >>> tokenizer.tokens("<|user|>Calculate 12 * 3456.")
  ['<|user|>', 'Calculate ', '12', ' * ', '345', '6', '.']
  """

  def __init__(self, *, digits_per_token: int = 3, phrases: Iterable[str] = PHRASES):
    if digits_per_token not in (1, 3):
      raise ValueError(f"digits_per_token must be 1 or 3; received {digits_per_token!r}.")
    phrases = tuple(phrases)
    for phrase in phrases:
      unknown = set(phrase) - set(CHARACTERS)
      if len(phrase) < 2 or unknown or re.search(r"[0-9]|<\||\|>", phrase) or phrases.count(phrase) > 1:
        raise ValueError(
          "phrases must be distinct strings of two or more printable ASCII characters without digits or tags; "
          f"received {phrase!r}."
        )
    digits = [f"{n:0{width}d}" for width in range(1, digits_per_token + 1) for n in range(10**width)]
    characters = [c for c in CHARACTERS if c not in "0123456789"]
    self.digits_per_token = digits_per_token
    self._tokens: tuple[str, ...] = (*SPECIAL_TOKENS, *digits, *phrases, *characters)
    self._ids = {token: i for i, token in enumerate(self._tokens)}
    longest_first = sorted((*SPECIAL_TOKENS, *phrases), key=len, reverse=True)
    self._split = re.compile("|".join(map(re.escape, longest_first)) + rf"|[0-9]{{1,{digits_per_token}}}|.", re.DOTALL)

  @property
  def vocab_size(self) -> int:
    return len(self._tokens)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The id of `<|end|>`."""
    return (self._ids[END],)

  @property
  def pad_id(self) -> int:
    """The id of `<|pad|>`, which fills rows and is never a stop id. Masks come from lengths, not from this id."""
    return self._ids[PAD]

  @property
  def control_ids(self) -> tuple[int, ...]:
    """Ids of the tags of turns: an observation without any has lost its markup."""
    return tuple(self._ids[token] for token in SPECIAL_TOKENS if token not in (PAD, UNKNOWN))

  def tokens(self, text: str) -> list[str]:
    """Splits a text into the pieces that `encode` gives ids to. Unknown characters stay as they are."""
    return self._split.findall(text)

  def encode(self, text: str) -> list[int]:
    unknown = self._ids[UNKNOWN]
    return [self._ids.get(piece, unknown) for piece in self._split.findall(text)]

  def decode(self, ids: Sequence[int]) -> str:
    """Joins the texts of tokens.

    Raises:
      ValueError: an id is outside `[0, vocab_size)`.
    """
    for i in ids:
      if not 0 <= i < len(self._tokens):
        raise ValueError(f"ids must be in [0, {len(self._tokens)}); received {i}.")
    return "".join(self._tokens[i] for i in ids)
