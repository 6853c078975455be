"""A one-layer policy and value model, in JAX for the learner and in NumPy float64 with hand-written gradients for
oracles.

h[t] = tanh(e[t] W_mlp + mean_{s <= t, same segment} e[s] W_attention), e = embedding; logits = h W_head, value = h
w_head.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.types import PolicyOutput, Trajectory

VOCAB, WIDTH = 11, 5


def init(seed: int, *, value: bool = False, scale: float = 0.5):
  rng = np.random.default_rng(seed)

  def matrix(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0.0, scale, shape), jnp.float32)

  params = {
    "embed": {"embedding": matrix(VOCAB, WIDTH)},
    "layers_0": {
      "attention": {"v_proj": {"kernel": matrix(WIDTH, WIDTH)}},
      "mlp": {"up_proj": {"kernel": matrix(WIDTH, WIDTH)}},
    },
  }
  params |= {"value_head": {"kernel": matrix(WIDTH, 1)}} if value else {"lm_head": {"kernel": matrix(WIDTH, VOCAB)}}
  return params


def hidden(params, tokens, positions, segment_ids):
  del positions
  layer = params["layers_0"]
  embedded = params["embed"]["embedding"][tokens]
  causal = jnp.tril(jnp.ones((tokens.shape[-1],) * 2, bool))
  mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal
  weights = mask / jnp.sum(mask, axis=-1, keepdims=True)
  mixed = jnp.einsum("bts,bsd->btd", weights, embedded)
  return jnp.tanh(embedded @ layer["mlp"]["up_proj"]["kernel"] + mixed @ layer["attention"]["v_proj"]["kernel"])


def policy_apply(params, tokens, positions, segment_ids) -> PolicyOutput:
  return PolicyOutput(hidden(params, tokens, positions, segment_ids), params["lm_head"]["kernel"])


def value_apply(params, tokens, positions, segment_ids) -> jax.Array:
  return (hidden(params, tokens, positions, segment_ids) @ params["value_head"]["kernel"])[..., 0]


@dataclasses.dataclass
class Oracle:
  """The same model over one trajectory, unpacked, in float64, with its backward pass."""

  params: dict

  @classmethod
  def of(cls, params) -> Oracle:
    return cls(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params))

  def hidden(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layer = self.params["layers_0"]
    embedded = self.params["embed"]["embedding"][tokens]
    mixed = np.cumsum(embedded, axis=0) / np.arange(1, len(tokens) + 1)[:, None]
    pre = embedded @ layer["mlp"]["up_proj"]["kernel"] + mixed @ layer["attention"]["v_proj"]["kernel"]
    return np.tanh(pre), embedded, mixed

  def backward(self, tokens: np.ndarray, d_hidden: np.ndarray) -> dict:
    """Gradients of embedding, mlp and attention, given those of the hidden states."""
    layer = self.params["layers_0"]
    hidden, embedded, mixed = self.hidden(tokens)
    d_pre = d_hidden * (1.0 - hidden**2)
    d_embedded = d_pre @ layer["mlp"]["up_proj"]["kernel"].T
    d_mixed = d_pre @ layer["attention"]["v_proj"]["kernel"].T / np.arange(1, len(tokens) + 1)[:, None]
    d_embedded = d_embedded + np.cumsum(d_mixed[::-1], axis=0)[::-1]
    d_table = np.zeros_like(self.params["embed"]["embedding"])
    np.add.at(d_table, tokens, d_embedded)
    return {
      "embed": {"embedding": d_table},
      "layers_0": {
        "attention": {"v_proj": {"kernel": mixed.T @ d_pre}},
        "mlp": {"up_proj": {"kernel": embedded.T @ d_pre}},
      },
    }

  def logps(self, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """`[T, V]`: log-probs of the distribution that `tokens[t]` is drawn from (row 0 is never used)."""
    logits = self.hidden(tokens)[0] @ self.params["lm_head"]["kernel"] / temperature
    logp = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return np.concatenate([np.zeros((1, logp.shape[1])), logp[:-1]])

  def policy_gradient(self, tokens: np.ndarray, coefficient: np.ndarray, temperature: float = 1.0) -> dict:
    """Gradient of sum_t coefficient[t] * logp[t]."""
    hidden = self.hidden(tokens)[0]
    d_logits = -np.exp(self.logps(tokens, temperature)) * coefficient[:, None]
    d_logits[np.arange(len(tokens)), tokens] += coefficient
    d_logits = np.concatenate([d_logits[1:], np.zeros((1, d_logits.shape[1]))]) / temperature
    head = self.params["lm_head"]["kernel"]
    return {**self.backward(tokens, d_logits @ head.T), "lm_head": {"kernel": hidden.T @ d_logits}}

  def values_after(self, tokens: np.ndarray) -> np.ndarray:
    return (self.hidden(tokens)[0] @ self.params["value_head"]["kernel"])[:, 0]

  def values(self, tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], self.values_after(tokens)[:-1]])

  def value_gradient(self, tokens: np.ndarray, d_value: np.ndarray) -> dict:
    """Gradient of sum_t d_value[t] * v[t]."""
    hidden = self.hidden(tokens)[0]
    d_after = np.concatenate([d_value[1:], [0.0]])[:, None]
    head = self.params["value_head"]["kernel"]
    return {**self.backward(tokens, d_after @ head.T), "value_head": {"kernel": hidden.T @ d_after}}


def trajectory(
  mask, *, seed: int = 0, reward: float | None = None, policy=None, lag: float = 0.0, ended="terminal", index: int = 0,
  temperature: float = 1.0,
) -> Trajectory:  # fmt: skip
  """A trajectory with the given action mask; its log-probs are `policy`'s, moved by noise of size `lag`."""
  rng = np.random.default_rng(seed)
  mask = np.asarray(mask, bool)
  tokens = rng.integers(0, VOCAB, len(mask)).astype(np.int32)
  if policy is None:
    logp = -rng.uniform(0.5, 4.0, len(mask))
  else:
    exact = Oracle.of(policy).logps(tokens, temperature)[np.arange(len(mask)), tokens]
    logp = np.minimum(exact + lag * rng.normal(size=len(mask)), -1e-6)
  rewards = np.zeros(len(mask), np.float32)
  rewards[np.flatnonzero(mask)[-1]] = rng.uniform(-1.0, 1.0) if reward is None else reward
  return Trajectory(
    tokens=tokens,
    action_mask=mask,
    behavior_logp=np.where(mask, logp, np.nan).astype(np.float32),
    versions=np.where(mask, 0, -1).astype(np.int32),
    rewards=rewards,
    ended=ended,
    task_index=index,
    episode_id=index,
    group_id=index,
    num_turns=int(np.sum(mask[1:] & ~mask[:-1])),
    success=bool(rewards.sum() > 0),
  )


def random_mask(rng: np.random.Generator, max_length: int = 14) -> np.ndarray:
  mask = rng.random(int(rng.integers(4, max_length + 1))) < 0.6
  mask[:2] = False
  mask[int(rng.integers(2, len(mask)))] = True
  return mask


def trajectories(count: int, *, seed: int = 0, policy=None, lag: float = 0.0, truncated_share: float = 0.0, **kwargs):
  rng = np.random.default_rng(seed)
  made = []
  for index in range(count):
    ended = "truncated" if rng.random() < truncated_share else "terminal"
    mask = random_mask(rng)
    made.append(trajectory(mask, seed=1000 * seed + index, policy=policy, lag=lag, ended=ended, index=index, **kwargs))
  return made
