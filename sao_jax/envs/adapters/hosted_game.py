"""A text game in a process that can be killed. After that, the game is played again from its moves."""

from __future__ import annotations

import base64
import pickle
import sys
import uuid
from collections.abc import Callable
from typing import Any

from sao_jax.envs.adapters._game_worker import LOST
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.grading.scoring_process import NoReplyError, Workers, shared_pool

_MEMORY_BYTES = 4 << 30
"""Memory for all games of this process."""


class HostedGame(TextGame):
  """A game whose code runs in another process, so a move that never ends or crashes costs only one episode.

  That episode is truncated and keeps its rewards; `info["scorer_error"]` holds the reason. The other games of the
  process are started again and replay their moves. So a game must depend only on its task and its moves. All such
  processes have the same hash seed.

  Args:
    make: function that makes the game. It must support pickling.
    max_turns: moves per episode.
    template: template of the turns.
    move_timeout_s: seconds per move.
    start_timeout_s: seconds for a game to start.
    workers: a pool of one process for the game. None uses the process that all games share.

  Raises:
    ValueError: `make` raised it.
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
    self._make = [list(sys.path), base64.b64encode(pickle.dumps(make)).decode("ascii")]
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
    """Calls a method of the game and returns its result."""
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
