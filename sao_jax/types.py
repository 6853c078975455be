"""Types that every room shares: what flows between them, with shapes and units.

Alignment, everywhere: index `t` of a per-token array describes `tokens[t]`. `logp[t]` is log p(tokens[t] |
tokens[:t]) and `v[t]` is the value of the state BEFORE `tokens[t]`. Models predict one ahead, so a model's output at
index `t` belongs to `tokens[t + 1]`; the only place that shifts is `ops.masking.align_predictions`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import chex
import jax
import numpy as np

Params: TypeAlias = Any
"""A pytree of arrays: nested dicts whose paths decide freezing, sharding and checkpoint names."""

Cache: TypeAlias = Any
"""A pytree of key/value arrays. Its layout is the model's business; the engine only passes it on (donated)."""

Window: TypeAlias = Any
"""A pytree: the part of a cache that a decode loop works on, and what it needs besides."""

Ended: TypeAlias = Literal["terminal", "truncated"]

LOGP_ROUNDING = 1e-4
"""A log-prob may be so much above 0, and then counts as 0; one above that is an error.

log p = x - logsumexp(x) is rounded in float32 by one unit in the last place of the logits, 2^-14 to 2^-13 where they
are as large as 1,000. What lower precision adds is not rounding that a ratio of probabilities could bear.
"""


class PolicyOutput(NamedTuple):
  """What a policy returns: log-probs are computed from the two by `ops.logprobs`, without ever holding `[B, T, V]`."""

  hidden: jax.Array
  """`[B, T, D]`: final hidden states (after the last norm); index `t` predicts `tokens[t + 1]`."""
  lm_head: jax.Array
  """`[D, V]`: the output projection; logits are `hidden @ lm_head`, in float32."""


