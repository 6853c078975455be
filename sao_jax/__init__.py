"""SAO: single-rollout asynchronous optimization for agentic reinforcement learning, in JAX."""

from __future__ import annotations
