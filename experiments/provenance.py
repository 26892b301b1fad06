"""Stamps on results: which command measured them, when, and on which sources.

The sources of a result are two hashes: one of the script and of the modules in experiments/ that it imports, one of the
modules of the package that these import, directly or through others, anywhere in a file. Both cover code:
comments, docstrings and blank lines do not count. The hash of the package covers paths too, that of a script does not,
because a script that moves stays what it is. Nothing of the machine, of Python or of version control enters.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import sys
import tokenize
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import cache
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE, EXPERIMENTS = "sepc_torch", "experiments"
# Twelve hexadecimal digits: short enough for a table, and two states of the sources practically never share them.
DIGITS = 12
# Stands for names that are made at run time.
_ANY = "*"

Files = Mapping[str, bytes]


def read_sources(root: Path = ROOT) -> dict[str, bytes]:
    """The Python files of the package and of experiments/, by their path from the root."""
    paths = [*(root / PACKAGE).rglob("*.py"), *(root / EXPERIMENTS).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@cache
def code(source: bytes) -> bytes:
    """The lines of a file without comments, docstrings and blank lines; the same in every version of Python."""
    text = source.decode()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def digest(files: Files) -> str:
    """A hash of paths and code, independent of the order of the files, of comments and of line endings."""
    found = hashlib.sha256()
    for path in sorted(files):
        content = code(files[path])
        found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:DIGITS]


def script_files(script: str, files: Files) -> dict[str, bytes]:
    """A script, such as ``paper.iris``, and the modules in experiments/ that it imports, directly or through others."""
    return _closure([f"{EXPERIMENTS}.{script}"], files, EXPERIMENTS)


def package_files(script: str, files: Files) -> dict[str, bytes]:
    """The modules of the package that a script and its modules import, directly or through others."""
    names = [name for source in script_files(script, files).values() for name in _imported(source)]
    return _closure(names, files, PACKAGE)


def _closure(names: list[str], files: Files, folder: str) -> dict[str, bytes]:
    """The modules of some names in a folder, and those in it that they import, directly or through others.

    A public name of the package stands for its module. A module that imports by names made at run time brings all of
    its folder.
    """
    homes, root = _homes(files.get(f"{PACKAGE}/__init__.py", b"")), f"{PACKAGE}/__init__.py"
    found: dict[str, bytes] = {}
    waiting = list(names)
    while waiting:
        path = homes.get(name := waiting.pop(), name).replace(".", "/")
        modules = [f"{part}{end}" for part in (*PurePosixPath(path).parents, path) for end in (".py", "/__init__.py")]
        for module in modules:
            if module in files and module.startswith(f"{folder}/") and module not in found and module != root:
                found[module] = files[module]
                imported = _imported(files[module])
                waiting += imported - {_ANY}
                if _ANY in imported:
                    own = f"{module.rpartition('/')[0]}/"
                    waiting += [other.removesuffix(".py") for other in files if other.startswith(own)]
    return found


@cache
def _homes(source: bytes) -> dict[str, str]:
    """The module of every public name of the package, from the table in its ``__init__.py``."""
    tables = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_NAMES"
    ]
    return {
        f"{PACKAGE}.{name}": f"{PACKAGE}.{module}"
        for table in tables
        for module, names in table.items()
        for name in names
    }


@cache
def _imported(source: bytes) -> frozenset[str]:
    """Names that a module imports, with the modules they come from, and modules that it names in texts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom():
                found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.Constant(value=str(text)) if re.fullmatch(rf"{PACKAGE}(\.\w+)+", text):
                found.add(text)
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module")):
                found.add(_ANY)
    return frozenset(found)


def hashes(script: str, files: Files) -> dict[str, str]:
    """The hash of the modules of the package, and that of the script with its modules."""
    contents = sorted(script_files(script, files).values(), key=code)
    own = {str(i): text for i, text in enumerate(contents)}
    return {"package": digest(package_files(script, files)), "script": digest(own)}


def script_of(command: str) -> str:
    """The name of the script in a command such as ``python -m experiments.paper.iris --seed 1``: ``paper.iris``."""
    found = re.search(rf"-m {EXPERIMENTS}\.([\w.]+)", command)
    if found is None:
        raise ValueError(f"Expected a command that runs a module of {EXPERIMENTS}, got {command!r}.")
    return found[1]


def running() -> str:
    """The command of the running process."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def stamp(command: str, files: Files) -> dict[str, Any]:
    """The stamp of a measurement that ends now; ``files`` are the sources as they were when the process started."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "date": date, "sources": hashes(script_of(command), files)}


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
