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
  """Limits of the interpreter. All are per session unless they say otherwise."""

  backend: Literal["auto", "bubblewrap", "subprocess"] = "auto"
  """`auto`: bubblewrap where it works, else the plain subprocess, with a warning that says so."""
  wall_s: float = 10.0
  """Wall-clock seconds per call; past it the interpreter is killed."""
  cpu_s: int = 5
  """CPU seconds per call; past it the code gets a TimeoutError, and the interpreter lives on."""
  session_cpu_s: int = 60
  """CPU seconds of one process over all calls; past it the process is killed."""
  memory_mb: int = 512
  """Address space of one process."""
  max_processes: int = 16
  """Processes and threads."""
  scratch_mb: int = 16
  """Size of the temporary directory, and of any one file."""
  max_output_bytes: int = 4096
  """Output returned per call; the middle of a longer one is cut out."""
  traceback_frames: int = 4
  """Innermost frames of a traceback that are shown; 0 shows only its last line."""
  pool_size: int = 4
  """Interpreters kept ready."""
  persistent: bool = True
  """Whether variables survive from call to call of one session."""
  python_path: tuple[str, ...] = ()
  """Directories that the code may import from besides the standard library. It can read all that is in them but for
  folders named `*-packages`."""
  packages: tuple[str, ...] = ()
  """Installed packages that the code may import, such as `("numpy", "sympy")`, by the names that pip knows them by.
  What they require comes with them; they are imported before sessions are forked. No other package can be read."""
  preload: tuple[str, ...] = _PRELOAD
  """Modules imported before sessions are forked, so that importing them costs a session nothing."""

  def __post_init__(self) -> None:
    if self.backend not in ("auto", "bubblewrap", "subprocess"):
      raise ValueError(f"backend must be 'auto', 'bubblewrap' or 'subprocess'; received {self.backend!r}.")
    for name in ("cpu_s", "session_cpu_s", "memory_mb", "max_processes", "scratch_mb", "max_output_bytes", "pool_size"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1; received {value!r}.")
    if not self.wall_s > 0:
      raise ValueError(f"wall_s must be > 0; received {self.wall_s!r}.")
    if self.traceback_frames < 0:
      raise ValueError(f"traceback_frames must be >= 0; received {self.traceback_frames!r}.")
    valid = isinstance(self.packages, tuple | list) and all(isinstance(name, str) for name in self.packages)
    if not valid or not all(re.fullmatch(_PACKAGE, name, re.ASCII | re.IGNORECASE) for name in self.packages):
      raise ValueError(
        f"packages must be a tuple of names of packages, without versions, such as 'numpy'; received {self.packages!r}."
      )
    object.__setattr__(self, "packages", tuple(self.packages))
