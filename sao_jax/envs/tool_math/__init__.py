"""Math problems to solve with a Python tool."""

from __future__ import annotations

from sao_jax.envs.tool_math.config import StrategyWeights, TaskWeights, ToolMathConfig
from sao_jax.envs.tool_math.demonstrations import Demonstration, Piece, demonstrate, demonstration_stats
from sao_jax.envs.tool_math.env import ToolMath, tool_math_factory
from sao_jax.envs.tool_math.problems import Problem, ProblemBank

__all__ = [
  "Demonstration", "Piece", "Problem", "ProblemBank", "StrategyWeights", "TaskWeights", "ToolMath", "ToolMathConfig",
  "demonstrate", "demonstration_stats", "tool_math_factory",
]  # fmt: skip
