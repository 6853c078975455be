"""Types that the packages share: the data that flows between them, with shapes and units.

Alignment: index `t` of a per-token array always describes `tokens[t]`. `logp[t]` is log p(tokens[t] | tokens[:t]), and
`v[t]` is the value of the state BEFORE `tokens[t]`. Models predict one ahead, so a model's output at index `t` belongs
to `tokens[t + 1]`. The only function that shifts is `ops.masking.align_predictions`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import chex
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PyTree, Shaped

AnyArray: TypeAlias = Array | np.ndarray
"""An array on devices or on the host."""

Leaf: TypeAlias = Shaped[AnyArray, "..."] | jax.ShapeDtypeStruct
"""An array, or only its shape and dtype."""

Params: TypeAlias = PyTree[Leaf]
"""Parameters of a model: nested dicts of arrays. A leaf's path decides freezing, sharding and its checkpoint name."""

Cache: TypeAlias = PyTree[Leaf]
"""A key/value cache: a pytree of arrays whose leading axis is the slot. The model chooses its layout; the engine passes
it on (donated)."""

Window: TypeAlias = PyTree[Leaf]
"""State of a decode loop: the part of a cache that it works on, and anything else that the model needs in the loop."""

Ended: TypeAlias = Literal["terminal", "truncated"]

LOGP_ROUNDING = 1e-4
"""A log-prob in (0, LOGP_ROUNDING] counts as 0; a larger one is an error.

In float32, log p = x - logsumexp(x) is rounded by one unit in the last place of the logits: by 2^-14 to 2^-13 if they
are as large as 1,000. Lower precision would add more than a ratio of probabilities tolerates.
"""


class PolicyOutput(NamedTuple):
  """Output of a policy. `ops.logprobs` computes log-probs from it without holding logits `[B, T, V]`."""

  hidden: Float[Array, "B T D"]
  """Final hidden states (after the last norm); index `t` predicts `tokens[t + 1]`."""
  lm_head: Float[Array, "D V"]
  """The output projection; logits are `hidden @ lm_head`, in float32."""
  num_tokens: int | None = None
  """Ids from here on pad the vocabulary: their probability is 0 (`ops.logprobs.exclude_padding`). None: no padding."""


