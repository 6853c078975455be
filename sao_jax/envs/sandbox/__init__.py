"""The Python tool of policies: a sandboxed interpreter."""

from __future__ import annotations

from sao_jax.envs.sandbox.python_tool import PythonSession, PythonTool
from sao_jax.envs.sandbox.python_tool_config import PythonToolConfig

__all__ = ["PythonSession", "PythonTool", "PythonToolConfig"]
