"""Rollouts: engines that generate trajectories, the queue that passes them to the learner, and weight sync."""

from __future__ import annotations

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.engine import Engine, EngineThread, ParamsFor, RolloutEngine
from sao_jax.rollout.engine.model_runner import ModelRunner, Row, StepSpec
from sao_jax.rollout.engine.sampling import sample_tokens
from sao_jax.rollout.episodes import EnvResponse, EpisodeFailure, EpisodeRequest
from sao_jax.rollout.failures import TooManyFailuresError
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.schedules import AsyncSchedule, LaggedSchedule, RolloutSchedule
from sao_jax.rollout.trajectory_queue import TrajectoryQueue
from sao_jax.rollout.weight_sync import WeightHistory, WeightStore, WeightSync

__all__ = [
  "AsyncSchedule",
  "Engine",
  "EngineConfig",
  "EngineThread",
  "EnvResponse",
  "EpisodeFailure",
  "EpisodeRequest",
  "LaggedSchedule",
  "ModelRunner",
  "ParamsFor",
  "RequestStream",
  "RolloutEngine",
  "RolloutSchedule",
  "Row",
  "StepSpec",
  "TooManyFailuresError",
  "TrajectoryQueue",
  "WeightHistory",
  "WeightStore",
  "WeightSync",
  "sample_tokens",
]