@runtime_checkable
class PolicyApply(Protocol):
  """A policy in the form that the learner uses."""

  def __call__(
    self,
    params: Params,
    tokens: Int[AnyArray, "B T"],
    positions: Int[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"],
  ) -> PolicyOutput:
    """Maps packed rows to hidden states.

    Args:
      params: the policy's parameters.
      tokens: int32 token ids.
      positions: int32 position of each token in its own segment, from 0.
      segment_ids: int32; 0 is padding. Tokens attend causally to tokens with the same id.
    """
    ...


@runtime_checkable
class ValueApply(Protocol):
  """A value model in the form that the learner uses."""

  def __call__(
    self,
    params: Params,
    tokens: Int[AnyArray, "B T"],
    positions: Int[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"],
  ) -> Float[Array, "B T"]:
    """Returns at index `t` the value of the state AFTER `tokens[t]` (one ahead, like the policy)."""
    ...


class SlotPlacement(NamedTuple):
  """Shardings of the rollout engine's arrays when its slots are spread over devices."""

  slots: jax.sharding.Sharding
  """Sharding of `[S]` arrays."""
  whole: jax.sharding.Sharding
  """Sharding of arrays that come from the host or go there: whole on every device."""
  dispatching: Callable[[], contextlib.AbstractContextManager[Any]]
  """Context around every dispatch of a program. If several threads start programs over several devices, it must make
  sure that all devices start them in the same order."""
  row_multiple: int = 1
  """The leading axis of a cache must be a multiple of it."""
  logits: Callable[[jax.Array], jax.Array] = lambda logits: logits
  """Constrains `[S, V]` logits, so that each device samples whole rows."""


class RaggedBatch(NamedTuple):
  """Tokens of several sequences in one row, over a paged cache of P pages: T tokens of S sequences of up to N pages."""

  positions: Int32[Array, "T"]
  """Position of each token in its sequence."""
  targets: Int32[Array, "T"]
  """Where each token is stored: page * page_size + offset; for padding, an offset in page 0."""
  lengths: Int32[Array, "S"]
  """Tokens of each sequence, those of the batch included; at least 1."""
  tables: Int32[Array, "S N"]
  """Pages of each sequence, in the order of its tokens."""
  starts: Int32[Array, "S_plus_1"]
  """First token of each sequence among the T, and the end of the last one. A sequence's tokens are its newest ones."""
  num_rows: Int32[Array, "1"]
  """Number of sequences with tokens. They come first."""


class PagedPolicy(NamedTuple):
  """A policy over a paged cache: the form that the rollout engine uses on TPUs."""

  init_cache: Callable[[int, int], Cache]
  """`(num_pages, page_size) -> pages`: the leading axes of every leaf are the page and the token in it."""

  step: Callable[[Params, Cache, jax.Array, RaggedBatch], tuple[jax.Array, Cache]]
  """`(params, pages, tokens [T], batch) -> (hidden [T, D], pages)`: feeds prompt and decode tokens together."""

  lm_head: Callable[[Params], jax.Array]
  """`(params) -> [D, V]`."""

  has_kernel: Callable[[], bool] = lambda: True
  """Whether attention over the pages has a kernel for TPUs. Without it, contiguous copies are faster."""


class CachedPolicy(NamedTuple):
  """A policy in the form that the rollout engine uses: incremental, with a key/value cache of one row per slot."""

  init_cache: Callable[[int, int], Cache]
  """`(num_slots, max_len) -> cache`: the leading axis of every leaf is the slot."""

  extend: Callable[..., tuple[jax.Array, Cache]]
  """`(params, cache, tokens [R, C], slots [R], start [R], count [R], *, live_len) -> (hidden [R, D], cache)`.

  Feeds `tokens[r, :count[r]]` to slot `slots[r]` at positions `start[r], start[r] + 1, ...`. Entries past `count[r]`
  are ignored, and so are rows with `slots[r] >= num_slots`. Returns the hidden state of each row's last token.
  `live_len` is a static upper bound of `start + count`: no cache entry at or past it is read.
  """

  window: Callable[..., Window]
  """`(cache, slots [S], positions [S], *, steps, live_lens) -> window`: opens a loop of `steps` decode steps.

  Row r of the loop is slot `slots[r]`; `slots` is a permutation of all slots. A NumPy array of 0 .. S - 1 saves a copy
  if the model recognizes it. In step i the row is fed at `positions[r] + i`; it attends to the cache before
  `positions[r]`, and to the loop's own tokens. `live_lens` are
  static. The rows form `len(live_lens)` groups of equal size, in this order. `live_lens[g]` is an upper bound of
  `positions + steps` for every row of group g whose hidden states are needed. It may exceed the cache's `max_len`,
  since the last steps of a loop may not be needed.
  """

  step: Callable[..., tuple[jax.Array, Window]]
  """`(prepared, window, tokens [S], i) -> (hidden [S, D], window)`: step i = 0, 1, ... of the loop.

  Feeds one token to every row; an idle row may be fed any token.
  """

  merge: Callable[[Cache, Window, jax.Array], Cache]
  """`(cache, window, count [S]) -> cache`: writes the tokens of each row's first `count[r]` steps to the cache."""

  lm_head: Callable[[Params], jax.Array]
  """`(prepared) -> [D, V]`."""

  prepare: Callable[[Params], Params] = lambda params: params
  """`(params) -> prepared`: converts the weights for decoding, e.g. joins kernels; runs once per policy version."""

  num_tokens: int | None = None
  """See `PolicyOutput.num_tokens`."""

  paged: PagedPolicy | None = None
  """The policy over a paged cache; None: pages are gathered for the functions above, on any platform."""

  placement: SlotPlacement | None = None
  """Set on a mesh (`parallel.cached_on_mesh`), where the functions above keep the cache sharded. None: JAX's default
  device."""


class Tokenizer(Protocol):
  """Converts text to token ids and back. Sampled ids are never decoded and encoded again; only new text is encoded."""

  vocab_size: int
  stop_ids: Sequence[int]
  """Ids that end an action. The id is part of the action."""

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """An environment's response to one action."""

  observation: str = ""
  """Text to append to the context, including template markup; no loss scores it."""
  reward: float = 0.0
  """Reward of this action; the action's last token receives it."""
  done: bool = False
  """The episode is over."""
  truncated: bool = False
  """With `done`: the episode was cut off (out of turns or time) rather than finished."""
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Values to log. Success rates count `success` (bool); by default, an episode with a reward > 0. Other numbers and
  bools become metrics: the mean over episodes of each one's last value, as `env/NAME`, or as `reward/NAME` if the name
  begins so."""


@runtime_checkable
class Environment(Protocol):
  """A task's environment, to be implemented for one's own task. One object runs one episode at a time."""

  def reset(self, task_index: int) -> str:
    """Starts an episode of task `task_index` (an int >= 0; the same index is the same task), and returns the prompt."""
    ...

  def step(self, action: str) -> Step:
    """Responds to the text of one action, stop token included. Runs in a worker thread; may block (tools, judges)."""
    ...

  def close(self) -> None:
    """Frees the object's resources (processes, files). Called once."""
    ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes an environment. The engine holds one per live episode, and reuses it for later episodes."""


Split: TypeAlias = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
  """A task in the form that the training loop uses: environments, their tokenizer and, optionally, demonstrations."""

  make_env: Callable[[Split], Environment]
  """Makes an environment of the training tasks or of the held-out tasks."""
  tokenizer: Tokenizer
  num_train_tasks: int
  """Number of training tasks: `reset` is called with 0 .. num_train_tasks - 1, in a new order on every pass."""
  num_eval_tasks: int
  """Number of held-out tasks."""
  demonstrate: Callable[[int, np.random.Generator], Sequence[tuple[str, bool]]] | None = None
  """`(training task, rng) -> pieces of (text, is_action)`: an episode to imitate in the warm start. None: no warm
  start."""
  close: Callable[[], None] = lambda: None
  """Frees resources that the environments share, e.g. a pool of interpreters."""
  files: Sequence[str] = ()
  """Files that the tasks come from. A resumed run refuses to go on if their contents have changed."""
  format_prompt: Callable[[str], str] = str
  """Writes a user's text as the start of an episode, in the policy's chat template if it has one."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
  """A finished episode, on the host: prompt, actions and observations as one sequence of tokens.

  Raises `ValueError` if the arrays do not agree. In particular, an action token without a log-prob or a version is an
  error; it is never filled in. A log-prob in (0, `LOGP_ROUNDING`] becomes 0.
  """

  tokens: Int32[np.ndarray, "T"]
  action_mask: Bool[np.ndarray, "T"]
  """True on tokens that the policy wrote. False at index 0."""
  behavior_logp: Float32[np.ndarray, "T"]
  """Log-prob that the engine sampled the token with (its weights and temperature then); NaN off actions."""
  versions: Int32[np.ndarray, "T"]
  """Policy version that sampled the token; -1 off actions."""
  rewards: Float32[np.ndarray, "T"]
  """Reward of each action on its last token, 0 elsewhere."""
  ended: Ended
  task_index: int
  episode_id: int
  """Unique number of the episode in the run; a resumed run continues the numbering."""
  group_id: int
  """Shared by episodes of one prompt that are compared with one another (group methods); otherwise `episode_id`."""
  num_turns: int
  """Number of actions."""
  success: bool
  text: str = ""
  """Readable form, for samples written to disk; may be empty."""
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """The environment's own numbers: the last value of each in `Step.info`, `success` left out."""

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
        f"{int(self.action_mask.sum())} of them actions; first one an action: {bool(self.action_mask[:1].any())}."
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
    """Number of action tokens, the l of the length-adaptive λ."""
    return int(self.action_mask.sum())

  @property
  def total_reward(self) -> float:
    """Sum of the rewards."""
    return float(self.rewards.sum())

  @property
  def oldest_version(self) -> int:
    """Oldest policy version among the action tokens. Staleness is the learner's version at use minus this."""
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

  tokens: Int32[Array, "*M B T"]
  positions: Int32[Array, "*M B T"]
  """Position in the segment, from 0."""
  segment_ids: Int32[Array, "*M B T"]
  """0 is padding; the segments of a row count from 1."""
  action_mask: Bool[Array, "*M B T"]
  behavior_logp: Float32[Array, "*M B T"]
  """0 off actions, where it is never read."""
  rewards: Float32[Array, "*M B T"]
  lambda_policy: Float32[Array, "*M B T"]
  """The trajectory's length-adaptive λ, on all its tokens (Section 3.2)."""
  turn_ids: Int32[Array, "*M B T"]
  """Number of the action (turn) that a token belongs to, from 1; 0 off actions."""
  truncated: Bool[Array, "*M B T"]
  """True on all tokens of a trajectory that was cut off. With `truncation="bootstrap"`, its end is bootstrapped."""
  baseline_adv: Float32[Array, "*M B T"]
  """Advantage from rewards alone (e.g. group or running mean), on all tokens of the trajectory; 0 if unused."""
  version: Int32[Array, "*M B T"] | None = None
  """Policy version of the action tokens of a trajectory that one version wrote; -1 elsewhere. For health checks."""
