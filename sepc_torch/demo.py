"""The whole path on data that scikit-learn ships: ``python -m sepc_torch.demo [FOLDER]`` or ``sepc demo [FOLDER]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from sepc_torch import SEPC, Prediction, TrustHead, landscape, partition
from sepc_torch.cli_tables import summary
from sepc_torch.data.arrays import label_codes
from sepc_torch.data.text_table import text_table
from sepc_torch.model.rules import Rule
from sepc_torch.plot import draw_decisions, draw_partition
from sepc_torch.shapes import Array, Int

# Below this trust, or outside every ellipsoid, a prediction goes to a person.
_THRESHOLD = 0.95
# The share of ordinary digits that may be refused.
_FLAG_RATE = 0.1


class Split(NamedTuple):
    """Labelled points to fit and others to score."""

    fit: Any
    fit_labels: Array
    held_out: Any
    held_out_labels: Array


def main(folder: Path) -> None:
    """Fit, freeze, score, explain, judge a network and draw; write models and pictures into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    data = load_breast_cancer(as_frame=True)
    labels = data.target_names[data.target]
    fit, held_out, fit_labels, held_out_labels = train_test_split(
        data.data, labels, test_size=0.2, random_state=0, stratify=labels
    )
    split = Split(fit, fit_labels, np.array(held_out), held_out_labels)
    sepc = _fit(split, folder)
    _score(sepc, split)
    _accept(folder)
    _draw_moons(folder)
    print(f"\nDone in {time.perf_counter() - begun:.0f} s. Written to {folder}:")
    print("  wdbc.partition.safetensors  the partition, with its hyperplanes (Partition.load)")
    print("  wdbc.safetensors            the frozen model (SEPC.load, sepc score, sepc explain)")
    print("  digits.head.safetensors     the calibrated trust head (TrustHead.load)")
    print("  moons.png                   two moons, the ellipses that cover them")
    print("  moons-decisions.png         two moons, the plane coloured by label and trust")


def _fit(split: Split, folder: Path) -> SEPC:
    _title("1. Fit: cover the training points of each class with ellipsoids")
    begun = time.perf_counter()
    found = partition(split.fit, split.fit_labels, max_impure=2)
    print(
        f"Breast cancer (WDBC): {len(split.fit)} of 569 records, 30 features, "
        f"partitioned in {time.perf_counter() - begun:.2f} s\n"
    )
    print(found)
    print("\nHow far do the classes overlap?\n")
    print(landscape(split.fit, split.fit_labels, partition=found))

    _title("2. Freeze: a torch module without a single training point inside")
    sepc = SEPC.from_partition(found, "euclidean")
    print(sepc)
    found.save(folder / "wdbc.partition.safetensors")
    sepc.save(folder / "wdbc.safetensors")
    return sepc


def _score(sepc: SEPC, split: Split) -> None:
    _title(f"3. Score the {len(split.held_out)} records that were held out")
    truth = label_codes(split.held_out_labels.tolist(), sepc.classes)
    out = sepc(sepc.as_tensor(split.held_out))
    found = summary(out, truth, _THRESHOLD)
    print(found)
    print(
        "\nSINGLE: inside one ellipsoid. OVERLAP, UNION: inside several, training points decide. OUTSIDE: inside none."
    )
    print(
        f"\nAll labels taken: {found.everything.accuracy:.1%} right. Only those inside an ellipsoid with trust >= "
        f"{_THRESHOLD}:\n{found.accepted.share:.1%} of the records, {found.accepted.accuracy:.1%} right; "
        "the rest goes to a person."
    )
    head = TrustHead.fit(split.fit, split.fit_labels, dim=5, normalize="standardize", max_impure=2)
    projected = summary(Prediction(*head(sepc.as_tensor(split.held_out))[:7]), truth, _THRESHOLD)
    print(
        f"\n30 dimensions are many for {len(split.fit)} records: the ellipsoids hug them, few new ones fall inside.\n"
        f"After projecting to 5 (TrustHead): {projected.everything.accuracy:.1%} right; "
        f"{projected.accepted.share:.1%} of the records accepted, {projected.accepted.accuracy:.1%} of them right."
    )
    _title("4. Explain three of them")
    for what, i in _interesting(out, truth).items():
        print(f"{what}, truly {str(split.held_out_labels[i])!r}:\n{sepc.explain(split.held_out, i)}\n")


