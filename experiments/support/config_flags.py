"""Presets and command-line overrides of frozen dataclasses.

A preset is a file whose `get_config()` returns `to_config_dict(SomeConfig(...))`. ml_collections' flag lets the command
line override every field (`--config.learner.eps_low=0.2`), and `from_config_dict` converts the result to the dataclass,
which checks its values. An unknown field and a wrong type are errors that name the field.

The conversion is written here because `ml_collections.config_flags.DEFINE_config_dataclass` assigns to the fields of
the dataclass, which frozen ones refuse, and fails on `Literal` fields and on `None` for optional ones. tyro, draccus
and fiddle add a dependency and have another command-line syntax; preset files and the messages would remain ours.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import inspect
import itertools
import pathlib
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

from experiments.support import preset_files
from experiments.tasks.options import closest

T = TypeVar("T")


def from_config_dict(
  config_type: type[T], config: Mapping[str, Any] | ml_collections.ConfigDict, *, path: str = "config"
) -> T:
  """Converts a ConfigDict or a plain mapping to a dataclass, including nested ones.

  Args:
    config_type: the dataclass.
    config: its fields; missing ones take their defaults.
    path: the name of `config` in messages.

  Raises:
    TypeError: a value has the wrong type; the message names the field, the allowed type and the received value.
    ValueError: a field is unknown (the message names the closest known ones) or missing, or the dataclass refuses a
      value.
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
    # The message of a field begins with its name.
    raise ValueError(f"{path}{'.' if str(error).partition(' ')[0] in fields else ': '}{error}") from error


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
  """Converts a dataclass, including nested ones, to a ConfigDict in which the command line can override every field.

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
  """Returns a `flags_parser` for `absl.app.run` that defines and parses `--config`; an error exits with one line.

  `--help` shows every field with the preset's value. `--config.FIELD=None` clears an optional field;
  `--config.FIELD="{'key': value}"` replaces a mapping.

  Args:
    config_type: the dataclass that the preset describes.
    default: the preset if `--config` is not given; see `preset_files.load`.
    flag_values: the flags in which `--config` is defined.
  """

  def parse(argv: Sequence[str]) -> list[str]:
    kept, replaced = _split_overrides(config_type, argv)
    kept, chosen = _without_preset(kept)
    name = chosen or default
    preset = preset_files.load(name, _override_texts(argv))
    for field in filter(None, map(_field_of, kept)):
      _check_in_preset(preset, field)
    ml_config_flags.DEFINE_config_dict(
      "config", preset, _help(config_type, preset, name), flag_values=flag_values, sys_argv=kept
    )
    # The help shows the preset's values already, and absl would add all of them once more.
    flag_values["config"].default_as_str = repr(pathlib.Path(default).stem)
    # --help shows the flags of the main module, for which this module defines the flag.
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
    except flags.IllegalFlagValueError as error:
      sys.exit(f"{pathlib.Path(argv[0]).stem}: {_illegal_value(config_type, argv, error)}")
    except (flags.Error, ValueError, OSError) as error:
      sys.exit(f"{pathlib.Path(argv[0]).stem}: {error}")

  return parse_or_exit


def read(config_type: type[T], *, flag_values: flags.FlagValues = flags.FLAGS) -> T:
  """Returns the configuration of the parsed command line; exits with one line if it is not allowed."""
  try:
    return from_config_dict(config_type, flag_values["config"].value)
  except (TypeError, ValueError, OSError) as error:
    sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {error}")


def parse_mapping(text: str) -> dict[str, Any] | None:
  """Parses a Python literal; returns None unless it is a dictionary with strings as keys."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return None
  return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None


def _illegal_value(config_type: type[Any], argv: Sequence[str], error: flags.IllegalFlagValueError) -> str:
  """Returns the message for a value that absl could not parse: that of the field, as far as its type is known."""
  for field, value in _override_texts(argv).items():
    hint = _hint_of(config_type, field)
    if hint is not Any and str(error).startswith(f"flag --config.{field}={value}: "):
      return f"config.{field} must be {_show(hint)}; received {value!r}."
  return str(error)


def _help(config_type: type[Any], preset: ml_collections.ConfigDict, name: str) -> str:
  """Returns the help of `--config`: the presets, and every field with its value in the chosen one."""
  values = from_config_dict(config_type, preset)
  return (
    f"The preset, by name or as a Python file. Available ones:\n{preset_files.available()}\n\n"
    f"--config.FIELD=VALUE overrides a field. The fields, with their values in {name}:\n\n"
    f"{describe(config_type, values=values)}"
  )


def describe(config_type: type[Any], *, prefix: str = "--config", values: Any = None) -> str:
  """Returns a paragraph per field: its name, type and value, and its docstring below it up to the first empty line.

  Args:
    config_type: the dataclass.
    prefix: the name that the fields belong to.
    values: an object of this dataclass whose values are shown; None: its defaults.
  """
  hints = typing.get_type_hints(config_type)
  documentation = _field_docstrings(config_type)
  entries = []
  for field in dataclasses.fields(config_type):
    name = f"{prefix}.{field.name}"
    hint = hints[field.name]
    value = field.default if values is None else getattr(values, field.name)
    if dataclasses.is_dataclass(hint):
      nested = None if value is dataclasses.MISSING else value
      entries.append(describe(typing.cast(Any, hint), prefix=name, values=nested))
      continue
    mapping = isinstance(value, Mapping) and value
    shown = "" if value is dataclasses.MISSING or mapping else f" = {value!r}"
    entry = [f"{name}: {_show(hint)}{shown}"]
    if mapping:
      entry += [f"{name}.{key} = {item!r}" for key, item in value.items()]
    entry.append(" ".join(documentation.get(field.name, "").partition("\n\n")[0].split()))
    entries.append("\n".join(filter(None, entry)))
  return "\n\n".join(entries)


