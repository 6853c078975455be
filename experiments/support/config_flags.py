"""Presets and the command line on one side, frozen dataclasses on the other.

A preset is a file whose `get_config()` returns `to_config_dict(SomeConfig(...))`; ml_collections' flag then lets the
command line override every field (`--config.learner.eps_low=0.2`), and `from_config_dict` turns the result back into
the dataclass, which checks its values. Nothing is ignored on the way: an unknown field and a wrong type are errors that
name the field.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import itertools
import pathlib
import runpy
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ml_collections
from absl import flags
from ml_collections import config_dict
from ml_collections import config_flags as ml_config_flags

from experiments.tasks.options import closest

T = TypeVar("T")


def from_config_dict(
  config_type: type[T], config: Mapping[str, Any] | ml_collections.ConfigDict, *, path: str = "config"
) -> T:
  """Makes a dataclass, nested ones included, from a ConfigDict or a plain mapping.

  Args:
    config_type: the dataclass.
    config: its fields; those left out take their defaults.
    path: the name of `config` in messages.

  Raises:
    TypeError: a value of the wrong type; the message names the field, what it got and what it wants.
    ValueError: an unknown field (with the closest known ones), a missing one, or what the dataclass itself refuses.
  """
  hints = typing.get_type_hints(config_type)
  fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, config_type)) if field.init}
  values = dict(config.items())
  for name in values:
    if name not in fields:
      raise ValueError(f"{path}.{name} is not a field of {config_type.__name__}{closest(str(name), fields)}")
  missing = [
    name for name, field in fields.items()
    if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
  ]  # fmt: skip
  if missing:
    raise ValueError(f"{path} lacks the required field{'s' * (len(missing) > 1)} {', '.join(missing)}.")
  converted = {name: _convert(hints[name], value, f"{path}.{name}") for name, value in values.items()}
  try:
    return config_type(**converted)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
  """Turns a dataclass, nested ones included, into a ConfigDict whose every field the command line can override.

  An optional field that is None becomes a typed placeholder, so that an override is parsed as the right type.
  """
  hints = typing.get_type_hints(type(config))
  result = ml_collections.ConfigDict()
  for field in dataclasses.fields(config):
    hint = hints[field.name]
    result[field.name] = _dissolve(_convert(hint, getattr(config, field.name), field.name), hint)
  return result


def parser(
  config_type: type[Any], *, default: str, flag_values: flags.FlagValues = flags.FLAGS
) -> Callable[[Sequence[str]], list[str]]:
  """For `absl.app.run(main, flags_parser=...)`: defines `--config`, parses, and ends with one line on an error.

  The help of `--config` lists every field with default and meaning. `--config.FIELD=None` clears an optional field;
  `--config.FIELD="{'key': value}"` replaces a mapping.

  Args:
    config_type: the dataclass that the preset describes.
    default: the preset that runs without `--config`.
    flag_values: where `--config` is defined.
  """
  text = f"The preset, a Python file; every field can be overridden, --config.FIELD=VALUE:\n{describe(config_type)}"

  def parse(argv: Sequence[str]) -> list[str]:
    kept, replaced = _split_overrides(config_type, argv)
    _check_options(load_preset(_preset_of(kept) or default), kept)
    ml_config_flags.DEFINE_config_file("config", default, text, flag_values=flag_values, sys_argv=kept)
    # --help shows what the main module defines; this module defines the flag on its behalf.
    flag_values.register_key_flag_for_module(argv[0], flag_values["config"])
    rest = list(flag_values(kept))
    for field, value in replaced.items():
      *parents, last = field.split(".")
      node: Any = flag_values["config"].value
      for parent in parents:
        node = node[parent]
      with node.ignore_type():
        node[last] = value
    return rest

  def parse_or_exit(argv: Sequence[str]) -> list[str]:
    try:
      return parse(argv)
    except (flags.Error, ValueError, OSError) as error:
      sys.exit(f"{pathlib.Path(argv[0]).stem}: {error}")

  return parse_or_exit


def read(config_type: type[T], *, flag_values: flags.FlagValues = flags.FLAGS) -> T:
  """The configuration that the parsed command line describes; ends the program with one line if it is not allowed."""
  try:
    return from_config_dict(config_type, flag_values["config"].value)
  except (TypeError, ValueError, OSError) as error:
    sys.exit(f"--config: {error}")


def load_preset(preset: str) -> ml_collections.ConfigDict:
  """What the `get_config` of a preset returns, so that what is wrong with it is known before the flag is defined.

  Args:
    preset: `FILE.py`, or `FILE.py:ARGUMENT` for a `get_config` with an argument.

  Raises:
    ValueError: no such file (with those that there are), no Python, no `get_config`, or one that refuses the argument.
  """
  path, _, argument = preset.partition(":")
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--config must be the file of a preset; received {path!r}, which is none. There are\n{presets()}")
  try:
    get_config = runpy.run_path(path).get("get_config")
  except (SyntaxError, UnicodeDecodeError) as error:
    raise ValueError(f"--config={path} is not a Python file: {error}") from error
  if get_config is None:
    raise ValueError(f"--config={path} is not a preset: it has no get_config(). There are\n{presets()}")
  arguments = [argument] if ":" in preset else []
  try:
    inspect.signature(get_config).bind(*arguments)
  except TypeError as error:
    takes = "nothing" if arguments else "an argument"
    raise ValueError(f"--config={path} takes {takes} behind a colon; received {preset!r}.") from error
  try:
    return typing.cast(ml_collections.ConfigDict, get_config(*arguments))
  except (ValueError, OSError) as error:
    raise ValueError(f"--config={preset}: {error}") from error


def presets() -> str:
  """A line for each preset of `experiments/presets`: its file, and the first line of its docstring."""
  lines = []
  for path in sorted((pathlib.Path(__file__).parents[1] / "presets").glob("*.py")):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body):
      lines.append(f"  experiments/presets/{path.name}  {(ast.get_docstring(tree) or '').splitlines()[0]}")
  return "\n".join(lines)


def parse_mapping(text: str) -> dict[str, Any] | None:
  """The dictionary with text as keys that a Python literal is; None if it is none."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return None
  return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None


