"""Rollouts: weights, the engine that generates trajectories, and the queue that hands them to the learner."""

from __future__ import annotations

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.engine import Engine, EngineThread, ParamsFor
from sao_jax.rollout.engine.sampler import Sampler, SamplerSpec, sample_tokens
from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.failures import TooManyFailuresError
from sao_jax.rollout.trajectory_queue import TrajectoryQueue
from sao_jax.rollout.weight_sync import WeightStore

__all__ = [
  "Engine",
  "EngineConfig",
  "EngineThread",
  "EpisodeFailure",
  "EpisodeRequest",
  "ParamsFor",
  "Sampler",
  "SamplerSpec",
  "TooManyFailuresError",
  "TrajectoryQueue",
  "WeightStore",
  "sample_tokens",
]
