"""Presets, overrides and dataclasses: exact round trips, and errors that name the field."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections
import pytest
from absl import flags

from experiments.support import config_flags, preset_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  eps_low: float = 1
  """Lower bound.
  In detail."""
  sizes: tuple[int, ...] = (1, 2)
  pair: tuple[int, str] = (1, "a")

  def __post_init__(self) -> None:
    if not 0 <= self.eps_low <= 1:
      raise ValueError(f"eps_low must be in [0, 1]; received {self.eps_low}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  num_steps: int
  name: str = "x"
  on: bool = True
  schedule: Literal["async", "sync"] = "async"
  lag: int | None = None
  share: float | None = 0.5
  inner: Inner = Inner()
  other: Inner | None = None
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


PRESET = """
from tests.experiments import config_flags_test as t
from experiments.support import config_flags

def get_config():
  return config_flags.to_config_dict(t.Outer(num_steps=3, options={"low": 1, "deep": {"a": "b"}}))
"""


def read(**fields: Any) -> Outer:
  return config_flags.from_config_dict(Outer, ml_collections.ConfigDict({"num_steps": 3} | fields))


@pytest.fixture(name="command")
def fixture_command(tmp_path):
  """Returns a function that parses overrides as the command line would."""
  (tmp_path / "preset.py").write_text(PRESET)

  def command(*arguments: str) -> Outer:
    values = flags.FlagValues()
    config_flags.parser(Outer, default=str(tmp_path / "preset.py"), flag_values=values)(["train", *arguments])
    return config_flags.read(Outer, flag_values=values)

  command.path = tmp_path / "preset.py"
  return command


def test_round_trip():
  config = Outer(num_steps=5, inner=Inner(eps_low=0.25, sizes=()), other=Inner(), lag=2, options={"a": {"b": 1}})
  assert config_flags.from_config_dict(Outer, config_flags.to_config_dict(config)) == config
  assert read() == Outer(num_steps=3)
  assert isinstance(read(inner={"eps_low": 1}).inner.eps_low, float)
  assert read(options={"a": {"b": 1}}).options == {"a": {"b": 1}}
  assert type(read(options={"a": {"b": 1}}).options["a"]) is dict


@pytest.mark.parametrize(
  ("fields", "kind", "message"),
  [
    ({"nmae": "y"}, ValueError, r"config\.nmae is not a field of Outer; did you mean name\?"),
    ({"zzz": 1}, ValueError, r"config\.zzz is not a field of Outer; it has num_steps, name"),
    ({"inner": {"eps_lo": 1}}, ValueError, r"config\.inner\.eps_lo is not .* did you mean eps_low"),
    ({"inner": {"eps_low": "a"}}, TypeError, r"config\.inner\.eps_low must be float; received 'a' \(str\)"),
    ({"inner": {"eps_low": 3}}, ValueError, r"config\.inner\.eps_low must be in \[0, 1\]; received 3"),
    ({"inner": {"sizes": (1, 2.5)}}, TypeError, r"config\.inner\.sizes\[1\] must be int; received 2.5"),
    ({"inner": {"sizes": 3}}, TypeError, r"config\.inner\.sizes must be tuple\[int, \.\.\.\]; received 3"),
    ({"inner": {"pair": (1, "a", 2)}}, TypeError, r"config\.inner\.pair .* of length 2"),
    ({"inner": 3}, TypeError, r"config\.inner must be Inner; received 3"),
    ({"other": {"eps_low": "a"}}, TypeError, r"config\.other\.eps_low must be float"),
    ({"num_steps": True}, TypeError, r"config\.num_steps must be int; received True"),
    ({"num_steps": 1.0}, TypeError, r"config\.num_steps must be int; received 1.0"),
    ({"on": 1}, TypeError, r"config\.on must be bool; received 1"),
    ({"share": True}, TypeError, r"config\.share must be float or None; received True"),
    ({"schedule": "never"}, TypeError, r"config\.schedule must be one of 'async', 'sync'; received 'never'"),
    ({"lag": "2"}, TypeError, r"config\.lag must be int or None; received '2'"),
    ({"options": 3}, TypeError, r"config\.options must be .*Mapping.*; received 3"),
  ],
)
def test_errors_name_the_field(fields, kind, message):
  with pytest.raises(kind, match=message):
    read(**fields)


def test_missing_fields_are_named():
  with pytest.raises(ValueError, match="config lacks the required field num_steps"):
    config_flags.from_config_dict(Outer, {})


def test_overrides(command):
  assert command() == Outer(num_steps=3, options={"low": 1, "deep": {"a": "b"}})
  changed = command(
    "--config.num_steps=7", "--config.inner.eps_low=0.5", "--config.inner.sizes=(4,)", "--config.lag=2",
    "--config.schedule=sync", "--config.share=None", "--config.on=false", "--config.options.deep.a=c",
  )  # fmt: skip
  assert changed == Outer(
    num_steps=7, inner=Inner(eps_low=0.5, sizes=(4,)), lag=2, schedule="sync", share=None, on=False,
    options={"low": 1, "deep": {"a": "c"}},
  )  # fmt: skip


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--config.inner.eps_lo=1", r"train: config\.inner\.eps_lo is not a field of Inner; did you mean eps_low\?"),
    ("--config.num_steps.more=1", r"config\.num_steps is int and has no field 'more'"),
    ("--config.num_steps=many", r"^train: config\.num_steps must be int; received 'many'\.$"),
    ("--config.num_steps=None", r"^train: config\.num_steps must be int; received 'None'\.$"),
    ("--config.inner.eps_low=a: b", r"^train: config\.inner\.eps_low must be float; received 'a: b'\.$"),
    ("--config.options.lo=1", r"config\.options\.lo is not in the preset's config\.options; did you mean low\?"),
    ("--config.options.deep.x=1", r"config\.options\.deep\.x is not in the preset's config\.options\.deep; it has a\."),
    ("--config.options.low.x=1", r"config\.options\.low\.x cannot be set: the preset's config\.options\.low is 1\."),
    ("--config.other.eps_low=1", r"config\.other\.eps_low cannot be set: the preset's config\.other is None\."),
    ("--config.inner.eps_low=2", r"^\S+: config\.inner\.eps_low must be in \[0, 1\]; received 2"),
    (
      "--config=nowhere.py",
      r"no preset 'nowhere\.py'\. Available presets:\n(.*\n)+.*tool_math_cpu  The default preset",
    ),
    ("--config=README.md", r"--config=README\.md is not a Python file: .*line \d+"),
    (
      "--config=experiments/presets/published.py",
      r"it has no get_config\(\)\. Available presets:\n  ablation_cpu  The",
    ),
    (
      "--config=experiments/presets/small_cpu.py:fast",
      r"small_cpu\.py takes no argument after a colon; received '.*:fast'",
    ),
    ("--config=experiments/presets/tool_math_cpu.py:fast", r"cpu\.py:fast: budget must be 'full' or 'quick'; received"),
    ("--config=tool_math_cpu:fast", r"--config=tool_math_cpu:fast: budget must be 'full' or 'quick'"),
    ("--config", r"--config needs a preset\. Available presets:\n  ablation_cpu"),
    ("--config=chat", r"--config=chat: this preset needs a checkpoint: --config=chat:DIR or"),
    ("--confg=x", "Unknown command line flag 'confg'"),
  ],
)
def test_bad_overrides_end_in_one_line(command, argument, message):
  with pytest.raises(SystemExit, match=message):
    command(argument)


def test_help_shows_every_field_with_its_value_and_its_whole_first_paragraph():
  text = config_flags.describe(Outer, values=Outer(num_steps=3, lag=2, options={"low": 1}))
  lines = text.splitlines()
  assert "--config.num_steps: int = 3" in lines
  assert "--config.num_steps: int" in config_flags.describe(Outer).splitlines()
  assert "--config.inner.eps_low: float = 1\nLower bound. In detail.\n" in text
  assert "--config.lag: int or None = 2" in lines and "--config.options.low = 1" in lines


def test_the_help_of_a_command_shows_the_values_of_the_chosen_preset(command, capsys):
  with pytest.raises(SystemExit):
    command("--help")
  values = flags.FlagValues()
  config_flags.parser(Outer, default="unused", flag_values=values)(["train", f"--config={command.path}"])
  shown = values.get_help()
  assert "(default: 'unused')" in shown and shown.count("options.low") == 1
  assert "--config.options.low = 1" in values["config"].help and "tool_math_cpu  The default" in values["config"].help


def test_presets_are_found_by_name_from_any_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("small_cpu", "small_cpu.py", "experiments/presets/small_cpu.py"):
    assert preset_files.find(name) == preset_files.FOLDER / "small_cpu.py"
  (tmp_path / "small_cpu.py").write_text(PRESET)  # a file of one's own comes first
  assert preset_files.find("small_cpu.py") == pathlib.Path("small_cpu.py")
  with pytest.raises(ValueError, match=r"no preset 'other/small_cpu\.py'"):
    preset_files.find("other/small_cpu.py")


def test_a_preset_derives_fields_from_overrides(tmp_path):
  path = tmp_path / "preset.py"
  path.write_text(PRESET.replace("get_config()", "get_config(*, overrides)").replace("3,", "int(overrides['lag']),"))
  values = flags.FlagValues()
  config_flags.parser(Outer, default="unused", flag_values=values)(["train", "--config.lag=5", "--config", str(path)])
  expected = Outer(num_steps=5, lag=5, options={"low": 1, "deep": {"a": "b"}})
  assert config_flags.read(Outer, flag_values=values) == expected


def test_a_missing_option_can_be_set_to_text(tmp_path):
  path = tmp_path / "preset.py"
  path.write_text(PRESET.replace('"low": 1', '"low": None'))
  for argument, expected in (("--config.options.low=some.jsonl", "some.jsonl"), ("--config.on=true", None)):
    values = flags.FlagValues()
    config_flags.parser(Outer, default=str(path), flag_values=values)(["train", argument])
    assert config_flags.read(Outer, flag_values=values).options["low"] == expected


def test_a_mapping_is_replaced_as_a_whole(command) -> None:
  options = {"high": [1, 2], "deep": {"a": None}}
  assert command(f"--config.options={options}").options == options
  assert command("--config.options={}").options == {}


@pytest.mark.parametrize("value", ["", "3", '{"a": false}', "[1]", "{1: 2}", "{'a'", "open('x')"])
def test_what_is_no_mapping_is_refused(command, value: str) -> None:
  with pytest.raises(SystemExit, match=r"config\.options must be a Python dictionary .* \(with True, "):
    command(f"--config.options={value}")
