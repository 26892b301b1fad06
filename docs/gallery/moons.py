"""Two moons: the ellipses that cover them, label and trust over the plane, and what a calibrated head accepts."""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from sklearn.datasets import make_moons

from sepc_torch import TrustHead, partition
from sepc_torch.plot import draw_decisions, draw_partition

x, y = make_moons(300, noise=0.12, random_state=0)
part = partition(x, y, max_impure=2)

head = TrustHead.fit(x, y, normalize=None, max_impure=2).calibrate(*make_moons(600, noise=0.12, random_state=1))
head.accept_at(risk=0.02, delta=0.1)
print(head.promise)
new, new_y = make_moons(200, noise=0.12, random_state=2)
out = head.judge(new)
correct, accept = out.label.numpy() == new_y, out.accept.numpy()
print(f"right: {correct.mean():.1%} of all labels, {correct[accept].mean():.1%} of the {accept.mean():.0%} accepted")

figure = Figure(figsize=(10, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
draw_partition(part, x, y, ax=left, legend=False).set_title("ellipses, and the hyperplane of every iteration")
draw_decisions(head, new, new_y, ax=right, legend=False).set_title("label and trust (colour depth), with new points")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"), dpi=64)
