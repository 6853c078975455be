"""Baselines per prompt from past rewards, as immutable states: alternatives to a value model for single rollouts.

Both states are pytrees of arrays, for use in jitted code and in checkpoints. A baseline must not contain the reward
that it is subtracted from: take `value` before `update`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float32, Int32, Integer, Real

from sao_jax.ops import _checks


class RunningMean(NamedTuple):
  """Mean of the most recent rewards of each prompt.

  v(x) = mean of the last min(n_x, W) rewards of prompt x; 0 before its first reward.

  (arXiv 2607.07508, Section 4: window 8 per prompt, or 128 over all prompts.) For a window over all prompts, use one
  prompt: `init(1, window=128)` and prompt id 0 throughout.

  >>> state = RunningMean.init(2, window=2)
  >>> state = state.update(jnp.array([0, 0, 0, 1]), jnp.array([9.0, 1.0, 2.0, 5.0]))
  >>> state.value(jnp.array([0, 1])).tolist()
  [1.5, 5.0]
  """

  rewards: Float32[Array, "P W"]
  """Ring buffers."""
  seen: Int32[Array, "P"]
  """Number of rewards seen so far."""

  @staticmethod
  def init(num_prompts: int, *, window: int = 8) -> RunningMean:
    """Makes an empty state of `num_prompts` ≥ 1 prompts that keeps the last `window` ≥ 1 rewards of each."""
    if num_prompts < 1 or window < 1:
      raise ValueError(f"num_prompts and window must be >= 1; received num_prompts={num_prompts}, window={window}.")
    return RunningMean(rewards=jnp.zeros((num_prompts, window), jnp.float32), seen=jnp.zeros((num_prompts,), jnp.int32))

  def update(
    self,
    prompt_ids: Integer[ArrayLike, "N"] | Integer[ArrayLike, ""],
    rewards: Real[ArrayLike, "N"] | Real[ArrayLike, ""],
  ) -> RunningMean:
    """Adds `[N]` rewards in order; a prompt may appear several times.

    Args:
      prompt_ids: `[N]` int in [0, P).
      rewards: `[N]` rewards, any real dtype.

    Returns:
      The new state. Ids out of range are dropped under jit, where they cannot be checked.

    Raises:
      ValueError: the shapes differ, or an id known on the host is out of range. TypeError: float ids.
    """
    num_prompts, window = self.rewards.shape
    ids, r = _pairs("RunningMean.update", prompt_ids, rewards, num_prompts)
    # `rank` numbers the rewards of each prompt in this call: the position in a stable sort by prompt.
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    rank = jnp.arange(ids.size) - jnp.searchsorted(ordered, ordered, side="left")
    total = jnp.searchsorted(ordered, ordered, side="right") - jnp.searchsorted(ordered, ordered, side="left")
    slot = (self.seen.at[ordered].get(mode="fill", fill_value=0) + rank) % window
    # Only the last W rewards of a prompt are written, since a scatter has no order among equal targets.
    target = jnp.where(rank >= total - window, ordered, num_prompts)
    return RunningMean(
      rewards=self.rewards.at[target, slot].set(r[order], mode="drop"),
      seen=self.seen.at[ids].add(1, mode="drop"),
    )

  def value(self, prompt_ids: Integer[ArrayLike, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the baseline of each prompt: 0 before its first reward, NaN for an unknown prompt."""
    num_prompts, window = self.rewards.shape
    _checks.ids("prompt_ids", prompt_ids, num_prompts, "num_prompts")
    filled = jnp.minimum(self.seen, window)
    total = jnp.sum(jnp.where(jnp.arange(window) < filled[:, None], self.rewards, 0.0), axis=1)
    return _lookup(total / jnp.maximum(filled, 1).astype(jnp.float32), prompt_ids)


