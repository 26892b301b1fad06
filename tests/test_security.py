"""SECURITY.md: the package reads and writes its own formats without pickle, which can run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sepc_torch"

# Modules whose files or bytes can run code when they are read.
MODULES = {"pickle", "_pickle", "pickletools", "dill", "cloudpickle", "jsonpickle", "marshal", "shelve"}
FUNCTIONS = {"joblib.dump", "joblib.load", "torch.load", "torch.save", "numpy.load", "eval", "exec"}
# Methods and functions of any object, such as a table of pandas.
ATTRIBUTES = {"read_pickle", "to_pickle"}

# The only uses, each with its reason.
ALLOWED = {
    # Whether a function can be sent to a spawned process. The bytes are thrown away.
    "training/lightning/settings.py": {"pickle", "pickle.dumps"},
    # The state of the callback, kept between runs beside Lightning's checkpoints. Weights only: tensors, numbers and
    # text, and no code.
    "training/lightning/monitor.py": {"torch.save", "torch.load(weights_only=True)"},
}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Each name that an import defines, also inside functions, and what it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """``numpy.load`` for ``np.load``; empty for an expression that is not a name with attributes."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, names)}.{node.attr}"
    return ""


def unsafe(tree: ast.Module) -> Iterator[str]:
    """The uses of pickle and of functions that may read it."""
    names = imported_names(tree)
    yield from (name for name in names.values() if name.partition(".")[0] in MODULES)
    settings = {
        id(node.func): {key.arg: key.value for key in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    for node in ast.walk(tree):
        name = full_name(node, names)
        if name.partition(".")[0] in MODULES or name.rpartition(".")[2] in ATTRIBUTES:
            yield name
        elif name in FUNCTIONS:
            safe = {"torch.load": "weights_only", "numpy.load": "allow_pickle"}.get(name, "")
            value = settings.get(id(node), {}).get(safe)
            yield f"{name}({safe}={value.value!r})" if isinstance(value, ast.Constant) else name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_uses_pickle(path: Path) -> None:
    found = set(unsafe(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == ALLOWED.get(path.relative_to(PACKAGE).as_posix(), set())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", {"pickle"}),
        ("def f():\n    import dill as d", {"dill"}),
        ("from pickle import loads as read\nread(b)", {"pickle.loads"}),
        ("import joblib\njoblib.load(p)", {"joblib.load"}),
        ("from joblib import dump\ndump(x, p)", {"joblib.dump"}),
        ("import torch as t\nt.load(p)", {"torch.load"}),
        ("from torch import load\nload(p, weights_only=False)", {"torch.load(weights_only=False)"}),
        ("import torch\nread = torch.load", {"torch.load"}),
        ("import numpy as np\nnp.load(p, allow_pickle=True)", {"numpy.load(allow_pickle=True)"}),
        ("import numpy as np\nnp.load(p, allow_pickle=maybe)", {"numpy.load"}),
        ("import pandas as pd\npd.read_pickle(p)", {"pandas.read_pickle"}),
        ("table().to_pickle(p)", {".to_pickle"}),
        ("eval(text)", {"eval"}),
        ("import numpy, torch\nmodel.eval()\nmodel.load(p)\nnumpy.save(p, x)", set()),
    ],
)
def test_every_way_to_use_pickle_is_seen(source: str, expected: set[str]) -> None:
    assert set(unsafe(ast.parse(source))) == expected


def test_the_exceptions_exist() -> None:
    assert all((PACKAGE / name).is_file() for name in ALLOWED)
