"""The architecture of the package: the order of its folders, light imports, and no machine-specific paths."""

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

# Each place (a folder, or a module directly in the package) and the places it may import. The order is bottom-up:
# a place may only name places above it in this table. CONTRIBUTING.md shows the same table as a map.
_GROUND = ["shapes", "ellipsoid"]
_LIBRARY = [*_GROUND, "data", "solvers", "partitioning", "layers", "model", "head", "metrics"]
_PAGES = [*_LIBRARY, "report", "plot"]
MAY_IMPORT = {
    "shapes": [],
    "ellipsoid": ["shapes"],
    "data": _GROUND,
    "solvers": [*_GROUND, "data"],
    "partitioning": [*_GROUND, "data", "solvers"],
    "layers": [*_GROUND, "data", "solvers", "partitioning"],
    "model": [*_GROUND, "data", "partitioning"],
    "head": [*_GROUND, "data", "partitioning", "model"],
    "metrics": [*_GROUND, "data", "solvers", "model", "head"],
    "report": _LIBRARY,
    "plot": _LIBRARY,
    "training": _PAGES,
    "serving": [*_LIBRARY, "training"],
    # Entry points for users.
    "sklearn": _LIBRARY,
    "cli": [*_PAGES, "training", "serving", "sklearn"],
    "demo": [*_PAGES, "cli"],
}
# The frozen model needs the records of a partition, a layer the limit of threads; neither needs the algorithm.
NOT_THE_ALGORITHM = {
    "layers": {"sepc_torch.partitioning.processes"},
    "model": {"sepc_torch.partitioning.record", "sepc_torch.partitioning.cells"},
}

# Not needed to run a frozen model, so not loaded by `import sepc_torch`.
HEAVY = [
    "cvxpy",
    "cvxpylayers",
    "joblib",
    "lightning",
    "matplotlib",
    "mlflow",
    "onnx",
    "pandas",
    "pyarrow",
    "pytorch_lightning",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "transformers",
]


def sources() -> list[Path]:
    """Every module except the package's own __init__, which stands below all of them and offers their names."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def place(path: Path) -> str:
    """The key of MAY_IMPORT that a file belongs to: its folder, or its own name."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(tree: ast.Module) -> set[str]:
    """Full names of the modules of this package that a module imports, also inside functions and for type checking."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are spelled out as if from the package; ruff forbids them anyway.
            home = node.module if node.level == 0 else ".".join(filter(None, ["sepc_torch", node.module]))
            names.update(f"{home}.{alias.name}" for alias in node.names)
    ours = {name for name in names if name.startswith("sepc_torch.") and name != "sepc_torch.__version__"}
    # A public name, as in `from sepc_torch import partition`, counts as the module that defines it.
    return {
        f"sepc_torch.{sepc_torch._HOME.get(name.removeprefix('sepc_torch.'), name.removeprefix('sepc_torch.'))}"
        for name in ours
    }


def without_type_imports(tree: ast.Module) -> ast.Module:
    """A module without what is imported only for type checking: no arrow at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def imported(tree: ast.Module) -> set[str]:
    """The places that a module imports."""
    return {name.split(".")[1] for name in imported_modules(tree)}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_table_is_ordered() -> None:
    """Every place names only places above it, so the places cannot form a cycle."""
    places = list(MAY_IMPORT)
    for i, (name, allowed) in enumerate(MAY_IMPORT.items()):
        assert set(allowed) <= set(places[:i]), f"{name} may import only places above it"
    assert {place(path) for path in sources()} == set(places)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upward(path: Path) -> None:
    here = place(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = imported(tree) - {here, *MAY_IMPORT[here]}
    assert not wrong, f"{here} imports {sorted(wrong)}; it may import {MAY_IMPORT[here]} (MAY_IMPORT in this file)."
    for module in imported_modules(tree) if here in NOT_THE_ALGORITHM else ():
        if module.startswith("sepc_torch.partitioning"):
            assert any(module.startswith(allowed) for allowed in NOT_THE_ALGORITHM[here]), (
                f"{path.name} imports {module}"
            )


@pytest.mark.slow
def test_no_module_imports_itself_through_others() -> None:
    """The import graph of single modules, within folders too, has no cycle."""
    graph: dict[str, set[str]] = {}
    names = {module_name(path) for path in sources()}
    for path in sources():
        here = module_name(path)
        found = set()
        for target in imported_modules(without_type_imports(ast.parse(path.read_text(encoding="utf-8")))):
            while target not in names and "." in target:
                target = target.rpartition(".")[0]
            found.add(target)
        graph[here] = (found & names) - {here}
    cycles = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            cycles.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    assert not cycles, "\n".join(cycles)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sepc_torch.plot", {"plot"}),
        ("from sepc_torch import plot, __version__", {"plot"}),
        ("from sepc_torch import Ellipsoid", {"ellipsoid"}),
        ("from sepc_torch.solvers.d_optimal import enclosure", {"solvers"}),
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


@pytest.mark.slow
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
        import numpy as np
        import torch
        from sepc_torch import SEPC, EllipsoidBank, TrustHead
        from sepc_torch.head.reading.projection import Projection
        from sepc_torch.model.rules import TrainingCounts
        from sepc_torch.partitioning.cells import Ledger
        bank = EllipsoidBank(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.eye(2).repeat(2, 1, 1))
        two, ones = np.arange(2, dtype=np.int32), np.ones(2, dtype=np.int64)
        distances = np.array([[0.5, 4.0], [4.0, 0.5]])
        ledger = Ledger(ones, two, two, two, ones, two, ones, np.stack([two, two]), distances, distances[:, :0])
        counts = TrainingCounts.from_ledger(torch.arange(2), ledger, torch.float32)
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