class ValueTracker(NamedTuple):
  """SPO's tracker of each prompt's success rate, which forgets as fast as the policy moves (arXiv 2509.13232).

  v(x) = α_x / (α_x + β_x);  on a reward r in [0, 1]: α ← ρ α + r, β ← ρ β + (1 − r), ρ = clip(2^(−D / D_half), ρ_min,
  ρ_max), with D the KL between the policy that last acted on x and the present one.

  >>> state = ValueTracker.init(jnp.array([0.5]), rho_min=0.875)
  >>> float(state.value(jnp.array(0)))
  0.5
  """

  alpha: Float32[Array, "P"]
  """Discounted sum of rewards."""
  beta: Float32[Array, "P"]
  """Discounted sum of 1 − reward."""

  @staticmethod
  def init(initial_value: Real[ArrayLike, "P"], *, rho_min: float) -> ValueTracker:
    """Starts from `[P]` estimates in [0, 1], each with the weight of 1 / (1 − rho_min) rewards."""
    _checks.interval("initial_value", initial_value, 0.0, 1.0)
    _checks.interval("rho_min", rho_min, 0.0, 1.0, open_high=True)
    estimate = _checks.float32(initial_value)
    if estimate.ndim != 1:
      raise ValueError(f"initial_value must be [P], one per prompt; received shape {estimate.shape}.")
    weight = 1.0 / (1.0 - rho_min)
    return ValueTracker(alpha=weight * estimate, beta=weight * (1.0 - estimate))

  def update(
    self,
    prompt_ids: Integer[ArrayLike, "N"] | Integer[ArrayLike, ""],
    rewards: Real[ArrayLike, "N"] | Real[ArrayLike, ""],
    kl: Real[ArrayLike, "N"] | Real[ArrayLike, ""],
    *,
    half_life: float,
    rho_min: float,
    rho_max: float,
  ) -> ValueTracker:
    """Adds `[N]` rewards in order; a prompt may appear several times.

    Args:
      prompt_ids: `[N]` int in [0, P).
      rewards: `[N]` in [0, 1].
      kl: `[N]` or scalar D ≥ 0 (nats).
      half_life: D_half > 0, the KL that halves the memory.
      rho_min: in [0, 1).
      rho_max: in (0, 1], at least rho_min.

    Raises:
      ValueError: the shapes differ, or a value known on the host is out of range. TypeError: float ids.
    """
    _checks.interval("half_life", half_life, 0.0, open_low=True)
    _checks.interval("rho_min", rho_min, 0.0, 1.0, open_high=True)
    _checks.interval("rho_max", rho_max, rho_min, 1.0)
    _checks.interval("rewards", rewards, 0.0, 1.0)
    _checks.interval("kl", kl, 0.0)
    ids, r = _pairs("ValueTracker.update", prompt_ids, rewards, self.alpha.shape[0])
    rho = jnp.clip(jnp.exp2(-_checks.float32(kl) / half_life), rho_min, rho_max)
    _, rho = _checks.broadcast(rewards=r, kl=rho)

    def step(state: ValueTracker, x: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[ValueTracker, None]:
      prompt, r_i, rho_i = x
      alpha = rho_i * state.alpha.at[prompt].get(mode="fill", fill_value=0) + r_i
      beta = rho_i * state.beta.at[prompt].get(mode="fill", fill_value=0) + 1.0 - r_i
      return ValueTracker(
        alpha=state.alpha.at[prompt].set(alpha, mode="drop"), beta=state.beta.at[prompt].set(beta, mode="drop")
      ), None

    return lax.scan(step, self, (ids, r, rho))[0]

  def value(self, prompt_ids: Integer[ArrayLike, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the baseline of each prompt; NaN for an unknown prompt."""
    _checks.ids("prompt_ids", prompt_ids, self.alpha.shape[0], "num_prompts")
    return _lookup(self.alpha / (self.alpha + self.beta), prompt_ids)


def init(num_prompts: int, *, window: int = 8) -> RunningMean:
  """Makes an empty state; see `RunningMean.init`."""
  return RunningMean.init(num_prompts, window=window)


def update(
  state: RunningMean,
  prompt_ids: Integer[ArrayLike, "N"] | Integer[ArrayLike, ""],
  rewards: Real[ArrayLike, "N"] | Real[ArrayLike, ""],
) -> RunningMean:
  """Adds rewards in order; see `RunningMean.update`."""
  return state.update(prompt_ids, rewards)


def value(state: RunningMean, prompt_ids: Integer[ArrayLike, "*shape"]) -> Float32[Array, "*shape"]:
  """Returns the baseline of each prompt; see `RunningMean.value`."""
  return state.value(prompt_ids)


def _pairs(function: str, prompt_ids: ArrayLike, rewards: ArrayLike, num_prompts: int) -> tuple[jax.Array, jax.Array]:
  """Returns `[N]` ids and `[N]` float32 rewards. Ids out of range become num_prompts, which scatters drop."""
  _checks.ids("prompt_ids", prompt_ids, num_prompts, "num_prompts")
  ids, r = jnp.atleast_1d(jnp.asarray(prompt_ids)), jnp.atleast_1d(_checks.float32(rewards))
  _checks.stream(function, prompt_ids=ids, rewards=r)
  return jnp.where((ids >= 0) & (ids < num_prompts), ids, num_prompts), r


def _lookup(values: jax.Array, prompt_ids: ArrayLike) -> jax.Array:
  ids = jnp.asarray(prompt_ids)
  known = (ids >= 0) & (ids < values.shape[0])
  return jnp.where(known, values[jnp.where(known, ids, 0)], jnp.nan)