def _interesting(out: Prediction, truth: Int[Array, "B"]) -> dict[str, int]:
    """One point of each kind: trusted, outside, and the mistake least trusted (or, without any, the point)."""
    trust, right = out.trust.numpy(), out.label.numpy() == truth
    outside = out.rule.numpy() == int(Rule.OUTSIDE)
    accepted = ~out.abstain(_THRESHOLD).numpy()
    wrong = ~right if not right.all() else ~outside
    return {
        "A trusted record": int(np.where(accepted & right, out.margin.numpy(), -np.inf).argmax()),
        "A record far outside": int(np.where(outside & right, out.distance.numpy(), -np.inf).argmax()),
        "A mistake" if not right.all() else "The least trusted record": int(np.where(wrong, trust, np.inf).argmin()),
    }


def _accept(folder: Path) -> None:
    _title("5. Trust a network: handwritten digits, and nobody told it of 8 and 9")
    pixels, digit = load_digits(return_X_y=True)
    fold, known = np.arange(len(digit)) % 3, digit < 8
    train, held, new = (known & (fold == f) for f in range(3))
    network = MLPClassifier([64], solver="lbfgs", random_state=0).fit(pixels[train] / 16, digit[train])
    z = np.maximum(pixels / 16 @ network.coefs_[0] + network.intercepts_[0], 0)
    logits = z @ network.coefs_[1] + network.intercepts_[1]
    head = TrustHead.fit(z[train], digit[train])
    head.calibrate(z[held], digit[held], logits[held])
    head.accept_at(flag_rate=_FLAG_RATE)
    rows = []
    for name, chosen in (("digits it knows", new), ("8 and 9", ~known)):
        out = head(torch.from_numpy(z[chosen]).float(), torch.from_numpy(logits[chosen]))
        wrong, accepted = logits[chosen].argmax(axis=1) != digit[chosen], out.accept.numpy()
        sure = np.exp(logits[chosen] - logits[chosen].max(axis=1, keepdims=True)).sum(axis=1) < 1 / 0.95
        rows.append(
            [
                name,
                str(len(wrong)),
                f"{wrong.mean():.1%}",
                f"{sure.mean():.1%}",
                f"{accepted.mean():.1%}",
                f"{wrong[accepted].mean():.1%}" if accepted.any() else "",
            ]
        )
    header = ["new pictures", "number", "network wrong", "softmax > 95 %", "head accepts", "of those wrong"]
    print(text_table(header, rows))
    print(f"\nThe head was asked to refuse at most {_FLAG_RATE:.0%} of ordinary digits; it has never seen an 8 or a 9.")
    head.save(folder / "digits.head.safetensors")


def _draw_moons(folder: Path) -> None:
    _title("6. Draw: two moons, where everything can be seen")
    split = Split(*make_moons(400, noise=0.12, random_state=0), *make_moons(200, noise=0.12, random_state=1))
    found = partition(split.fit, split.fit_labels, max_impure=2)
    print(found)
    # A figure of its own, not pyplot's, opens no window and needs no screen.
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    ax = draw_partition(found, split.fit, split.fit_labels, ax=figure.subplots())
    ax.set_title("Two moons: the ellipsoids of SEP-C and the hyperplane of every iteration")
    figure.savefig(folder / "moons.png", dpi=150)

    sepc = SEPC.from_partition(found, "euclidean")
    out = sepc(sepc.as_tensor(split.held_out))
    right = (out.label.numpy() == split.held_out_labels).mean()
    figure = Figure(figsize=(8.6, 5.5), layout="constrained")
    ax = draw_decisions(sepc, split.held_out, split.held_out_labels, ax=figure.subplots())
    ax.set_title(f"Two moons: label and trust everywhere, and 200 new points ({right:.1%} right)")
    figure.savefig(folder / "moons-decisions.png", dpi=150)


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo"))