def describe(config_type: type[Any], *, prefix: str = "--config", defaults: Any = None) -> str:
  """One line per field: name, type, default, and the docstring under the field.

  Args:
    config_type: the dataclass.
    prefix: what stands before the fields' names.
    defaults: an instance whose values are the defaults; None: those of the class.
  """
  hints = typing.get_type_hints(config_type)
  documentation = _field_docstrings(config_type)
  lines = []
  for field in dataclasses.fields(config_type):
    name = f"{prefix}.{field.name}"
    hint = hints[field.name]
    value = field.default if defaults is None else getattr(defaults, field.name)
    if dataclasses.is_dataclass(hint):
      nested = None if value is dataclasses.MISSING else value
      lines.append(describe(typing.cast(Any, hint), prefix=name, defaults=nested))
      continue
    default = "" if value is dataclasses.MISSING else f" = {value!r}"
    meaning = documentation.get(field.name, "").splitlines()[:1]
    lines.append("  ".join([f"{name}: {_show(hint)}{default}", *meaning]))
  return "\n".join(lines)


def _convert(hint: Any, value: Any, path: str) -> Any:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return _plain(value)
  if origin in (typing.Union, types.UnionType):
    return _convert_union(hint, value, path)
  if origin is typing.Literal:
    if any(type(value) is type(choice) and value == choice for choice in args):
      return value
  elif origin in (tuple, collections.abc.Sequence):
    if isinstance(value, tuple | list):
      return _convert_tuple(hint, tuple(value), path)
  elif origin in (dict, collections.abc.Mapping):
    if isinstance(value, Mapping | ml_collections.ConfigDict):
      return {key: _convert(args[1], item, f"{path}.{key}") for key, item in value.items()}
  elif dataclasses.is_dataclass(hint):
    if isinstance(value, typing.cast(Any, hint)):
      return value
    if isinstance(value, Mapping | ml_collections.ConfigDict):
      return from_config_dict(typing.cast(Any, hint), value, path=path)
  elif hint is float:
    if isinstance(value, int | float) and not isinstance(value, bool):
      return float(value)
  elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
    return value
  raise TypeError(f"{path} must be {_show(hint)}; received {value!r} ({type(value).__name__}).")


def _convert_union(hint: Any, value: Any, path: str) -> Any:
  arms = typing.get_args(hint)
  if value is None and type(None) in arms:
    return None
  arms = tuple(arm for arm in arms if arm is not type(None))
  for arm in arms:
    try:
      return _convert(arm, value, path)
    except TypeError:
      if len(arms) == 1 and dataclasses.is_dataclass(arm) and isinstance(value, Mapping | ml_collections.ConfigDict):
        raise
  raise TypeError(f"{path} must be {_show(hint)}; received {value!r} ({type(value).__name__}).")


def _convert_tuple(hint: Any, value: tuple[Any, ...], path: str) -> tuple[Any, ...]:
  args = typing.get_args(hint)
  if typing.get_origin(hint) is not tuple or args[1:] == (Ellipsis,):
    args = (args[0],) * len(value)
  elif len(args) != len(value):
    raise TypeError(f"{path} must be {_show(hint)}, of length {len(args)}; received {value!r}.")
  return tuple(_convert(arm, item, f"{path}[{i}]") for i, (arm, item) in enumerate(zip(args, value, strict=True)))


