"""How long the engine waits for environments before it starts the next decode chunk."""

from __future__ import annotations

import collections

import numpy as np

_REMEMBERED = 256


class Patience:
  """Decides from how long environments took lately.

  A slot whose environment answers just after a chunk has begun stands idle for all of it; waiting for the answer keeps
  all the others idle. Of the times t that answers took, the best is the one with the largest gain in slot-seconds,

    gain(t) = P(answer <= t) * fresh * chunk_s - t * ready,

  and 0 if no gain is positive: fast environments are waited for, slow tools are not.
  """

  def __init__(self) -> None:
    self._seconds = collections.deque[float](maxlen=_REMEMBERED)

  def answered(self, seconds: float) -> None:
    """An environment took `seconds` to answer, its time in the queue included."""
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
