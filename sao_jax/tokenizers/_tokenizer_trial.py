"""The trial of an untrusted tokenizer, which `hf_tokenizer` runs as a program in a limited process.

A `tokenizer.json` may make the package `tokenizers` panic, run for hours or use all memory, when it is loaded or only
when it encodes or decodes. The trial loads it, computes how much longer its parts can make a text, and then tries the
texts most likely to cause failures.

This module imports nothing from the library, which would take longer than the trial.
"""

from __future__ import annotations

import base64
import json
import re
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_GROWTH = 1024.0
"""Largest factor by which all parts of a tokenizer together may lengthen a text. A published tokenizer with the NFKC
table, which can turn one character into 33 bytes, reaches 400."""
MAX_IDS_PER_BYTE = 64
MAX_SECONDS = 1.0
"""Time for each text of the trial; a published tokenizer takes milliseconds."""

_CHARS = "aA1 \n.'_-é中\u0300"
"""One character of each kind that patterns distinguish."""
_LONG_CHARS = "a1 \n.中"
_LONG, _SHORT = 20_000, 2_000
_MAX_LITERALS = 48
_MAX_ID = 2**31


def build(serialized: str, added: Sequence[Mapping[str, Any]] = ()) -> Any:
  """Loads a tokenizer and adds tokens to it.

  Args:
    serialized: the text of a `tokenizer.json`.
    added: further tokens; see `added_tokens.read`.

  Raises:
    ValueError: the text is not a tokenizer, or a token cannot have its `id`.
  """
  import tokenizers

  with_failures_named = _named_failure("not a tokenizer")
  backend = with_failures_named(lambda: tokenizers.Tokenizer.from_str(serialized))
  # Encoding must add nothing and cut nothing off.
  backend.post_processor = None
  backend.no_truncation()
  backend.no_padding()
  with_failures_named(lambda: _add(backend, added))
  return backend


def _named_failure(what: str) -> Callable[[Callable[[], Any]], Any]:
  def call(function: Callable[[], Any]) -> Any:
    try:
      return function()
    except BaseException as error:
      if is_failure(error):
        raise ValueError(f"{what}: {error}") from error
      raise

  return call


def is_failure(error: BaseException) -> bool:
  """Whether the package raised an exception: a plain `Exception`, or a panic, which is not an `Exception`."""
  return type(error) is Exception or type(error).__name__ == "PanicException"


def _add(backend: Any, added: Sequence[Mapping[str, Any]]) -> None:
  from tokenizers import AddedToken

  known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
  new = []
  for token in sorted(added, key=lambda x: x.get("id", _MAX_ID)):
    flags = token.get("flags", {})
    before = known.get(token["content"])
    if before is None or any(getattr(before, name) != value for name, value in flags.items()):
      special = token["special"]
      new.append(AddedToken(token["content"], **{"special": special, "normalized": not special, **flags}))
  backend.add_tokens(new)
  for token in added:
    _check_id(backend, token["content"], token.get("id"))


def _check_id(backend: Any, content: str, wanted: int | None) -> None:
  received = backend.token_to_id(content)
  if received is None or wanted not in (None, received):
    holder = None if wanted is None or not 0 <= wanted < _MAX_ID else backend.id_to_token(wanted)
    raise ValueError(
      f"the files disagree about the ids of added tokens: {content!r:.100} must be {wanted}; it is {received}"
      + (f", and {wanted} is {holder!r:.100}" if holder not in (None, content) else "")
    )