def _dissolve(value: Any, hint: Any) -> Any:
  if value is None:
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    kind = _runtime_type(arms[0]) if arms else None
    return None if kind is None else config_dict.placeholder(kind)
  if dataclasses.is_dataclass(value):
    return to_config_dict(value)
  if isinstance(value, dict):
    return ml_collections.ConfigDict(value)
  return value


def _runtime_type(hint: Any) -> type | None:
  """The class of a field's values as flags parse them; None for what they cannot parse (a sub-config)."""
  origin = typing.get_origin(hint)
  if origin is typing.Literal:
    return type(typing.get_args(hint)[0])
  kind = tuple if origin in (tuple, collections.abc.Sequence) else hint
  return kind if kind in (bool, int, float, str, tuple) else None


def _plain(value: Any) -> Any:
  return value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value


def _hint_of(config_type: Any, field: str) -> Any:
  """The type of a dotted field; inside a mapping anything goes."""
  hint, path = config_type, "config"
  for part in field.split("."):
    arms = [arm for arm in typing.get_args(hint) if dataclasses.is_dataclass(arm)]
    hint = arms[0] if arms else hint
    if not dataclasses.is_dataclass(hint):
      if typing.get_origin(hint) in (dict, collections.abc.Mapping) or hint is Any:
        return Any
      raise ValueError(f"{path} is {_show(hint)} and has no field {part!r}.")
    hints = typing.get_type_hints(hint)
    if part not in hints:
      raise ValueError(f"{path}.{part} is not a field of {typing.cast(Any, hint).__name__}{closest(part, hints)}")
    hint, path = hints[part], f"{path}.{part}"
  return hint


def _split_overrides(config_type: type[Any], argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
  """Checks the field of every `--config.FIELD=VALUE`.

  Returns the arguments to parse, and what cannot be parsed as flags: fields set to None, and mappings.
  """
  kept: list[str] = []
  replaced: dict[str, Any] = {}
  for argument in argv:
    name, _, value = argument.partition("=")
    field = name.lstrip("-").removeprefix("config.")
    hint = None
    if name.startswith("-") and name.lstrip("-").startswith("config."):
      hint = _hint_of(config_type, field)
    if hint is not None and type(None) in typing.get_args(hint) and value == "None":
      replaced[field] = None
    elif typing.get_origin(hint) in (dict, collections.abc.Mapping):
      replaced[field] = ml_collections.ConfigDict(_mapping(field, value))
    else:
      kept.append(argument)
  return kept, replaced


def _preset_of(argv: Sequence[str]) -> str | None:
  """The value of the last `--config`, as absl reads it; None without one."""
  found = None
  for argument, after in itertools.zip_longest(argv, argv[1:]):
    name, equals, value = argument.partition("=")
    if argument.startswith("-") and name.lstrip("-") == "config":
      found = value if equals else after
  return found


def _check_options(config: ml_collections.ConfigDict, argv: Sequence[str]) -> None:
  """Refuses an override of a key that a mapping of the preset lacks: nobody knows the type of its value."""
  for argument in argv:
    name = argument.partition("=")[0].lstrip("-")
    if not argument.startswith("-") or not name.startswith("config."):
      continue
    node: Any = config
    path = name.split(".")
    for depth, part in enumerate(path[1:], start=1):
      parent = ".".join(path[:depth])
      if not isinstance(node, ml_collections.ConfigDict):
        raise ValueError(f"{name} cannot be set: the preset's {parent} is {node!r}.")
      if part not in node:
        whole = f" What the preset lacks is given with all the rest: --{parent}=\"{{'key': value, ...}}\"."
        raise ValueError(f"{name} is not in the preset's {parent}{closest(part, node)}{whole}")
      node = node[part]


def _mapping(field: str, text: str) -> dict[str, Any]:
  value = parse_mapping(text)
  if value is None:
    raise ValueError(f"--config.{field} must be a mapping written like {{'key': 1}}; received {text!r}.")
  return value


def _field_docstrings(config_type: type[Any]) -> dict[str, str]:
  tree = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body[0]
  found = {}
  body = typing.cast(ast.ClassDef, tree).body
  for statement, after in itertools.pairwise(body):
    if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
      found[ast.unparse(statement.target)] = inspect.cleandoc(str(after.value.value))
  return found


def _show(hint: Any) -> str:
  if typing.get_origin(hint) is typing.Literal:
    return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return " or ".join("None" if arm is type(None) else _show(arm) for arm in typing.get_args(hint))
  return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
