"""Settings of rollout engines in Ray workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from sao_jax.parallel.mesh import EngineMeshConfig


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
  mesh: EngineMeshConfig = EngineMeshConfig()
  """Mesh of each engine over the devices that it sees; by default one device. An axis of -1 takes all of them that the
  other axes leave. `engine.num_slots` counts the slots of one engine, and must be a multiple of data x expert."""
  resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Other Ray resources per engine, such as {'TPU': 4}, for four chips of a TPU."""
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
    devices = self.mesh.num_devices()
    for name, amount in {"num_gpus": self.num_gpus, "resources['TPU']": self.resources.get("TPU", 0.0)}.items():
      if amount and devices is not None and math.ceil(amount) != devices:
        raise ValueError(
          f"ClusterConfig.{name} must be {devices}, the number of devices of {self.mesh}, or 0; received {amount}."
        )
    for name in ("connect_timeout_s", "head_timeout_s", "start_timeout_s", "silence_timeout_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"ClusterConfig.{name} must be > 0; received {getattr(self, name)}.")
