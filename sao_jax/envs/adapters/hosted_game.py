"""A text game that runs in a process which can be killed; when it was, the game is played again from its moves."""

from __future__ import annotations

import base64
import pickle
import uuid
from collections.abc import Callable
from typing import Any

from sao_jax.envs.adapters._game_worker import LOST
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.grading.scoring_process import NoReplyError, Workers, shared_pool

_MEMORY_BYTES = 4 << 30
"""For all games of this process."""


class HostedGame(TextGame):
  """Another game, whose code runs elsewhere: a move that never ends, or takes the process with it, ends one episode.

  That episode is truncated with what it has earned, and says why as `info["scorer_error"]`. The other games of the
  process go on: they are started again and given the moves that they had. So a game must depend on nothing but its task
  and its moves; the process has a hash seed of its own, the same everywhere.

  Args:
    make: makes the game; can be pickled.
    max_turns: moves per episode.
    template: how the turns are written.
    move_timeout_s: seconds that a move may take.
    start_timeout_s: seconds that a game may take to start.
    workers: what plays; it must be a single process. None: the process that all games share.

  Raises:
    ValueError: from `make`.
  """

  def __init__(
    self,
    make: Callable[[], TextGame],
    *,
    max_turns: int,
    template: Template,
    move_timeout_s: float = 10.0,
    start_timeout_s: float = 600.0,
    workers: Workers | None = None,
  ):
    super().__init__(max_turns=max_turns, template=template)
    if workers is None:
      workers = shared_pool("sao_jax.envs.adapters._game_worker", max_workers=1, memory_bytes=_MEMORY_BYTES)
    self._workers = workers
    self._make = base64.b64encode(pickle.dumps(make)).decode("ascii")
    self._key = uuid.uuid4().hex
    self._move_timeout_s = move_timeout_s
    self._start_timeout_s = start_timeout_s
    self._task_index = 0
    self._moves: list[str] = []
    self._call("make")

  def start(self, task_index: int) -> str:
    self._task_index, self._moves = task_index, []
    return str(self._call("start", task_index)[0])

  def play(self, text: str) -> Reply:
    try:
      reply = Reply(*self.ask("play", text))
    except NoReplyError as error:
      return Reply(done=True, truncated=True, info={"success": False, "scorer_error": str(error)})
    self._moves.append(text)
    return reply

  def ask(self, method: str, *arguments: str) -> Any:
    """The game's own reply to one of its methods."""
    found = self._call(method, *arguments)
    if found == LOST:
      found = self._call(method, *arguments, history=[self._task_index, self._moves])
    return found[0]

  def close(self) -> None:
    super().close()
    self._call("close")

  def _call(self, method: str, *arguments: Any, history: list[Any] | None = None) -> Any:
    plays_one_move = history is None and method not in ("make", "start")
    timeout_s = self._move_timeout_s if plays_one_move else self._start_timeout_s
    return self._workers.call([self._key, self._make, method, arguments, history], timeout_s=timeout_s)
