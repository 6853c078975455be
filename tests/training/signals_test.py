"""SIGINT and SIGTERM, wherever they meet a run: it saves and ends, and the next run ends as if nothing had been."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from sao_jax.io import trajectory_arrays
from sao_jax.io.metrics import read_metrics
from sao_jax.learner import learner_config
from sao_jax.rollout import schedules
from sao_jax.training import loop, stages
from sao_jax.training.components import Components
from sao_jax.training.config import CheckpointConfig, CriticConfig, RunConfig, WarmStartConfig
from sao_jax.training.run_state import RunState
from sao_jax.training.signals import Interrupted, RetryLater, StopSignals
from sao_jax.types import Domain, Step
from tests.bare_run import BusyEnv, bare, busy_domain
from tests.tiny_domain import tiny_domain
from tests.training.loop_test import LEARNER, final_params, without_times
from tests.waiting import LONG_S

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Gate:
  """Stands still when the n-th step of all environments comes, sends this process a signal, and can be opened again."""

  def __init__(self, at: int, number: signal.Signals):
    self.left = at
    self.number = number
    self.opened = threading.Event()
    self.signalled_at = 0.0
    self._lock = threading.Lock()

  def pass_through(self) -> None:
    with self._lock:  # one signal: a second one would end the process
      self.left -= 1
      left = self.left
    if left == 0:
      threading.Timer(0.1, self._send).start()  # from outside, while the tool is at work
    if left <= 0:
      self.opened.wait(120.0)

  def _send(self) -> None:
    self.signalled_at = time.monotonic()
    # To the thread that a signal from outside wakes too, unless it stands still (in a debugger, say) at that moment.
    signal.pthread_kill(threading.main_thread().ident or 0, self.number)


def gated(gate: Gate, *, split: str = "train") -> Domain:
  class Gated(BusyEnv):
    def step(self, action: str) -> Step:
      if self.split == split:
        gate.pass_through()
      return super().step(action)

  return busy_domain(Gated)


def stop(gate: Gate, config: RunConfig, workdir: pathlib.Path, **options: Any) -> None:
  """Runs until the gate's signal ends the run."""
  assert loop.train(config, gated(gate, **options), workdir) is None
  gate.opened.set()
  assert 0 < time.monotonic() - gate.signalled_at < 100  # the tool takes 120 s; the machine may be busy


def test_in_an_inline_tool_the_batch_is_made_again(tmp_path: pathlib.Path) -> None:
  config = bare(schedule="lagged", lag=1, lag_switch_chunks=1)
  workdir, whole = tmp_path / "run", tmp_path / "whole"
  loop.train(config, busy_domain(), whole)
  stop(Gate(60, signal.SIGTERM), config, workdir)
  assert 0 < len(read_metrics(workdir)[0]) < config.num_steps
  loop.train(config, busy_domain(), workdir)
  assert without_times(workdir) == without_times(whole)
  jax.tree.map(np.testing.assert_array_equal, final_params(config, workdir), final_params(config, whole))


@pytest.mark.parametrize("env_workers", [8, 0])
def test_async_does_not_wait_for_tools(env_workers: int, tmp_path: pathlib.Path, monkeypatch: Any, caplog: Any) -> None:
  # With workers the engine ends however long the tools take; without, it is in one of them.
  monkeypatch.setattr(schedules, "_STOP_S", LONG_S if env_workers else 0.5)
  timeout = 50.0 if env_workers else None
  engine = dataclasses.replace(bare().engine, env_workers=env_workers, env_timeout_s=timeout)
  config = bare(schedule="async", engine=engine, max_staleness=1)
  stop(Gate(60, signal.SIGINT), config, tmp_path)
  assert ("left behind" in caplog.text) == (env_workers == 0)
  assert len(read_metrics(tmp_path)[0]) < config.num_steps
  assert loop.train(config, busy_domain(), tmp_path) is not None
  assert [row["step"] for row in read_metrics(tmp_path)[0]] == list(range(1, 7))


