"""The rollout engine: continuous batching of multi-turn episodes, with new weights taken up while sequences decode."""

from __future__ import annotations

from sao_jax.rollout.engine.config import EngineConfig as EngineConfig
from sao_jax.rollout.engine.engine import AsyncEngine as AsyncEngine
from sao_jax.rollout.engine.engine import Engine as Engine
from sao_jax.rollout.engine.engine import EngineThread as EngineThread
from sao_jax.rollout.engine.engine import ParamsFor as ParamsFor
from sao_jax.rollout.engine.engine import RolloutEngine as RolloutEngine
from sao_jax.rollout.engine.sampler import Sampler as Sampler
from sao_jax.rollout.engine.sampler import SamplerSpec as SamplerSpec
from sao_jax.rollout.engine.sampler import sample_tokens as sample_tokens