def check(serialized: str, added: Sequence[Mapping[str, Any]]) -> None:
  """Tries a tokenizer out.

  Raises:
    ValueError: the tokenizer fails; the message says how.
  """
  backend = build(serialized, added)
  declared = json.loads(serialized)["added_tokens"]
  overridden = {token["content"] for token in added}
  for token in declared:
    if token["content"] and token["content"] not in overridden:  # The package does not add empty ones.
      _check_id(backend, token["content"], token["id"])
  ids = list(backend.get_vocab(with_added_tokens=True).values())
  if max(ids, default=0) >= _MAX_ID or len(set(ids)) < len(ids):
    raise ValueError(f"ids must differ and be below {_MAX_ID}; received {len(set(ids))} for {len(ids)} tokens, the "
                     f"largest is {max(ids)}.")  # fmt: skip
  parts = {name: _parsed(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
  for name, wanted in (("encoded", ("normalizer", "pre_tokenizer")), ("decoded", ("decoder",))):
    factor = 1.0
    for part in wanted:
      factor *= growth(parts[part])
    if factor > MAX_GROWTH:
      raise ValueError(f"{name} text may be {MAX_GROWTH:g} times as long; with this {' and '.join(wanted)} it can be "
                       f"{factor:.3g} times as long.")  # fmt: skip
  for text in _texts(parts):
    _try_text(backend, text)
  _try_decoding(backend, sorted(ids))


def _parsed(part: Any) -> Any:
  return None if part is None else json.loads(part.__getstate__())


def growth(part: Any) -> float:
  """The largest factor by which a normalizer, pre-tokenizer or decoder can multiply the bytes of a text.

  >>> growth({"type": "Replace", "pattern": {"String": "x"}, "content": "xxxx"})
  4.0
  >>> growth({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]})
  4.0
  """
  if not isinstance(part, dict):
    return 1.0
  kind, factor = part.get("type"), 1.0
  if kind == "Sequence":
    for inner in next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), ()):
      factor = min(factor * growth(inner), 1e300)
  elif kind == "Replace":
    pattern = part["pattern"].get("String")
    size = len(part["content"].encode())
    # A regular expression may match the empty text before every character.
    factor = size / len(pattern.encode()) if pattern else float(size + 1)
  elif kind == "Prepend":
    factor = 1.0 + len(part["prepend"].encode())
  elif kind == "Precompiled":
    factor = float(max(map(len, base64.b64decode(part["precompiled_charsmap"]).split(b"\0"))))
  elif kind == "Metaspace":
    factor = 4.0  # A space, or the beginning, becomes a character.
  elif kind in ("ByteLevel", "BertNormalizer", "WordPiece", "BPEDecoder"):
    factor = 2.0
  return max(factor, 1.0)


def _literals(part: Any) -> Iterator[str]:
  """The texts that a part searches for: its patterns, whole, in pieces and as single characters."""
  if isinstance(part, list):
    for inner in part:
      yield from _literals(inner)
  elif isinstance(part, dict):
    for key, value in part.items():
      if isinstance(value, dict | list):
        yield from _literals(value)
      elif isinstance(value, str) and key in ("String", "Regex", "pattern"):
        yield value[:20]
        yield from (found[:20] for found in re.findall(r"[^\\()\[\]{}|?*+.^$]+", value))
        yield from value


def _texts(parts: Mapping[str, Any]) -> Iterator[str]:
  yield "x"
  yield "".join(map(chr, range(0x250))) + "中文 اللغة ﷺ ﬃ 👩‍👩‍👧 e\u0300\ufeff\u2028"
  yield (string.printable + "The quick brown fox.\n") * (2 * _LONG // len(string.printable))
  found = dict.fromkeys([*_CHARS, *_literals(list(parts.values()))])
  for literal in [x for x in found if x][:_MAX_LITERALS]:
    yield literal * (_SHORT // len(literal)) + "\x01"  # No pattern expects this end.
  for char in _LONG_CHARS:
    yield char * _LONG


def _try_text(backend: Any, text: str) -> None:
  began = time.process_time()
  shown = f"a text of {len(text)} characters, {text[:10]!r}..."
  ids: list[int] = []
  try:
    ids = backend.encode(text, add_special_tokens=False).ids
  except BaseException as error:
    if type(error) is not Exception:  # A plain one only says that the vocabulary lacks a character.
      raise ValueError(f"encoding {shown} fails: {error}") from error
  seconds = time.process_time() - began
  if seconds > MAX_SECONDS:
    raise ValueError(f"encoding {shown} takes {seconds:.1f} s; allowed is {MAX_SECONDS:g} s.")
  if len(ids) > MAX_IDS_PER_BYTE * (len(text.encode()) + 1):
    raise ValueError(f"encoding {shown} gives {len(ids)} ids.")


def _try_decoding(backend: Any, ids: list[int]) -> None:
  step = max(1, len(ids) // 1000)
  size = sum(len(token.encode()) for token in backend.get_vocab(with_added_tokens=True))
  for some in (ids, *([i] * 2 for i in ids[::step])):
    try:
      text = backend.decode(some, skip_special_tokens=False)
    except BaseException as error:
      raise ValueError(f"decoding the ids {some[:3]} fails: {error}") from error
    if len(text) > MAX_GROWTH * (size + len(some)):
      raise ValueError(f"decoding {len(some)} ids gives {len(text)} characters.")


def main() -> None:
  """Reads `[serialized, added]` and writes null, or why the tokenizer fails."""
  error: str | None = None
  try:
    check(*json.load(sys.stdin))
  except ValueError as failure:
    error = str(failure)
  except MemoryError:
    error = "it takes too much memory"
  except BaseException as failure:
    if not is_failure(failure):
      raise
    error = f"it fails: {failure}"
  json.dump(error, sys.stdout)


if __name__ == "__main__":
  main()
