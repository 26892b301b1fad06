"""Unknown digits: a network that never saw 8 and 9 is sure about many of them. The head refuses most."""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from sepc_torch import TrustHead

pixels, digit = load_digits(return_X_y=True)
fold, known = np.arange(len(digit)) % 3, digit < 8
train, held, new = (known & (fold == f) for f in range(3))
network = MLPClassifier([64], solver="lbfgs", random_state=0).fit(pixels[train] / 16, digit[train])
z = np.maximum(pixels / 16 @ network.coefs_[0] + network.intercepts_[0], 0)
logits = z @ network.coefs_[1] + network.intercepts_[1]

head = TrustHead.fit(z[train], digit[train]).calibrate(z[held], digit[held], logits[held])
head.accept_at(flag_rate=0.1)
out = head.judge(z, logits)
softmax = torch.from_numpy(logits).softmax(dim=1).amax(dim=1).numpy()
print(f"accepted: {out.accept[new].float().mean():.0%} of 0 to 7, {out.accept[~known].float().mean():.0%} of 8 and 9")

figure = Figure(figsize=(11, 5), layout="constrained")
above, below = figure.subfigures(2, 1, height_ratios=[1.4, 1])
for ax, (name, score) in zip(
    above.subplots(1, 2), [("softmax", softmax), ("joint score", out.joint.numpy())], strict=True
):
    for rows, label in ((new, "0 to 7"), (~known, "8 and 9, unknown")):
        ax.hist(
            score[rows], bins=np.linspace(0, 1, 26), weights=np.full(rows.sum(), 1 / rows.sum()), alpha=0.6, label=label
        )
    ax.set(xlabel=name, ylabel="share of images")
    ax.legend()
refused = np.flatnonzero(~known & ~out.accept.numpy())
surest = refused[np.argsort(-softmax[refused])][:8]
for ax, i in zip(below.subplots(1, 8), surest, strict=True):
    ax.imshow(pixels[i].reshape(8, 8), cmap="gray_r")
    ax.set_title(f"softmax {softmax[i]:.0%}\njoint {out.joint[i]:.0%}", fontsize=8)
    ax.axis("off")
below.suptitle("refused, although the network is sure", fontsize=10)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"), dpi=80)
