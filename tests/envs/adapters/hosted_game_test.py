"""Games in another process: their replies, and their recovery when the process is killed."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from sao_jax.envs.adapters import _game_worker
from sao_jax.envs.adapters.hosted_game import HostedGame
from sao_jax.envs.adapters.text_game import Template
from sao_jax.envs.grading.scoring_process import NoReplyError, WorkerPool
from tests.envs.adapters.counting_game import CountingGame, make_counting_game
from tests.waiting import LONG_S

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv("PYTHONPATH", raising=False)  # Games are found on this process's `sys.path`.
    pool = WorkerPool("sao_jax.envs.adapters._game_worker", max_workers=1, memory_bytes=1 << 28)
    yield pool
    pool.close()


def game(pool: WorkerPool, *, first: int = 0) -> HostedGame:
  make = functools.partial(make_counting_game, first)
  return HostedGame(make, max_turns=20, template=Template(), move_timeout_s=LONG_S, workers=pool)


def test_it_says_what_the_game_says(pool: WorkerPool) -> None:
  here, there = CountingGame(3), game(pool, first=3)
  assert there.reset(4) == here.reset(4) == "<|user|>Count from 7.<|assistant|>"
  for move in ("8", "9", "what", "10"):
    assert there.step(f"{move}<|end|>") == here.step(f"{move}<|end|>")
  step = there.step("stop<|end|>")
  assert step == here.step("stop<|end|>") and step.done and step.info["counted"] == 10 and step.info["success"]


def test_a_move_that_never_ends_truncates_its_episode_and_others_go_on(pool: WorkerPool) -> None:
  patient, hasty = game(pool), game(pool)
  patient.reset(0)
  patient.step("1<|end|>")
  hasty.reset(5)
  assert hasty.step("6<|end|>").reward == 0.5
  before = pool.timeouts
  began = time.perf_counter()
  hasty._move_timeout_s = 0.5
  step = hasty.step("think<|end|>")
  hasty._move_timeout_s = LONG_S
  assert time.perf_counter() - began < LONG_S and pool.timeouts == before + 1
  assert step.done and step.truncated and step.reward == 0.0 and not step.info["success"]
  assert "it took more than 0.5 s" in step.info["scorer_error"]
  assert patient.step("2<|end|>").observation == "<|output|>2, after [1, 2]<|assistant|>"
  hasty.reset(5)
  assert hasty.step("6<|end|>").observation == "<|output|>6, after [6]<|assistant|>"


def test_a_move_that_takes_the_process_with_it_truncates_its_episode(pool: WorkerPool) -> None:
  env = game(pool)
  env.reset(0)
  step = env.step("die<|end|>")
  assert step.done and step.truncated and "its process ended" in step.info["scorer_error"]
  env.reset(0)
  assert not env.step("1<|end|>").done


def test_games_are_played_again_from_their_moves(pool: WorkerPool) -> None:
  envs = [game(pool, first=10 * i) for i in range(4)]
  for env in envs:
    env.reset(1)
    env.step("hm<|end|>")
  for turn in range(2, 6):
    (worker,) = pool._idle
    assert worker.process is not None
    os.kill(worker.process.popen.pid, signal.SIGKILL)
    worker.process.popen.wait()
    for i, env in enumerate(envs):
      step = env.step(f"{10 * i + turn}<|end|>")
      said = list(range(10 * i + 2, 10 * i + turn + 1))
      assert step.observation == f"<|output|>{said[-1]}, after {said}<|assistant|>"
      assert env.ask("walkthrough") == [str(said[-1] + 1)]


def test_from_many_threads(pool: WorkerPool) -> None:
  said: dict[int, list[str]] = {}

  def work(i: int) -> None:
    env = game(pool, first=i)
    env.reset(0)
    said[i] = [env.step(f"{i + turn}<|end|>").observation for turn in range(1, 5)]

  threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(LONG_S)
  for i in range(12):
    counts = [list(range(i + 1, i + turn + 1)) for turn in range(1, 5)]
    assert said[i] == [f"<|output|>{count[-1]}, after {count}<|assistant|>" for count in counts]


def test_games_that_have_not_been_played_for_long_are_forgotten_and_played_again(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(_game_worker, "_KEPT_GAMES", 2)
  games = _game_worker.Games()

  class InThisProcess:
    def call(self, request: object, *, timeout_s: float) -> object:
      del timeout_s
      return games.answer(request)

  envs = [
    HostedGame(functools.partial(make_counting_game, 0), max_turns=20, template=Template(), workers=InThisProcess())
    for _ in range(3)
  ]
  for env in envs:
    env.reset(0)
  for turn in range(1, 5):
    for env in envs:
      said = list(range(1, turn + 1))
      assert env.step(f"{turn}<|end|>").observation == f"<|output|>{turn}, after {said}<|assistant|>"
      assert len(games._games) == 2
  for env in envs:
    env.close()
  assert not games._games


def test_exceptions_of_a_game(pool: WorkerPool) -> None:
  with pytest.raises(ValueError, match="first must not be negative; received -1"):
    game(pool, first=-1)
  env = game(pool)
  with pytest.raises(ValueError, match="task_index must be an int >= 0"):
    env.reset(-1)
  with pytest.raises(ValueError, match=r"method must be one of .*received 'succeeded'"):
    env.ask("succeeded")
  slow = game(pool)
  slow._start_timeout_s = 0.5
  with pytest.raises(NoReplyError, match=r"took more than 0\.5 s"):
    slow.reset(1_000)
