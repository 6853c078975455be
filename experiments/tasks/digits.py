"""A task that takes seconds, to check the machinery: answer with the digit in the prompt, after some waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from sao_jax.types import Domain, Environment, Split, Step

VOCABULARY = "~0123456789?.w;"
"""Padding, digits, question, answer, wait, end of action."""


class DigitsTokenizer:
  """One token per character of `VOCABULARY`."""

  vocab_size = len(VOCABULARY)
  stop_ids = (VOCABULARY.index(";"),)

  def encode(self, text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(VOCABULARY[i] for i in ids)


class DigitsEnv(Environment):
  """Prompt `?7`: `.7;` earns 1 and ends; any other answer ends with 0. Up to four other actions get the reply `w`."""

  def __init__(self, sleep_s: float) -> None:
    self._sleep_s = sleep_s
    self._digit = "0"
    self._turns = 0

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
    """Does nothing: there are no resources."""


def make_domain(*, sleep_s: float = 0.0, num_tasks: int = 50) -> Domain:
  """Makes the domain; `sleep_s` is the latency of every step of the environment in seconds."""

  def make_env(split: Split) -> DigitsEnv:
    return DigitsEnv(sleep_s)

  def demonstrate(task_index: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
    digit = str(task_index % 10)
    answer = digit if rng.random() < 0.7 else str(rng.integers(10))
    waits = [(";", True), ("w", False)] * int(rng.integers(3))
    return [(f"?{digit}", False), *waits, (f".{answer};", True)]

  return Domain(
    make_env=make_env,
    tokenizer=DigitsTokenizer(),
    num_train_tasks=num_tasks,
    num_eval_tasks=20,
    demonstrate=demonstrate,
  )
