"""Check of the weights that a server samples with: its log-probs against the learner's model, at every version."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int32

from sao_jax.rollout.episodes import EpisodeFailure
from sao_jax.rollout.remote.client import ServerClient, ServerError
from sao_jax.types import Params

Score = Callable[[Params, Int32[np.ndarray, "N T"]], Float32[np.ndarray, "N T"]]
"""`(params, tokens) -> log-probs`: that of `tokens[n, t]` given `tokens[n, :t]`, at the engine's temperature."""

_PROMPTS = 4
_PROMPT_TOKENS = 16
_NEW_TOKENS = 8


class LogprobMismatchError(ServerError):
  """The server's log-probs are not those of the weights that it was sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightCheck:
  """Compares the log-probs of some sampled tokens with those of the weights that the server was sent.

  A server may take an update without an error and still sample with other weights: a tied output head that keeps its
  old values, experts that are laid out differently, another dtype, log-probs before the temperature. Training on its
  tokens would go on, with most of them masked. So the server completes four prompts of random tokens after every
  update, before any trajectory with tokens of the new version is handed on.
  """

  score: Score
  """The learner's model."""
  max_error: float
  """Bound on the mean absolute difference of the log-probs, in nats."""
  max_len: int
  """Maximum tokens of a trajectory."""
  max_action_tokens: int
  """Maximum tokens of a completion."""

  async def run(self, client: ServerClient, params: Params, version: int, *, vocab_size: int, seed: int) -> None:
    """Checks the server right after the update to `params`.

    Args:
      client: of the server.
      params: the weights that it was sent.
      version: their policy version.
      vocab_size: upper bound (exclusive) on the ids of the prompts.
      seed: of the prompts.

    Raises:
      LogprobMismatchError: the mean difference exceeds `max_error`.
      ServerError: the server does not complete the prompts.
    """
    length = min(_PROMPT_TOKENS, self.max_len // 2)
    new_tokens = min(_NEW_TOKENS, self.max_action_tokens, self.max_len - length)
    prompts = np.random.default_rng((seed, version)).integers(vocab_size, size=(_PROMPTS, length), dtype=np.int32)
    try:
      done = await asyncio.gather(
        *(client.generate(row.tolist(), max_tokens=new_tokens, seed=version, any_id=True) for row in prompts)
      )
    except EpisodeFailure as error:
      raise ServerError(f"The server's weights cannot be checked: {error}") from error
    tokens = np.zeros((_PROMPTS, length + new_tokens), np.int32)
    tokens[:, :length] = prompts
    logp = np.full(tokens.shape, np.nan, np.float32)
    for row, (completion, found) in enumerate(done):
      if found != version:
        raise ServerError(f"{client.url} must answer with version {version}, as just sent; received {found}.")
      where = slice(length, length + completion.tokens.size)
      tokens[row, where], logp[row, where] = completion.tokens, completion.logp
    ours = await asyncio.to_thread(self.score, params, tokens)
    sampled = ~np.isnan(logp)
    self._compare(client.url, logp[sampled], ours[sampled], version)

  def _compare(self, url: str, theirs: np.ndarray, ours: np.ndarray, version: int) -> None:
    error = np.abs(theirs.astype(np.float64) - ours)
    if not error.mean() <= self.max_error:
      raise LogprobMismatchError(
        f"{url} does not sample with the weights of version {version}: its log-probs of {error.size} tokens differ "
        f"from the learner's by {error.mean():.3g} on average and {error.max():.3g} at most; allowed on average: "
        f"{self.max_error:g} (max_logprob_error). It may have kept old weights (a tied output head, experts), or have "
        "another dtype, or return log-probs before the temperature."
      )
