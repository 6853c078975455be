"""Single-turn tasks of Prime Intellect's `verifiers.v1`, scored by their own rewards."""

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
  """Settings of a taskset.

  Raises:
    ValueError: a field is outside its range.
  """

  num_tasks: int = 1_000
  """Number of tasks to use, from the first on; a taskset may be endless. Larger task indices start again."""
  success_threshold: float = 1.0
  """Weighted sum of the rewards from which an episode counts as a success."""
  score_timeout_s: float | None = 60.0
  """Seconds to score an answer in one of a few child processes; a slower one scores 0. None scores in this process,
  without a limit, for rewards that wait for other services or cannot be pickled."""
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.score_timeout_s is not None and self.score_timeout_s <= 0:
      raise ValueError(f"VerifiersConfig.score_timeout_s must be None or positive; received {self.score_timeout_s!r}.")
    if self.num_tasks < 1:
      raise ValueError(f"VerifiersConfig.num_tasks must be at least 1; received {self.num_tasks!r}.")


class VerifiersTask(TextGame):
  """An environment with one task per episode: its prompts, one answer, and the weighted sum of its `@reward` methods.

  `reset` refuses tasks that need the package's own agent loop: a runtime or container, tool servers, skills, a user
  simulator, hooks on requests and responses, or a prompt that is not one text of the user. An answer that was cut off
  gets the finish reason `length`. An answer scores 0 if scoring takes too long or crashes its process, and
  `info["scorer_error"]` holds the reason.

  Args:
    config: settings of the tasks.
    tasks: the tasks that a `verifiers.v1.Taskset` yields (see `verifiers_factory`).

  Raises:
    ValueError: there are no tasks, or (from `reset`) a task needs the agent loop.
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
        # In a new thread, since the caller's thread may run an event loop, as in a notebook.
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
    import cloudpickle  # It sends the code of classes that the process cannot import.
    import verifiers.v1 as vf

  try:
    packed = base64.b64encode(cloudpickle.dumps((task, text, finish_reason))).decode("ascii")
  except Exception as error:
    raise ValueError(
      "tasks must support pickling, or VerifiersConfig.score_timeout_s must be None; "
      f"received {type(task).__name__}: {error}"
    ) from error
  workers = shared_pool("sao_jax.envs.adapters._verifiers_worker", memory_bytes=_MEMORY_BYTES)
  try:
    reward, metrics = workers.call([sys.path, packed], timeout_s=timeout_s)
  except WorkerError as error:
    raise (vf.TaskError(error.message) if error.kind == "TaskError" else error) from error
  return reward, metrics


def verifiers_factory(config: VerifiersConfig, taskset: Any) -> EnvironmentFactory:
  """Returns a factory of environments for a `verifiers.v1.Taskset`, whose tasks are loaded once.

  Raises:
    ValueError: the tasks share tool servers, which need the package's agent loop.
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
  """Whether a hook requires a runtime, by the same rule as in the package."""
  parameter = inspect.signature(hook).parameters.get("runtime")
  return parameter is not None and parameter.default is inspect.Parameter.empty


def _hooks_into_calls(task: Any) -> bool:
  """Whether a task changes or refuses model calls. Stops that read the trace only matter before a second turn."""
  import verifiers.v1 as vf
  from verifiers.v1.session import hook_boundary
  from verifiers.v1.utils.decorators import discover_decorated

  stops = (hook_boundary(stop, allow_trace=True) for stop in task.hooks("stop"))
  return bool(discover_decorated(task, "intercept")) or any(boundary is not vf.Trace for boundary in stops)


def _parts(message: Any) -> Sequence[Any]:
  content = getattr(message, "content", None)
  return content if isinstance(content, list) else ()
