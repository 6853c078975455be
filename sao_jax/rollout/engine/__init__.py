"""The rollout engine: continuous batching of multi-turn episodes, with weight updates while sequences decode."""

from __future__ import annotations

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.engine import AsyncEngine, Engine, EngineThread, ParamsFor, RolloutEngine
from sao_jax.rollout.engine.model_runner import ModelRunner, Row, StepSpec
from sao_jax.rollout.engine.sampling import sample_tokens

__all__ = [
  "AsyncEngine",
  "Engine",
  "EngineConfig",
  "EngineThread",
  "ModelRunner",
  "ParamsFor",
  "RolloutEngine",
  "Row",
  "StepSpec",
  "sample_tokens",
]
