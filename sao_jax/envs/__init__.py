"""Environments: the protocol, and the tasks."""

from __future__ import annotations

from sao_jax.envs.base import Environment as Environment
from sao_jax.envs.base import EnvironmentFactory as EnvironmentFactory
from sao_jax.envs.base import Step as Step
from sao_jax.envs.base import Tag as Tag
from sao_jax.envs.base import Tool as Tool
from sao_jax.envs.base import ToolSession as ToolSession
from sao_jax.envs.tool_math.config import StrategyWeights as StrategyWeights
from sao_jax.envs.tool_math.config import TaskWeights as TaskWeights
from sao_jax.envs.tool_math.config import ToolMathConfig as ToolMathConfig
from sao_jax.envs.tool_math.demonstrations import Demonstration as Demonstration
from sao_jax.envs.tool_math.demonstrations import Piece as Piece
from sao_jax.envs.tool_math.demonstrations import demonstrate as demonstrate
from sao_jax.envs.tool_math.demonstrations import demonstration_stats as demonstration_stats
from sao_jax.envs.tool_math.env import ToolMath as ToolMath
from sao_jax.envs.tool_math.env import tool_math_factory as tool_math_factory
from sao_jax.envs.tool_math.problems import Problem as Problem
from sao_jax.envs.tool_math.problems import ProblemBank as ProblemBank
