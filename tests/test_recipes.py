"""Recipes of the documentation run with the real libraries, and each has its dependency group."""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from page_code import RECIPES, ROOT, blocks, check_page

GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]


def imported_packages(page: Path) -> set[str]:
    """Names of the packages that a page's code imports."""
    nodes = [node for block in blocks(page) for node in ast.walk(ast.parse(block))]
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {module.partition(".")[0] for module in found}


@pytest.mark.models
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = sorted(package for package in imported_packages(page) if importlib.util.find_spec(package) is None)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-models RECIPE={page.stem}")
    monkeypatch.chdir(tmp_path)
    check_page(page, capsys)


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_the_group_of_a_recipe_holds_what_it_imports(page: Path) -> None:
    """``make test-models RECIPE=...`` installs the group without dependencies, so that CI skips no recipe."""
    listed = {canonicalize_name(Requirement(line).name).replace("-", "_") for line in GROUPS[page.stem]}
    installed_by_set_up = {"numpy", "pandas", "sepc_torch", "sklearn", "torch"}
    assert imported_packages(page) - {"random"} - installed_by_set_up <= listed


def test_the_group_models_includes_every_recipe() -> None:
    assert [entry["include-group"] for entry in GROUPS["models"]] == [page.stem for page in RECIPES]
