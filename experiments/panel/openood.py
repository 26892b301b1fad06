"""Strong networks: ResNet-18 by OpenOOD's recipe, and the trust head on the last layer and on several layers of it.

The recipe is that of OpenOOD v1.5 for CIFAR-10 and CIFAR-100: ResNet-18 for pictures of 32 pixels, 100 epochs of SGD
with cosine decay, flips and crops. Near unknowns are the other CIFAR and Tiny ImageNet, far ones MNIST and textures.
Known test pictures are split at random: a tenth calibrates, the others test. Differences to OpenOOD: training runs in
bfloat16 and leaves out the last, smaller batch of an epoch; the split of CIFAR into training and test pictures is
drawn at random, with equal classes in the test set; a part of CIFAR-10's training set (1135 pictures) is missing; Tiny
ImageNet keeps the classes that overlap with CIFAR; the textures are of ten classes; SVHN and Places365 are missing
among the far unknowns. Only near figures can therefore be compared with the published ones.

    python -m experiments.panel.openood train --set cifar100 --seed 0 --compile reduce-overhead    # on a GPU
    python -m experiments.panel.openood                                  # collect the figures of all trainings

On an H200 three trainings of a set at the same time take 6 minutes with this mode of torch.compile.

``train`` reads ``cifar10.npz``, ``cifar100.npz`` (``x_train``, ``y_train``, ``x_test``, ``y_test``), ``tin.npz``,
``textures.npz`` and ``mnist.npz`` (``x``) from ``--pictures``: arrays (N, 32, 32, 3) of bytes. It writes three files
``<set>_<seed>`` to ``--out``: the figures with all rows (json), a sample of all activations (npz), and a checkpoint
every ten epochs (pt), from which the same command continues. Seeds can be trained at the same time in several
processes. Without ``train`` the figures in ``--out`` are collected; if there are none, they are computed from the
samples in ``SEPC_DATA``/openood, which have fewer rows.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from experiments.harness import SOURCES, arguments, write_results
from experiments.provenance import older, running, stamp
from sepc_torch import TrustHead
from sepc_torch.metrics import aurc, fpr95, scod_aurc, unknown_auroc
from sepc_torch.metrics.baselines import (
    Mahalanobis,
    NearestNeighbours,
    RelativeMahalanobis,
    ViM,
    energy,
    gen,
    max_softmax,
)
from sepc_torch.metrics.compare import BASELINES

Array = np.ndarray

# OpenOOD's mean and standard deviation of each colour.
COLOURS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
OTHER = {"cifar10": "cifar100", "cifar100": "cifar10"}
FAR = ("mnist", "textures")
# OpenOOD's recipe.
EPOCHS, BATCH, RATE, LAST_RATE, MOMENTUM, DECAY, PADDING = 100, 128, 0.1, 1e-6, 0.9, 5e-4, 4
# One test picture in ten calibrates: 1000 of 10 000, as many as OpenOOD's validation set.
CALIBRATION = 10
# Rows per call of a network or head in evaluation, which limits memory.
ROWS = 2000
# Epochs between checkpoints: at most a minute of training is lost.
KEPT = 10
# Rows of each part in a stored sample, so that one network takes at most 14 MB.
SAMPLE = {"train": 6000, "calibration": 1000, "test": 3000}
SAMPLE_UNKNOWN = 600
EARLIER = "cifar100_layers.npz"
STAGES = ("layer1", "layer2", "layer3", "layer4")
# Whether a head gets the earlier layers.
HEADS = {"head": False, "head_layers": True}
OTHERS = ("max_softmax", "gen", "energy", "knn", "relative_mahalanobis", "vim", "mahalanobis++")
TITLES = {name: BASELINES[name].title for name in OTHERS} | {
    "head": "SEP-C, last layer",
    "head_layers": "SEP-C, four layers",
}
# AUROC (near, far) that OpenOOD v1.5 reports for three trainings; its far unknowns include SVHN and Places365.
PUBLISHED = {
    "cifar10": {
        "vim": (88.68, 93.48),
        "max_softmax": (88.03, 90.73),
        "energy": (87.58, 91.21),
        "knn": (90.64, 92.96),
        "gen": (88.20, 91.35),
        "relative_mahalanobis": (89.80, 92.20),
    },
    "cifar100": {
        "vim": (74.98, 81.70),
        "max_softmax": (80.27, 77.76),
        "energy": (80.91, 79.77),
        "knn": (80.18, 82.40),
        "gen": (81.31, 79.68),
        "relative_mahalanobis": (80.15, 82.92),
    },
}


class Pictures(NamedTuple):
    """Pictures (N, 32, 32, 3) of bytes and labels, by part: train, calibration, test and the unknowns."""

    x: dict[str, Array]
    y: dict[str, Array]


class Features(NamedTuple):
    """Pooled activations of the four stages, labels (-1 if unknown) and logits of some pictures."""

    stages: dict[str, Tensor]
    y: Tensor
    logits: Tensor

    @property
    def z(self) -> Tensor:
        """The embedding: the activations of the last stage."""
        return self.stages[STAGES[-1]]

    def earlier(self, rows: slice = slice(None)) -> dict[str, dict[str, Tensor]]:
        """The argument that passes the activations before the embedding to a head."""
        return {"layers": {name: self.stages[name][rows] for name in STAGES[:-1]}}


class Network(NamedTuple):
    """A trained network: its activations by part, and weight and bias of its last layer."""

    parts: dict[str, Features]
    classifier: tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1 and inputs == width
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.convolutions(x) + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """ResNet-18 for pictures of 32 pixels: a 3 x 3 stem without pooling; ``width`` is that of the first stage."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, classes: int, colours: tuple[tuple[float, ...], tuple[float, ...]], width: int = 64) -> None:
        super().__init__()
        mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in colours)
        self.register_buffer("mean", 255 * mean)
        self.register_buffer("deviation", 255 * deviation)
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width * 2**stage for stage in range(len(STAGES))]
        self.stages = nn.ModuleList(
            nn.Sequential(Block(inputs, own, 1 if own == width else 2), Block(own, own, 1))
            for inputs, own in zip([width, *widths], widths, strict=False)
        )
        self.classifier = nn.Linear(widths[-1], classes)

    def activations(self, pictures: Tensor) -> list[Tensor]:
        """The activations of every stage, averaged over the picture; ``pictures`` are bytes (B, 32, 32, 3)."""
        x = self.stem((pictures.permute(0, 3, 1, 2).float() - self.mean) / self.deviation)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x.mean(dim=(2, 3)))
        return found

    def forward(self, pictures: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.classifier(self.activations(pictures)[-1])
        return logits


def read_pictures(folder: Path, name: str) -> Pictures:
    """The pictures of a CIFAR set and its unknowns; the same tenth of the test pictures calibrates for every seed."""
    files = [f"{file}.npz" for file in (*OTHER, "tin", *FAR)]
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}. train needs {', '.join(files)}; --pictures names their folder."
        )
    own, other = (np.load(folder / f"{file}.npz") for file in (name, OTHER[name]))
    unknown = {OTHER[name]: other["x_test"]} | {file: np.load(folder / f"{file}.npz")["x"] for file in ("tin", *FAR)}
    return split(own["x_train"], own["y_train"], own["x_test"], own["y_test"], unknown)


