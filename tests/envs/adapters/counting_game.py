"""A game that its process can import. Some of its moves never end."""

from __future__ import annotations

import os
import time

from sao_jax.envs.adapters.text_game import Reply, Template, TextGame


class CountingGame(TextGame):
  """Each next number earns 0.5. `think` never ends, and `die` ends the process."""

  def __init__(self, first: int):
    super().__init__(max_turns=20, template=Template())
    if first < 0:
      raise ValueError(f"first must not be negative; received {first!r}.")
    self._first = self._last = first
    self._said: list[int] = []

  def start(self, task_index: int) -> str:
    if task_index == 1_000:
      time.sleep(1_000)
    self._last = self._first + task_index
    self._said = []
    return f"Count from {self._last}."

  def play(self, text: str) -> Reply:
    if text == "think":
      while True:
        pass
    if text == "die":
      os._exit(1)
    if text == "stop":
      return Reply(reward=1.0, done=True, info={"counted": self._last})
    if text != str(self._last + 1):
      return Reply(text="no")
    self._last += 1
    self._said.append(self._last)
    return Reply(text=f"{self._last}, after {self._said}", reward=0.5)

  def walkthrough(self) -> list[str]:
    return [str(self._last + 1)]


def make_counting_game(first: int) -> CountingGame:
  return CountingGame(first)
