"""Settings of rollout engines that run as Ray actors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Where rollout engines run; checked when made."""

  num_engines: int = 0
  """Engines in Ray actors; 0: the one embedded engine, in the learner's process."""
  address: str | None = None
  """Of the Ray cluster; None: that of RAY_ADDRESS, or one that runs here, or a new one here; 'local': a new one."""
  num_cpus: float = 1.0
  """Cores of one engine: where Ray finds room for it, and (rounded up) the threads of its CPU programs."""
  num_gpus: float = 0.0
  """GPUs of one engine; it sees no others."""
  resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """What else one engine takes of its machine, by Ray's names: {'TPU': 4}."""
  env_vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment of the engines' processes. JAX_PLATFORMS is the learner's unless named here."""
  max_restarts: int = 3
  """Times in a row that an engine may be replaced; an episode that was on so many engines that died fails."""
  connect_timeout_s: float = 180.0
  """How long it may take to join the Ray cluster, or to start one."""
  head_timeout_s: float = 20.0
  """The run ends, with an error, once the cluster's head is out of reach for so long; after 60 s Ray ends processes."""
  start_timeout_s: float = 600.0
  """How long an engine may take to be up; waiting for room in the cluster counts."""
  silence_timeout_s: float = 120.0
  """An engine that does not answer for so long counts as dead."""

  def __post_init__(self) -> None:
    for name in ("num_engines", "max_restarts"):
      if getattr(self, name) < 0:
        raise ValueError(f"ClusterConfig.{name} must be >= 0; received {getattr(self, name)}.")
    for name, amount in {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}.items():
      if not 0 <= amount < math.inf:
        raise ValueError(f"ClusterConfig.{name} must be finite and >= 0; received {amount}.")
    for name in ("connect_timeout_s", "head_timeout_s", "start_timeout_s", "silence_timeout_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"ClusterConfig.{name} must be > 0; received {getattr(self, name)}.")
