"""docs/field-reports.md: every report has its line, and what a line names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")
BODY, LEFT_OUT = PAGE.split("## Left out")
ROWS = re.findall(r"^\| (\d[\d, ]*) \|(.*)$", BODY, re.MULTILINE)
TESTS = sorted(set(re.findall(r"`(tests/[^`:]+\.py)::([^`]+)`", BODY)))
FILES = sorted(set(re.findall(r"`((?:tests|specprefill_jax)/[^`:]+\.py)[`:]", BODY)))


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@cache
def functions_of(file: str) -> set[str]:
    """The test functions of a file, those of a class behind its name."""
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        within = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{within}{member.name}" for member in members if isinstance(member, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_each_of_the_53_reports_has_one_line_or_is_left_out():
    told = [number for row, _ in ROWS for number in numbers(row)]
    assert sorted([*told, *numbers(LEFT_OUT)]) == list(range(1, 54))


@pytest.mark.parametrize(("row", "line"), ROWS, ids=[row for row, _ in ROWS])
def test_a_line_says_where_it_was_reported_what_happened_and_names_a_test_or_a_place(row: str, line: str):
    *told, guard = [cell.strip() for cell in line.strip(" |").split(" | ")]
    assert len(told) == 2
    assert all(told)
    assert any(f"`{file}" in guard for file in FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_named_exists(file: str):
    assert (ROOT / file).is_file()


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[name for _, name in TESTS])
def test_a_test_that_is_named_exists(file: str, name: str):
    assert name in functions_of(file)
