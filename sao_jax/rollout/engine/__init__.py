"""The rollout engine: continuous batching of multi-turn episodes, with weight updates while sequences decode."""

from __future__ import annotations

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.engine import AsyncEngine, Engine, EngineThread, ParamsFor, RolloutEngine
from sao_jax.rollout.engine.sampler import Sampler, SamplerSpec, sample_tokens

__all__ = [
  "AsyncEngine",
  "Engine",
  "EngineConfig",
  "EngineThread",
  "ParamsFor",
  "RolloutEngine",
  "Sampler",
  "SamplerSpec",
  "sample_tokens",
]
