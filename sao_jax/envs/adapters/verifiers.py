"""Single-turn tasks written for Prime Intellect's `verifiers.v1`: their prompts, scored by their own rewards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.base import EnvironmentFactory, Step
from sao_jax.utils.extras import require_extra


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

  What needs the package's own agent loop (a runtime or container, tool servers, skills, a user who answers, hooks on
  requests and responses, a prompt that is not the user's text) is refused when the task comes up; it cannot be had
  without that loop. An answer that was cut off before its end is recorded as one of finish reason `length`.

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
    self._finish_reason = "stop"

  def start(self, task_index: int) -> str:
    self._task = self._tasks[task_index % len(self._tasks)]
    _check_single_turn(self._task)
    self._system_prompt = self._task.data.system_prompt or ""
    return str(self._task.data.prompt_text)

  def step(self, action: str) -> Step:
    self._finish_reason = "stop" if action.endswith(self.template.end) else "length"
    return super().step(action)

  def play(self, text: str) -> Reply:
    trace = _trace(self._task, text, self._finish_reason)
    # In a thread of its own: the caller's may be running a loop already, as a notebook's is.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      thread.submit(lambda: asyncio.run(self._task.score(trace))).result()
    reward = float(trace.reward)
    info = {"success": reward >= self.config.success_threshold, "metrics": dict(trace.metrics)}
    return Reply(reward=reward, done=True, info=info)


def verifiers_factory(config: VerifiersConfig, taskset: Any) -> EnvironmentFactory:
  """Makes environments over the tasks of a `verifiers.v1.Taskset`, which are loaded once.

  Raises:
    ValueError: a taskset whose tasks share tool servers, which need the package's own agent loop.
  """
  if type(taskset).toolsets(taskset.config):
    raise ValueError(f"taskset must be one of single-turn tasks; those of {type(taskset).__name__} share tool servers.")
  tasks = list(itertools.islice(iter(taskset), config.num_tasks))
  return lambda: VerifiersTask(config, tasks)


def _check_single_turn(task: Any) -> None:
  with require_extra("envs"):
    import verifiers.v1 as vf

  kind, data = type(task), task.data
  messages = data.prompt if isinstance(data.prompt, list) else []
  scorers = (*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges()))
  needs = {
    "a container": kind.NEEDS_CONTAINER,
    "tool servers": bool(kind.toolsets(task.config)),
    "skills": bool(data.skills),
    "a runtime to set it up": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
    "a runtime to score it": any(map(_requires_runtime, scorers)),
    "hooks on requests and responses": _hooks_into_calls(task),
    "a user simulator to open it": data.prompt is None,
    "a chat of several speakers": any(not isinstance(message, vf.UserMessage) for message in messages),
    "images": any(part.type != "text" for message in messages for part in _parts(message)),
  }
  found = [need for need, there in needs.items() if there]
  if found:
    name = f"{kind.__name__} number {data.idx}"
    raise ValueError(f"task must be a single-turn one; {name} needs {', '.join(found)}.")


def _requires_runtime(hook: Callable[..., Any]) -> bool:
  """As the package itself decides it."""
  parameter = inspect.signature(hook).parameters.get("runtime")
  return parameter is not None and parameter.default is inspect.Parameter.empty


def _hooks_into_calls(task: Any) -> bool:
  """Whether it changes or refuses model calls. Stops that read the trace come before a next turn: there is none."""
  import verifiers.v1 as vf
  from verifiers.v1.session import hook_boundary
  from verifiers.v1.utils.decorators import discover_decorated

  stops = (hook_boundary(stop, allow_trace=True) for stop in task.hooks("stop"))
  return bool(discover_decorated(task, "intercept")) or any(boundary is not vf.Trace for boundary in stops)


def _parts(message: Any) -> Sequence[Any]:
  content = getattr(message, "content", None)
  return content if isinstance(content, list) else ()


def _trace(task: Any, answer: str, finish_reason: str) -> Any:
  """What the package's rewards read: the conversation as its own agent loop would have recorded it."""
  import verifiers.v1 as vf
  from verifiers.v1.state import state_cls
  from verifiers.v1.trace import ModelCall

  data = task.data
  trace = vf.Trace(
    task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
    state=state_cls(type(task))(),
    agent=vf.AgentInfo(config=vf.AgentConfig()),
  )
  messages: list[Any] = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
  messages += [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
  trace.nodes = [vf.MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(messages)]
  parent = len(messages) - 1 if messages else None
  trace.nodes.append(vf.MessageNode(parent=parent, message=vf.AssistantMessage(content=answer), sampled=True))
  trace.calls.append(ModelCall(node=len(messages), finish_reason=finish_reason))
  trace.stop("agent_completed")
  return trace
