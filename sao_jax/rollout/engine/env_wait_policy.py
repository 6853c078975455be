"""The environment wait policy: how long the engine waits for environments before the next decode chunk."""

from __future__ import annotations

import collections

import numpy as np

_REMEMBERED = 256


class EnvWaitPolicy:
  """Wait limit computed from the recent response times of environments.

  A slot whose environment responds just after a chunk has started is idle for the whole chunk. Waiting for the response
  keeps all the other slots idle. The limit is the recent response time t with the largest gain in slot-seconds,

    gain(t) = P(response <= t) * fresh * chunk_s - t * ready,

  or 0 if no gain is positive. So the engine waits for fast environments, and not for slow tools.

  >>> policy = EnvWaitPolicy()
  >>> for seconds in (0.001, 0.001, 0.5):
  ...   policy.record(seconds)
  >>> policy.limit(fresh=3, ready=5, chunk_s=0.03)  # two of three respond in time
  0.001
  >>> policy.limit(fresh=3, ready=500, chunk_s=0.03)  # too many slots would stand idle
  0.0
  """

  def __init__(self) -> None:
    self._seconds = collections.deque[float](maxlen=_REMEMBERED)

  def record(self, seconds: float) -> None:
    """Records the response time of an environment, in seconds, including the time in the worker queue."""
    self._seconds.append(seconds)

  def limit(self, *, fresh: int, ready: int, chunk_s: float) -> float:
    """Returns how many seconds after its submission a call is worth waiting for; 0 if it is not.

    Args:
      fresh: number of calls made since the last chunk.
      ready: number of slots that could decode now.
      chunk_s: duration of a chunk, in seconds.
    """
    if not (self._seconds and fresh and ready):
      return 0.0
    seconds = np.sort(np.fromiter(self._seconds, np.float64))
    share = np.arange(1, len(seconds) + 1) / len(seconds)
    gain = share * fresh * chunk_s - seconds * ready
    best = int(gain.argmax())
    return float(seconds[best]) if gain[best] > 0 else 0.0
