"""Single-turn tasks written for Prime Intellect's `verifiers.v1`: their prompts, scored by their own rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sao_jax.envs.base import EnvironmentFactory
from sao_jax.envs.text_game import Reply, Template, TextGame


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiersConfig:
  """How a taskset is used.

  Raises:
    ValueError: `num_tasks` below 1.
  """

  num_tasks: int = 1_000
  """Tasks taken from the front of the taskset, which may be endless; task indices beyond them start again."""
  success_threshold: float = 1.0
  """Weighted sum of the rewards from which an episode counts as a success."""
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.num_tasks < 1:
      raise ValueError(f"VerifiersConfig.num_tasks must be at least 1; received {self.num_tasks!r}.")


class VerifiersTask(TextGame):
  """One task per episode: its system prompt and prompt, one answer, the weighted sum of its `@reward` methods.

  What needs the package's own agent loop (a runtime or container, tool servers, a user simulator, a prompt of several
  messages that are not the user's) is refused when the task comes up; it cannot be had without that loop.

  Args:
    config: how the tasks are used.
    tasks: the tasks, as iterating over a `verifiers.v1.Taskset` yields them (see `verifiers_factory`).

  Raises:
    ValueError: no tasks, or (from `reset`) a task of a kind that cannot be run here.
  """

  def __init__(self, config: VerifiersConfig, tasks: Sequence[Any]):
    super().__init__(max_turns=1, template=config.template)
    if not tasks:
      raise ValueError("tasks must not be empty.")
    self.config = config
    self._tasks = tasks
    self._task: Any = None

  def start(self, task_index: int) -> str:
    self._task = self._tasks[task_index % len(self._tasks)]
    _check_single_turn(self._task)
    self._system_prompt = self._task.data.system_prompt or ""
    return str(self._task.data.prompt_text)

  def play(self, text: str) -> Reply:
    trace = _trace(self._task, text)
    asyncio.run(self._task.score(trace))
    reward = float(trace.reward)
    info = {"success": reward >= self.config.success_threshold, "metrics": dict(trace.metrics)}
    return Reply(reward=reward, done=True, info=info)


def verifiers_factory(config: VerifiersConfig, taskset: Any) -> EnvironmentFactory:
  """Makes environments over the tasks of a `verifiers.v1.Taskset`, which are loaded once."""
  tasks = list(itertools.islice(iter(taskset), config.num_tasks))
  return lambda: VerifiersTask(config, tasks)


def _check_single_turn(task: Any) -> None:
  import verifiers.v1 as vf

  kind = type(task)
  messages = task.data.prompt if isinstance(task.data.prompt, list) else []
  needs = {
    "a container": kind.NEEDS_CONTAINER,
    "tool servers": bool(kind.toolsets(task.config)),
    "a runtime to set it up": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
    "a runtime to score it": any(map(_requires_runtime, (*task.hooks("reward"), *task.hooks("metric")))),
    "a user simulator to open it": task.data.prompt is None,
    "a chat of several speakers": any(not isinstance(message, vf.UserMessage) for message in messages),
  }
  found = [need for need, there in needs.items() if there]
  if found:
    name = f"{kind.__name__} number {task.data.idx}"
    raise ValueError(f"task must be a single-turn one; {name} needs {', '.join(found)}.")


def _requires_runtime(hook: Callable[..., Any]) -> bool:
  """As the package itself decides it."""
  parameter = inspect.signature(hook).parameters.get("runtime")
  return parameter is not None and parameter.default is inspect.Parameter.empty


def _trace(task: Any, answer: str) -> Any:
  """What the package's rewards read: the conversation as its own agent loop would have recorded it."""
  import verifiers.v1 as vf
  from verifiers.v1.state import state_cls

  data = task.data
  trace = vf.Trace(
    task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
    state=state_cls(type(task))(),
    agent=vf.AgentInfo(config=vf.AgentConfig()),
  )
  messages: list[Any] = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
  messages += [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
  trace.nodes = [
    vf.MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(messages)
  ]
  parent = len(messages) - 1 if messages else None
  trace.nodes.append(vf.MessageNode(parent=parent, message=vf.AssistantMessage(content=answer), sampled=True))
  return trace
