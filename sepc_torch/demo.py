"""Demonstration of every step, on data sets of scikit-learn: ``python -m sepc_torch.demo [FOLDER]`` or ``sepc demo``.

The steps are: fit ellipsoids, freeze the model, score new records, explain predictions, decide which labels of a neural
network to accept, draw, and write a report.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from sepc_torch import SEPC, Prediction, TrustHead, landscape, partition, write_report
from sepc_torch.cli.tally import RuleTally
from sepc_torch.data.labels import label_codes
from sepc_torch.data.text import printable, text_table
from sepc_torch.model.rules import Rule
from sepc_torch.plot import draw_decisions, draw_partition
from sepc_torch.shapes import Array, Int

# Trust from which on the table of step 3 counts a label apart.
_THRESHOLD = 0.95
# Promised share of wrong labels among the accepted ones, and the probability that the promise fails.
_RISK, _DELTA = 0.05, 0.1
# Fraction of the known digits that the head may reject.
_FLAG_RATE = 0.1


class Split(NamedTuple):
    """Labelled points for fitting, and held-out points for scoring."""

    fit: Any
    fit_labels: Array
    held_out: Any
    held_out_labels: Array


class Decided(NamedTuple):
    """A calibrated head, and the images that it decided on with their numbers in the data set."""

    head: TrustHead
    embeddings: Array
    digits: Array
    logits: Array
    pixels: Array
    numbers: Array


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to write the models and figures to.")] = Path("demo"),
) -> None:
    """Run the demonstration: every step on data sets that scikit-learn includes."""
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
    decided = _accept(folder)
    _draw_moons(folder)
    _report(decided, folder)
    print(f"\nDone in {time.perf_counter() - begun:.0f} s. Written to {printable(folder)}:")
    print("  wdbc.partition.safetensors  ellipsoids and hyperplanes of step 1 (Partition.load)")
    print("  wdbc.safetensors            frozen model of step 2 (SEPC.load, sepc paper score)")
    print("  digits.head.safetensors     calibrated trust head of step 5 (TrustHead.load)")
    print("  moons.png                   step 6: two moons, and the ellipses that cover them")
    print("  moons-decisions.png         step 6: the plane, coloured by label and trust")
    print("  report.html, report.json    step 7: trust report of the digits of step 5")


def _fit(split: Split, folder: Path) -> SEPC:
    _title("1. Fit: cover the training records of each class with ellipsoids")
    begun = time.perf_counter()
    found = partition(split.fit, split.fit_labels, max_impure=2)
    print(
        f"Data: breast cancer (WDBC), 569 records with 30 features. {len(split.fit)} records train the model; "
        f"the fit took {time.perf_counter() - begun:.2f} s.\n"
    )
    print(found)
    print(
        "\nkind: first and further name the iteration; a terminal ellipsoid covers points that cannot be separated;"
        "\nan isolated point has a small ball of its own. covers: number of points that the ellipsoid was fitted to."
        "\nholds: training points inside. purity: fraction of them of this class. support: points on the surface."
    )
    print("\nHow much do the classes overlap?\n")
    print(landscape(split.fit, split.fit_labels, partition=found))
    print(
        "\noverlap: the ellipsoid around the training points that lie in the ellipsoids of both classes."
        "\noverlap ratio: its volume divided by the volume of the ellipsoid of the class."
    )

    _title("2. Freeze: turn the ellipsoids into a torch module")
    sepc = SEPC.from_partition(found, "euclidean")
    print(sepc)
    print("\nThe module stores ellipsoids and counts, but no training records.")
    found.save(folder / "wdbc.partition.safetensors")
    sepc.save(folder / "wdbc.safetensors")
    return sepc


def _score(sepc: SEPC, split: Split) -> None:
    _title(f"3. Score: label the {len(split.held_out)} held-out records, and compute the trust in each label")
    truth = label_codes(split.held_out_labels.tolist(), sepc.classes)
    out = sepc(sepc.as_tensor(split.held_out))
    found = RuleTally(sepc.classes, _THRESHOLD)
    found.add_prediction(out, split.held_out_labels.tolist())
    print(found)
    print(
        "\nThe rule that gave the label depends on where the record lies. SINGLE: inside one ellipsoid."
        "\nOVERLAP and UNION: inside several ellipsoids, the majority of their training points decides."
        "\nOUTSIDE: inside none, the nearest ellipsoid decides."
    )
    print(
        f"\nIf every label is accepted, {found.share().accuracy:.1%} are right. Trust explains a label by the "
        "training records around it; it promises no error rate.\nWith 30 features and only "
        f"{len(split.fit)} training records the ellipsoids are tight: {found.share('OUTSIDE').share:.1%} of the new "
        "records lie outside."
    )
    fit, held, fit_labels, held_labels = train_test_split(
        split.fit, split.fit_labels, test_size=0.5, random_state=0, stratify=split.fit_labels
    )
    head = TrustHead.fit(fit, fit_labels, dim=5, normalize="standardize", max_impure=2).calibrate(held, held_labels)
    head.accept_at(risk=_RISK, delta=_DELTA)
    decided = head.judge(split.held_out)
    right, accepted = decided.label.numpy() == truth, decided.accept.numpy()
    print(
        "\nTo decide, a trust head projects half of the records to 5 dimensions and calibrates with the other half. It "
        f"promises that\n{head.promise} (accept_at).\nIt accepts {accepted.mean():.1%} of the new labels, and "
        f"{right[accepted].mean():.1%} of these are right; of all its labels {right.mean():.1%}."
        " A person labels the rest."
    )
    _title("4. Explain: why three of the records got their labels")
    for title, i in _examples(out, truth).items():
        print(f"{title} (true class {str(split.held_out_labels[i])!r}):\n{sepc.explain(split.held_out, i)}\n")


def _examples(out: Prediction, truth: Int[Array, "B"]) -> dict[str, int]:
    """Rows to explain, by title: a trusted record, a record outside, and the mistake with the least trust.

    If there is no mistake, the third is the record inside an ellipsoid with the least trust.
    """
    trust, right = out.trust.numpy(), out.label.numpy() == truth
    outside = out.rule.numpy() == int(Rule.OUTSIDE)
    accepted = ~out.abstain(_THRESHOLD).numpy()
    wrong = ~right if not right.all() else ~outside
    return {
        "A trusted record": int(np.where(accepted & right, out.margin.numpy(), -np.inf).argmax()),
        "A record far outside": int(np.where(outside & right, out.distance.numpy(), -np.inf).argmax()),
        "A mistake" if not right.all() else "The least trusted record": int(np.where(wrong, trust, np.inf).argmin()),
    }


def _accept(folder: Path) -> Decided:
    _title("5. Accept or reject the labels of a neural network")
    print("Data: images of handwritten digits. The network and the trust head are trained on 0 to 7 only.\n")
    pixels, digit = load_digits(return_X_y=True)
    fold, known = np.arange(len(digit)) % 3, digit < 8
    train, held, new = (known & (fold == f) for f in range(3))
    network = MLPClassifier([64], solver="lbfgs", random_state=0).fit(pixels[train] / 16, digit[train])
    z = np.maximum(pixels / 16 @ network.coefs_[0] + network.intercepts_[0], 0)
    logits = z @ network.coefs_[1] + network.intercepts_[1]
    head = TrustHead.fit(z[train], digit[train], ids=[f"image {i}" for i in np.flatnonzero(train)])
    head.calibrate(z[held], digit[held], logits[held])
    head.accept_at(flag_rate=_FLAG_RATE)
    rows = []
    for name, chosen in (("0 to 7 (known)", new), ("8 and 9 (unknown)", ~known)):
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
    header = ["new images", "number", "network wrong", "softmax > 95 %", "head accepts", "accepted and wrong"]
    print(text_table(header, rows))
    print(
        f"\nThe head promises that {head.promise}\n(accept_at(flag_rate={_FLAG_RATE}))."
        "\nIt rejects most images of 8 and 9, although the network is confident about many of them."
        "\naccepted and wrong: fraction of the accepted labels that are wrong."
    )
    head.save(folder / "digits.head.safetensors")
    shown = new | ~known
    return Decided(head, z[shown], digit[shown], logits[shown], pixels[shown], np.flatnonzero(shown))


def _report(decided: Decided, folder: Path) -> None:
    _title("7. Report: one page about the decisions of step 5, to hand to a colleague")
    page = write_report(
        decided.head,
        decided.embeddings,
        decided.digits,
        decided.logits,
        folder / "report.html",
        images=decided.pixels.reshape(-1, 8, 8),
        ids=[f"image {i}" for i in decided.numbers],
        model="digits.head.safetensors",
        data="digits of step 5",
    )
    size = page.stat().st_size
    print(f"Open {printable(page)} in a browser: one file of {size // 1000} kB, with the unknown digits 8 and 9.")


def _draw_moons(folder: Path) -> None:
    _title("6. Draw: a partition of two-dimensional points (two moons)")
    split = Split(*make_moons(400, noise=0.12, random_state=0), *make_moons(200, noise=0.12, random_state=1))
    found = partition(split.fit, split.fit_labels, max_impure=2)
    print(found)
    # A Figure created without pyplot opens no window and needs no display.
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    ax = draw_partition(found, split.fit, split.fit_labels, ax=figure.subplots())
    ax.set_title("Two moons: ellipsoids and the hyperplane of every iteration")
    figure.savefig(folder / "moons.png", dpi=150)

    sepc = SEPC.from_partition(found, "euclidean")
    out = sepc(sepc.as_tensor(split.held_out))
    right = (out.label.numpy() == split.held_out_labels).mean()
    figure = Figure(figsize=(8.6, 5.5), layout="constrained")
    ax = draw_decisions(sepc, split.held_out, split.held_out_labels, ax=figure.subplots())
    ax.set_title(f"Two moons: predicted label and trust, with 200 new points ({right:.1%} right)")
    figure.savefig(folder / "moons-decisions.png", dpi=150)


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}\n")


if __name__ == "__main__":
    typer.run(main)
