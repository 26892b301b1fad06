"""Requirements: each has one exact version in constraints.txt, in the range that is stated. Version of the release."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement  # pytest needs packaging too
from packaging.utils import canonicalize_name
from packaging.version import Version

import sepc_torch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> list[str]:
    """The requirements of the package, of all extras and of development; not of the build, which pip isolates."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = PROJECT["dependency-groups"].values()
    lines = [line for lines in (*extras, *groups) for line in lines]
    return [*PROJECT["project"]["dependencies"], *(line for line in lines if isinstance(line, str))]  # no inclusions


def pins() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def pinned(pin: Requirement) -> Version:
    """The version of a pin; anything but one exact version is an error."""
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin} is not an exact version"
    return Version(specifier.version)  # refuses ==2.*


def test_every_pin_is_one_exact_version_without_conditions() -> None:
    for pin in pins():
        assert pinned(pin)
        assert not pin.extras
        assert pin.marker is None
        assert pin.url is None
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert sorted(names) == sorted(set(names)), "a package is pinned twice"


@pytest.mark.parametrize("line", sorted({line for line in requirements() if not line.startswith("sepc_torch[")}))
def test_every_requirement_is_pinned_within_its_range(line: str) -> None:
    wanted = Requirement(line)
    found = [pinned(pin) for pin in pins() if canonicalize_name(pin.name) == canonicalize_name(wanted.name)]
    assert len(found) == 1, f"constraints.txt pins {wanted.name} {len(found)} times"
    assert wanted.specifier.contains(found[0]), f"{wanted} excludes the pinned version {found[0]}"


def test_the_extra_all_names_every_other_extra() -> None:
    extras = dict(PROJECT["project"]["optional-dependencies"])
    (everything,) = extras.pop("all")
    assert Requirement(everything).extras == set(extras)


def test_the_makefile_installs_the_pinned_torch() -> None:
    (version,) = re.findall(r"torch==(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert [pinned(pin) for pin in pins() if pin.name == "torch"] == [Version(version)]


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == sepc_torch.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    # What the schema of the Citation File Format, version 1.2.0, requires.
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= citation.keys()
    assert all({"name"} <= author.keys() or {"family-names"} <= author.keys() for author in citation["authors"])


def test_the_newest_heading_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert headings[0] in {sepc_torch.__version__, "Unreleased"}
    assert sepc_torch.__version__ in headings
