"""Settings of rollout engines in Ray workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Validated settings of `EngineCluster`; `ValueError` if a field is out of range."""

  num_engines: int = 0
  """Number of engines in Ray workers; 0: one embedded engine, in the learner's process."""
  address: str | None = None
  """Address of the Ray cluster; 'local': start a new one. None: that of RAY_ADDRESS, or one that runs on this machine,
  or a new one."""
  num_cpus: float = 1.0
  """Cores per engine. Ray reserves them; rounded up, it is also the number of threads of the engine's CPU programs."""
  num_gpus: float = 0.0
  """GPUs per engine; other GPUs are hidden from it."""
  resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Other Ray resources per engine, such as {'TPU': 4}."""
  env_vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of the engines' processes. JAX_PLATFORMS is the learner's unless it is set here."""
  max_restarts: int = 3
  """Number of times in a row that an engine may be replaced. An episode fails after this many engines died with it."""
  connect_timeout_s: float = 180.0
  """Seconds to join the Ray cluster, or to start one."""
  head_timeout_s: float = 20.0
  """The run ends with an error after the cluster's head was unreachable for this long (seconds). After 60 s Ray itself
  ends the process."""
  start_timeout_s: float = 600.0
  """Seconds for an engine to start, including the wait for free resources in the cluster."""
  silence_timeout_s: float = 120.0
  """Seconds without a response after which an engine counts as dead."""

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
