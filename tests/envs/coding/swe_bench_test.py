"""The SWE-Bench reader on published rows and on odd ones."""

from __future__ import annotations

import json
import pathlib

import pytest

from sao_jax.envs.coding.swe_bench import SweBenchInstance, read_swe_bench

ROW = {
  "repo": "astropy/astropy",
  "instance_id": "astropy__astropy-12907",
  "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
  "patch": "diff --git a/astropy/modeling/separable.py b/astropy/modeling/separable.py\n--- a/x\n+++ b/x\n",
  "test_patch": "diff --git a/t.py b/t.py\n",
  "problem_statement": "`separability_matrix` is wrong\u2028for nested\x85models\f.",
  "hints_text": "",
  "created_at": "2022-03-03T15:14:54Z",
  "version": "4.3",
  "FAIL_TO_PASS": '["astropy/modeling/tests/test_separable.py::test_separable[compound_model6-result6]"]',
  "PASS_TO_PASS": '["t.py::a", "t.py::b[\\u00e9 x]"]',
  "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
  "difficulty": "15 min - 1 hour",
}


def write(path: pathlib.Path, *rows: object, ascii_only: bool = False) -> pathlib.Path:
  path.write_bytes("\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode())
  return path


@pytest.mark.parametrize("ascii_only", [True, False])
def test_published_rows_are_read(tmp_path: pathlib.Path, ascii_only: bool) -> None:
  path = write(tmp_path / "rows.jsonl", ROW, {**ROW, "instance_id": "b"}, ascii_only=ascii_only)
  one, two = read_swe_bench(path)
  assert one.fail_to_pass == ("astropy/modeling/tests/test_separable.py::test_separable[compound_model6-result6]",)
  assert one.pass_to_pass == ("t.py::a", "t.py::b[\u00e9 x]") and two.instance_id == "b"
  assert one.problem_statement == ROW["problem_statement"] and one.version == "4.3"


def test_a_list_of_rows_blank_lines_and_a_byte_order_mark(tmp_path: pathlib.Path) -> None:
  (tmp_path / "rows.json").write_text(json.dumps([ROW], indent=1))
  (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n\r\n\n")
  for name in ("rows.json", "rows.jsonl"):
    assert read_swe_bench(tmp_path / name) == [SweBenchInstance.from_row(ROW)]
  (tmp_path / "none.jsonl").write_text("")
  assert read_swe_bench(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
  ("change", "field", "value"),
  [
    ({"FAIL_TO_PASS": ["x", "y"]}, "fail_to_pass", ("x", "y")),
    ({"FAIL_TO_PASS": "['x::it\\'s', \"y\"]"}, "fail_to_pass", ("x::it's", "y")),
    ({"FAIL_TO_PASS": "[]"}, "fail_to_pass", ()),
    ({"fail_to_pass": '["x"]'}, "fail_to_pass", ("x",)),
    ({"hints_text": None}, "hints_text", ""),
    ({"version": None}, "version", ""),
    ({"problem_statement": ""}, "problem_statement", ""),
  ],
)
def test_forms_of_its_relatives(change: dict[str, object], field: str, value: object) -> None:
  assert getattr(SweBenchInstance.from_row({**ROW, **change}), field) == value


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"repo": None}, "astropy-12907' lacks the key 'repo'"),
    ({"FAIL_TO_PASS": "x"}, "list of test names; received 'x'"),
    ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS"),
    ({"PASS_TO_PASS": None}, "lacks the key 'PASS_TO_PASS'"),
    ({"PASS_TO_PASS": '{"a": 1}'}, "PASS_TO_PASS"),
    ({"PASS_TO_PASS": "(" * 100_000}, "PASS_TO_PASS"),
    ({"version": 4.3}, "version must be a string; received 4.3"),
    ({"base_commit": ["a"]}, "base_commit"),
  ],
)
def test_bad_rows_are_named(tmp_path: pathlib.Path, change: dict[str, object], message: str) -> None:
  path = write(tmp_path / "rows.jsonl", {**ROW, "instance_id": "good"}, {**ROW, **change})
  with pytest.raises(ValueError, match=message) as error:
    read_swe_bench(path)
  assert "rows.jsonl, line 2: " in str(error.value)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("[1]", "entry 0: a row must be an object; received int"),
    ('"a"', "line 1: a row must be an object"),
    ("{", "line 1"),
    ("[{]", "rows: the list is not valid JSON"),
    ("[" * 100_000, "rows: the list is not valid JSON"),
    ('{"a":' * 100_000, "rows, line 1: "),
    (json.dumps(ROW) + "\n" + json.dumps(ROW), "line 2: instance_id 'astropy__astropy-12907' occurs twice"),
  ],
)
def test_bad_files_are_named(tmp_path: pathlib.Path, content: str, message: str) -> None:
  (tmp_path / "rows").write_text(content)
  with pytest.raises(ValueError, match=message):
    read_swe_bench(tmp_path / "rows")
