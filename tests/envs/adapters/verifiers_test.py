from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sao_jax.envs.adapters.verifiers import VerifiersConfig, VerifiersTask, verifiers_factory
from tests.waiting import LONG_S

vf = pytest.importorskip("verifiers.v1", reason="needs the extra 'envs'")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


class Data(vf.TaskData):
  target: str


class Echo(vf.Task[Data, vf.State, vf.TaskConfig]):
  @vf.reward(weight=0.75)
  async def exact(self, trace: vf.Trace) -> float:
    return float(trace.last_reply == self.data.target)

  @vf.reward(weight=0.25)
  async def short(self, trace: vf.Trace) -> float:
    return float(len(trace.messages[-1].content) < 10)

  @vf.metric
  async def messages(self, trace: vf.Trace) -> float:
    return float(len(trace.messages))


class NeedsRuntime(Echo):
  @vf.reward
  async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
    raise AssertionError("never called")


class NeedsSetup(Echo):
  async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
    raise AssertionError("never called")


class Gated(Echo):
  @vf.stop
  async def refuse(self, response: vf.Response) -> bool:
    raise AssertionError("never called")


class Judged(vf.Task[Data, vf.State, vf.TaskConfig]):
  """A task whose rewards read the episode, with a stop for tasks of more turns."""

  @vf.stop
  async def enough(self, trace: vf.Trace) -> bool:
    return trace.num_turns >= 1

  @vf.reward
  async def scores(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> dict[str, float]:
    assert runtime is None and trace.is_completed and trace.stop_condition == "agent_completed"
    await asyncio.sleep(0)
    return {"whole": 0.5 * (not trace.is_truncated), "turns": 0.5 * (trace.num_turns == 1)}


class Shared(vf.Taskset[Echo, vf.TasksetConfig]):
  @classmethod
  def toolsets(cls, config: vf.TasksetConfig) -> list[Any]:
    return [object()]

  def load(self) -> Iterator[Echo]:
    raise AssertionError("never called")


class Words(vf.Taskset[Echo, vf.TasksetConfig]):
  INFINITE = True

  def load(self) -> Iterator[Echo]:
    i = 0
    while True:
      yield Echo(Data(prompt=f"Say {i}.", system_prompt="Be brief." if i % 2 else None, target=str(i)))
      i += 1


def test_prompts_and_rewards_are_the_packages_own() -> None:
  make = verifiers_factory(VerifiersConfig(num_tasks=3), Words(vf.TasksetConfig(id="words")))
  env = make()
  assert env.reset(1) == "<|system|>Be brief.<|user|>Say 1.<|assistant|>"
  step = env.step("1<|end|>")
  assert step.done and step.reward == 1.0 and step.info["success"] and step.info["metrics"] == {"messages": 3.0}
  assert env.reset(2) == "<|user|>Say 2.<|assistant|>"
  step = env.step("it is 2, I think<|end|>")
  assert step.reward == 0.0 and not step.info["success"] and step.info["metrics"] == {"messages": 2.0}
  env.reset(5)  # Task 2 again.
  step = env.step("3<|end|>")
  assert step.reward == 0.25 and not step.info["success"]


@pytest.mark.parametrize(
  ("task", "message"),
  [
    (lambda: NeedsRuntime(Data(prompt="x", target="x")), "a runtime to score it"),
    (lambda: NeedsSetup(Data(prompt="x", target="x")), "a runtime to set it up"),
    (lambda: Gated(Data(prompt="x", target="x")), "hooks on requests and responses"),
    (lambda: Echo(Data(prompt=None, target="x")), "a user simulator"),
    (lambda: Echo(Data(prompt=[vf.UserMessage(content=[IMAGE])], target="x")), "images"),
    (lambda: Echo(Data(prompt=[vf.AssistantMessage(content="x")], target="x")), "a chat of several speakers"),
  ],
)
def test_other_kinds_of_tasks_are_refused(task: Any, message: str) -> None:
  with pytest.raises(ValueError, match=f"task must be a single-turn one.*{message}"):
    VerifiersTask(VerifiersConfig(), [task()]).reset(0)


def test_an_answer_that_was_cut_off_is_a_truncated_trace() -> None:
  env = VerifiersTask(VerifiersConfig(), [Judged(Data(prompt="x", target="x"))])
  for action, reward in (("y<|end|>", 1.0), ("y", 0.5)):
    env.reset(0)
    assert env.step(action).reward == reward


def test_scoring_where_a_loop_is_running_already() -> None:
  async def notebook() -> float:
    env = VerifiersTask(VerifiersConfig(), [Judged(Data(prompt="x", target="x"))])
    env.reset(0)
    return env.step("y<|end|>").reward

  assert asyncio.run(notebook()) == 1.0


def test_a_reward_that_raises_is_an_error_of_the_episode() -> None:
  class Broken(Echo):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
      raise KeyError("no such field")

  env = VerifiersTask(VerifiersConfig(), [Broken(Data(prompt="x", target="x"))])
  env.reset(0)
  with pytest.raises(vf.TaskError, match="no such field"):
    env.step("y<|end|>")


class Nasty(Echo):
  @vf.reward
  async def nasty(self, trace: vf.Trace) -> float:
    if trace.last_reply == "spin":
      while True:
        pass
    if trace.last_reply == "die":
      os._exit(1)
    return 1.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ("answer", "limit_s", "reason"), [("spin", 1.0, "it took more than 1 s"), ("die", LONG_S, "its process ended")]
)
def test_an_answer_that_is_never_scored_scores_nothing_in_time(answer: str, limit_s: float, reason: str) -> None:
  env = VerifiersTask(VerifiersConfig(score_timeout_s=limit_s), [Nasty(Data(prompt="x", target="x"))])
  env.reset(0)
  began = time.perf_counter()
  step = env.step(f"{answer}<|end|>")
  assert time.perf_counter() - began < LONG_S
  assert step.done and not step.truncated and step.reward == 0.0 and not step.info["success"]
  assert reason in step.info["scorer_error"]
  patient = VerifiersTask(VerifiersConfig(), [Nasty(Data(prompt="x", target="x"))])
  patient.reset(0)
  assert patient.step("x<|end|>").reward == 2.0


