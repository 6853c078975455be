"""The environment wait policy: how long the engine waits for environments before the next decode chunk."""

from __future__ import annotations

import collections

import numpy as np

_REMEMBERED = 256


class EnvWaitPolicy:
  """Decides from how long environments took recently.

  A slot whose environment responds just after a chunk has begun is idle for the whole chunk. Waiting for the response
  keeps all the other slots idle. Of the recent response times t, the best is the one with the largest gain in
  slot-seconds,

    gain(t) = P(response <= t) * fresh * chunk_s - t * ready,

  and 0 if no gain is positive. So fast environments are waited for, and slow tools are not.
  """

  def __init__(self) -> None:
    self._seconds = collections.deque[float](maxlen=_REMEMBERED)

  def record(self, seconds: float) -> None:
    """Records that an environment took `seconds` to respond, time in the queue included."""
    self._seconds.append(seconds)

  def limit(self, *, fresh: int, ready: int, chunk_s: float) -> float:
    """Seconds since its submission for which a call is worth waiting.

    Args:
      fresh: calls made since the last chunk.
      ready: slots that could decode now.
      chunk_s: seconds that a chunk takes.
    """
    if not (self._seconds and fresh and ready):
      return 0.0
    seconds = np.sort(np.fromiter(self._seconds, np.float64))
    share = np.arange(1, len(seconds) + 1) / len(seconds)
    gain = share * fresh * chunk_s - seconds * ready
    best = int(gain.argmax())
    return float(seconds[best]) if gain[best] > 0 else 0.0
