"""A task to compare algorithms on one CPU core: find a hidden number with as few guesses as bisection needs.

The prompt `02-27:5?` says that the number lies in 2 to 27 and that five guesses are left. An action such as `14;` is a
guess. The reply has the form of the prompt and contains the remaining range: `15-27:4?`. A guess that is not a number
of two digits, or lies outside the range, is wasted. The reward is 1 for finding the number and 0 otherwise. Episodes
have several turns, more for wide ranges than for narrow ones. The environment writes half of the tokens, and the
quality of a guess shows only turns later.

The demonstrations guess at random. A share `careless` of their guesses ignores the replies. RL has to find that guesses
belong inside the remaining range and that its middle is best.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from experiments.tasks.demonstrations import Pieces, play
from sao_jax.types import Domain, Environment, Split, Step

END = ";"
NUMBERS = 32
MAX_GUESSES = NUMBERS.bit_length() - 1


class BisectionTokenizer:
  """Each end of a range is one token, as is the number of guesses left. Guesses are written in digits."""

  def __init__(self) -> None:
    ends = [f"{number:02d}{mark}" for mark in "-:" for number in range(NUMBERS)]
    left = [f"{number}?" for number in range(MAX_GUESSES + 1)]
    self._tokens = ("~", *"0123456789", END, *left, *ends)
    self._ids = {token: i for i, token in enumerate(self._tokens)}
    self._split = re.compile("[0-9]{2}[-:]|[0-9][?]|.", re.DOTALL)
    self.vocab_size = len(self._tokens)
    self.stop_ids = (self._ids[END],)

  def encode(self, text: str) -> list[int]:
    return [self._ids[piece] for piece in self._split.findall(text)]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(self._tokens[i] for i in ids)


@dataclasses.dataclass(frozen=True)
class Problem:
  """A hidden number and the range in the prompt, both ends included."""

  low: int
  high: int
  secret: int

  @property
  def guesses(self) -> int:
    """The number of guesses that bisection needs in the worst case: ceil(log2(width + 1)).

    >>> Problem(0, 2, 1).guesses, Problem(0, 3, 1).guesses, Problem(1, 31, 11).guesses
    (2, 3, 5)
    """
    return (self.high - self.low + 1).bit_length()


def make_problem(index: int, split: Split) -> Problem:
  """Makes problem number `index`. The two splits are drawn independently."""
  rng = np.random.default_rng((index, split == "eval"))
  width = int(rng.integers(3, NUMBERS))
  low = int(rng.integers(0, NUMBERS - width + 1))
  return Problem(low, low + width - 1, int(rng.integers(low, low + width)))


class Bisection(Environment):
  """An environment with `num_tasks` problems."""

  def __init__(self, split: Split, num_tasks: int):
    self._split: Split = split
    self._num_tasks = num_tasks
    self.problem = Problem(0, 0, 0)
    self.low = self.high = self.left = 0

  def reset(self, task_index: int) -> str:
    self.problem = make_problem(task_index % self._num_tasks, self._split)
    self.low, self.high, self.left = self.problem.low, self.problem.high, self.problem.guesses
    return self._state()

  def step(self, action: str) -> Step:
    self.left -= 1
    guess = int(action[:2]) if len(action) == 3 and action[:2].isdecimal() and action[2] == END else -1
    if guess == self.problem.secret:
      return Step(reward=1.0, done=True)
    if self.low <= guess < self.problem.secret:
      self.low = guess + 1
    elif self.problem.secret < guess <= self.high:
      self.high = guess - 1
    return Step(observation=self._state(), done=self.left == 0)

  def close(self) -> None:
    """Does nothing: there are no resources."""

  def _state(self) -> str:
    return f"{self.low:02d}-{self.high:02d}:{self.left}?"


def make_domain(*, num_train_tasks: int = 4096, num_eval_tasks: int = 512, careless: float = 0.6) -> Domain:
  """Makes the domain.

  Args:
    num_train_tasks: number of training problems, few enough that prompts repeat, as baselines per prompt require.
    num_eval_tasks: number of held-out problems, which are drawn independently.
    careless: share of a demonstration's guesses that are drawn from the whole range of the prompt instead of the
      remaining range.
  """
  if not 0.0 <= careless <= 1.0:
    raise ValueError(f"careless must be in [0, 1]; received {careless!r}.")

  def make_env(split: Split) -> Bisection:
    return Bisection(split, num_train_tasks if split == "train" else num_eval_tasks)

  def demonstrate(task_index: int, rng: np.random.Generator) -> Pieces:
    env = make_env("train")

    def guess() -> str:
      low, high = (env.problem.low, env.problem.high) if rng.random() < careless else (env.low, env.high)
      return f"{rng.integers(low, high + 1):02d}{END}"

    return play(env, task_index, guess)

  return Domain(
    make_env=make_env,
    tokenizer=BisectionTokenizer(),
    num_train_tasks=num_train_tasks,
    num_eval_tasks=num_eval_tasks,
    demonstrate=demonstrate,
  )
