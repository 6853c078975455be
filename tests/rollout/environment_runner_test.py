"""Faults of environments: each fails only its own episode, is counted by kind, and is logged once per kind."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import logging
import os
import pathlib
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.rollout import Engine, TooManyFailuresError
from sao_jax.types import Step
from tests.rollout.engine.engine_test import PARAMS, config, fixed, requests
from tests.rollout.fakes import POLICY, CharTokenizer, Echo, make_params
from tests.waiting import LONG_S, until

EAGER = make_params(0, stop_bias=50.0)
"""Policy that samples only the stop token, so that every action reaches its environment."""


def eager(_chunk: int):
  return EAGER, 0


class Odd(Echo):
  """Tasks 1, 4, 7, ... misbehave in `step`."""

  respond = staticmethod(lambda: Step())

  def step(self, action):
    return self.respond() if self.task % 3 == 1 else super().step(action)


def raises(error):
  def respond():
    raise error

  return respond


class Unspeakable(Exception):
  def __repr__(self):
    raise ValueError("no words")

  __str__ = __repr__


class Unprintable(Exception):
  """Its `repr` raises SystemExit."""

  def __repr__(self):
    raise SystemExit(3)


class Locked(Step):
  """A step whose `info` raises."""

  @property
  def info(self):
    raise StopIteration

  def __init__(self):
    object.__setattr__(self, "observation", "")
    object.__setattr__(self, "reward", 0.0)
    object.__setattr__(self, "done", False)
    object.__setattr__(self, "truncated", False)


class Surprise:
  """A reward whose `shape` raises."""

  @property
  def shape(self):
    raise GeneratorExit


def moves():
  """Changes the environment variables and the working directory, and then fails."""
  os.environ["SAO_JAX_TEST_MOVED"] = "1"
  os.chdir("/")
  raise RuntimeError("moved")


class Liar(fractions.Fraction):
  def __float__(self):
    return float("nan")


class Short(str):
  def __len__(self):
    return 1


def recursive():
  return recursive()


FAULTS = {
  "raises": (raises(RuntimeError("tool died")), "step_error"),
  "exits": (raises(SystemExit(3)), "step_error"),
  "none": (lambda: None, "bad_step"),
  "nan": (lambda: Step(reward=float("nan")), "bad_reward"),
  "inf": (lambda: Step(reward=np.float32("inf")), "bad_reward"),
  "text_reward": (lambda: Step(reward="1"), "bad_reward"),
  "huge_reward": (lambda: Step(reward=1e300, done=True), "bad_reward"),
  "large_reward": (lambda: Step(reward=-2e6, done=True), "bad_reward"),
  "endless_int": (lambda: Step(reward=10**400), "bad_reward"),
  "no_reward": (lambda: Step(reward=None), "bad_reward"),
  "many_rewards": (lambda: Step(reward=np.ones(2)), "bad_reward"),
  "bytes": (lambda: Step(observation=b"\xff\xfe"), "bad_observation"),
  "surrogates": (lambda: Step(observation=b"\xff".decode("utf-8", "surrogateescape")), "bad_observation"),
  "flood": (lambda: Step(observation="c" * 2_000_000), "observation_too_long"),
  "no_info": (lambda: Step(info=None), "step_error"),
  "cancelled": (raises(asyncio.CancelledError()), "step_error"),
  "generator": (raises(GeneratorExit()), "step_error"),
  "gigantic_message": (raises(RuntimeError("x" * 10**6)), "step_error"),
  "message_that_raises": (raises(Unspeakable()), "step_error"),
  "recursion": (lambda: recursive(), "step_error"),
  "complex_reward": (lambda: Step(reward=np.complex64(1)), "bad_reward"),
  "numbers_that_lie": (lambda: Step(reward=Liar(1, 2)), "bad_reward"),
  "decimal_reward": (lambda: Step(reward=decimal.Decimal(1)), "bad_reward"),
  "python_complex_reward": (lambda: Step(reward=1 + 0j), "bad_reward"),
  "date_reward": (lambda: Step(reward=np.datetime64("2020-01-01")), "bad_reward"),
  "trap_reward": (lambda: Step(reward=Surprise()), "step_error"),
  "locked": (Locked, "step_error"),
  "stops": (raises(StopIteration()), "step_error"),
  "unprintable": (raises(Unprintable()), "step_error"),
  "group": (raises(BaseExceptionGroup("many", [SystemExit(i) for i in range(1000)])), "step_error"),
  "moves": (moves, "step_error"),
  "done_as_text": (lambda: Step(done="False"), "bad_step"),
  "success_as_number": (lambda: Step(info={"success": 0.5}), "bad_step"),
  "long_str_of_no_length": (lambda: Step(observation=Short("c" * 2_000_000)), "observation_too_long"),
}


def build(make_env, **changes) -> Engine:
  return Engine(model=POLICY, make_env=make_env, tokenizer=CharTokenizer(), config=config(**changes), seed=0)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("env_workers", [0, 3])
def test_a_fault_fails_only_its_episode(fault, env_workers, caplog, monkeypatch):
  monkeypatch.chdir(pathlib.Path.cwd())  # restored after "moves"
  monkeypatch.setenv("SAO_JAX_TEST_MOVED", "0")
  respond, kind = FAULTS[fault]
  made = []

  class Env(Odd):
    def __init__(self):
      super().__init__(2)
      made.append(self)

  Env.respond = staticmethod(respond)
  failed = []
  with caplog.at_level(logging.WARNING), build(Env, env_workers=env_workers) as engine:
    done = list(engine.generate(eager, requests(15), on_failure=failed.append))
    counters = engine.counters
  assert sorted(x.episode_id for x in done) == [i for i in range(15) if i % 3 != 1]
  assert all(x.ended == "terminal" and x.total_reward == 2.0 for x in done)
  assert sorted(x.episode_id for x in failed) == [1, 4, 7, 10, 13]
  assert counters["failed_by_kind"] == {kind: 5} and counters["failed_episodes"] == 5
  assert counters["episodes_started"] == 15 and counters["episodes_finished"] == 10
  logged = [x.getMessage() for x in caplog.records if kind in x.getMessage()]
  assert len(logged) == 1 and len(logged[0]) < 20_000
  # Every environment, those of failed episodes included, was closed exactly once.
  assert [x.closed for x in made] == [1] * len(made)
  assert len(made) >= 6


def test_an_environment_is_closed_if_its_episode_fails_as_the_last_of_a_call():
  made = []

  class Env(Odd):
    respond = staticmethod(raises(RuntimeError("tool died")))

    def __init__(self):
      super().__init__(2)
      made.append(self)

  with build(Env, env_workers=3) as engine:
    for last in (1, 4, 7):
      assert list(engine.generate(eager, [requests(9)[last]])) == []
    assert engine.counters["failed_by_kind"] == {"step_error": 3}
  assert [x.closed for x in made] == [1] * len(made)


def test_faults_of_reset_and_of_the_factory():
  calls = [0]

  class BadReset(Echo):
    def reset(self, task_index):
      if task_index == 2:
        resets.append(id(self))
        raise OSError("no such task")
      usual = super().reset(task_index)
      odd = {3: "", 4: "c" * 48, 5: b"cd", 6: "cdé", 7: "c" * 47, 8: None, 9: "c" * 10_000_000, 10: "\udcff"}
      return odd.get(task_index, usual)

  def make():
    calls[0] += 1
    if calls[0] == 1:
      raise MemoryError("no process left")
    made.append(BadReset(1))
    return made[-1]

  for retries, failed_resets in ((0, 2), (2, 1)):
    made, resets, calls[0] = [], [], 0
    with build(make, reset_retries=retries) as engine:
      done = list(engine.generate(eager, requests(11)))
      counters = engine.counters
    assert [x.episode_id for x in done] == ([0, 1, 7] if retries else [1, 7])
    assert counters["failed_by_kind"] == {
      "reset_error": failed_resets,
      "empty_prompt": 1,
      "prompt_too_long": 2,
      "bad_prompt": 3,
      "bad_tokens": 1,
    }
    # Each attempt at task 2 had its own environment; the failure of the factory was retried.
    assert len(set(resets)) == len(resets) == 1 + retries
    assert counters["reset_retries"] == (1 if retries else 0)
    assert [x.closed for x in made] == [1] * len(made)


@pytest.mark.parametrize(
  "reward", [1, True, np.float64(1), np.bool_(True), np.array(1.0), jnp.float32(1), fractions.Fraction(1)]
)
def test_numbers_of_every_type_are_rewards_and_flags(reward):
  flag = reward if isinstance(reward, bool | np.bool_) else True

  class Env(Echo):
    def step(self, action):
      return Step(reward=reward, done=flag, info={"success": flag}, observation=np.str_("c"))

  with build(Env, env_workers=0) as engine:
    (done,) = engine.generate(eager, requests(1))
  assert done.total_reward == 1.0 and done.success is True


def test_an_inline_environment_lets_an_interrupt_pass():
  class Signal(KeyboardInterrupt):
    pass

  class Env(Echo):
    def step(self, action):
      raise Signal

  with build(Env, env_workers=0) as engine, pytest.raises(Signal):
    list(engine.generate(eager, requests(1)))
  with build(Env, env_workers=1) as engine:  # on a worker thread it is no interrupt: signals reach the main thread only
    assert list(engine.generate(eager, requests(2))) == []
    assert engine.counters["failed_by_kind"] == {"step_error": 2}


@pytest.mark.parametrize(
  "ids", [[1.5], [-1], [10**6], [2**70], [True], ["c"], [[2, 3]], [2, [3]], [None], np.array([np.nan]), {"ids": [1]}]
)
def test_anything_but_a_list_of_token_ids_is_rejected(ids):
  class Encodes(CharTokenizer):
    def encode(self, text):
      return super().encode(text) if text.endswith("h") else ids

  engine = Engine(model=POLICY, make_env=lambda: Echo(2), tokenizer=Encodes(), config=config())
  with engine:
    assert list(engine.generate(eager, requests(2))) == []
    assert sum(engine.counters["failed_by_kind"].values()) == 2
    assert set(engine.counters["failed_by_kind"]) <= {"bad_tokens", "step_error"}


def test_an_action_of_no_text_reaches_the_environment():
  class Silent(CharTokenizer):
    def decode(self, ids):
      return super().decode(ids).replace("b", "")

  class Heard(Echo):
    def step(self, action):
      heard.append(action)
      return Step(reward=1.0, done=len(heard) % 2 == 0)

  heard = []
  engine = Engine(model=POLICY, make_env=Heard, tokenizer=Silent(), config=config(env_workers=0, num_slots=1))
  with engine:
    done = list(engine.generate(eager, requests(2)))
  assert heard == [""] * 4
  assert [x.num_turns for x in done] == [2, 2] and all(x.num_actions == 2 for x in done)


def test_text_that_utf8_cannot_encode_is_replaced_in_the_readable_form():
  class Surrogates(CharTokenizer):
    def decode(self, ids):
      return "\udcff" + super().decode(ids)

  engine = Engine(model=POLICY, make_env=lambda: Echo(1), tokenizer=Surrogates(), config=config())
  with engine:
    (done,) = engine.generate(eager, requests(1))
  assert done.text.encode("utf-8").count(b"?") == 1


def test_an_over_long_prompt_is_rejected_before_sampling_with_the_lengths(caplog):
  class Long(Echo):
    def reset(self, task_index):
      return "c" * 50

  with caplog.at_level(logging.WARNING), build(Long) as engine:
    assert list(engine.generate(fixed, requests(2))) == []
    assert engine.counters["tokens_generated"] == engine.counters["prefill_tokens"] == 0
  assert "50 tokens" in caplog.text and "max_len = 48" in caplog.text


@pytest.mark.parametrize("count", [12, 4])  # with 4, all have started before any hangs, so no new call starts a thread
def test_a_hanging_environment_is_abandoned_and_replaced(count):
  release = threading.Event()
  made = []

  class Hangs(Echo):
    def __init__(self):
      super().__init__(2)
      made.append(self)

    def step(self, action):
      if self.task in (1, 2, 3):
        release.wait(500)
      return super().step(action)

  # Three of them hang, on two threads. Abandoned threads must be replaced.
  began = time.monotonic()
  with build(Hangs, env_workers=2, env_timeout_s=3.0) as engine:
    done = list(engine.generate(eager, requests(count)))
    assert engine.counters["failed_by_kind"] == {"timeout": 3}
  assert time.monotonic() - began < LONG_S
  assert sorted(x.episode_id for x in done) == [0, *range(4, count)]
  release.set()
  until(lambda: all(x.closed for x in made))
  assert [x.closed for x in made] == [1] * len(made)


@pytest.mark.parametrize("env_workers", [0, 2])
@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(1), StopIteration(), GeneratorExit()])
def test_an_environment_whose_close_raises_is_logged(env_workers, error, caplog):
  class Stuck(Odd):
    respond = staticmethod(raises(RuntimeError("tool died")))

    def close(self):
      raise error

  with caplog.at_level(logging.WARNING), build(lambda: Stuck(2), env_workers=env_workers) as engine:
    done = list(engine.generate(eager, requests(9)))
    assert engine.counters["failed_by_kind"] == {"step_error": 3}
  assert len(done) == 6 and "Environment.close() failed" in caplog.text


def test_a_close_that_hangs_does_not_block():
  release = threading.Event()

  class Stuck(Odd):
    respond = staticmethod(raises(RuntimeError("tool died")))

    def close(self):
      release.wait(500)

  began = time.monotonic()
  with build(lambda: Stuck(2), env_workers=2, env_timeout_s=1.0) as engine:
    done = list(engine.generate(eager, requests(15)))
    assert engine.counters["failed_by_kind"] == {"step_error": 5}
    release.set()  # otherwise the engine's `close` waits for it
  assert len(done) == 10 and time.monotonic() - began < LONG_S


def test_an_abandoned_call_does_not_affect_the_next():
  class Slow(Echo):
    def step(self, action):
      time.sleep(0.05)
      return super().step(action)

  with build(lambda: Slow(2), env_workers=4) as engine:
    iterator = engine.generate(eager, requests(8))
    next(iterator)
    iterator.close()
    done = list(engine.generate(eager, requests(6, first=100)))
  assert sorted(x.episode_id for x in done) == list(range(100, 106))
  assert all(x.total_reward == 2.0 for x in done)


def test_a_tokenizer_that_fails():
  class Refuses(CharTokenizer):
    def decode(self, ids):
      raise UnicodeDecodeError("utf-8", b"", 0, 1, "no")

  for weights in (eager, lambda _: (make_params(0, stop_bias=-99.0), 0)):  # one action ends, one does not
    engine = Engine(model=POLICY, make_env=Echo, tokenizer=Refuses(), config=config())
    with engine:
      assert list(engine.generate(weights, requests(3))) == []
      assert engine.counters["failed_episodes"] == 3


def test_not_finite_logits_fail_the_episode():
  broken = {**PARAMS[0], "table": PARAMS[0]["table"] * np.nan}
  with build(Echo) as engine:
    assert list(engine.generate(lambda _: (broken, 0), requests(3))) == []
    assert engine.counters["failed_by_kind"] == {"bad_trajectory": 3}


def test_too_many_failures_stop_the_engine():
  class Dead(Echo):
    def reset(self, task_index):
      raise ConnectionError("tool server is down")

  with build(Dead) as engine, pytest.raises(RuntimeError, match=r"max_failed_share.*tool server is down"):
    list(engine.generate(fixed, requests(200)))
  with build(Dead, max_failed_share=1.0) as engine:
    assert list(engine.generate(fixed, requests(200))) == []
    assert engine.counters["failed_episodes"] == 200


def test_earlier_successes_do_not_hide_that_everything_fails_now():
  class Dies(Echo):
    def reset(self, task_index):
      if task_index >= 600:
        raise ConnectionError("tool server is down")
      return super().reset(task_index)

  done = []
  with build(lambda: Dies(1)) as engine, pytest.raises(TooManyFailuresError, match="of the last 256 episodes"):
    done.extend(x.episode_id for x in engine.generate(eager, requests(2000)))
  assert engine.counters["failed_episodes"] <= 129 + 8


class Broken(Echo):
  def step(self, action):
    raise NameError("a tool that never works")


def test_actions_that_are_cut_do_not_hide_that_every_step_fails():
  done = []
  with build(Broken, max_action_tokens=3) as engine, pytest.raises(TooManyFailuresError, match="16 of the last 16"):
    done.extend(engine.generate(fixed, requests(200)))
  assert done and all(x.ended == "truncated" and x.num_turns == 1 for x in done)
  assert engine.counters["episodes_answered"] == 0
  with build(lambda: Echo(9), max_action_tokens=3) as engine:  # most are cut after an answer, some before
    done = list(engine.generate(fixed, requests(100)))
    answered = sum(x.total_reward > 0 for x in done)
    assert 0 < answered < 100 and engine.counters["episodes_answered"] == answered