def _convert(hint: Any, value: Any, path: str) -> Any:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value
  if _is_union(hint):
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
  raise _type_error(hint, value, path)


def _type_error(hint: Any, value: Any, path: str) -> TypeError:
  return TypeError(f"{path} must be {_show(hint)}; received {value!r} ({type(value).__name__}).")


def _arms(hint: Any) -> list[Any]:
  """Returns the types of a union other than None; the type itself if it is not a union."""
  return [arm for arm in typing.get_args(hint) if arm is not type(None)] if _is_union(hint) else [hint]


def _is_union(hint: Any) -> bool:
  return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _convert_union(hint: Any, value: Any, path: str) -> Any:
  if value is None and type(None) in typing.get_args(hint):
    return None
  arms = _arms(hint)
  if len(arms) == 1 and dataclasses.is_dataclass(arms[0]) and isinstance(value, Mapping | ml_collections.ConfigDict):
    return _convert(arms[0], value, path)  # its errors name the nested field
  for arm in arms:
    with contextlib.suppress(TypeError):
      return _convert(arm, value, path)
  raise _type_error(hint, value, path)


def _convert_tuple(hint: Any, value: tuple[Any, ...], path: str) -> tuple[Any, ...]:
  args = typing.get_args(hint)
  if typing.get_origin(hint) is not tuple or args[1:] == (Ellipsis,):
    args = (args[0],) * len(value)
  elif len(args) != len(value):
    raise TypeError(f"{path} must be {_show(hint)}, of length {len(args)}; received {value!r}.")
  return tuple(_convert(arm, item, f"{path}[{i}]") for i, (arm, item) in enumerate(zip(args, value, strict=True)))


def _dissolve(value: Any, hint: Any) -> Any:
  if value is None:
    kind = _runtime_type(_arms(hint)[0])
    return None if kind is None else config_dict.placeholder(kind)
  if dataclasses.is_dataclass(value):
    return to_config_dict(value)
  if isinstance(value, dict):
    # A missing value can be set to text.
    return ml_collections.ConfigDict({k: config_dict.placeholder(str) if x is None else x for k, x in value.items()})
  return value


def _runtime_type(hint: Any) -> type | None:
  """Returns the type that flags parse a field as; None if they cannot parse it (a sub-config)."""
  origin = typing.get_origin(hint)
  if origin is typing.Literal:
    return type(typing.get_args(hint)[0])
  kind = tuple if origin in (tuple, collections.abc.Sequence) else hint
  return kind if kind in (bool, int, float, str, tuple) else None


def _hint_of(config_type: Any, field: str) -> Any:
  """Returns the type of a dotted field; Any inside a mapping."""
  hint, path = config_type, "config"
  for part in field.split("."):
    hint = next((arm for arm in _arms(hint) if dataclasses.is_dataclass(arm)), hint)
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

  Returns:
    The arguments for absl, and the overrides that it cannot parse: fields set to None, and mappings.
  """
  kept: list[str] = []
  replaced: dict[str, Any] = {}
  for argument in argv:
    field, value = _field_of(argument), argument.partition("=")[2]
    hint = None if field is None else _hint_of(config_type, field)
    if field is None:
      kept.append(argument)
    elif type(None) in typing.get_args(hint) and value == "None":
      replaced[field] = None
    elif typing.get_origin(hint) in (dict, collections.abc.Mapping):
      mapping = parse_mapping(value)
      if mapping is None:
        form = "a Python dictionary such as {'key': 1} (with True, False and None, not true, false and null)"
        raise ValueError(f"config.{field} must be {form}; received {value!r}.")
      replaced[field] = ml_collections.ConfigDict(mapping)
    else:
      kept.append(argument)
  return kept, replaced


def _field_of(argument: str) -> str | None:
  """Returns the dotted field of an argument `--config.FIELD=VALUE`; None for other arguments."""
  name = argument.partition("=")[0].lstrip("-")
  return name.removeprefix("config.") if argument.startswith("-") and name.startswith("config.") else None


def _override_texts(argv: Sequence[str]) -> dict[str, str]:
  """Returns the text of every `--config.FIELD=VALUE`, by field; the last one counts."""
  return {field: argument.partition("=")[2] for argument in argv if (field := _field_of(argument)) is not None}


def _without_preset(argv: Sequence[str]) -> tuple[list[str], str | None]:
  """Returns the arguments without `--config=PRESET` or `--config PRESET`, and the last such preset, if any."""
  kept: list[str] = []
  found, is_value = None, False
  for argument in argv:
    name, equals, value = argument.partition("=")
    if is_value:
      found, is_value = argument, False
    elif argument.startswith("-") and name.lstrip("-") == "config":
      found, is_value = (value, False) if equals else (found, True)
    else:
      kept.append(argument)
  if is_value:
    raise ValueError(f"--config needs a preset. Available presets:\n{preset_files.available()}")
  return kept, found


def _check_in_preset(preset: ml_collections.ConfigDict, field: str) -> None:
  """Refuses a key that a mapping of the preset lacks, as the type of its value is unknown."""
  node: Any = preset
  parent = "config"
  for part in field.split("."):
    if not isinstance(node, ml_collections.ConfigDict):
      raise ValueError(f"config.{field} cannot be set: the preset's {parent} is {node!r}.")
    if part not in node:
      hint = f" To add a key, set the whole mapping: --{parent}=\"{{'key': value, ...}}\"."
      raise ValueError(f"config.{field} is not in the preset's {parent}{closest(part, node)}{hint}")
    node, parent = node[part], f"{parent}.{part}"


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
  if _is_union(hint):
    return " or ".join("None" if arm is type(None) else _show(arm) for arm in typing.get_args(hint))
  return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
