"""The default task: reasoning-gym problems with a Python tool over several turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.tasks.options import checked
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
from sao_jax.envs.tool_math.config import StrategyWeights, TaskWeights, ToolMathConfig
from sao_jax.envs.tool_math.env import ToolMath
from sao_jax.envs.tool_math.problems import ProblemBank
from sao_jax.tokenizers import MathTokenizer
from sao_jax.types import Domain, Split


def make_domain(
  *,
  tool: Mapping[str, Any] | None = None,
  tasks: Mapping[str, float] | None = None,
  strategies: Mapping[str, float] | None = None,
  **options: Any,
) -> Domain:
  """Makes the domain.

  Args:
    tool: fields of `PythonToolConfig`.
    tasks: fields of `TaskWeights`.
    strategies: fields of `StrategyWeights`.
    **options: the other fields of `ToolMathConfig`.

  Raises:
    ValueError: a field is unknown, or its config rejects the value.
  """
  config = checked(
    ToolMathConfig,
    {**options, "tasks": checked(TaskWeights, tasks or {}), "strategies": checked(StrategyWeights, strategies or {})},
  )
  python = PythonTool(checked(PythonToolConfig, tool or {}))
  banks = {split: ProblemBank(config, split) for split in ("train", "eval")}

  def make_env(split: Split) -> ToolMath:
    return ToolMath(config, python, split, bank=banks[split])

  demonstrator = make_env("train")

  def demonstrate(task_index: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
    return [(piece.text, piece.is_action) for piece in demonstrator.demonstrate(task_index, rng).pieces]

  return Domain(
    make_env=make_env,
    tokenizer=MathTokenizer(),
    num_train_tasks=config.train_size,
    num_eval_tasks=config.eval_size,
    demonstrate=demonstrate,
    close=python.close,
  )
