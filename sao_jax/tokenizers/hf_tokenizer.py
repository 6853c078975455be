"""The tokenizer of a Hugging Face checkpoint directory, read with the `tokenizers` package."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sao_jax.tokenizers import _tokenizer_trial, added_tokens, quoting
from sao_jax.utils import limited_process, untrusted_files
from sao_jax.utils.extras import require_extra

_MOST_BYTES = 1 << 28
_NO_ID = 1 << 32
"""Past every id that the package can hold."""


class HFTokenizer:
  """`tokenizer.json` of a checkpoint, as the engine wants it.

  Nothing is added to what is encoded (no beginning-of-sequence token: a chat template writes its own), and nothing is
  left out of what is decoded. Control tokens that text spells out are encoded as those tokens, except inside the marks
  of `quoting`, which `ChatTemplate` puts around foreign text. Thread-safe.

  Args:
    serialized: the text of a `tokenizer.json`.
    stop_tokens: tokens that end an action; each must be one token of the vocabulary.

    added_tokens: tokens besides, or other flags of those that are there; see `added_tokens.read`.

  Raises:
    ValueError: not the text of a tokenizer; one that panics, takes long or lets texts grow when it is tried out, in a
      process with limits; an added token with another id than its own; a stop token that the vocabulary lacks, or none
      given; or a tokenizer that writes a space before every text (as Llama 2's): observations are encoded piece by
      piece, and would gain spaces.
  """

  def __init__(self, serialized: str, *, stop_tokens: Sequence[str], added_tokens: Sequence[Mapping[str, Any]] = ()):
    self._backend, self._plain = _open(serialized, added_tokens)
    self._stop_at(stop_tokens)

  def _stop_at(self, stop_tokens: Sequence[str]) -> None:
    ids = [self._backend.token_to_id(token) for token in stop_tokens]
    if not ids or None in ids:
      unknown = [token for token, i in zip(stop_tokens, ids, strict=True) if i is None]
      raise ValueError(f"stop_tokens must be one or more tokens of the vocabulary; received {list(stop_tokens)}, "
                       f"unknown: {unknown}.")  # fmt: skip
    if self.decode(self.encode("x") + self.encode("x")) != "xx":
      raise ValueError("the tokenizer must encode a text that goes on like one that begins; it adds a space to each.")
    self.stop_tokens = tuple(stop_tokens)
    self.stop_ids: tuple[int, ...] = tuple(i for i in ids if i is not None)

  @classmethod
  def load(cls, directory: str | pathlib.Path, *, stop_tokens: Sequence[str] | None = None) -> HFTokenizer:
    """Reads a checkpoint directory.

    Args:
      directory: holds `tokenizer.json`, and the files that name its stop tokens and further tokens (see
        `added_tokens`).
      stop_tokens: None: those of `generation_config.json` (`eos_token_id`), else of `config.json`, else the
        `eos_token` of `tokenizer_config.json` or `special_tokens_map.json`.

    Raises:
      FileNotFoundError: no `tokenizer.json` there.
      ValueError: a file that cannot be read as what it should be; no file names a stop token, or one names a token
        that the vocabulary lacks.
    """
    path = pathlib.Path(directory) / "tokenizer.json"
    serialized = untrusted_files.read_text(path, most_bytes=_MOST_BYTES)
    try:
      self = cls.__new__(cls)
      self._backend, self._plain = _open(serialized, added_tokens.read(path.parent))
      self._stop_at(_stop_tokens(path.parent, self._backend) if stop_tokens is None else stop_tokens)
      return self
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error

  @property
  def vocab_size(self) -> int:
    """One more than the largest id; a model's embedding may have more rows."""
    return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

  @property
  def control_tokens(self) -> tuple[str, ...]:
    """What foreign text must not be able to forge: the vocabulary's added tokens, tags such as `<tool_call>` too."""
    return tuple(token.content for token in self._backend.get_added_tokens_decoder().values())

  def encode(self, text: str) -> list[int]:
    ids: list[int] = []
    for piece, quoted in quoting.split(text):
      with _named_failures("encode a text"):
        ids += self._spelled(piece) if quoted else self._backend.encode(piece, add_special_tokens=False).ids
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """The text of the ids, control tokens included; ids that end inside a UTF-8 character give U+FFFD for it."""
    with _named_failures("decode ids"):
      return self._backend.decode(list(ids), skip_special_tokens=False)

  def _spelled(self, piece: str) -> list[int]:
    """Ids that spell a control token. Those not marked 'special' are found in any text: they are cut in two."""
    ids = self._plain.encode(piece, add_special_tokens=False).ids
    forbidden = set(self._backend.get_added_tokens_decoder())
    if len(piece) < 2 or not forbidden.intersection(ids):
      return ids
    middle = len(piece) // 2
    return self._spelled(piece[:middle]) + self._spelled(piece[middle:])


def _open(serialized: str, added: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
  """The tokenizer, and another one that finds no control tokens in a text: that is a switch of the whole object."""
  with require_extra("hf"):
    import tokenizers  # noqa: F401 (the trial's process imports it, whose error nobody would see)

  _try_out(serialized, added)
  backend, plain = (_tokenizer_trial.build(serialized, added) for _ in range(2))
  plain.encode_special_tokens = True
  return backend, plain


def _try_out(serialized: str, added: Sequence[Mapping[str, Any]]) -> None:
  """Refuses a tokenizer that panics, takes long or lets texts grow; it may do all of that to a process of its own."""
  size = len(serialized)
  try:
    reply = limited_process.run(
      pathlib.Path(_tokenizer_trial.__file__),
      json.dumps([serialized, added]).encode("ascii"),
      cpu_seconds=5.0 + size / 4_000_000,
      wall_seconds=60.0 + size / 400_000,
      memory_bytes=min((1 << 30) + 24 * size, 6 << 30),
    )
  except ValueError as error:
    raise ValueError(f"the tokenizer fails when it is tried out: {error}") from error
  if (fault := json.loads(reply)) is not None:
    raise ValueError(fault)


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
  """Makes ValueErrors of the failures of the package, whose panics are no `Exception`s."""
  try:
    yield
  except BaseException as error:
    if not _tokenizer_trial.is_failure(error):
      raise
    raise ValueError(f"the tokenizer cannot {what}: {error}") from error


def _stop_tokens(directory: pathlib.Path, backend: Any) -> list[str]:
  """The stop tokens that a checkpoint's files name."""
  for name in ("generation_config.json", "config.json"):
    ids = untrusted_files.read_object_if_there(directory / name).get("eos_token_id")
    if ids is None:
      continue
    listed = ids if isinstance(ids, list) else [ids]
    tokens = [backend.id_to_token(i) if type(i) is int and 0 <= i < _NO_ID else None for i in listed]
    known = [token for token in tokens if token is not None]
    if len(known) < len(tokens):
      raise ValueError(f"{directory / name}: eos_token_id must be ids of the vocabulary; received {ids!r:.200}.")
    return known
  token = added_tokens.special_tokens(directory).get("eos_token")
  if token is None:
    raise ValueError(f"{directory}: no eos_token_id in generation_config.json or config.json, and no eos_token in "
                     "tokenizer_config.json or special_tokens_map.json; give stop_tokens.")  # fmt: skip
  return [token]
