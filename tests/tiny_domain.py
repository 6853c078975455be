"""A task small enough for tests of the whole loop: answer with the digit that is asked for, after as many waits as it
says."""

from __future__ import annotations

import time

import numpy as np

from sao_jax.types import Domain, Environment, Split, Step

VOCABULARY = "~0123456789?.w;"  # padding, digits, question, answer, wait, end of action


class TinyTokenizer:
  """A character each."""

  vocab_size = len(VOCABULARY)
  stop_ids = (VOCABULARY.index(";"),)

  def encode(self, text: str) -> list[int]:
    return [VOCABULARY.index(c) for c in text]

  def decode(self, ids: list[int]) -> str:
    return "".join(VOCABULARY[i] for i in ids)


class TinyEnv(Environment):
  """Prompt `?d`; any action but `.d;` is answered by `w`; `.d;` with the right digit earns 1; four actions at most."""

  def __init__(self, sleep_s: float = 0.0):
    self._sleep_s = sleep_s

  def reset(self, task_index: int) -> str:
    self._digit = str(task_index % 10)
    self._turns = 0
    return f"?{self._digit}"

  def step(self, action: str) -> Step:
    time.sleep(self._sleep_s)
    self._turns += 1
    if action.startswith("."):
      return Step(reward=float(action == f".{self._digit};"), done=True)
    return Step(observation="w", done=self._turns == 4, truncated=self._turns == 4)

  def close(self) -> None:
    pass


def tiny_domain(*, sleep_s: float = 0.0) -> Domain:
  def make_env(split: Split) -> TinyEnv:
    return TinyEnv(sleep_s)

  def demonstrate(task: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
    digit = str(task % 10)
    waits = [(";", True), ("w", False)] * int(rng.integers(3))
    return [(f"?{digit}", False), *waits, (f".{digit if rng.random() < 0.7 else rng.integers(10)};", True)]

  return Domain(
    make_env=make_env, tokenizer=TinyTokenizer(), num_train_tasks=50, num_eval_tasks=20, demonstrate=demonstrate
  )
