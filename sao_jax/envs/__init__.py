"""Environments: the protocol, the Python tool, and the tasks that need no optional package to import.

Adapters for other libraries are in `adapters`, coding tasks in `coding`, and graders in `grading`.
"""

from __future__ import annotations

from sao_jax.envs.base import Environment, EnvironmentFactory, Step, Tag, Tool, ToolSession
from sao_jax.envs.chat import ChatEnv, ChatFormat, Question
from sao_jax.envs.function_tools import FunctionTool
from sao_jax.envs.sandbox import PythonSession, PythonTool, PythonToolConfig
from sao_jax.envs.tool_math import (
  Demonstration,
  Piece,
  Problem,
  ProblemBank,
  StrategyWeights,
  TaskWeights,
  ToolMath,
  ToolMathConfig,
  demonstrate,
  demonstration_stats,
  tool_math_factory,
)

__all__ = [
  "ChatEnv", "ChatFormat", "Demonstration", "Environment", "EnvironmentFactory", "FunctionTool", "Piece", "Problem",
  "ProblemBank", "PythonSession", "PythonTool", "PythonToolConfig", "Question", "Step", "StrategyWeights", "Tag",
  "TaskWeights", "Tool", "ToolMath", "ToolMathConfig", "ToolSession", "demonstrate", "demonstration_stats",
  "tool_math_factory",
]  # fmt: skip