def test_scoring_in_this_process_where_tasks_ask_for_it() -> None:
  class Local(Echo):
    @vf.reward
    async def here(self, trace: vf.Trace) -> float:
      return float(seen.append(os.getpid()) is None)

  seen: list[int] = []
  task = Local(Data(prompt="x", target="x"))
  for limit, here in ((60.0, []), (None, [os.getpid()])):
    env = VerifiersTask(VerifiersConfig(score_timeout_s=limit), [task])
    env.reset(0)
    assert env.step("x<|end|>").reward == 2.0 and seen == here


def test_tasks_that_cannot_be_sent_are_refused() -> None:
  lock = threading.Lock()

  class Locked(Echo):
    @vf.reward
    async def locked(self, trace: vf.Trace) -> float:
      return float(lock.acquire())

  env = VerifiersTask(VerifiersConfig(), [Locked(Data(prompt="x", target="x"))])
  env.reset(0)
  with pytest.raises(ValueError, match=r"support pickling, or .*score_timeout_s must be None; received Locked"):
    env.step("x<|end|>")


def test_bad_input_is_refused() -> None:
  with pytest.raises(ValueError, match="tasks must not be empty"):
    VerifiersTask(VerifiersConfig(), [])
  with pytest.raises(ValueError, match="those of Shared share tool servers"):
    verifiers_factory(VerifiersConfig(), Shared(vf.TasksetConfig(id="shared")))
  with pytest.raises(ValueError, match="score_timeout_s must be None or positive; received 0"):
    VerifiersConfig(score_timeout_s=0)
  with pytest.raises(ValueError, match="num_tasks must be at least 1"):
    VerifiersConfig(num_tasks=0)
