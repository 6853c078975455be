"""A tiny policy whose next-token distribution depends on every token of the context, and toy environments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.types import CachedPolicy, Step

VOCAB = 20
ROWS = 31
STOP = 1
MARK = 2
"""The only token that the policy samples when it reads a cache entry of other weights than its own."""


class CharTokenizer:
  vocab_size = VOCAB
  stop_ids = (STOP,)

  def encode(self, text: str) -> list[int]:
    return [ord(c) - ord("a") for c in text]

  def decode(self, ids) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def make_params(seed: int, *, stop_bias: float = 1.0, mark: bool = False):
  """Makes a table of logits; a hash of the context selects the row."""
  table = np.random.default_rng(seed).normal(size=(ROWS, VOCAB)).astype(np.float32)
  table[:, STOP] += stop_bias
  if mark:
    table[:, MARK] = -30.0
  return {"table": jnp.asarray(table), "id": jnp.float32(seed), "mark": jnp.float32(mark)}


def reference_logits(params, tokens: np.ndarray) -> np.ndarray:
  """Returns the logits `[V]` after the context `tokens`, without the mark."""
  row = int((tokens * (np.arange(len(tokens)) + 1)).sum() % ROWS)
  return np.asarray(params["table"])[row]


def fake_policy() -> CachedPolicy:
  def init_cache(num_slots, max_len):
    return {"tokens": jnp.zeros((num_slots, max_len), jnp.int32), "id": jnp.full((num_slots, max_len), -1.0)}

  def hidden(params, cache, slots, last, live_len):
    tokens = cache["tokens"][slots, :live_len]
    at = jnp.arange(live_len)
    seen = at[None] <= last[:, None]
    row = jnp.sum(jnp.where(seen, tokens * (at + 1), 0), axis=-1) % ROWS
    wrong = (seen & (cache["id"][slots, :live_len] != params["id"])).any(-1) & (params["mark"] > 0)
    only_mark = jnp.where(jnp.arange(VOCAB) == MARK, 0.0, -1e9)
    return jnp.where(wrong[:, None], only_mark, params["table"][row])

  def extend(params, cache, tokens, slots, start, count, *, live_len):
    at = jnp.arange(tokens.shape[1])
    where = jnp.where(at[None] < count[:, None], start[:, None] + at[None], cache["tokens"].shape[1])
    cache = {
      "tokens": cache["tokens"].at[slots[:, None], where].set(tokens, mode="drop"),
      "id": cache["id"].at[slots[:, None], where].set(params["id"], mode="drop"),
    }
    return hidden(params, cache, jnp.minimum(slots, cache["id"].shape[0] - 1), start + count - 1, live_len), cache

  def window(cache, slots, positions, *, steps, live_lens):
    lengths = jnp.repeat(jnp.asarray(live_lens), len(slots) // len(live_lens))
    rows = {name: x[slots] for name, x in cache.items()}
    return {"cache": rows, "slots": slots, "positions": positions, "lengths": lengths}

  def step(params, window, tokens, i):
    cache, positions = window["cache"], window["positions"]
    rows = jnp.arange(tokens.shape[0])
    max_len = cache["tokens"].shape[1]
    at = positions + i
    where = jnp.where(at < window["lengths"], at, max_len)
    cache = {
      "tokens": cache["tokens"].at[rows, where].set(tokens, mode="drop"),
      "id": cache["id"].at[rows, where].set(params["id"], mode="drop"),
    }
    return hidden(params, cache, rows, at, max_len), {**window, "cache": cache}

  def merge(cache, window, count):
    at = jnp.arange(cache["tokens"].shape[1])
    first = window["positions"][:, None]
    written = (at >= first) & (at < first + count[:, None])
    slots = window["slots"]
    return jax.tree.map(lambda old, new: old.at[slots].set(jnp.where(written, new, old[slots])), cache, window["cache"])

  return CachedPolicy(
    init_cache=init_cache, extend=extend, window=window, step=step, merge=merge, lm_head=lambda params: jnp.eye(VOCAB)
  )


POLICY = fake_policy()
"""A single object, so that tests share compiled programs."""


class Echo:
  """Ends after `turns` actions with reward `reward`; observations grow with the turn."""

  def __init__(self, turns: int = 2, reward=1.0):
    self.turns, self.reward = turns, reward
    self.closed = 0
    self.left = None

  def reset(self, task_index: int) -> str:
    self.task = task_index
    self.left = self.turns
    return "cdefg"[: 1 + task_index % 5] + "h"

  def step(self, action: str) -> Step:
    assert self.left, "stepped after the end"
    assert action.endswith("b"), action
    self.left -= 1
    return Step(observation="opq"[: self.left % 4], reward=self.reward, done=self.left == 0)

  def close(self) -> None:
    self.closed += 1


def log_softmax(x: np.ndarray) -> np.ndarray:
  x = x.astype(np.float64)
  x = x - x.max()
  return x - np.log(np.exp(x).sum())


def assert_logps_true(trajectory, params_of_version, temperature: float = 1.0) -> None:
  """Checks every log-prob against that of the token under the weights of its version, given the tokens before it."""
  for t in np.flatnonzero(trajectory.action_mask):
    params = params_of_version[int(trajectory.versions[t])]
    expected = log_softmax(reference_logits(params, trajectory.tokens[:t]) / temperature)[trajectory.tokens[t]]
    np.testing.assert_allclose(trajectory.behavior_logp[t], expected, atol=1e-4)


def key_data(x) -> np.ndarray:
  return np.asarray(jax.device_get(x))
