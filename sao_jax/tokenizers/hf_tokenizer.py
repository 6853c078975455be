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
"""Above every id that the package can hold."""


class HFTokenizer:
  """A tokenizer read from a `tokenizer.json`. Thread-safe.

  Encoding adds no tokens: a chat template writes its own beginning-of-sequence token. Decoding leaves none out. A
  control token spelled out in the text is encoded as that token, except inside the marks of `quoting`, which
  `ChatTemplate` puts around untrusted text.

  Args:
    serialized: the text of a `tokenizer.json`.
    stop_tokens: tokens that end an action; each must be one token of the vocabulary.
    added_tokens: further tokens, or new flags of existing ones; see `added_tokens.read`.

  Raises:
    ValueError: the text is not a tokenizer; the tokenizer fails its trial in a limited process, because it panics, is
      slow or makes texts much longer; an added token has another id; `stop_tokens` is empty or names an unknown
      token; or the tokenizer writes a space before every text, as Llama 2's does. Observations are encoded piece by
      piece and would gain spaces.
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
      raise ValueError("the tokenizer adds a space before every text, so observations would gain spaces.")
    self.stop_tokens = tuple(stop_tokens)
    self.stop_ids: tuple[int, ...] = tuple(i for i in ids if i is not None)

  @classmethod
  def load(cls, directory: str | pathlib.Path, *, stop_tokens: Sequence[str] | None = None) -> HFTokenizer:
    """Reads a checkpoint directory.

    Args:
      directory: folder with `tokenizer.json` and the files that name stop tokens and further tokens (see
        `added_tokens`).
      stop_tokens: None takes `eos_token_id` of `generation_config.json` or else of `config.json`, or else the
        `eos_token` of `tokenizer_config.json` or `special_tokens_map.json`.

    Raises:
      FileNotFoundError: the directory has no `tokenizer.json`.
      ValueError: a file is invalid, no file names a stop token, or a stop token is not in the vocabulary.
    """
    path = pathlib.Path(directory) / "tokenizer.json"
    if not path.is_file():
      raise FileNotFoundError(f"{path.parent} holds no tokenizer.json, which the tokenizer is read from.")
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
    """The largest id plus one. A model's embedding may have more rows."""
    return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

  @property
  def control_tokens(self) -> tuple[str, ...]:
    """Tokens that untrusted text must not forge: all added tokens, including tags like `<tool_call>`."""
    return tuple(token.content for token in self._backend.get_added_tokens_decoder().values())

  @property
  def control_ids(self) -> tuple[int, ...]:
    """Ids of `control_tokens`: an observation without any has lost its markup."""
    return tuple(self._backend.get_added_tokens_decoder())

  def encode(self, text: str) -> list[int]:
    ids: list[int] = []
    for piece, quoted in quoting.split(text):
      with _named_failures("encode a text"):
        ids += self._spelled(piece) if quoted else self._backend.encode(piece, add_special_tokens=False).ids
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of the ids with control tokens. An incomplete UTF-8 character at the end becomes U+FFFD."""
    with _named_failures("decode ids"):
      return self._backend.decode(list(ids), skip_special_tokens=False)

  def _spelled(self, piece: str) -> list[int]:
    """Ids that spell out control tokens. Those not marked "special" are found in any text, so they are cut in two."""
    ids = self._plain.encode(piece, add_special_tokens=False).ids
    forbidden = set(self._backend.get_added_tokens_decoder())
    if len(piece) < 2 or not forbidden.intersection(ids):
      return ids
    middle = len(piece) // 2
    return self._spelled(piece[:middle]) + self._spelled(piece[middle:])


def _open(serialized: str, added: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
  """Returns the tokenizer and a copy that finds no control tokens in a text. The package has no switch per call."""
  with require_extra("hf"):
    import tokenizers  # noqa: F401 (the child process cannot report a missing package)

  _try_out(serialized, added)
  backend, plain = (_tokenizer_trial.build(serialized, added) for _ in range(2))
  plain.encode_special_tokens = True
  return backend, plain


def _try_out(serialized: str, added: Sequence[Mapping[str, Any]]) -> None:
  """Tries a tokenizer in a limited process. Raises ValueError if it panics, is slow or makes texts much longer."""
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
    raise ValueError(f"the tokenizer fails its trial: {error}") from error
  if (fault := json.loads(reply)) is not None:
    raise ValueError(fault)


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
  """Converts failures of the package to ValueErrors. Its panics are not `Exception`s."""
  try:
    yield
  except BaseException as error:
    if not _tokenizer_trial.is_failure(error):
      raise
    raise ValueError(f"the tokenizer cannot {what}: {error}") from error


def _stop_tokens(directory: pathlib.Path, backend: Any) -> list[str]:
  """Reads the stop tokens from the files of a checkpoint."""
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
