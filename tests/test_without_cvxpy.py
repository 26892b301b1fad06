"""A process without cvxpy, clarabel and the packages that come with them: everything but their solvers works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from page_code import ROOT

# The packages are hidden from the import system, as if they were not installed.
HIDDEN = """
import sys

HIDDEN = {"cvxpy", "clarabel", "cvxpylayers", "diffcp", "osqp", "scs", "qdldl", "highspy", "ecos"}


class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
"""

FIT_TO_LOAD = """
import numpy as np
import torch
from sepc_torch import SEPC, MVELayer, Scorer, TrustHead, landscape, minimum_volume_ellipsoid, partition
from sepc_torch import reduced_hull_points, write_report

rng = np.random.default_rng()
y = np.arange(600) % 3
z = rng.normal(size=(600, 4)) + 3.0 * np.eye(3, 4)[y]
found = partition(z[:300], y[:300])
found.save(sys.argv[1] + "/partition.safetensors")
SEPC.from_partition(found)(torch.from_numpy(z)).label
landscape(z[:300], y[:300])
minimum_volume_ellipsoid(z[:50])
reduced_hull_points(z[y == 0], z[y == 1])
points = torch.from_numpy(z[:40]).requires_grad_()
MVELayer(40, 4)(points).log_volume().backward()
for layers in ({}, {"layers": {"first": z[:300, :2]}}):
    own = {"layers": {"first": z[300:, :2]}} if layers else {}
    head = TrustHead.fit(z[:300], y[:300], normalize="standardize", keep_points=True, **layers)
    head.calibrate(z[300:], y[300:], **own)
    head.accept_at(flag_rate=0.2)
    head.save(sys.argv[1] + "/head.safetensors")
    again = TrustHead.load(sys.argv[1] + "/head.safetensors")
    assert torch.equal(again.judge(z, **({"layers": {"first": z[:, :2]}} if layers else {})).accept,
                       head.judge(z, **({"layers": {"first": z[:, :2]}} if layers else {})).accept)
head = TrustHead.fit(z[:300], y[:300], normalize="standardize", keep_points=True, ids=np.arange(300))
head.calibrate(z[300:], y[300:])
write_report(head, z, y, path=sys.argv[1] + "/report.html")
head.explain(z[0])
head.update(z[300:310], y[300:310], ids=np.arange(300, 310)).refit()
assert not any(name.partition(".")[0] in HIDDEN for name in sys.modules)
print("done")
"""

# Statements that need a hidden package, and the extra that their errors name.
ERRORS = {
    "minimum_volume_ellipsoid(z, solver='CLARABEL')": "cvxpy",
    "reduced_hull_points(z, z + 9.0, solver='scs')": "cvxpy",
    "partition(z, y, solver='CLARABEL')": "cvxpy",
    "TrustHead.fit(z, y, partition={'solver': 'CLARABEL'})": "cvxpy",
    "MVELayer(40, 2, backend='cvxpylayers')(torch.from_numpy(z))": "layers",
    "RCHLayer(20, 20, 2, cap=0.5)(torch.from_numpy(z[:20]), torch.from_numpy(z[20:] + 9.0))": "layers",
}
ASKING = """
import numpy as np
import torch
from sepc_torch import MVELayer, RCHLayer, TrustHead, minimum_volume_ellipsoid, partition, reduced_hull_points

z, y = np.random.default_rng().normal(size=(40, 2)), np.arange(40) % 2
for statement in sys.argv[1:]:
    try:
        eval(statement)
    except ModuleNotFoundError as error:
        print(error)
"""


def run(script: str, *arguments: str) -> str:
    """What a new process prints that hides the packages and runs a script."""
    command = [sys.executable, "-c", HIDDEN + script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_head_is_fitted_calibrated_saved_and_loaded(tmp_path: Path) -> None:
    assert run(FIT_TO_LOAD, str(tmp_path)) == "done\n"


@pytest.mark.slow
def test_errors_name_the_extra() -> None:
    said = run(ASKING, *ERRORS).splitlines()
    assert len(said) == len(ERRORS)
    for extra, line in zip(ERRORS.values(), said, strict=True):
        assert f"pip install 'sepc_torch[{extra}]'" in line


def test_the_hidden_packages_are_no_requirement() -> None:
    """A plain installation has none of them, and the extras ``cvxpy`` and ``layers`` have both solvers."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [line.split(">=")[0] for line in project["dependencies"]]
    assert not {"cvxpy", "clarabel", "cvxpylayers"} & set(names)
    extras = project["optional-dependencies"]
    assert {line.split(">=")[0] for line in extras["cvxpy"]} == {"cvxpy", "clarabel"}
    assert "sepc_torch[cvxpy]" in extras["layers"]
