"""The input of a step of the model runner: its static settings, and the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from sao_jax.types import CachedPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
  """Static settings of the compiled programs. Runners with equal specs share their programs."""

  model: CachedPolicy
  use_pages: bool | None = None
  """Whether attention reads the pages themselves (`ragged`), or contiguous copies (`windows`). None: pages on TPUs, if
  the model has that form and a kernel."""
  chunk_steps: int
  """Maximum number of tokens sampled per row and step."""
  temperature: float
  """Sampling temperature, > 0. Logits are divided by it in float32, and log-probs are those of the result."""
  stop_ids: tuple[int, ...]
  """Token ids that end an action."""
  top_p: float = 1.0
  """Nucleus mass, in (0, 1]. Log-probs are those of the truncated distribution."""

  @property
  def reads_pages(self) -> bool:
    """`use_pages`, or its default."""
    if self.use_pages is not None:
      return self.use_pages
    return jax.default_backend() == "tpu" and self.model.paged is not None and self.model.paged.has_kernel()


class Row(NamedTuple):
  """The part of a step that belongs to one sequence."""

  episode: int
  """Id of the episode; sampling noise is derived from it and from the position."""
  start: int
  """Position of the first token; all earlier ones are in the cache."""
  tokens: np.ndarray
  """`[n]` int32, n >= 1: the next tokens of the context."""
  budget: int
  """Number of tokens that may be sampled after them; 0: more of the context follows in later steps."""
  pages: Sequence[int]
  """Pages of the sequence, with room for `start + n` tokens and for all but the last sampled one."""

  @property
  def num_prefilled(self) -> int:
    """Number of tokens to prefill. The last token of a row that decodes is the first input of its decode loop."""
    return len(self.tokens) - (self.budget > 0)
