"""Shared parts of the two refit experiments: a small encoder trained in three ways, and measures of its embedding.

The arms start from the same weights and see the same batches. ``cross-entropy`` trains with cross-entropy alone;
``refit`` adds ``EllipsoidLoss``; ``detached`` adds the same loss with constant ellipsoids, which isolates the effect of
the gradient through the refit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sepc_torch import EllipsoidLoss, TrustHead, minimum_volume_ellipsoid
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.metrics import aurc

ARMS = ("cross-entropy", "detached", "refit")
METRICS = (
    "foreign_inside",
    "own_inside",
    "pairs_meeting",
    "network_accuracy",
    "network_aurc",
    "sepc_accuracy",
    "sepc_aurc",
)
# The gradient has spikes where the support of an ellipsoid changes; one unclipped step can undo a hundred.
MOST_GRADIENT = 10.0


class Setting(NamedTuple):
    """The size of the encoder and of its training, the same for every arm."""

    width: int
    dim: int
    epochs: int
    batch: int
    rate: float
    weight: float


class Trained(NamedTuple):
    """Embeddings before and after training, and the network's logits of the test points."""

    before: np.ndarray
    train: np.ndarray
    test: np.ndarray
    logits: Tensor


def train(arm: str, data: tuple[Data, Data], setting: Setting, seed: int) -> Trained:
    """Train encoder and classifier together; the embedding is the classifier's input."""
    (x, y), (x_test, _) = data
    mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-6
    inputs, test = (torch.from_numpy((part - mean) / deviation).float() for part in (x, x_test))
    labels = torch.from_numpy(y).long()
    classes = int(labels.max()) + 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for the initial weights; the generator below draws everything else
        encoder = nn.Sequential(nn.Linear(x.shape[1], setting.width), nn.Tanh(), nn.Linear(setting.width, setting.dim))
        classifier = nn.Linear(setting.dim, classes)
    parameters = [*encoder.parameters(), *classifier.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=setting.rate)
    extra = EllipsoidLoss(classes, setting.dim, through_refit=arm == "refit") if arm != "cross-entropy" else None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        before = encoder(inputs).numpy()
    for _ in range(setting.epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(setting.batch):
            if len(rows) < setting.batch // 2:
                continue  # a short last batch has too few points of a class
            z = encoder(inputs[rows])
            loss = cross_entropy(classifier(z), labels[rows])
            if extra is not None:
                loss = loss + setting.weight * extra(z, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MOST_GRADIENT)
            optimizer.step()
    with torch.no_grad():
        z_test = encoder(test)
        return Trained(before, encoder(inputs).numpy(), z_test.numpy(), classifier(z_test))


def judge(trained: Trained, data: tuple[Data, Data]) -> dict[str, float]:
    """Overlap of the classes in the embedding, and accuracy and AURC of the network and of SEP-C, on test points.

    ``foreign_inside`` is the share of other classes' test points inside a class's ellipsoid, ``own_inside`` the share
    of the class's own, ``pairs_meeting`` the share of pairs of classes whose ellipsoids intersect.
    """
    (_, y), (_, y_test) = data
    classes = np.unique(y)
    deviation = trained.train.std(axis=0).astype(float) + 1e-12
    ellipsoids = [
        minimum_volume_ellipsoid(trained.train[y == c].astype(float) / deviation, floor=DEFAULT_FLOOR) for c in classes
    ]
    inside = np.stack([e.contains(trained.test.astype(float) / deviation) for e in ellipsoids], axis=1)
    own = y_test[:, None] == classes
    meeting = [a.intersects(b) for i, a in enumerate(ellipsoids) for b in ellipsoids[:i]]
    head = TrustHead.fit(trained.train, y, dim=trained.train.shape[1], normalize="standardize", progress=False)
    out = head(torch.from_numpy(trained.test), logits=trained.logits)
    truth = torch.from_numpy(y_test).long()
    softmax = trained.logits.softmax(-1).amax(-1)
    network_right, sepc_right = out.network_label == truth, out.label == truth
    return {
        "foreign_inside": float(inside[~own].mean()),
        "own_inside": float(inside[own].mean()),
        "pairs_meeting": float(np.mean(meeting)),
        "network_accuracy": float(network_right.float().mean()),
        "network_aurc": float(aurc(softmax.double(), network_right)),
        "sepc_accuracy": float(sepc_right.float().mean()),
        "sepc_aurc": float(aurc(out.margin.double(), sepc_right)),
    }


def compare(data: tuple[Data, Data], setting: Setting, seeds: list[int]) -> tuple[dict[str, Any], dict[str, Trained]]:
    """Every value, mean and standard deviation of all arms over all seeds, and the first seed's embeddings."""
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    first: dict[str, Trained] = {}
    for seed in seeds:
        for arm in ARMS:
            trained = train(arm, data, setting, seed)
            first.setdefault(arm, trained)
            runs[arm].append(judge(trained, data))
    summary = {
        arm: {
            name: {"mean": float(np.mean([r[name] for r in found])), "std": float(np.std([r[name] for r in found]))}
            for name in METRICS
        }
        for arm, found in runs.items()
    }
    return {"seeds": seeds, "setting": setting._asdict(), "summary": summary, "runs": runs}, first


def show(name: str, result: dict[str, Any]) -> None:
    """Print the means of every arm."""
    print(f"{name}: {len(result['seeds'])} seeds, mean (standard deviation)")
    print("                 " + "".join(f"{metric:>20s}" for metric in METRICS))
    for arm, values in result["summary"].items():
        cells = "".join(f"{v['mean']:11.4f} ({v['std']:.4f})" for v in values.values())
        print(f"{arm:>16s} {cells}", flush=True)
