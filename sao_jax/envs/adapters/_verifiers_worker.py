"""Scoring of `verifiers.v1` tasks in a process of its own (see `scoring_process`).

A request is `[sys.path, arguments]`, where `arguments` are those of `score`, pickled, in base64.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable
from typing import Any

from sao_jax.utils import child_process
from sao_jax.utils.extras import require_extra


def start() -> Callable[[Any], Any]:
  """Loads the package and returns a function from a request to `[reward, metrics]`."""
  with require_extra("envs"):
    import verifiers.v1  # noqa: F401 (loaded before memory is limited)

  return answer


def answer(request: Any) -> tuple[float, dict[str, float]]:
  path, arguments = request
  child_process.extend_path(path)
  return score(*pickle.loads(base64.b64decode(arguments)))  # noqa: S301 (from the process that started this one)


def score(task: Any, text: str, finish_reason: str) -> tuple[float, dict[str, float]]:
  """Returns the weighted sum of a task's rewards, and its metrics, for an answer."""
  trace = _trace(task, text, finish_reason)
  asyncio.run(task.score(trace))
  return float(trace.reward), {name: float(value) for name, value in trace.metrics.items()}


def _trace(task: Any, answer: str, finish_reason: str) -> Any:
  """Returns the conversation as the package's agent loop would record it, for the rewards to read."""
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
