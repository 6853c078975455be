"""Limits of the sandboxed Python interpreter."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

_PRELOAD = (
  "math",
  "cmath",
  "random",
  "re",
  "json",
  "itertools",
  "functools",
  "collections",
  "fractions",
  "decimal",
  "statistics",
  "string",
  "operator",
  "heapq",
  "bisect",
  "datetime",
  "time",
  "copy",
  "typing",
  "dataclasses",
  "enum",
  "inspect",
  "textwrap",
  "numbers",
)
_PACKAGE = r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonToolConfig:
  """Limits of the interpreter, per session unless stated otherwise."""

  backend: Literal["auto", "bubblewrap", "subprocess"] = "auto"
  """`auto` uses bubblewrap where it works, else a plain subprocess, with a warning."""
  wall_s: float = 10.0
  """Wall-clock seconds per call. After that the interpreter is killed."""
  cpu_s: int = 5
  """CPU seconds per call. After that the code gets a TimeoutError, and the interpreter keeps running."""
  session_cpu_s: int = 60
  """CPU seconds of one process over all calls. After that the process is killed."""
  memory_mb: int = 512
  """Address space of one process."""
  max_processes: int = 16
  """Processes and threads."""
  scratch_mb: int = 16
  """Size of the temporary directory, and of any one file."""
  max_output_bytes: int = 4096
  """Output returned per call. The middle of longer output is cut."""
  traceback_frames: int = 4
  """Number of innermost traceback frames shown. 0 shows only the last line."""
  pool_size: int = 4
  """Number of interpreters kept ready."""
  persistent: bool = True
  """Whether variables stay from call to call within a session."""
  python_path: tuple[str, ...] = ()
  """Directories that code may import from besides the standard library. It can read everything in them except folders
  named `*-packages`."""
  packages: tuple[str, ...] = ()
  """Installed packages that code may import, with their requirements, by pip name, such as `("numpy", "sympy")`. They
  are imported before sessions are forked. No other packages can be read."""
  preload: tuple[str, ...] = _PRELOAD
  """Modules imported before sessions are forked, which makes importing them free."""

  def __post_init__(self) -> None:
    if self.backend not in ("auto", "bubblewrap", "subprocess"):
      raise ValueError(f"backend must be 'auto', 'bubblewrap' or 'subprocess'; received {self.backend!r}.")
    for name in ("cpu_s", "session_cpu_s", "memory_mb", "max_processes", "scratch_mb", "max_output_bytes", "pool_size"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"PythonToolConfig.{name} must be an integer >= 1; received {value!r}.")
    if not self.wall_s > 0:
      raise ValueError(f"wall_s must be > 0; received {self.wall_s!r}.")
    if self.traceback_frames < 0:
      raise ValueError(f"traceback_frames must be >= 0; received {self.traceback_frames!r}.")
    valid = isinstance(self.packages, tuple | list) and all(isinstance(name, str) for name in self.packages)
    if not valid or not all(re.fullmatch(_PACKAGE, name, re.ASCII | re.IGNORECASE) for name in self.packages):
      raise ValueError(
        f"packages must be a tuple of names of packages, such as 'numpy', without versions; received {self.packages!r}."
      )
    object.__setattr__(self, "packages", tuple(self.packages))
