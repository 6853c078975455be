"""Rollout engines in Ray workers. Ray, from the extra `cluster`, is imported when an `EngineCluster` is made."""

from __future__ import annotations

from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.ray.ray_worker import EngineFactory

__all__ = ["ClusterConfig", "EngineCluster", "EngineFactory"]