class PolicyApply(Protocol):
  """A policy as the learner sees it."""

  def __call__(self, params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> PolicyOutput:
    """Maps packed rows to hidden states.

    Args:
      params: the policy's parameters.
      tokens: `[B, T]` int32 token ids.
      positions: `[B, T]` int32 position of each token inside its own segment, from 0.
      segment_ids: `[B, T]` int32; 0 is padding, equal ids attend to each other causally.
    """
    ...


class ValueApply(Protocol):
  """A value model as the learner sees it."""

  def __call__(self, params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns `[B, T]` float32: at index `t` the value of the state AFTER `tokens[t]` (one ahead, like the policy)."""
    ...


class SlotPlacement(NamedTuple):
  """Where the rollout engine's arrays live when its slots are spread over devices."""

  slots: jax.sharding.Sharding
  """Of `[S]` arrays."""
  whole: jax.sharding.Sharding
  """On every device: what comes from the host or goes there."""
  dispatching: Callable[[], contextlib.AbstractContextManager[Any]]
  """Entered around every dispatch of a program: threads that start programs over several devices at the same time must
  not start them in different orders on different devices."""


class CachedPolicy(NamedTuple):
  """A policy as the rollout engine sees it: incremental, with a key/value cache of one row per slot."""

  init_cache: Callable[[int, int], Cache]
  """`(num_slots, max_len) -> cache`: the leading axis of every leaf is the slot."""

  extend: Callable[..., tuple[jax.Array, Cache]]
  """`(params, cache, tokens [R, C], slots [R], start [R], count [R], *, live_len) -> (hidden [R, D], cache)`.

  Feeds `tokens[r, :count[r]]` to slot `slots[r]` at positions `start[r], start[r] + 1, ...`; entries past `count[r]`
  are ignored, and so is a row with `slots[r] >= num_slots`. Returns the hidden state of the last fed token of each row.
  `live_len` is a static upper bound on `start + count`: no cache entry at or past it is read.
  """

  window: Callable[..., Window]
  """`(cache, slots [S], positions [S], *, steps, live_lens) -> window`: opens a loop of `steps` decode steps.

  Row r of the loop is slot `slots[r]`, a permutation of all. It is fed at `positions[r] + i` in step i and attends to
  the cache before `positions[r]`. `live_lens` are static: the rows come in as many groups of equal size, in this order,
  and group g's is an upper bound on `positions + steps` of every row whose hidden states are wanted; it may pass the
  cache's `max_len`, since the last steps of a loop need not be.
  """

  step: Callable[..., tuple[jax.Array, Window]]
  """`(prepared, window, tokens [S], i) -> (hidden [S, D], window)`: step i = 0, 1, ... of the loop, by row.

  Feeds one token to every row. One that is idle may be fed anything.
  """

  merge: Callable[[Cache, Window, jax.Array], Cache]
  """`(cache, window, count [S]) -> cache`: what the first `count[r]` steps fed to row r is written, nothing else."""

  lm_head: Callable[[Params], jax.Array]
  """`(prepared) -> [D, V]`."""

  prepare: Callable[[Params], Params] = lambda params: params
  """`(params) -> prepared`: the weights as decoding wants them (joined, say); computed once per policy version."""

  placement: SlotPlacement | None = None
  """Set on a mesh (`sharding.cached_on_mesh`), where the functions above keep the cache on its shards; None: JAX's
  default device."""


class Tokenizer(Protocol):
  """Text to ids and back. Sampled ids are never decoded and re-encoded; only new text is encoded."""

  vocab_size: int
  stop_ids: Sequence[int]
  """Ids that end an action (they belong to it)."""

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """What an environment answers to one action."""

  observation: str = ""
  """Text appended to the context, template markup included; not scored by any loss."""
  reward: float = 0.0
  """Reward of this action; it is booked on the action's last token."""
  done: bool = False
  """The episode is over."""
  truncated: bool = False
  """With `done`: it was cut off (out of turns or time) rather than finished."""
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Anything to log; `success` (bool) is what success rates count (default: reward of the episode > 0)."""


@runtime_checkable
class Environment(Protocol):
  """What a user writes for a task of their own: one object runs one episode at a time."""

  def reset(self, task_index: int) -> str:
    """Starts an episode of task number `task_index` (any int >= 0: same index, same task) and returns the prompt."""
    ...

  def step(self, action: str) -> Step:
    """Takes the text of one action, stop token included. Called on a worker thread; may block (tools, judges)."""
    ...

  def close(self) -> None:
    """Frees what the object holds (processes, files). Called once."""
    ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes a fresh environment; the engine holds one per live episode and reuses it for the next."""


Split: TypeAlias = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
  """A task as the training loop sees it: environments, the tokenizer they are written for, and demonstrations if
  any."""

  make_env: Callable[[Split], Environment]
  """Makes an environment of the training tasks or of the held-out ones."""
  tokenizer: Tokenizer
  num_train_tasks: int
  """Training tasks: `reset` is called with 0 .. num_train_tasks - 1, in a new order on every pass."""
  num_eval_tasks: int
  """Held-out tasks."""
  demonstrate: Callable[[int, np.random.Generator], Sequence[tuple[str, bool]]] | None = None
  """`(training task, rng) -> pieces of (text, is_action)`: one episode to imitate in the warm start; None: no warm
  start."""
  close: Callable[[], None] = lambda: None
  """Frees what the environments share (a pool of interpreters, say)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
  """One finished episode, on the host: prompt, actions and observations as one token string.

  `ValueError` if the arrays do not agree (see `__post_init__`): in particular an action token without a log-prob or a
  version is refused, never filled in. A log-prob in (0, `LOGP_ROUNDING`] becomes 0.
  """

  tokens: np.ndarray
  """`[T]` int32."""
  action_mask: np.ndarray
  """`[T]` bool: True where the policy wrote the token. False at index 0."""
  behavior_logp: np.ndarray
  """`[T]` float32: log-prob the engine sampled the token with (its weights and temperature then); NaN off actions."""
  versions: np.ndarray
  """`[T]` int32: policy version that sampled the token; -1 off actions."""
  rewards: np.ndarray
  """`[T]` float32: reward booked on the last token of each action, 0 elsewhere."""
  ended: Ended
  task_index: int
  episode_id: int
  """Number of the episode in the run: unique, and what resume counts."""
  group_id: int
  """Episodes of one prompt that are compared with one another share it (group methods); else equal to `episode_id`."""
  num_turns: int
  """Number of actions."""
  success: bool
  text: str = ""
  """Readable form, for samples that are written to disk; may be empty."""

  def __post_init__(self) -> None:
    length = self.tokens.shape[0] if self.tokens.ndim == 1 else -1
    expected = {
      "tokens": np.int32,
      "action_mask": np.bool_,
      "behavior_logp": np.float32,
      "versions": np.int32,
      "rewards": np.float32,
    }
    for name, dtype in expected.items():
      array = getattr(self, name)
      if array.shape != (length,) or array.dtype != dtype:
        raise ValueError(
          f"Trajectory.{name} must be a [T] array of {np.dtype(dtype).name} with T = len(tokens) = {length}; "
          f"received shape {array.shape}, dtype {array.dtype}."
        )
    if length < 2 or self.action_mask[0] or not self.action_mask.any():
      raise ValueError(
        f"Trajectory {self.episode_id} must have a prompt and at least one action token; received {length} tokens, "
        f"{int(self.action_mask.sum())} of them actions; first an action: {bool(self.action_mask[:1].any())}."
      )
    logp = self.behavior_logp[self.action_mask]
    positive = logp > np.float32(LOGP_ROUNDING)
    if not np.isfinite(logp).all() or positive.any():
      raise ValueError(
        f"Trajectory {self.episode_id}: every action token needs a finite log-prob <= 0; "
        f"{int((~np.isfinite(logp)).sum())} of {logp.size} are missing or not finite, "
        f"{int(positive.sum())} are positive by more than rounding, {LOGP_ROUNDING}."
      )
    if (logp > 0).any():
      rounded = np.where(self.action_mask, np.minimum(self.behavior_logp, np.float32(0)), self.behavior_logp)
      object.__setattr__(self, "behavior_logp", rounded)
    if (self.versions[self.action_mask] < 0).any():
      raise ValueError(
        f"Trajectory {self.episode_id}: every action token needs the policy version that sampled it (>= 0)."
      )
    if not np.isfinite(self.rewards).all() or self.rewards[~self.action_mask].any():
      raise ValueError(f"Trajectory {self.episode_id}: rewards must be finite, and 0 except on action tokens.")
    if self.ended not in ("terminal", "truncated"):
      raise ValueError(f"Trajectory.ended must be 'terminal' or 'truncated'; received {self.ended!r}.")

  @property
  def num_actions(self) -> int:
    """Number of action tokens: `l` of the length-adaptive lambda."""
    return int(self.action_mask.sum())

  @property
  def total_reward(self) -> float:
    return float(self.rewards.sum())

  @property
  def oldest_version(self) -> int:
    """Oldest policy version among the action tokens: staleness is the learner's version at use minus this."""
    return int(self.versions[self.action_mask].min())

  @property
  def mixed_versions(self) -> bool:
    """Whether more than one policy version wrote this trajectory."""
    versions = self.versions[self.action_mask]
    return bool(versions.min() != versions.max())


@chex.dataclass(frozen=True)
class TokenBatch:
  """Trajectories packed into rows; all leaves are `[B, T]`, or `[M, B, T]` when stacked into `M` microbatches.

  A segment is one whole trajectory; a trajectory never spans two rows. Padding has `segment_ids == 0` and every mask
  False.
  """

  tokens: jax.Array
  """int32."""
  positions: jax.Array
  """int32: position inside the segment, from 0."""
  segment_ids: jax.Array
  """int32: 0 is padding; segments of a row count from 1."""
  action_mask: jax.Array
  """bool."""
  behavior_logp: jax.Array
  """float32: 0 off actions (never read there)."""
  rewards: jax.Array
  """float32."""
  lambda_policy: jax.Array
  """float32: the trajectory's length-adaptive lambda on all its tokens (Section 3.2)."""
  turn_ids: jax.Array
  """int32: number of the action (turn) a token belongs to, from 1; 0 off actions."""
  truncated: jax.Array
  """bool: True on all tokens of a trajectory that was cut off; where bootstrapping is on, its end is bootstrapped."""
  baseline_adv: jax.Array
  """float32: advantage from rewards alone (group or running-mean baseline) on all tokens of a trajectory; 0 if
  unused."""
