"""Preset files: found by name or path, and run with what stands behind the colon and with the overrides.

A preset is a Python file with a function `get_config(ARGUMENT)`, which returns `to_config_dict(SomeConfig(...))`. If
the function takes `overrides`, it gets the command line's `--config.FIELD=VALUE` as a mapping of field to text, so that
it can derive other fields from them.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import runpy
import typing
from collections.abc import Mapping

import ml_collections

FOLDER = pathlib.Path(__file__).parents[1] / "presets"


def load(preset: str, overrides: Mapping[str, str]) -> ml_collections.ConfigDict:
  """Returns the result of a preset's `get_config`.

  Args:
    preset: `NAME` or `FILE.py`, or either with `:ARGUMENT` for a `get_config` with an argument. `NAME` is a file of
      `experiments/presets`.
    overrides: the text of each overridden field, by its dotted name.

  Raises:
    ValueError: there is no such preset (the message lists the available ones), it is not Python or has no
      `get_config`, or `get_config` refuses the argument.
  """
  name, colon, argument = preset.partition(":")
  path = find(name)
  try:
    get_config = runpy.run_path(str(path)).get("get_config")
  except (SyntaxError, UnicodeDecodeError) as error:
    raise ValueError(f"--config={name} is not a Python file: {error}") from error
  if get_config is None:
    raise ValueError(f"--config={name} is not a preset: it has no get_config(). Available presets:\n{available()}")
  arguments = [argument] if colon else []
  derived = {"overrides": overrides} if "overrides" in inspect.signature(get_config).parameters else {}
  try:
    inspect.signature(get_config).bind(*arguments, **derived)
  except TypeError as error:
    takes = "no argument" if arguments else "an argument"
    raise ValueError(f"--config={name} takes {takes} after a colon; received {preset!r}.") from error
  try:
    return typing.cast(ml_collections.ConfigDict, get_config(*arguments, **derived))
  except (ValueError, OSError) as error:
    raise ValueError(f"--config={preset}: {error}") from error


def find(name: str) -> pathlib.Path:
  """Returns the file of a preset, from its path or from its name in `experiments/presets` (with or without `.py`).

  An existing path takes precedence. `experiments/presets/NAME.py` is found from any working directory.

  Raises:
    ValueError: there is none.
  """
  path = pathlib.Path(name)
  if path.is_file():
    return path
  if path.parent in (pathlib.Path(), pathlib.Path("experiments/presets")):
    known = FOLDER / f"{path.name.removesuffix('.py')}.py"
    if known.is_file():
      return known
  raise ValueError(f"--config: no preset {name!r}. Available presets:\n{available()}")


def available() -> str:
  """Returns a line for each preset in `experiments/presets`: its name and the first line of its docstring."""
  lines = []
  for path in sorted(FOLDER.glob("*.py")):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body):
      lines.append(f"  {path.stem}  {(ast.get_docstring(tree) or '').splitlines()[0]}")
  return "\n".join(lines)
