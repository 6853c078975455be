from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("textworld", reason="needs the extra 'envs'")

from sao_jax.envs.adapters.textworld import HostedTextWorld, TextWorld, TextWorldConfig, textworld_factory

# The package silences its own interpreter's warning about its games; pytest turns it on again.
pytestmark = [pytest.mark.filterwarnings("ignore:Game .* is not fully supported:UserWarning"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TextWorldConfig:
  return TextWorldConfig(
    directory=str(tmp_path_factory.mktemp("games")),
    num_games=1,
    seed=1,
    nb_objects=3,
    quest_length=2,
    max_turns=4,
    list_commands=True,
  )


@pytest.fixture
def env(config: TextWorldConfig) -> Iterator[HostedTextWorld]:
  env = textworld_factory(config)()
  assert isinstance(env, HostedTextWorld)
  yield env
  env.close()


def test_the_walkthrough_wins(env: HostedTextWorld, config: TextWorldConfig) -> None:
  prompt = env.reset(0)
  assert prompt.startswith("<|user|>") and "Commands: " in prompt and "$$" not in prompt
  commands = env.walkthrough()
  assert commands
  for command in commands[:-1]:
    step = env.step(f"{command}<|end|>")
    assert not step.done and step.reward == 0.0 and step.observation.startswith("<|output|>")
  last = env.step(f"{commands[-1]}<|end|>")
  assert last.done and not last.truncated and last.reward == 1.0 and last.info["success"]
  games = list(pathlib.Path(config.directory).glob("*.z8"))
  made = games[0].stat().st_mtime_ns
  assert env.reset(1) == prompt  # num_games is 1.
  assert len(games) == 1 and games[0].stat().st_mtime_ns == made


@pytest.mark.parametrize(("rooms", "objects", "quest"), [(1, 7, 4), (5, 3, 3), (3, 10, 6)])
def test_walkthroughs_of_other_games_win_also_after_detours(
  tmp_path: pathlib.Path, rooms: int, objects: int, quest: int
) -> None:
  config = TextWorldConfig(
    directory=str(tmp_path), num_games=1, seed=1000 + quest, nb_rooms=rooms, nb_objects=objects, quest_length=quest,
    max_turns=60,
  )  # fmt: skip
  env = textworld_factory(config)()
  assert isinstance(env, HostedTextWorld)
  env.reset(0)
  detours = iter(range(3))
  total = 0.0
  while True:
    detour = next(detours, None)
    command = env.walkthrough()[0] if detour is None else sorted(env.commands())[detour]
    step = env.step(f"{command}<|end|>")
    total += step.reward
    if step.done:
      break
  assert total == pytest.approx(1.0) and step.info["success"] and not step.truncated
  env.close()


def test_nonsense_costs_turns(env: HostedTextWorld) -> None:
  env.reset(0)
  for command in ("dance wildly\nlook", "", "xyzzy"):
    step = env.step(f"{command}<|end|>")
    assert not step.done and step.reward == 0.0 and len(step.observation) > 30
  step = env.step("look<|end|>")
  assert step.done and step.truncated and not step.info["success"]


def test_bad_settings_are_refused() -> None:
  with pytest.raises(ValueError, match="quest_length must be at least 1; received 0"):
    TextWorldConfig(directory="games", quest_length=0)
  with pytest.raises(ValueError, match="seed must be at least 0; received -1"):
    TextWorldConfig(directory="games", seed=-1)


def test_commands_that_the_interpreter_cannot_take_are_answered(tmp_path: pathlib.Path) -> None:
  config = TextWorldConfig(directory=str(tmp_path), num_games=1, quest_length=1, max_turns=99)
  env = textworld_factory(config)()
  env.reset(0)
  for action in ("a" * 10_000, "\0", "look\0", "\ud800", "\u00e9", "look\x1b[2J"):
    step = env.step(f"{action}<|end|>")
    assert "printable ASCII" in step.observation and not step.done and step.reward == 0.0
  assert not env.step("look<|end|>").done
  env.close()


def test_commands_that_write_or_read_files_are_refused(
  config: TextWorldConfig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  # In this process, whose folder the test checks.
  env = TextWorld(dataclasses.replace(config, max_turns=20), lock=threading.Lock())
  env.reset(0)
  for command in ("save", "Script on", "transcript", "transcripts", "look. save", "recording on", "restore", "replay"):
    step = env.step(f"{command}<|end|>")
    assert not step.done and "error: there are no saved games" in step.observation
  assert "error" not in env.step("look<|end|>").observation
  env.close()
  assert not list(tmp_path.iterdir())
