"""Drift: a monitor of a stream that changes after 1000 points. Without drift it alarms with probability at most 1 %."""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from sepc_torch import DriftMonitor, TrustHead
from sepc_torch.plot import draw_drift

rng = np.random.default_rng(0)
ALPHA = 0.01


def draw(count: int, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    y = rng.integers(3, size=count)
    return noise * rng.normal(size=(count, 8)) + 4.0 * np.eye(3, 8)[y], y


head = TrustHead.fit(*draw(400), normalize=None).calibrate(*draw(1000))
head.accept_at(flag_rate=0.05)
monitor = DriftMonitor(head, alpha=ALPHA)
stream = np.concatenate([draw(1000)[0], draw(400, noise=1.2)[0]])  # the sensor becomes noisier
reports = list(monitor.watch(np.split(stream, 70)))
print(reports[-1])

figure = Figure(figsize=(8, 3.6), layout="constrained")
evidence = [-np.log(max(report.p_value, 1e-12)) for report in reports]
ax = draw_drift(evidence, alarm=-np.log(ALPHA), steps=[report.seen for report in reports], ax=figure.subplots())
ax.axvline(1000, color="0.5", ls=":", label="the stream changes")
ax.set(xlabel="points seen", ylabel="log(1 / p-value)", title="evidence of drift")
ax.legend(frameon=False)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"), dpi=80)
