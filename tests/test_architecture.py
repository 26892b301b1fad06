"""The shape of the package: imports point one way, `import sepc_torch` is light, and no file knows its machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sepc_torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sepc_torch"

# A module may import only modules above it in this list; parts of a folder (solvers, kernels) may import each other.
ORDER = [
    "shapes",
    "tables",
    "storage",
    "progress",
    "inputs",
    "waiting",
    "buffers",
    "given_labels",
    "geometry",
    "ellipsoid",
    "affine_hull",
    "programs",
    "solvers",
    "separating",
    "ledger",
    "partition_record",
    "partitioning",
    "overlap",
    "ops",
    "rules",
    "kernels",
    "bank",
    "projection",
    "trust",
    "baselines",
    "guarantees",
    "prediction",
    "verdict",
    "explaining",
    "sepc",
    "densities",
    "neighbours",
    "evidence",
    "confidence",
    "calibration",
    "embedding",
    "head",
    "metrics",
    "comparison_record",
    "comparing",
    "layers",
    "estimator",
    "trust_table",
    "flagging",
    "active",
    "callbacks",
    "plot",
    "tabular",
    "demo",
    "cli",
]

# Not needed to run a frozen model, so not loaded by `import sepc_torch`.
HEAVY = [
    "cvxpy",
    "cvxpylayers",
    "joblib",
    "lightning",
    "matplotlib",
    "pandas",
    "pytorch_lightning",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
]


def sources() -> list[Path]:
    """Every module except the package's own __init__, which stands below all of them and offers their names."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def place(path: Path) -> str:
    """The entry of ORDER that a file belongs to: its own name, or that of its folder."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree: ast.Module) -> set[str]:
    """The entries of ORDER that a module imports, also inside functions and for type checking only."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are spelled out as if from the package; ruff forbids them anyway.
            home = node.module if node.level == 0 else ".".join(filter(None, ["sepc_torch", node.module]))
            names.update(f"{home}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    ours = {part[1] for part in parts if part[0] == "sepc_torch" and len(part) > 1 and part[1] != "__version__"}
    # A public name, as in `from sepc_torch import partition`, counts as the module that defines it.
    return {sepc_torch._HOME.get(name, name) for name in ours}


def test_the_package_has_modules() -> None:
    assert {"shapes", "geometry", "ellipsoid"} <= {place(path) for path in sources()}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upward(path: Path) -> None:
    here = place(path)
    assert here in ORDER, f"{here} has no place in ORDER ({Path(__file__).name}): add it below everything it imports."
    names = imported(ast.parse(path.read_text(encoding="utf-8")))
    unknown = names - set(ORDER)
    assert not unknown, f"{here} imports {sorted(unknown)} from sepc_torch: import from the module that defines it."
    wrong = {name for name in names - {here} if ORDER.index(name) > ORDER.index(here)}
    assert not wrong, (
        f"{here} imports {sorted(wrong)}, which stand below it in ORDER: move code up, or the module down."
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sepc_torch.plot", {"plot"}),
        ("from sepc_torch import plot, __version__", {"plot"}),
        ("from sepc_torch import Ellipsoid", {"ellipsoid"}),
        ("from sepc_torch.solvers.design import enclosure", {"solvers"}),
        ("def f():\n    from sepc_torch.cli import app", {"cli"}),
        ("from .head import TrustHead", {"head"}),
        ("from . import head", {"head"}),
        ("import numpy as np\nfrom torch import nn", set()),
    ],
)
def test_every_way_to_import_is_seen(source: str, expected: set[str]) -> None:
    assert imported(ast.parse(source)) == expected


def run_python(code: str) -> str:
    """The output of a fresh interpreter in the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_is_light() -> None:
    loaded = run_python(
        "import sys; before = set(sys.modules); import sepc_torch; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    ).split()
    assert "sepc_torch" in loaded
    assert not set(loaded) & set(HEAVY), f"import sepc_torch loads {sorted(set(loaded) & set(HEAVY))}"


def test_an_ellipsoid_needs_only_numpy() -> None:
    """None in sys.modules makes an import fail, as on a machine without that package."""
    absent = [*HEAVY, "jaxtyping", "beartype", "torch"]
    answer = run_python(
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import numpy as np\n"
        "from sepc_torch import Ellipsoid\n"
        "print(Ellipsoid.ball(np.zeros(2), radius=0.5).distance(np.ones((1, 2)))[0] ** 2)"
    )
    assert float(answer) == pytest.approx(8.0)


def test_a_partition_without_a_device_needs_no_torch() -> None:
    answer = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "from sepc_torch import partition\n"
        "print(len(partition([[0.0], [1.0], [5.0], [6.0]], [0, 0, 1, 1]).ellipsoids))"
    )
    assert answer == "2"


def test_a_frozen_head_runs_on_torch_and_numpy_alone() -> None:
    """Everything else is hidden from the import system, as if it were not installed."""
    frozen = """
        import sys
        class Hiding:
            def __init__(self, finder):
                self.finder = finder
            def find_spec(self, name, path=None, target=None):
                return None if name.partition(".")[0] in MISSING else self.finder.find_spec(name, path, target)
        sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
        import torch
        from sepc_torch import SEPC, EllipsoidBank, TrustHead
        from sepc_torch.projection import Projection
        from sepc_torch.rules import TrainingCounts
        bank = EllipsoidBank(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.eye(2).repeat(2, 1, 1))
        eye = torch.eye(2, dtype=torch.int64)
        reach = torch.tensor([[[0.5], [4.0]], [[4.0], [0.5]]])
        counts = TrainingCounts(torch.arange(2), eye.bool(), eye, eye, reach, torch.ones(2, 1, dtype=torch.int64))
        sepc = SEPC(bank, counts, torch.ones(2, dtype=torch.int64), torch.ones(2), classes=["a", "b"])
        head = TrustHead(Projection(torch.zeros(2), torch.eye(2), unit_length=False), sepc)
        print(*head(torch.tensor([[0.1, 0.2], [9.0, 0.0]])).label.tolist(), head.explain([0.1, 0.2]).details["rule"])
    """
    missing = [*HEAVY, "jaxtyping", "beartype"]
    assert run_python(textwrap.dedent(frozen).replace("MISSING", repr(missing))).split() == ["0", "1", "SINGLE"]


def project_files() -> list[Path]:
    """What git tracks or would track; outside a checkout, everything but environments and caches."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
        paths = [path for path in ROOT.rglob("*") if not skipped & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


# A path from the root of somebody's machine, not the middle of an address or of a relative path.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt)/")


def test_no_file_knows_its_machine() -> None:
    files = project_files()
    assert Path(__file__).resolve() in files
    found = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or an archive
        found += [
            f"{path.relative_to(ROOT)}:{i}: {s.strip()}" for i, s in enumerate(lines, 1) if MACHINE_PATH.search(s)
        ]
    assert not found, "absolute paths of one machine:\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_machine_paths_are_recognised(folder: str) -> None:
    assert MACHINE_PATH.search(f'open("/{folder}/data.csv")')
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/index.html and ../{folder}/data.csv")
