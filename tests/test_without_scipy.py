"""A process without SciPy: a calibrated head judges, explains and watches for drift."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sepc_torch import TrustHead

ROOT = Path(__file__).resolve().parent.parent

# Everything of SciPy is hidden from the import system, as if it were not installed.
SCRIPT = """
import sys
import numpy as np
import torch

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "scipy" else self.finder.find_spec(name, path, target)

sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
from sepc_torch import DriftMonitor, TrustHead

head, (z, logits) = TrustHead.load(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
out = head.judge(z, logits)
head.accept_at(flag_rate=0.2)
head.explain(z[0], logits=logits[0])
DriftMonitor(head).update(z, logits)
head.accept_at(flag_rate=0.1)
assert torch.equal(head.judge(z, logits).accept, out.accept)
assert not any(name.partition(".")[0] == "scipy" for name in sys.modules)
print(int(out.accept.sum()))
"""


@pytest.mark.slow
def test_a_calibrated_head_works(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(300) % 2
    z = torch.from_numpy(rng.normal(size=(300, 4)) + 3.0 * y[:, None]).float()
    logits = torch.stack([-z.sum(dim=1) + 6.0, z.sum(dim=1) - 6.0], dim=1)
    head = TrustHead.fit(z[:150], y[:150], progress=False).calibrate(z[150:], y[150:], logits[150:])
    head.accept_at(flag_rate=0.1)
    head.save(tmp_path / "head.safetensors")
    torch.save((z[150:], logits[150:]), tmp_path / "rows.pt")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "head.safetensors"), str(tmp_path / "rows.pt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == int(head.judge(z[150:], logits[150:]).accept.sum())
