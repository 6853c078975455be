"""The tokens that a checkpoint's files name: bos, eos and pad, of `config.json` and of `generation_config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

KEYS: Mapping[str, str] = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id"}
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
  "llama": {"bos": 1, "eos": 2},
  "deepseek_v3": {"bos": 0, "eos": 1},
  "glm_moe_dsa": {"bos": 0, "eos": 1},
}
"""Defaults of transformers, by model type, for keys that a `config.json` lacks. Other types have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIds:
  """Ids of the special tokens; None: not named."""

  bos: int | None = None
  eos: int | Sequence[int] | None = None
  """One id, or several that all end a text; kept as a tuple."""
  pad: int | None = None

  def __post_init__(self) -> None:
    if isinstance(self.eos, list):  # as JSON has it
      object.__setattr__(self, "eos", tuple(self.eos))
    for name, key in KEYS.items():
      value = getattr(self, name)
      ids = value if name == "eos" and isinstance(value, tuple) else () if value is None else (value,)
      # Published files say -1 where they mean no token.
      if any(type(i) is not int or not -1 <= i < 2**31 for i in ids):
        several = " or a list of them" if name == "eos" else ""
        raise ValueError(f"{key} must be null or an id{several}, an int below 2**31; received {value!r:.200}.")


def from_hf(values: Mapping[str, Any], model_type: str | None = None) -> TokenIds:
  """The ids in a `config.json` of the given type, or in a `generation_config.json` (None).

  >>> from_hf({"bos_token_id": 5, "eos_token_id": [6, 7]}, "qwen3")
  TokenIds(bos=5, eos=(6, 7), pad=None)
  """
  defaults = _DEFAULTS.get(model_type or "", {})
  return TokenIds(**{name: values.get(key, defaults.get(name)) for name, key in KEYS.items()})


def to_hf(ids: TokenIds) -> dict[str, Any]:
  """The keys of a `config.json`, nulls included: transformers has defaults of its own for absent ones.

  >>> to_hf(TokenIds(eos=(6, 7)))
  {'bos_token_id': None, 'eos_token_id': [6, 7], 'pad_token_id': None}
  """
  values = {key: getattr(ids, name) for name, key in KEYS.items()}
  return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def generation_config(ids: TokenIds, existing: Mapping[str, Any]) -> dict[str, Any]:
  """A `generation_config.json` with these ids; other settings of one that exists are kept.

  >>> generation_config(TokenIds(bos=1, eos=(6, 7)), {"eos_token_id": 2, "pad_token_id": 0, "top_p": 0.9})
  {'top_p': 0.9, 'bos_token_id': 1, 'eos_token_id': [6, 7]}
  """
  kept = {key: value for key, value in existing.items() if key not in KEYS.values()}
  return kept | {key: value for key, value in to_hf(ids).items() if value is not None}
