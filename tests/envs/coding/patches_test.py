"""Patches as git writes them: changed, new, removed and renamed files, and those that do not fit."""

from __future__ import annotations

import random

import pytest

from sao_jax.envs.coding.patches import apply_patch
from tests.envs.coding.instances import diff

FILES = {"a.py": "1\n2\n3\n", "b c.py": "x\ny"}


def test_random_changes_are_applied() -> None:
  rng = random.Random(0)
  for _ in range(200):
    old, new = ("".join(rng.choices(["a\n", "b\n", "\n", "--- c\n"], k=rng.randrange(1, 30))) for _ in range(2))
    if old != new:
      assert apply_patch({"p": old}.get, diff("p", old, new)) == {"p": new}


@pytest.mark.parametrize(
  ("patch", "texts"),
  [
    ("", {}),
    (diff("new.py", None, "n\n"), {"new.py": "n\n"}),
    (diff("a.py", FILES["a.py"], "1\n3\n") + diff("z.py", None, "z\n"), {"a.py": "1\n3\n", "z.py": "z\n"}),
    ("diff --git a/a.py b/a.py\ndeleted file mode 100644\n--- a/a.py\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-1\n-2\n-3\n",
     {"a.py": None}),
    ("diff --git a/a.py b/d.py\nsimilarity index 100%\nrename from a.py\nrename to d.py\n",
     {"a.py": None, "d.py": FILES["a.py"]}),
    ("diff --git a/e.py b/e.py\nnew file mode 100644\nindex 0000000..e69de29\n", {"e.py": ""}),
    ("--- a/b c.py\t\n+++ b/b c.py\t\n@@ -2 +2 @@\n-y\n\\ No newline at end of file\n+z\n", {"b c.py": "x\nz\n"}),
    ("--- a/b c.py\n+++ b/b c.py\n@@ -1,2 +1 @@\n x\n-y\n\\ No newline at end of file\n", {"b c.py": "x\n"}),
    ("--- a/a.py\n+++ b/a.py\n@@ -3 +3 @@\n-3\n+4\n\\ No newline at end of file\n", {"a.py": "1\n2\n4"}),
  ],
)  # fmt: skip
def test_forms_of_patches(patch: str, texts: dict[str, str | None]) -> None:
  assert apply_patch(FILES.get, patch) == texts


@pytest.mark.parametrize(
  ("patch", "message"),
  [
    (diff("a.py", "1\n2\n4\n", "1\n"), "'a.py' does not fit at line 3: '4' is '3'"),
    (diff("none.py", "1\n", "2\n"), "changes 'none.py', which does not exist"),
    ("--- a/a.py\n+++ b/a.py\n@@ -9 +9 @@\n-1\n+2\n", "it has no line 9"),
    ("--- a/a.py\n+++ b/a.py\n@@ -1,3 +1 @@\n-1\n", "a line without a mark|ends within a hunk|does not fit"),
    ("@@ -1 +1 @@\n-1\n+2\n", "a hunk before the name"),
    ("diff --git a/x.png b/x.png\nGIT binary patch\n", "binary file"),
  ],
)
def test_what_does_not_fit_is_named(patch: str, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    apply_patch(FILES.get, patch)
