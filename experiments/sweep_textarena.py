"""Every single-player game of TextArena through the adapter: whether good play earns more than bad play.

    python -m experiments.sweep_textarena
    python -m experiments.sweep_textarena --games=Bandit-v0,Set-v0 --seeds=10

For each game that can be made here, these play the same problems: the best known player, who sees the answers; one who
plays at random; one who quits after five random moves; one who writes nonsense; one who is silent; where there is one,
a player who does what once paid too much. It is a fault if one of the last three earns as much as the best on average
or is said to have succeeded, if anyone earns more than the best or more than 1, if the worst earns more than the random
one, or if a reward of 1 is no success of the best. Prints a row per game, then the games that cannot be made, with the
reason. One JSON object on the last line. Exits 1 when there are faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags

from experiments.support import command, sweeps
from experiments.support.textarena_players import GAMES, Game
from sao_jax.envs.adapters.textarena import TextArena, TextArenaConfig
from sao_jax.utils.extras import require_extra

TURNS = 300
_LIMIT_S = 300.0
_SLOW_S = 1.0
_QUIT_AFTER = 5
_NONSENSE = "banana %$"
BAD = ("nonsense", "silent", "worst")
PLAYERS = ("best", "random", "quits", *BAD)


@dataclasses.dataclass
class Outcome:
  """Mean rewards by player, and what is wrong with them."""

  game: str
  rewards: dict[str, float] = dataclasses.field(default_factory=dict)
  faults: list[str] = dataclasses.field(default_factory=list)
  seeds: int = 0
  reset_s: float = 0.0


def check(game: str, *, seeds: int = 5) -> Outcome:
  """Lets all players play the game; games that are slow to start get one seed. On the main thread.

  Raises:
    ValueError: a game that cannot be made here, or has several players.
  """
  outcome = Outcome(game=game)
  with contextlib.redirect_stdout(io.StringIO()), sweeps.time_limit(_LIMIT_S):  # some games print
    env = TextArena(TextArenaConfig(game=game, max_turns=TURNS), lock=threading.Lock())
    began = time.process_time()
    env.reset(0)
    outcome.reset_s = time.process_time() - began
    outcome.seeds = 1 if outcome.reset_s > _SLOW_S else seeds
    players = GAMES.get(type(env._env).__name__)
    if players is None:
      outcome.faults.append(f"no player is known for {type(env._env).__name__}")
      return outcome
    for name in PLAYERS:
      if name != "worst" or players.worst is not None:
        outcome.rewards[name] = _mean_reward(env, players, name, outcome)
  outcome.faults += _inversions(outcome.rewards)
  return outcome


def _inversions(rewards: Mapping[str, float]) -> list[str]:
  best = rewards["best"]
  faults = [
    f"{name} play earns {reward:.3f}, the best known {best:.3f}"
    for name, reward in rewards.items()
    if reward > best or (name in BAD and reward >= best)
  ]
  if rewards.get("worst", rewards["random"]) > rewards["random"]:
    faults.append(f"worst play earns {rewards['worst']:.3f}, random play {rewards['random']:.3f}")
  return faults


def _mean_reward(env: TextArena, players: Game, name: str, outcome: Outcome) -> float:
  total = 0.0
  for seed in range(outcome.seeds):
    env.reset(seed)
    for move in _moves(env._env, players, name, random.Random(f"{name} {seed}")):
      step = env.step(f"{move}<|end|>")
      if step.done:
        break
    total += step.reward
    if step.reward > 1.0:
      outcome.faults.append(f"{name} play earns {step.reward:.3f} at seed {seed}")
    if name in BAD and step.info["success"]:
      outcome.faults.append(f"{name} play succeeds at seed {seed}")
    if name == "best" and step.reward == 1.0 and not step.info["success"]:
      outcome.faults.append(f"best play earns 1 without success at seed {seed}")
  return total / outcome.seeds


def _moves(env: Any, players: Game, name: str, rng: random.Random) -> Iterator[str]:
  """A player's moves; out of them, nonsense."""
  chosen = (rng.choice(players.moves(env)) for _ in itertools.count())
  if name == "best":
    yield from players.best(env)
  elif name == "worst" and players.worst is not None:
    yield from players.worst(env)
  elif name == "random":
    yield from chosen
  elif name == "quits":
    yield from itertools.islice(chosen, _QUIT_AFTER)
  yield from itertools.repeat("" if name == "silent" else _NONSENSE)


def all_games() -> list[str]:
  """Names of all games of the package, without those of its wrappers."""
  with require_extra("envs"):
    from textarena.envs.registration import ENV_REGISTRY

  return sorted(name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw"))


_GAMES = flags.DEFINE_list("games", None, "Games to check; all if not given.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Problems of each game.", lower_bound=1)


def main(argv: list[str]) -> int:
  del argv
  outcomes, refused = [], {}
  print(f"{'game':24}" + "".join(f"{name:>10}" for name in PLAYERS) + "  seeds")
  for game in _GAMES.value or all_games():
    try:
      outcome = check(game, seeds=_SEEDS.value)
    except ValueError as error:
      if _GAMES.value:
        raise
      refused[game] = str(error)
      continue
    outcomes.append(outcome)
    cells = (f"{outcome.rewards[name]:.3f}" if name in outcome.rewards else "" for name in PLAYERS)
    print(f"{game:24}" + "".join(f"{cell:>10}" for cell in cells) + f"{outcome.seeds:7}", flush=True)
    for fault in outcome.faults:
      print(f"  FAULT {fault}", flush=True)
  for game, reason in refused.items():
    print(f"refused: {reason}" if game in reason else f"refused: {game}: {reason}")
  summary = {
    "games": len(outcomes),
    "refused": len(refused),
    "slow_to_start": [outcome.game for outcome in outcomes if outcome.reset_s > _SLOW_S],
    "unsolved": [outcome.game for outcome in outcomes if outcome.rewards.get("best", 0.0) < 1.0],
    "faults": [outcome.game for outcome in outcomes if outcome.faults],
  }
  return sweeps.conclude(summary, faults="faults")


if __name__ == "__main__":
  command.run(main)
