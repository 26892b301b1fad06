"""torch.compile without graph breaks and torch.export, each in a separate process.

The other tests run under shape checks, which wrap every function in Python code that the compiler cannot trace. Users
run without these checks, and so does the separate process. On a CPU the backend runs captured graphs without code
generation, so no C++ compiler is needed.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

PRELUDE = """
    import numpy as np, torch
    from sepc_torch import SEPC, EllipsoidBank, TrustHead, partition
    rng = np.random.default_rng(SEED)
    y = rng.integers(0, 3, 240)
    x = rng.normal(size=(240, 4)) + 2.0 * rng.normal(size=(3, 4))[y]
    z = torch.from_numpy(np.concatenate([x, 4 * x])).float()
    def same(a, b):
        a, b = (a, b) if isinstance(a, tuple) else ((a,), (b,))
        return all(torch.equal(u.nan_to_num(-9.0), v.nan_to_num(-9.0)) for u, v in zip(a, b, strict=True))
    def check(module, *args):
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert same(compiled(*args), module(*args))
        assert same(compiled(*(a[:7] for a in args)), module(*(a[:7] for a in args)))
        batch = torch.export.Dim("batch", min=2)
        program = torch.export.export(module, args, dynamic_shapes=tuple({0: batch} for _ in args))
        assert same(program.module()(*args), module(*args))
        assert same(program.module()(*(a[:5] for a in args)), module(*(a[:5] for a in args)))
"""


CHECKS = {
    "bank": "check(SEPC.from_partition(partition(x, y)).bank, z)",
    "sepc": "check(SEPC.from_partition(partition(x, y)), z)",
    "euclidean": "check(SEPC.from_partition(partition(x, y), 'euclidean'), z)",
    "given labels": "check(SEPC.from_partition(partition(x, y)), z, torch.from_numpy(np.concatenate([y, y])))",
    "head": "check(TrustHead.fit(x, y, dim=3), z, torch.randn(480, 3))",
    "calibrated head": (
        "check(TrustHead.fit(x, y, dim=3).calibrate(x, y, rng.normal(size=(240, 3))), z, torch.randn(480, 3))"
    ),
}

# The thresholds of every kind of group, in a head that was loaded from a file. They differ by one lookup, so that one
# is compiled and another one exported: each takes seconds.
GROUPS = """
import tempfile
class Grouped(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head
    def forward(self, z, logits, groups):
        return self.head(z, logits, None, groups)
scores = 6.0 * np.eye(3)[y] + rng.normal(size=(240, 3))
args = z, torch.from_numpy(np.concatenate([scores, scores])).float()
head = TrustHead.fit(x[:120], y[:120], dim=3).calibrate(x[120:], y[120:], scores[120:])
for by in ("predicted", "region", np.arange(120) % 3):
    head.accept_at(risk=0.2, delta=0.2, by=by, joint=False)
    with tempfile.TemporaryDirectory() as folder:
        head.save(folder + "/head")
        loaded = TrustHead.load(folder + "/head")
    given = not isinstance(by, str)
    groups = (torch.arange(480) % 4 - 1,) if given else ()
    module, plain = (Grouped(loaded), Grouped(head)) if given else (loaded, head)
    expected = plain(*args, *groups)
    assert expected.accept.any()
    assert same(module(*args, *groups), expected)
    if not given and by == "region":
        torch._dynamo.reset()
        assert same(torch.compile(module, fullgraph=True, backend="aot_eager")(*args), expected)
    if given:
        sizes = tuple({0: torch.export.Dim("batch", min=2)} for _ in (*args, *groups))
        program = torch.export.export(module, (*args, *groups), dynamic_shapes=sizes).module()
        assert same(program(*args, *groups), expected)
"""
CHECKS["groups"] = GROUPS

# One graph serves all batch sizes but one row, which torch always compiles separately. No size is that of another
# dimension, which torch would take for the same dimension.
CHECKS["batch sizes"] = """
graphs = []
def backend(graph, _inputs):
    graphs.append(graph)
    return graph.forward
scores = rng.normal(size=(240, 3))
head = TrustHead.fit(x, y, dim=3).calibrate(x, y, scores)
logits = torch.from_numpy(np.concatenate([scores, scores])).float()
compiled = torch.compile(head, fullgraph=True, dynamic=True, backend=backend)
with torch.no_grad():
    for rows in (64, 33, 480, 7):
        batch = z[:rows].clone(), logits[:rows].clone()
        assert same(compiled(*batch), head(*batch))
assert len(graphs) == 1, len(graphs)
called = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
assert "sepc_torch.judge_distances.default" in called, called
"""

# The operator of CUDA devices.
CHECKS["operator of CUDA"] = """
from sepc_torch.head.calibration import assess
scores = rng.normal(size=(240, 3))
head = TrustHead.fit(x, y, dim=3).calibrate(x, y, scores)
class Assess(torch.nn.Module):
    def forward(self, z, logits):
        density, near, white, mahalanobis, _ = head.evidence.measure(z)
        label, least = logits.argmax(dim=1), torch.zeros((), dtype=torch.float64)
        valid = torch.zeros_like(label, dtype=torch.bool)
        rows = density, [near], [white], mahalanobis, [logits], label, valid, least
        return assess._assess(*rows, list(head.calibration.network.tables()))
check(Assess(), z, torch.from_numpy(np.concatenate([scores, scores])).float())
"""

# Gradients of the network's margin, with a row that has no label.
CHECKS["gradient"] = """
scores = torch.from_numpy(rng.normal(size=(480, 3))).float()
scores[3] = torch.nan
head = TrustHead.fit(x, y, dim=3, nan_policy="flag")
gradients = []
for module in (head, torch.compile(head, fullgraph=True, backend="aot_eager")):
    leaf = z.clone().requires_grad_()
    margin = module(leaf, logits=scores).network_margin
    margin[margin.isfinite()].sum().backward()
    gradients.append(leaf.grad)
assert gradients[0].abs().sum() > 0
assert torch.allclose(*gradients)
"""


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=name, marks=[] if name == "bank" else [pytest.mark.slow]) for name, body in CHECKS.items()],
)
def test_compiles_and_exports(rng: object, body: str) -> None:
    run(rng, body)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiles_on_cuda(rng: object) -> None:
    """With torch's own code generator: one graph, and the answers of the head, also of invalid rows."""
    body = """
        scores = rng.normal(size=(240, 3))
        head = TrustHead.fit(x, y, dim=3, nan_policy="flag").calibrate(x, y, scores).cuda()
        head.accept_at(flag_rate=0.1)
        z, logits = z.cuda(), torch.from_numpy(np.concatenate([scores, scores])).float().cuda()
        z[1], z[2], logits[3] = 0.0, torch.nan, torch.nan
        compiled = torch.compile(head, fullgraph=True)
        with torch.no_grad():
            for rows in (64, 33, 480, 7):
                batch = z[:rows].clone(), logits[:rows].clone()
                for part in batch:
                    torch._dynamo.mark_dynamic(part, 0)
                assert same(compiled(*batch), head(*batch)), rows
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    """
    run(rng, textwrap.dedent(body))


def run(rng: object, body: str) -> None:
    seed = int(rng.integers(2**31))  # type: ignore[attr-defined]
    script = textwrap.dedent(PRELUDE).replace("SEED", str(seed)) + body
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
