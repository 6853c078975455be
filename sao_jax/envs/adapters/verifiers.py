"""Single-turn tasks written for Prime Intellect's `verifiers.v1`: their prompts, scored by their own rewards."""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sao_jax.envs.adapters._verifiers_worker import score
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.base import EnvironmentFactory, Step
from sao_jax.envs.grading.scoring_process import NoReplyError, WorkerError, shared_pool
from sao_jax.utils.extras import require_extra

_MEMORY_BYTES = 4 << 30


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
  score_timeout_s: float | None = 60.0
  """Seconds that scoring an answer may take, in one of a few processes; past it the answer scores 0. None: no limit, in
  this process, for rewards that wait for other services, or that cannot be sent to a process."""
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.score_timeout_s is not None and self.score_timeout_s <= 0:
      raise ValueError(f"VerifiersConfig.score_timeout_s must be None or positive; received {self.score_timeout_s!r}.")
    if self.num_tasks < 1:
      raise ValueError(f"VerifiersConfig.num_tasks must be at least 1; received {self.num_tasks!r}.")


class VerifiersTask(TextGame):
  """One task per episode: its system prompt and prompt, one answer, the weighted sum of its `@reward` methods.

  What needs the package's own agent loop (a runtime or container, tool servers, skills, a user who answers, hooks on
  requests and responses, a prompt that is not the user's text) is refused when the task comes up; it cannot be had
  without that loop. An answer that was cut off before its end is recorded as one of finish reason `length`. One that is
  not scored in time, or whose scoring ends its process, scores 0, with the reason as `info["scorer_error"]`.

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
    arguments = (self._task, text, self._finish_reason)
    try:
      if self.config.score_timeout_s is None:
        # In a thread of its own: the caller's may be running a loop already, as a notebook's is.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
          reward, metrics = thread.submit(score, *arguments).result()
      else:
        reward, metrics = _score_elsewhere(*arguments, timeout_s=self.config.score_timeout_s)
    except NoReplyError as error:
      return Reply(done=True, info={"success": False, "metrics": {}, "scorer_error": str(error)})
    info = {"success": reward >= self.config.success_threshold, "metrics": metrics}
    return Reply(reward=reward, done=True, info=info)


def _score_elsewhere(task: Any, text: str, finish_reason: str, *, timeout_s: float) -> tuple[float, dict[str, float]]:
  with require_extra("envs"):
    import cloudpickle  # Of classes that cannot be imported elsewhere, such as a notebook's, it sends the code.
    import verifiers.v1 as vf

  try:
    packed = base64.b64encode(cloudpickle.dumps((task, text, finish_reason))).decode("ascii")
  except Exception as error:
    raise ValueError(
      "tasks must be such that they can be pickled, or VerifiersConfig.score_timeout_s None; "
      f"{type(task).__name__}: {error}"
    ) from error
  workers = shared_pool("sao_jax.envs.adapters._verifiers_worker", memory_bytes=_MEMORY_BYTES)
  try:
    reward, metrics = workers.call([sys.path, packed], timeout_s=timeout_s)
  except WorkerError as error:
    raise (vf.TaskError(error.message) if error.kind == "TaskError" else error) from error
  return reward, metrics


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
