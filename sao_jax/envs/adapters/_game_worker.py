"""The games of `hosted_game`, in the process that plays them (see `scoring_process`).

A request is `[key, make, method, arguments, history]`. `make` holds the caller's `sys.path` and the pickled function
that makes the game, in base64.
`history` is null or `[task_index, moves]`, from which a lost game is played again.
"""

from __future__ import annotations

import base64
import collections
import pickle
from collections.abc import Callable
from typing import Any, Final

from sao_jax.envs.adapters.text_game import Reply, TextGame
from sao_jax.utils import child_process

LOST: Final = "lost"
"""The reply if the game is lost, because the process is new or has played many other games since."""
METHODS: Final = ("make", "start", "play", "commands", "walkthrough", "close")
_KEPT_GAMES = 256


def start() -> Callable[[Any], Any]:
  """Returns a function from a request to `LOST` or `[value]`."""
  return Games().answer


class Games:
  """The most recently played games. Older ones are dropped, since they can be played again from their moves."""

  def __init__(self) -> None:
    self._games: collections.OrderedDict[str, TextGame] = collections.OrderedDict()

  def answer(self, request: Any) -> Any:
    key, make, method, arguments, history = request
    if method not in METHODS:
      raise ValueError(f"method must be one of {METHODS}; received {method!r}.")
    game = self._games.get(key)
    if game is None:
      if method not in ("make", "start") and history is None:
        return LOST
      path, packed = make
      child_process.extend_path(path)
      make_game = pickle.loads(base64.b64decode(packed))  # noqa: S301 (from the process that started this one)
      game = self._add(key, make_game())
      if history is not None:
        game.start(history[0])
        for move in history[1]:
          game.play(move)
    self._games.move_to_end(key)
    if method == "make":
      return [None]
    if method == "close":
      del self._games[key]
    value = getattr(game, method)(*arguments)
    return [[*value[:-1], dict(value.info)] if isinstance(value, Reply) else value]

  def _add(self, key: str, game: TextGame) -> TextGame:
    self._games[key] = game
    while len(self._games) > _KEPT_GAMES:
      self._games.popitem(last=False)[1].close()
    return game