def test_in_the_evaluation(tmp_path: pathlib.Path) -> None:
  config = bare(num_steps=2, eval_episodes=8)
  stop(Gate(5, signal.SIGTERM), config, tmp_path, split="eval")
  assert read_metrics(tmp_path) == ([], [])
  assert loop.train(config, busy_domain(), tmp_path) is not None
  assert [row["step"] for row in read_metrics(tmp_path)[1]] == [0, 2]


def stage_result(stage: str, config: RunConfig, workdir: pathlib.Path) -> Any:
  with Components(config, busy_domain()) as parts, stages.stage_checkpointer(parts, workdir, stage) as checkpointer:
    return checkpointer.arrays(checkpointer.steps()[-1])


def test_in_the_warm_start_it_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
  config = bare(warm_start=WarmStartConfig(num_steps=30, batch_size=4))
  calls = 0
  usual = tiny_domain().demonstrate
  assert usual is not None

  def demonstrate(task: int, rng: np.random.Generator) -> Any:
    nonlocal calls
    calls += 1
    if calls == 40:
      os.kill(os.getpid(), signal.SIGTERM)
    return usual(task, rng)

  domain = dataclasses.replace(busy_domain(), demonstrate=demonstrate)
  stopped, whole = tmp_path / "stopped", tmp_path / "whole"
  assert loop.train(config, domain, stopped, run_stages=("warm_start",)) is None
  assert (stopped / "stages/warm_start/partial").is_dir()
  before = calls
  assert loop.train(config, domain, stopped, run_stages=("warm_start",)) is None
  assert calls <= 30 * 4 + 3 * 4 and before < 80  # the second run did not start anew
  assert not (stopped / "stages/warm_start/partial").exists()
  loop.train(config, domain, whole, run_stages=("warm_start",))
  again, expected = (stage_result("warm_start", config, path) for path in (stopped, whole))
  jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_in_the_value_pretraining_nothing_is_left_behind(tmp_path: pathlib.Path) -> None:
  stop(Gate(20, signal.SIGTERM), pretraining(), tmp_path)
  assert list((tmp_path / "stages/value_pretraining/checkpoints").iterdir()) == []


def pretraining(**changes: Any) -> RunConfig:
  learner = learner_config("sao", eps_low=0.3, eps_high=5.0, **LEARNER)
  return bare(algorithm="sao", learner=learner, critic=CriticConfig(pretraining_trajectories=32), **changes)


def test_the_fit_of_values_goes_on_where_it_was(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  config, stopped, whole = pretraining(), tmp_path / "stopped", tmp_path / "whole"
  run = functools.partial(loop.train, config, run_stages=("warm_start", "value_pretraining"))
  asked = 0
  original = StopSignals.requested_anywhere

  def anywhere(self: StopSignals) -> bool:
    nonlocal asked
    asked += 1
    self.requested = self.requested or asked == 3
    return original(self)

  monkeypatch.setattr(StopSignals, "requested_anywhere", anywhere)
  assert run(busy_domain(), stopped) is None and asked == 4  # the fourth time is `check`, which raises

  class Forbidden(BusyEnv):
    def reset(self, task_index: int) -> str:
      raise AssertionError("the trajectories were there")

  run(busy_domain(Forbidden), stopped)
  assert asked == 4 + 4 - 3  # updates: one batch in each of four epochs, three of them done before
  assert not (stopped / "stages/value_pretraining/partial").exists()
  run(busy_domain(), whole)
  again, expected = (stage_result("value_pretraining", config, path) for path in (stopped, whole))
  jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_finished_initial_trajectories_are_kept_in_async(tmp_path: pathlib.Path) -> None:
  config = pretraining(schedule="async")
  stop(Gate(20, signal.SIGTERM), config, tmp_path)
  (path,) = (tmp_path / "stages/value_pretraining/partial").glob("*.safetensors")
  kept = {x.episode_id for x in trajectory_arrays.read(path)}
  resets = 0

  class Counted(BusyEnv):
    def reset(self, task_index: int) -> str:
      nonlocal resets
      resets += 1
      return super().reset(task_index)

  loop.train(config, busy_domain(Counted), tmp_path, run_stages=("value_pretraining",))
  assert kept and resets == 32 - len(kept) + 2  # The check of prompts resets a task twice.


def test_a_demonstration_that_hangs_does_not_keep_the_run(tmp_path: pathlib.Path) -> None:
  config = bare(warm_start=WarmStartConfig(num_steps=30, batch_size=4))
  opened, calls = threading.Event(), itertools.count(1)
  usual = tiny_domain().demonstrate
  assert usual is not None

  def demonstrate(task: int, rng: np.random.Generator) -> Any:
    if next(calls) == 40:
      threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM)).start()
      opened.wait(120.0)
    return usual(task, rng)

  began = time.monotonic()
  domain = dataclasses.replace(busy_domain(), demonstrate=demonstrate)
  assert loop.train(config, domain, tmp_path, run_stages=("warm_start",)) is None
  assert time.monotonic() - began < 100
  opened.set()
  saved = tmp_path / "stages/warm_start/partial/checkpoints"
  assert [path.name for path in saved.iterdir()] == ["9"]


