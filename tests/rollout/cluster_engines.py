"""Engines for the tests of the cluster, made in Ray workers: nothing here imports pytest."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import time

from sao_jax.rollout import Engine, EngineConfig
from sao_jax.rollout.ray.ray_worker import EngineFactory, EngineWorker, Shardings
from sao_jax.types import Step
from tests.rollout.fakes import POLICY, CharTokenizer, Echo

CONFIG = EngineConfig(
  num_slots=4,
  max_len=48,
  max_action_tokens=20,
  max_turns=4,
  chunk_steps=4,
  token_budget=16,
  page_size=8,
  env_workers=4,
)


class Signed(Echo):
  """Environment with three turns; the reward of the last turn is the process id / 4096.

  Args:
    sleep_s: duration of a turn, in seconds.
    deadly_task: task that ends the process.
    hung: unless this file exists, a process that runs the deadly task writes its id there and then hangs as a whole,
      with its interpreter locked.
  """

  def __init__(self, sleep_s: float, deadly_task: int | None, hung: pathlib.Path | None):
    super().__init__(3)
    self._sleep_s = sleep_s
    self._deadly_task = deadly_task
    self._hung = hung

  def step(self, action: str) -> Step:
    if self.task == self._deadly_task:
      if self._hung and not self._hung.exists():
        self._hung.write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(1_000)
      os._exit(9)
    time.sleep(self._sleep_s)
    step = super().step(action)
    return dataclasses.replace(step, reward=os.getpid() / 4096 if step.done else 0.0)


def make_engine(sleep_s: float = 0.0, deadly_task: int | None = None, hung: pathlib.Path | None = None) -> Engine:
  return Engine(
    model=POLICY,
    make_env=lambda: Signed(sleep_s, deadly_task, hung),
    tokenizer=CharTokenizer(),
    config=CONFIG,
    seed=7,
  )


def raise_on_creation() -> Engine:
  raise OSError("no accelerator in this machine")


def die_on_creation() -> Engine:
  os._exit(9)


class FaultyWorker(EngineWorker):
  """Worker with two faults, each as often as there are files for it in the folder: `die*` ends the process between two
  groups of a delta, `corrupt*` changes the weights that a delta starts from.

  Args:
    folder: holds the files; one is removed for each fault.
  """

  def __init__(self, make_engine: EngineFactory, shardings: Shardings, folder: pathlib.Path):
    super().__init__(make_engine, shardings)
    self._folder = folder

  def receive_weights(self, key, full, delta, checksum) -> bool:
    if delta is not None and self._arrived and self._due("die"):
      os._exit(9)
    if delta and self._due("corrupt"):
      piece = self._groups[key][0]
      self._groups[key][0] = piece._replace(values=piece.values ^ 1)
    return super().receive_weights(key, full, delta, checksum)

  def _due(self, fault: str) -> bool:
    for path in self._folder.glob(f"{fault}*"):
      try:
        path.unlink()
      except FileNotFoundError:  # the other engine was quicker
        continue
      return True
    return False
