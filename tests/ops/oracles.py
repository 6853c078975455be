"""Slow references in NumPy float64, one loop each, written from the definitions."""

from __future__ import annotations

import math

import numpy as np


def action_chains(mask: np.ndarray, segment_ids: np.ndarray | None) -> list[list[int]]:
  """Indices of the action tokens of each segment, in order."""
  ids = np.ones(len(mask), int) if segment_ids is None else np.asarray(segment_ids)
  chains: dict[int, list[int]] = {}
  for t, counts in enumerate(mask):
    if counts and ids[t] != 0:
      chains.setdefault(int(ids[t]), []).append(t)
  return list(chains.values())


def at(x, t: int) -> float:
  """Entry t of something that is a scalar or an array."""
  x = np.asarray(x)  # no cast: it would copy the whole array for every entry
  return float(x if x.ndim == 0 else x[t])


def gae(r, v, mask, *, discount, lambda_, bootstrap=0.0, segment_ids=None) -> np.ndarray:
  """Eqs. 4, 5: GAE over the subsequence of action tokens. `bootstrap`: scalar, or [T] read at the last action token."""
  out = np.zeros(len(mask))
  for chain in action_chains(mask, segment_ids):
    next_v, next_adv = at(bootstrap, chain[-1]), 0.0
    for t in reversed(chain):
      delta = at(r, t) + at(discount, t) * next_v - at(v, t)
      next_adv = delta + at(discount, t) * at(lambda_, t) * next_adv
      next_v, out[t] = at(v, t), next_adv
  return out


def step_gae(
  r, v, mask, *, discount, lambda_, step_value, bootstrap=0.0, segment_ids=None, turn_ids=None
) -> np.ndarray:
  """Appendix A.1: GAE over steps, one advantage for all tokens of a step."""
  out = np.zeros(len(mask))
  for chain in action_chains(mask, segment_ids):
    steps: list[list[int]] = []
    for t in chain:
      same = bool(steps) and (
        turn_ids[t] == turn_ids[steps[-1][-1]] if turn_ids is not None else t == steps[-1][-1] + 1
      )
      if same:
        steps[-1].append(t)
      else:
        steps.append([t])
    next_v, next_adv = at(bootstrap, chain[-1]), 0.0
    for step in reversed(steps):
      values = [at(v, t) for t in step]
      value = sum(values) / len(values) if step_value == "mean" else values[-1]
      gamma, lam = at(discount, step[-1]), at(lambda_, step[-1])
      next_adv = sum(at(r, t) for t in step) + gamma * next_v - value + gamma * lam * next_adv
      next_v = value
      out[step] = next_adv
  return out


def dis_coefficient(logp, behavior_logp, *, eps_low, eps_high) -> np.ndarray:
  """Eq. 3."""
  r = np.exp(np.asarray(logp, np.float64) - np.asarray(behavior_logp, np.float64))
  return np.where((1 - eps_low < r) & (r < 1 + eps_high), r, 0.0)


def ppo(ratio: float, adv: float, *, clip_low: float, clip_high: float) -> float:
  """PPO's surrogate for one token."""
  return min(ratio * adv, min(max(ratio, 1 - clip_low), 1 + clip_high) * adv)


def token_logprob(logits: np.ndarray, token: int, temperature: float = 1.0) -> tuple[float, float]:
  """Log-prob of one token and the entropy of the distribution, from the definition."""
  z = [float(x) / temperature for x in logits]
  top = max(z)
  total = sum(math.exp(x - top) for x in z)
  log_probs = [x - top - math.log(total) for x in z]
  return log_probs[token], -sum(math.exp(x) * x for x in log_probs)


def running_means(ids, rewards, *, window: int, num_prompts: int) -> np.ndarray:
  """Mean of the last `window` rewards of each prompt."""
  seen: list[list[float]] = [[] for _ in range(num_prompts)]
  for i, r in zip(ids, rewards, strict=True):
    seen[i].append(float(r))
  return np.array([np.mean(x[-window:]) if x else 0.0 for x in seen])


def group_advantages(rewards, ids, *, normalize_std: bool) -> np.ndarray:
  rewards, ids = np.asarray(rewards, np.float64), np.asarray(ids)
  out = np.zeros(len(rewards))
  for i, (r, g) in enumerate(zip(rewards, ids, strict=True)):
    group = rewards[ids == g]
    out[i] = r - group.mean()
    if normalize_std:
      out[i] /= group.std() + 1e-6
  return out
