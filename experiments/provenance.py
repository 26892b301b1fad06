"""Stamps on results: which command measured them, when, and on which sources.

The sources of a result are two hashes: one of the package's Python files, one of the script and of the modules in
experiments/ that it imports. A hash covers paths and contents, and nothing of the machine or of version control.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE, EXPERIMENTS = "sepc_torch", "experiments"
# Twelve hexadecimal digits: short enough for a table, and two states of the sources practically never share them.
DIGITS = 12

Files = Mapping[str, bytes]


def read_sources(root: Path = ROOT) -> dict[str, bytes]:
    """The Python files of the package and of experiments/, by their path from the root."""
    paths = [*(root / PACKAGE).rglob("*.py"), *(root / EXPERIMENTS).glob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def digest(files: Files) -> str:
    """A hash of paths and contents, independent of the order of the files and of line endings."""
    found = hashlib.sha256()
    for path in sorted(files):
        content = files[path].replace(b"\r\n", b"\n")
        found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:DIGITS]


def script_files(script: str, files: Files) -> dict[str, bytes]:
    """A script and the modules in experiments/ that it imports, directly or through others."""
    found: dict[str, bytes] = {}
    waiting = [f"{EXPERIMENTS}/{script}.py"]
    while waiting:
        path = waiting.pop()
        if path in files and path not in found:
            found[path] = files[path]
            waiting += [f"{EXPERIMENTS}/{name}.py" for name in _imported(files[path])]
    return found


def _imported(source: bytes) -> set[str]:
    """The first parts of all imported module names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def hashes(script: str, files: Files) -> dict[str, str]:
    """The hash of the package and that of the script with its modules."""
    package = {path: content for path, content in files.items() if path.startswith(f"{PACKAGE}/")}
    return {"package": digest(package), "script": digest(script_files(script, files))}


def script_of(command: str) -> str:
    """The name of the script in a command such as ``python experiments/iris.py --seed 1``."""
    found = re.search(rf"{EXPERIMENTS}/(\w+)\.py", command)
    if found is None:
        raise ValueError(f"Expected a command that runs a script in {EXPERIMENTS}/, got {command!r}.")
    return found[1]


def stamp(documented: str, files: Files) -> dict[str, Any]:
    """The stamp of a measurement that ends now.

    Args:
        documented: The command that the script documents. The stamp holds the command that was really run, where the
            running process is that script.
        files: The sources as they were when the process started.
    """
    script = script_of(documented)
    running = Path(sys.argv[0])
    command = documented
    if running.stem == script:
        before = documented.partition("python ")[0]  # an environment variable that the script needs
        command = before + shlex.join(["python", f"{EXPERIMENTS}/{script}.py", *sys.argv[1:]])
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sources": hashes(script, files),
    }


def stamp_parts(
    parts: dict[str, Any], before: dict[str, Any], new: dict[str, Any], measured: Collection[str]
) -> dict[str, Any]:
    """A stamp for every part of a result that can be measured in parts.

    A part keeps its stored stamp if it was not measured and still holds the stored numbers.

    Args:
        parts: The parts to store, by name.
        before: The stored file, empty if there is none.
        new: The stamp of this run.
        measured: The names of the parts that this run measured. Parts whose numbers changed count without being named.
    """
    old_parts, old_stamps = before.get("parts", {}), before.get("measured", {}).get("parts", {})
    kept = {name for name in old_stamps if name not in measured and old_parts.get(name) == parts.get(name)}
    return {name: old_stamps[name] if name in kept else new for name in parts}


def stamps(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The stamps of a stored result by part; a result without parts has one stamp, under the empty name."""
    measured = result["measured"]
    found: dict[str, dict[str, Any]] = measured.get("parts", {"": measured})
    return found


def older(stamp: dict[str, Any], files: Files) -> bool:
    """Whether the package or the script differs from the one that was measured."""
    return bool(stamp["sources"] != hashes(script_of(stamp["command"]), files))