def split(x_train: Array, y_train: Array, x_test: Array, y_test: Array, unknown: dict[str, Array]) -> Pictures:
    """All parts, with a random tenth of the test pictures for calibration; the draw does not depend on the training."""
    for name, given in {"training": x_train, "test": x_test, **unknown}.items():
        if given.dtype != np.uint8 or given.shape[1:] != (32, 32, 3):
            raise ValueError(
                f"Expected {name} pictures as bytes of shape (N, 32, 32, 3), got {given.dtype} of shape {given.shape}. "
                "Resize pictures to 32 x 32 RGB first."
            )
    order = np.random.default_rng(0).permutation(len(y_test))
    calibration, test = np.split(order, [len(order) // CALIBRATION])
    x = {"train": x_train, "calibration": x_test[calibration], "test": x_test[test], **unknown}
    y = {"train": y_train, "calibration": y_test[calibration], "test": y_test[test]}
    return Pictures(x, {part: y.get(part, np.full(len(pictures), -1)).astype(np.int64) for part, pictures in x.items()})


def batches(x: Tensor, y: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of augmented pictures with their labels; ``x`` has a margin of PADDING, and a last part is left out."""
    size = x.shape[1] - 2 * PADDING
    pixels = torch.arange(size, device=x.device)
    count = min(BATCH, len(y))
    for rows in torch.randperm(len(y), generator=generator, device=x.device).split(count):
        if len(rows) < count:
            return
        top, left = torch.randint(0, 2 * PADDING + 1, (2, count, 1), generator=generator, device=x.device)
        flipped = torch.rand(count, 1, generator=generator, device=x.device) < 0.5
        columns = left + torch.where(flipped, pixels.flip(0), pixels)
        yield x[rows[:, None, None], (top + pixels)[:, :, None], columns[:, None, :]], y[rows]


def trained(
    pictures: Pictures,
    name: str,
    seed: int,
    epochs: int,
    device: torch.device,
    *,
    kept: Path | None,
    width: int = 64,
    mode: str = "default",
) -> ResNet18:
    """Train a network by OpenOOD's recipe.

    Args:
        pictures: The pictures; only the part ``train`` is used.
        name: The set, for its colours.
        seed: Seed of the weights and of every epoch.
        epochs: Number of epochs.
        device: Where to train.
        kept: File of the checkpoint, written every few epochs; training continues from it if it exists.
        width: Width of the first stage.
        mode: Mode of ``torch.compile`` on a CUDA device.
    """
    torch.manual_seed(seed)
    network = ResNet18(int(pictures.y["train"].max()) + 1, COLOURS[name], width)
    network = network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = pad(torch.from_numpy(pictures.x["train"]).to(device), (0, 0, *[PADDING] * 4))
    y = torch.from_numpy(pictures.y["train"]).to(device)
    cuda = device.type == "cuda"
    optimizer = torch.optim.SGD(network.parameters(), RATE, MOMENTUM, weight_decay=DECAY, nesterov=True, fused=cuda)
    steps = epochs * max(1, len(y) // BATCH)

    def rate(step: int) -> float:
        """Cosine from 1 down to LAST_RATE / RATE, as a factor of RATE."""
        least = LAST_RATE / RATE
        return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    first = 0
    if kept is not None and kept.is_file():
        state = torch.load(kept, map_location=device, weights_only=True)
        if state["epochs"] != epochs:
            raise ValueError(f"{kept} is of a training of {state['epochs']} epochs, not {epochs}; delete or move it.")
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"]
    forward: Callable[[Tensor], Tensor] = torch.compile(network, mode=mode) if cuda else network
    network.train()
    for epoch in range(first, epochs):
        begun, total = time.perf_counter(), torch.zeros((), device=device)
        generator = torch.Generator(device).manual_seed(seed * 10_000 + epoch)
        for inputs, labels in batches(x, y, generator):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(forward(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        mean = float(total) * epochs / steps
        print(f"{name} {seed}: epoch {epoch + 1}, loss {mean:.4f}, {time.perf_counter() - begun:.1f} s", flush=True)
        if kept is not None and ((epoch + 1) % KEPT == 0 or epoch + 1 == epochs):
            states = {"network": network, "optimizer": optimizer, "schedule": schedule}
            state = {key: value.state_dict() for key, value in states.items()}
            part = kept.with_suffix(".part")  # a killed process leaves no half checkpoint
            torch.save(state | {"epoch": epoch + 1, "epochs": epochs}, part)
            part.replace(kept)
    return network.eval()


@torch.no_grad()
def activations(network: ResNet18, pictures: Pictures, device: torch.device) -> Network:
    """Activations and logits of all pictures, in float32."""
    parts = {}
    for part, x in pictures.x.items():
        found = [network.activations(rows.to(device)) for rows in torch.from_numpy(x).split(ROWS)]
        stages = dict(zip(STAGES, (torch.cat(stage) for stage in zip(*found, strict=True)), strict=True))
        logits = network.classifier(stages[STAGES[-1]])
        parts[part] = Features(stages, torch.from_numpy(pictures.y[part]).to(device), logits)
    return Network(parts, (network.classifier.weight.detach(), network.classifier.bias.detach()))


def in_turn(y: Array, count: int, order: Array | None = None) -> Array:
    """At most ``count`` rows, from every class in turn: the classes differ by one row at most while they last.

    Args:
        y: The label of every row.
        count: The number of rows.
        order: The order in which the rows of a class are taken; by default that of ``y``.
    """
    order = np.arange(len(y)) if order is None else order
    ranks = np.empty(len(y))
    for label in np.unique(y):
        own = order[y[order] == label]
        ranks[own] = np.arange(len(own))
    found: Array = order[np.argsort(ranks[order], kind="stable")][:count]
    return found


def quantised(parts: dict[str, Array], levels: int = 255) -> tuple[dict[str, Array], Array]:
    """Embeddings of all parts in one byte each on a root scale, and the scale of every feature.

    An embedding is (byte * scale)^2 with the sign of the byte. Without a negative value, as after a ReLU, bytes have no
    sign and at most ``levels``, otherwise at most half of it.
    """
    signed = any(bool((z < 0).any()) for z in parts.values())
    most = levels // 2 if signed else levels
    roots = {part: np.sign(z) * np.abs(z) ** 0.5 for part, z in parts.items()}
    scale = np.max([np.abs(root).max(axis=0) for root in roots.values()], axis=0) / most
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    kind = np.int8 if signed else np.uint8
    return {part: np.round(root / scale).astype(kind) for part, root in roots.items()}, scale


def dequantised(values: Array, scale: Array) -> Array:
    """The embeddings that ``quantised`` stored, in float32."""
    root = values * scale
    found: Array = (np.abs(root) * root).astype(np.float32)
    return found


def store(network: Network, epochs: int, path: Path, rng: np.random.Generator) -> None:
    """Store a sample of rows: logits in float16, activations in 8 bits on a root scale as their skewness asks."""
    kept = {}
    for part, rows in network.parts.items():
        y = rows.y.cpu().numpy()
        kept[part] = in_turn(y, SAMPLE.get(part, SAMPLE_UNKNOWN), rng.permutation(len(y)))
    weight, bias = network.classifier
    arrays = {"epochs": np.array(epochs), "weight": weight.cpu().numpy(), "bias": bias.cpu().numpy()}
    for stage in STAGES:
        found = {part: rows.stages[stage].cpu().numpy()[kept[part]] for part, rows in network.parts.items()}
        values, arrays[f"scale_{stage}"] = quantised(found)
        arrays |= {f"{part}_{stage}": own for part, own in values.items()}
    for part, rows in network.parts.items():
        arrays[f"{part}_logits"] = rows.logits.cpu().numpy()[kept[part]].astype(np.float16)
        arrays[f"{part}_y"] = rows.y.cpu().numpy()[kept[part]].astype(np.int16)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def stored(path: Path) -> tuple[Network, int]:
    """The network that ``store`` wrote, and its epochs."""
    arrays = np.load(path)
    parts = {}
    for part in (name.removesuffix("_logits") for name in arrays if name.endswith("_logits")):
        stages = {
            stage: torch.from_numpy(dequantised(arrays[f"{part}_{stage}"], arrays[f"scale_{stage}"]))
            for stage in STAGES
        }
        labels, logits = (torch.from_numpy(arrays[f"{part}_{name}"]) for name in ("y", "logits"))
        parts[part] = Features(stages, labels.long(), logits.float())
    classifier = torch.from_numpy(arrays["weight"]), torch.from_numpy(arrays["bias"])
    return Network(parts, classifier), int(arrays["epochs"])


def earlier_sample(path: Path) -> Network:
    """A small sample of one network that was trained by the recipe for 59 epochs, with names of its own."""
    arrays = np.load(path)
    names = {"train": "train", "val": "calibration", "test": "test"}
    names |= {f"ood_{part}": part for part in ("cifar10", "tin", "textures", "mnist")}
    stages = dict(zip(STAGES, ("layer1", "layer2", "layer3", "X"), strict=True))

    def of(part: str, stage: str) -> Array:
        found: Array = np.square(arrays[f"{part}_{stages[stage]}"] * arrays[f"scale_{stages[stage]}"])
        return found.astype(np.float32)

    # The logits are linear in the embeddings, up to rounding; those of the training rows are not stored.
    design = np.concatenate([of(part, STAGES[-1]) for part in ("val", "test")])
    logits = np.concatenate([arrays[f"{part}_logits"] for part in ("val", "test")]).astype(np.float64)
    solution = np.linalg.lstsq(np.column_stack([design, np.ones(len(design))]), logits, rcond=None)[0].astype(
        np.float32
    )
    parts = {}
    for part, name in names.items():
        z = {stage: torch.from_numpy(of(part, stage)) for stage in STAGES}
        stored_logits = arrays.get(f"{part}_logits")
        made = z[STAGES[-1]].numpy() @ solution[:-1] + solution[-1] if stored_logits is None else stored_logits
        y = arrays.get(f"{part}_y", np.full(len(made), -1))
        parts[name] = Features(z, torch.from_numpy(y).long(), torch.from_numpy(made).float())
    return Network(parts, (torch.from_numpy(solution[:-1].T.copy()), torch.from_numpy(solution[-1])))


# Confidence of test rows and unknowns by the question: mistakes, unknowns, both.
Confidence = dict[str, dict[str, Tensor]]


def peer_scores(network: Network) -> dict[str, Confidence]:
    """Scores of other methods; each has one score for all questions."""
    train = network.parts["train"]
    # By default k-NN takes the N / 1000-th neighbour: the 50th of 50 000 rows, as OpenOOD does.
    neighbours = NearestNeighbours.fit(train.z, train.y)
    relative = RelativeMahalanobis.fit(train.z, train.y)
    plus = Mahalanobis.fit(train.z, train.y, unit_length=True)
    vim = ViM.fit(train.z, train.logits, classifier=network.classifier)
    scores: dict[str, Callable[[Features], Tensor]] = {
        "max_softmax": lambda rows: max_softmax(rows.logits),
        "gen": lambda rows: gen(rows.logits),
        "energy": lambda rows: energy(rows.logits),
        "knn": lambda rows: neighbours.score(rows.z),
        "relative_mahalanobis": lambda rows: relative.score(rows.z),
        "vim": lambda rows: vim.score(rows.z, rows.logits),
        "mahalanobis++": lambda rows: plus.score(rows.z),
    }
    found = {}
    for name, score in scores.items():
        values = {part: score(rows).cpu() for part, rows in judged(network).items()}
        found[name] = dict.fromkeys(("mistakes", "unknowns", "both"), values)
    return found


def head_scores(network: Network, *, layers: bool) -> Confidence:
    """The head's score for each question, with all defaults; ``layers`` adds the activations before the embedding."""
    train, calibration = network.parts["train"], network.parts["calibration"]

    def more(rows: Features, chosen: slice = slice(None)) -> Any:
        return rows.earlier(chosen) if layers else {}

    classes = np.arange(train.logits.shape[1])
    head = TrustHead.fit(train.z, train.y.cpu(), classes=classes, progress=False, **more(train)).to(train.z.device)
    head.calibrate(calibration.z, calibration.y.cpu(), calibration.logits, **more(calibration))
    found: Confidence = {"mistakes": {}, "unknowns": {}, "both": {}}
    for part, rows in judged(network).items():
        chosen = [slice(start, start + ROWS) for start in range(0, len(rows.y), ROWS)]
        outs = [head(rows.z[own], rows.logits[own], **more(rows, own)) for own in chosen]
        found["mistakes"][part] = torch.cat([out.confidence for out in outs]).cpu()
        found["unknowns"][part] = torch.cat([-out.nonconformity for out in outs]).cpu()
        found["both"][part] = torch.cat([out.joint for out in outs]).cpu()
    return found


def judged(network: Network) -> dict[str, Features]:
    """The rows to score: the test rows and the unknowns."""
    return {part: rows for part, rows in network.parts.items() if part not in ("train", "calibration")}


@torch.no_grad()
def figures(network: Network) -> dict[str, Any]:
    """Rows, accuracy and the figures of every score: AURC, and AUROC, FPR@95 and SCOD-AURC of each kind of unknowns.

    FPR@95 is OpenOOD's: the share of known rows rejected where 95 % of the unknowns are rejected.
    """
    test = network.parts["test"]
    right = (test.logits.argmax(dim=1) == test.y).cpu()
    scores = peer_scores(network) | {name: head_scores(network, layers=layers) for name, layers in HEADS.items()}
    found: dict[str, Any] = {}
    for name, score in scores.items():
        own: dict[str, Any] = {"aurc": 1000 * float(aurc(score["mistakes"]["test"], right)), "unknowns": {}}
        for part in judged(network):
            if part == "test":
                continue
            pair = score["unknowns"]["test"], score["unknowns"][part]
            own["unknowns"][part] = {
                "auroc": 100 * float(unknown_auroc(*pair)),
                "fpr95": 100 * float(fpr95(*pair, positive="unknown")),
                "scod_aurc": 1000 * _scod_aurc(score["both"]["test"], score["both"][part], right),
            }
        found[name] = own
    rows = {part: len(own.y) for part, own in network.parts.items()}
    return {"rows": rows, "accuracy": 100 * float(right.double().mean()), "scores": found}


def _scod_aurc(known: Tensor, unknown: Tensor, right: Tensor) -> float:
    """SCOD-AURC of as many known as unknown rows, drawn alike for every score."""
    count = min(len(known), len(unknown))
    rng = np.random.default_rng(count)
    rows, others = (torch.from_numpy(rng.permutation(len(score))[:count]) for score in (known, unknown))
    both = torch.cat([known[rows], unknown[others]])
    correct = torch.cat([right[rows], torch.zeros(count, dtype=torch.bool)])
    return float(scod_aurc(both, correct, torch.arange(2 * count) >= count))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every set and score: mean and standard deviation over the trainings, of near and of far unknowns."""
    rows = []
    for name in dict.fromkeys(run["set"] for run in runs):
        own = [run for run in runs if run["set"] == name]
        for score in own[0]["scores"]:
            found = [run["scores"][score] for run in own]
            row: dict[str, Any] = {"set": name, "score": score, "title": TITLES[score], "runs": len(own)}
            row["aurc"] = _spread([figure["aurc"] for figure in found])
            for kind, groups in (("near", (OTHER[name], "tin")), ("far", FAR)):
                for figure in ("auroc", "fpr95", "scod_aurc"):
                    values = [np.mean([run["unknowns"][group][figure] for group in groups]) for run in found]
                    row[f"{kind}_{figure}"] = _spread(values)
            row["published"] = PUBLISHED[name].get(score)
            rows.append(row)
    return rows


def _spread(values: list[Any]) -> tuple[float, float | None]:
    """Mean and standard deviation; None for the deviation of one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def collect(folder: Path) -> list[dict[str, Any]]:
    """The figures of all trainings in a folder; without any, figures of the samples in SEPC_DATA."""
    paths = sorted(folder.glob("cifar*_*.json"))
    if paths:
        runs = [json.loads(path.read_text()) for path in paths]
        for path, run in zip(paths, runs, strict=True):
            if older(run["measured"], SOURCES):
                print(f"{path.name} was measured on other sources; train again before you rely on its figures.")
        return runs
    from experiments.datasets import data_folder  # needs pandas, which a machine that trains may not have

    data = data_folder()
    samples = sorted((data / "openood").glob("cifar*_*.npz")) if data is not None else []
    if not samples and data is not None and (data / EARLIER).is_file():
        return [{"set": "cifar100", "seed": 0, "epochs": 59} | figures(earlier_sample(data / EARLIER))]
    if not samples:
        raise FileNotFoundError(
            f"Neither {folder} has figures (cifar100_0.json, ...) nor SEPC_DATA samples (openood/cifar100_0.npz, ...). "
            "Run `python -m experiments.panel.openood train` on a GPU first, or name its folder with --out."
        )
    found = []
    for path in samples:
        name, _, seed = path.stem.partition("_")
        network, epochs = stored(path)
        found.append({"set": name, "seed": int(seed), "epochs": epochs} | figures(network))
    return found


def train(
    pictures: Pictures, name: str, seed: int, epochs: int, folder: Path, device: torch.device, **options: Any
) -> dict[str, Any]:
    """Train one network, store a sample of its activations and return its figures; ``options`` are of ``trained``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{seed}"
    model = trained(pictures, name, seed, epochs, device, kept=path.with_suffix(".pt"), **options)
    network = activations(model, pictures, device)
    store(network, epochs, path.with_suffix(".npz"), np.random.default_rng(seed))
    return {"set": name, "seed": seed, "epochs": epochs} | figures(network)


def random_pictures(rng: np.random.Generator, classes: int = 4, count: int = 240) -> Pictures:
    """Noisy pictures with a colour per class, and unknowns of random colours, to run everything in seconds."""

    def noisy(colours: Array) -> Array:
        noise = rng.normal(0.0, 30.0, (len(colours), 32, 32, 3))
        return np.clip(colours[:, None, None, :] + noise, 0, 255).astype(np.uint8)

    colours = rng.uniform(30, 220, (classes, 3))
    labels = [rng.permutation(np.arange(count) % classes) for _ in range(2)]
    known = [noisy(colours[y]) for y in labels]
    unknown = {part: noisy(rng.uniform(30, 220, (40, 3))) for part in ("cifar10", "tin", *FAR)}
    return split(known[0], labels[0], known[1], labels[1], unknown)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        near, far = (f"{kind} {row[f'{kind}_auroc'][0]:6.2f}" for kind in ("near", "far"))
        print(f"{row['set']:9} {row['title']:22} {near}  {far}  AURC x 1000 {row['aurc'][0]:.2f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("action", nargs="?", choices=["train"], help="train a network; without it, collect the figures")
    parser.add_argument("--set", choices=list(COLOURS), default="cifar100", help="the known classes")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    modes = ["default", "reduce-overhead"]
    parser.add_argument(
        "--compile", choices=modes, default=modes[0], help="mode of torch.compile; the second uses CUDA graphs"
    )
    parser.add_argument("--pictures", type=Path, default=Path("build/pictures"), help="the folder of the pictures")
    parser.add_argument("--out", type=Path, default=Path("build/openood"), help="the folder of trainings")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    if options.smoke:
        pictures = random_pictures(np.random.default_rng(options.seed))
        with tempfile.TemporaryDirectory() as folder:
            run = train(pictures, "cifar100", options.seed, 1, Path(folder), torch.device("cpu"), width=4)
        show(summarise([run]))
    elif options.action == "train":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.benchmark = True
        pictures = read_pictures(options.pictures, options.set)
        begun = time.perf_counter()
        run = train(pictures, options.set, options.seed, options.epochs, options.out, device, mode=options.compile)
        run |= {"seconds": time.perf_counter() - begun, "measured": stamp(running(), SOURCES)}
        (options.out / f"{options.set}_{options.seed}.json").write_text(json.dumps(run, indent=1) + "\n")
        show(summarise([run]))
        print(f"accuracy {run['accuracy']:.2f} %, {run['seconds']:.0f} s", flush=True)
    else:
        runs = collect(options.out)
        rows = summarise(runs)
        show(rows)
        write_results("openood", options, ("torch", "scikit-learn"), {"rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
