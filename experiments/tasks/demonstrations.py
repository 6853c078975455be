"""Episodes of an environment as demonstrations."""

from __future__ import annotations

from collections.abc import Callable

from sao_jax.types import Environment

Pieces = list[tuple[str, bool]]
"""The pieces of an episode as (text, is action)."""


def play(env: Environment, task_index: int, choose: Callable[[], str]) -> Pieces:
  """Plays one episode.

  Args:
    env: the environment.
    task_index: the task.
    choose: returns the next action, with its end.
  """
  pieces = [(env.reset(task_index), False)]
  while True:
    action = choose()
    step = env.step(action)
    pieces.append((action, True))
    if step.done:
      return pieces
    pieces.append((step.observation, False))