@pytest.mark.parametrize("ids", [[10**6], [-1], [1.5]])
def test_demonstrations_that_are_no_tokens_of_the_vocabulary_are_refused(ids: Any, tmp_path: pathlib.Path) -> None:
  domain = busy_domain()

  class Wrong(type(domain.tokenizer)):  # type: ignore[misc]
    def encode(self, text: str) -> Any:
      return ids

  with pytest.raises(ValueError, match=r"demonstration 0 of a batch: Tokenizer\.encode must return"):
    loop.train(
      bare(warm_start=WarmStartConfig(num_steps=2, batch_size=4)), dataclasses.replace(domain, tokenizer=Wrong()),
      tmp_path,
    )  # fmt: skip


STUBBORN = """
import time
from sao_jax.training.signals import StopSignals
with StopSignals():
  print("ready", flush=True)
  while True:
    time.sleep(1)
"""


def test_a_learner_step_that_is_still_compiled_can_be_aborted(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  """The emergency checkpoint is of the step before, and the next run trains on the same batch. Once the step is on the
  device it is waited for."""
  config = bare(num_steps=3, checkpoint=CheckpointConfig(every_steps=9))
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  loop.train(config, busy_domain(), whole)
  made: list[Callable[[], None]] = []
  late: list[str] = []
  steps = itertools.count(1)
  original_checkpoint, original_update = RunState.emergency_checkpoint, Components.update

  def emergency_checkpoint(self: RunState, *args: Any) -> Callable[[], None]:
    made.append(original_checkpoint(self, *args))
    return made[-1]

  def update(self: Components, state: Any, batch: Any) -> Any:
    if next(steps) == 3:  # the batch is packed; what follows would be compiled
      made[-1]()
      raise Interrupted
    result = original_update(self, state, batch)
    for save in made:
      with pytest.raises(RetryLater):
        save()
      late.append("refused")
    return result

  with monkeypatch.context() as patch:
    patch.setattr(RunState, "emergency_checkpoint", emergency_checkpoint)
    patch.setattr(Components, "update", update)
    assert loop.train(config, busy_domain(), stopped) is None
  assert late == ["refused"]
  assert loop.train(config, busy_domain(), stopped) is not None
  assert without_times(stopped) == without_times(whole)
  jax.tree.map(np.testing.assert_array_equal, final_params(config, stopped), final_params(config, whole))


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(first: signal.Signals) -> None:
  command = [sys.executable, "-c", STUBBORN]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert "Ctrl-C ends it at once" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG_S) == -signal.SIGINT


def test_handlers_are_put_back_and_check_raises_only_after_a_signal() -> None:
  before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  ran: list[Callable[[], None]] = []
  with pytest.raises(Interrupted), StopSignals() as signals:
    signals.check()
    with signals.interruptible():
      ran.append(signals.check)
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(60)
      raise AssertionError("the signal came too late")
  assert signals.requested and ran
  assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
