"""Feature files of networks that nobody tuned on, from pictures or texts and published weights.

Networks of other people, for which no choice of the head was made: two ResNets for CIFAR-10 (akamaster's ResNet-20 and
ResNet-56), two LeNets for MNIST (OpenOOD's), frozen ImageNet backbones with linear probes (EfficientNet-Lite0 and
Lite2, torchvision's MobileNetV2) and a linear probe on mean token vectors (WordLlama) of CLINC150. ``networks.py``
measures the head on the files. Sounds become pictures of their spectrograms, for a backbone with a linear probe.

    python -m experiments.panel.features --pictures DIR --weights DIR --out DIR [--only NAME,...]

``--pictures`` has a file of arrays for each set: pictures (N, side, side, 3) of bytes, in random order, as ``x_train``,
``y_train``, ``x_test``, ``y_test`` or as ``x``, ``y``; and the texts ``data_full.json`` of clinc/oos-eval. CIFAR-10
must have its original split, which the published networks have learned. A set of sounds is a folder of WAV files whose
names begin (Free Spoken Digit Dataset: ``spoken``) or end (ESC-50: ``environment``) with the class. ``--weights`` has
the published files under their own names. EfficientNet-Lite needs the package efficientnet-lite-pytorch, CLINC150
safetensors and tokenizers. A GPU is used if there is one; without one the backbones take about ten minutes each.

Rows are chosen without chance: the first of every class in turn, in the order of the file. The classes that are left
out are drawn with a fixed seed. ImageNet weights have seen the classes of Tiny ImageNet, and pictures of many others.
MNIST is test pictures only: its networks have not learned the rows that the head is fitted on.

A file has the embeddings in few bits on a root scale, which their skewness asks for, labels, weight and bias of the
last layer, and the names of near unknowns. Logits are not stored: they are linear in the stored embeddings, so that
the network of a file is exactly what its numbers say.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.io import wavfile
from scipy.signal import resample_poly, stft
from torch import Tensor, nn
from torch.nn import functional

from experiments.harness import arguments
from experiments.panel.openood import dequantised, in_turn, quantised

Array = np.ndarray
Parts = dict[str, tuple[Array, Array]]
Classifier = tuple[Array, Array]

# ImageNet's mean and standard deviation of each colour; EfficientNet-Lite and OpenOOD's LeNet take (x - a) / b.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
HALF = ((0.5,) * 3, (0.5,) * 3)
# Weights of red, green and blue in a grey picture (ITU-R 601, as in Pillow).
GREY = (0.299, 0.587, 0.114)
# Sets of sounds: the class in the name of a file. Rate in Hz (telephone speech), samples of a window, mel bands and the
# range of loudness in dB, all as is usual for short sounds.
SOUNDS = {"spoken": r"(\d+)_", "environment": r".*-(\d+)$"}
RATE, WINDOW, BANDS, RANGE = 8000, 256, 64, 80.0
# Rows of the parts of a network with few features, and of one with 1280 features; of each kind of unknowns.
SMALL, LARGE = (5000, 2000, 3000, 600), (3000, 1200, 2000, 400)
# Levels of a stored root: 8 bits, or fewer where 1280 features would take more than 5 MB; the
# rounding error is then at most 6 % of a feature's standard deviation.
FINE, COARSE = 255, 23
# scikit-learn's default of LogisticRegression; not tuned.
PROBE_C = 1.0
# Pictures per call of a network on a GPU and on a CPU.
BATCH = {"cuda": 256, "cpu": 32}
PARTS = ("train", "calibration", "test")


class CifarBlock(nn.Module):
    """Two convolutions with a shortcut that has no weights: every second pixel, and zeros for new channels."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.stride = width // inputs
        self.conv1 = nn.Conv2d(inputs, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        own = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        added = (own.shape[1] - x.shape[1]) // 2
        kept = x[:, :, :: self.stride, :: self.stride]
        return (own + functional.pad(kept, (0, 0, 0, 0, added, added))).relu()


class CifarResNet(nn.Module):
    """The ResNet of He et al. for CIFAR-10 with 6 n + 2 layers, under the names of akamaster's weights."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in range(1, len(widths)):
            inputs = [widths[stage - 1], *[widths[stage]] * (blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(*(CifarBlock(size, widths[stage]) for size in inputs)))
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding (B, 64)."""
        x = self.bn1(self.conv1(x)).relu()
        for stage in (1, 2, 3):
            x = getattr(self, f"layer{stage}")(x)
        return x.mean(dim=(2, 3))


class LeNet(nn.Module):
    """OpenOOD's LeNet for pictures of 28 pixels, under the names of its weights."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(3, 6, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.block3 = nn.Sequential(nn.Conv2d(16, 120, 5), nn.ReLU())
        self.classifier1 = nn.Linear(120, 84)
        self.fc = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding (B, 84)."""
        found: Tensor = self.classifier1(self.block3(self.block2(self.block1(x))).flatten(1)).relu()
        return found


class Lite(nn.Module):
    """The pooled features of an EfficientNet-Lite."""

    def __init__(self, name: str) -> None:
        from efficientnet_lite_pytorch import EfficientNet

        super().__init__()
        self.network = EfficientNet.from_name(name)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding (B, 1280)."""
        found: Tensor = self.network.extract_features(x).mean(dim=(2, 3))
        return found


# Expansion, width, blocks and first stride of the stages of MobileNetV2.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _convolution(inputs: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(width), nn.ReLU6())


class MobileBlock(nn.Module):
    """An inverted residual block of MobileNetV2."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        first = [_convolution(inputs, inner, 1)] if expansion > 1 else []
        last = [nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)]
        self.conv = nn.Sequential(*first, _convolution(inner, inner, 3, stride, inner), *last)
        self.same = stride == 1 and inputs == width

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x)
        return x + found if self.same else found


class MobileNet(nn.Module):
    """The pooled features of MobileNetV2, under the names of torchvision's weights."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, 2)]
        inputs = 32
        for expansion, width, blocks, stride in STAGES:
            for number in range(blocks):
                layers.append(MobileBlock(inputs, width, stride if number == 0 else 1, expansion))
                inputs = width
        self.features = nn.Sequential(*layers, _convolution(inputs, 1280, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding (B, 1280)."""
        found: Tensor = self.features(x).mean(dim=(2, 3))
        return found


@dataclass(frozen=True)
class Recipe:
    """How to make the features of one network.

    Attributes:
        known: The picture file of the known classes.
        weights: The file of the weights.
        make: Makes the network, without weights.
        size: Side of the pictures that the network takes.
        colours: Mean and standard deviation of each colour.
        near: Picture files of near unknowns; left-out classes are near too.
        far: Picture files of far unknowns.
        side: Side to which all pictures are brought first, so that sharpness does not tell unknowns.
        last: The name of the last layer; None for a linear probe.
        classes: Labels of the known classes in the order of the network's outputs; None for all that are not left out.
        left_out: Number of classes left out.
        rows: Rows of training, calibration, test and of each kind of unknowns.
        grey: Whether pictures are made grey.
        levels: Levels of a stored root.
    """

    known: str
    weights: str
    make: Callable[[], nn.Module]
    size: int
    colours: tuple[tuple[float, ...], tuple[float, ...]]
    near: tuple[str, ...]
    far: tuple[str, ...]
    side: int
    last: str | None = None
    classes: tuple[int, ...] | None = None
    left_out: int = 0
    rows: tuple[int, int, int, int] = SMALL
    grey: bool = False
    levels: int = FINE


FAR_DIGITS = ("cifar10", "textures", "tinyimagenet")
LITE0, LITE2 = "efficientnet-lite0-57934424.pth", "efficientnet-lite2-9656183e.pth"
MOBILE = "mobilenet_v2-b0353104.pth"


def _cifar(weights: str, blocks: int) -> Recipe:
    near, far = ("cifar100", "tinyimagenet"), ("textures", "mnist")
    return Recipe("cifar10", weights, lambda: CifarResNet(blocks), 32, IMAGENET, near, far, 32, "linear")


def _digits(weights: str, classes: tuple[int, ...]) -> Recipe:
    found = Recipe("mnist", weights, lambda: LeNet(len(classes)), 28, HALF, ("notmnist",), FAR_DIGITS, 28, "fc")
    return replace(found, classes=classes, left_out=10 - len(classes), grey=True)


def _lite(known: str, weights: str, size: int, near: tuple[str, ...], far: tuple[str, ...], side: int) -> Recipe:
    name = weights.rpartition("-")[0]
    found = Recipe(known, weights, lambda: Lite(name), size, LITE, near, far, side)
    return replace(found, rows=LARGE, levels=COARSE)


def _mobile(known: str, far: tuple[str, ...], side: int) -> Recipe:
    return Recipe(known, MOBILE, MobileNet, 224, IMAGENET, (), far, side, rows=LARGE, levels=COARSE)


NETWORKS = {
    "cifar10_resnet20": _cifar("resnet20-12fca82f.th", 3),
    "cifar10_resnet56": _cifar("resnet56-4bfd9763.th", 9),
    "mnist_lenet": _digits("mnist_lenet_acc99.60.ckpt", tuple(range(10))),
    # OpenOOD's first draw of six digits; the others are near unknowns.
    "mnist6_lenet": _digits("mnist6_seed1.ckpt", (2, 4, 5, 9, 8, 3)),
    "cifar100_lite2": replace(_lite("cifar100", LITE2, 260, ("cifar10",), ("textures", "mnist"), 32), left_out=20),
    "tinyimagenet_mobilenet": replace(
        _mobile("tinyimagenet", ("textures", "mnist"), 64), left_out=40, rows=(2400, 1000, 1600, 300)
    ),
    "textures_lite0": replace(
        _lite("textures", LITE0, 224, (), ("cifar100", "scenes"), 96), left_out=2, rows=(480, 200, 280, 240)
    ),
    "scenes_mobilenet": replace(
        _mobile("scenes", ("textures", "cifar100"), 64), left_out=2, rows=(2000, 1200, 2000, 300)
    ),
    "spoken_mobilenet": replace(_mobile("spoken", ("environment",), BANDS), left_out=2, rows=(1200, 500, 700, 300)),
    "environment_mobilenet": replace(
        _mobile("environment", ("spoken",), BANDS), left_out=10, rows=(800, 300, 500, 300)
    ),
}
CLINC = "clinc150_wordllama"
CLINC_ROWS = (6000, 3000, 3000, 1000)


class Chosen(NamedTuple):
    """Rows of a picture file: the names of its arrays and the indices."""

    file: str
    arrays: tuple[str, str]
    rows: Array
    y: Array


def choose(recipe: Recipe, read: Callable[[str], Mapping[str, Array]]) -> dict[str, Chosen]:
    """The rows of every part of a network: the first of each class in turn, in the order of the file.

    Args:
        recipe: The network.
        read: Returns the arrays of a picture file.
    """
    *counts, of_unknowns = recipe.rows
    arrays = read(recipe.known)
    apart = "y_train" in arrays
    held = ("x_test", "y_test") if apart else ("x", "y")
    labels = np.asarray(arrays[held[1]])
    names = np.unique(labels)
    left_out = np.random.default_rng(0).permutation(names)[: recipe.left_out]
    classes = np.setdiff1d(names, left_out) if recipe.classes is None else np.array(recipe.classes)
    place = np.full(int(names.max()) + 1, -1)
    place[classes] = np.arange(len(classes))
    found = {}
    wanted = dict(zip(PARTS, counts, strict=True))
    if apart:
        own = place[np.asarray(arrays["y_train"])]
        rows = _of_known(own, wanted.pop("train"))
        found["train"] = Chosen(recipe.known, ("x_train", "y_train"), rows, own[rows])
    code = place[labels]
    total = sum(wanted.values())
    pool = _of_known(code, total)
    ends = np.cumsum([round(count * len(pool) / total) for count in wanted.values()])
    for part, rows in zip(wanted, np.split(pool, ends[:-1]), strict=True):
        found[part] = Chosen(recipe.known, held, rows, code[rows])
    if recipe.left_out:
        others = np.flatnonzero(code < 0)
        rows = others[in_turn(labels[others], of_unknowns)]
        found["ood_left_out"] = Chosen(recipe.known, held, rows, np.full(len(rows), -1))
    for file in (*recipe.near, *recipe.far):
        held = ("x_test", "y_test") if "y_test" in read(file) else ("x", "y")
        rows = in_turn(np.asarray(read(file)[held[1]]), of_unknowns)
        found[f"ood_{file}"] = Chosen(file, held, rows, np.full(len(rows), -1))
    return {part: found[part] for part in (*PARTS, *(part for part in found if part not in PARTS))}


def _of_known(code: Array, count: int) -> Array:
    known = np.flatnonzero(code >= 0)
    rows: Array = known[in_turn(code[known], count)]
    return rows


def prepared(x: Tensor, recipe: Recipe) -> Tensor:
    """Pictures (B, H, W, 3) of bytes as the network takes them."""
    pictures = x.permute(0, 3, 1, 2).float()
    for side in (recipe.side, recipe.size):
        if pictures.shape[-1] != side:
            options: dict[str, Any] = {"mode": "bicubic", "antialias": True, "align_corners": False}
            pictures = functional.interpolate(pictures, (side, side), **options).clamp(0, 255)
    if recipe.grey:
        weights = torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)
        pictures = (pictures * weights).sum(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    mean, deviation = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in recipe.colours)
    return (pictures / 255 - mean) / deviation


def load_weights(network: nn.Module, path: Path) -> None:
    """Load published weights, without ImageNet's last layer."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    state = {name.removeprefix("module."): value for name, value in state.get("state_dict", state).items()}
    target = network.network if isinstance(network, Lite) else network
    missing, other = target.load_state_dict(state, strict=False)
    wrong = [name for name in (*missing, *other) if not name.startswith(("_fc.", "classifier.1."))]
    if wrong:
        raise ValueError(f"{path.name} has other weights than expected: {', '.join(wrong[:5])}")


@torch.no_grad()
def embedded(network: nn.Module, x: Array, recipe: Recipe, device: torch.device) -> Array:
    """The embeddings of pictures, in float32."""
    batches = torch.from_numpy(np.ascontiguousarray(x)).split(BATCH[device.type])
    return torch.cat([network(prepared(rows.to(device), recipe)).float().cpu() for rows in batches]).numpy()


def linear_probe(z: Array, y: Array, strength: float = PROBE_C, device: torch.device | None = None) -> Classifier:
    r"""Multinomial logistic regression, the optimum of scikit-learn's objective with C = ``strength``.

    .. math:: \min_{W, b} \tfrac12 \|W\|^2 + C \sum_i -\log \mathrm{softmax}(W z_i + b)_{y_i}
    """
    inputs = torch.from_numpy(z).to(device).double()
    labels = torch.from_numpy(y).to(device)
    weight = torch.zeros(int(y.max()) + 1, z.shape[1], dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.zeros(len(weight), dtype=torch.float64, device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=1000, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        errors = functional.cross_entropy(inputs @ weight.T + bias, labels, reduction="mean")
        value = errors + weight.square().sum() / (2 * strength * len(labels))
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach().float().cpu().numpy(), bias.detach().float().cpu().numpy()


def store(
    path: Path, parts: Parts, classifier: Classifier | None, near: tuple[str, ...], levels: int, device: torch.device
) -> dict[str, Any]:
    """Store the parts of a network; without a classifier a probe is fitted to the stored training rows.

    Returns:
        Accuracy on the training and test rows, rows, features, classes and the size of the file.
    """
    stored, scale = quantised({part: z for part, (z, _) in parts.items()}, levels)
    read = {part: dequantised(values, scale) for part, values in stored.items()}
    weight, bias = linear_probe(read["train"], parts["train"][1], device=device) if classifier is None else classifier
    arrays = {f"{part}_z": values for part, values in stored.items()}
    arrays |= {f"{part}_y": y.astype(np.int16) for part, (_, y) in parts.items()}
    arrays |= {"scale": scale, "weight": weight.astype(np.float16), "bias": bias.astype(np.float32)}
    np.savez_compressed(path, near=np.array(near, dtype=str), **arrays)  # type: ignore[arg-type]
    about: dict[str, Any] = {"rows": {part: len(y) for part, (_, y) in parts.items()}, "features": len(scale)}
    for part in ("train", "test"):
        right = (read[part] @ arrays["weight"].astype(np.float32).T + bias).argmax(axis=1) == parts[part][1]
        about[part] = float(right.mean())
    return about | {"classes": len(bias), "megabytes": path.stat().st_size / 1e6}


def of_pictures(
    recipe: Recipe,
    read: Callable[[str], Mapping[str, Array]],
    network: nn.Module,
    path: Path,
    device: torch.device,
) -> dict[str, Any]:
    """The feature file of a network of pictures; ``network`` has its weights."""
    network = network.to(device).eval()
    parts: Parts = {}
    for part, chosen in choose(recipe, read).items():
        parts[part] = embedded(network, read(chosen.file)[chosen.arrays[0]][chosen.rows], recipe, device), chosen.y
    classifier = None
    if recipe.last is not None:
        last = getattr(network, recipe.last)
        classifier = last.weight.detach().cpu().numpy(), last.bias.detach().cpu().numpy()
    near = (("left_out",) if recipe.left_out else ()) + recipe.near
    return store(path, parts, classifier, near, recipe.levels, device)


def of_texts(
    data: Mapping[str, list[tuple[str, str]]], embed: Callable[[list[str]], Array], path: Path, device: torch.device
) -> dict[str, Any]:
    """The feature file of CLINC150: a linear probe on sentence embeddings; queries of no intent are near unknowns.

    Args:
        data: Texts with their intents, by the names of clinc/oos-eval.
        embed: Returns the embeddings of texts.
        path: The file to write.
        device: Where the probe is fitted.
    """
    intents = sorted({intent for _, intent in data["train"]})
    parts: Parts = {}
    for part, name, count in zip((*PARTS, "ood_scope"), ("train", "val", "test", "oos_test"), CLINC_ROWS, strict=True):
        code = np.array([-1 if part == "ood_scope" else intents.index(intent) for _, intent in data[name]])
        rows = in_turn(code, count)
        parts[part] = embed([data[name][row][0] for row in rows]), code[rows]
    return store(path, parts, None, ("scope",), FINE, device)


def token_means(weights: Path) -> Callable[[list[str]], Array]:
    """WordLlama's sentence embedding: the mean of the vectors of a text's tokens."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    table = load_file(weights / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    tokenizer = Tokenizer.from_file(str(weights / "l2_supercat_tokenizer_config.json"))

    def embed(texts: list[str]) -> Array:
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        return np.stack([table[tokens.ids].mean(axis=0) for tokens in found])

    return embed


def spectrogram(wave: Array, rate: int) -> Array:
    r"""The spectrogram of a sound as a grey picture (BANDS, BANDS, 3) of bytes: mel bands over time, in dB.

    Mel bands are triangles of equal width on the scale :math:`2595 \log_{10}(1 + f / 700)`.
    """
    wave = resample_poly(wave.astype(np.float64), RATE, rate)
    wave = np.pad(wave, (0, max(0, WINDOW - len(wave))))
    frequency, _, values = stft(wave, RATE, nperseg=WINDOW, noverlap=WINDOW * 3 // 4, nfft=4 * WINDOW, boundary=None)
    mel = 2595 * np.log10(1 + frequency / 700)
    centres = np.linspace(0, mel[-1], BANDS + 2)
    filters = np.clip(1 - abs(mel - centres[1:-1, None]) / (centres[1] - centres[0]), 0, None)
    power = filters @ np.abs(values) ** 2
    loudness = 10 * np.log10(np.maximum(power, 1e-30) / max(power.max(), 1e-30))
    grey = torch.from_numpy((1 + loudness / RANGE).clip(0, 1) * 255)[None, None]
    grey = functional.interpolate(grey, (BANDS, BANDS), mode="bicubic", antialias=True, align_corners=False)
    return grey.clamp(0, 255).round().byte()[0, 0, :, :, None].expand(-1, -1, 3).numpy()


def of_sounds(folder: Path, name: str) -> dict[str, Array]:
    """The arrays of a picture file: spectrograms of the WAV files of a folder, in random order."""
    paths = sorted(folder.glob("*.wav"))
    paths = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]
    classes = [re.match(SOUNDS[name], path.stem) for path in paths]
    x = np.stack([spectrogram(*wavfile.read(path)[::-1]) for path in paths])
    return {"x": x, "y": np.array([int(found[1]) for found in classes if found])}


def reader(folder: Path) -> Callable[[str], Mapping[str, Array]]:
    """Reads picture files and folders of sounds, each once."""
    found: dict[str, dict[str, Array]] = {}

    def read(file: str) -> Mapping[str, Array]:
        if file not in found and file in SOUNDS and (folder / file).is_dir():
            found[file] = of_sounds(folder / file, file)
        if file not in found:
            if not (folder / f"{file}.npz").is_file():
                raise FileNotFoundError(f"{folder} has no {file}.npz; --pictures names the folder of the pictures.")
            with np.load(folder / f"{file}.npz") as arrays:
                found[file] = dict(arrays.items())
        return found[file]

    return read


def make(name: str, read: Callable[[str], Mapping[str, Array]], options: Any, device: torch.device) -> dict[str, Any]:
    """Write the feature file of a network by name."""
    path = options.out / f"{name}.npz"
    if name == CLINC:
        data = json.loads((options.pictures / "data_full.json").read_text())
        return of_texts(data, token_means(options.weights), path, device)
    recipe = NETWORKS[name]
    network = recipe.make()
    load_weights(network, options.weights / recipe.weights)
    return of_pictures(recipe, read, network, path, device)


def show(name: str, about: dict[str, Any], seconds: float) -> None:
    rows = " ".join(f"{part} {count}" for part, count in about["rows"].items())
    print(
        f"{name}: accuracy {about['test']:.2%} (training rows {about['train']:.2%}), {about['classes']} classes, "
        f"{about['features']} features, {rows}; {about['megabytes']:.2f} MB, {seconds:.1f} s",
        flush=True,
    )


def smoke(seed: int) -> None:
    """Random networks on random pictures: a published last layer, and a probe with left-out classes."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    cpu = torch.device("cpu")

    def read(file: str) -> Mapping[str, Array]:
        y = np.arange(60) % 4
        x = np.clip(60.0 * y[:, None, None, None] + rng.normal(0, 30, (60, 12, 12, 3)), 0, 255).astype(np.uint8)
        return {"x_train": x, "y_train": y, "x_test": x, "y_test": y} if file == "cifar10" else {"x": x, "y": y}

    with tempfile.TemporaryDirectory() as folder:
        for name, last, left_out in (("published", "linear", 0), ("probe", None, 1)):
            known, rows = "cifar10" if last else "textures", (24, 12, 12, 10)
            recipe = Recipe(known, "", lambda: CifarResNet(1, 4), 16, IMAGENET, (), ("mnist",), 8, last)
            recipe = replace(recipe, left_out=left_out, rows=rows)
            about = of_pictures(recipe, read, recipe.make(), Path(folder) / f"{name}.npz", cpu)
            show(name, about, 0.0)
        for i in range(40):  # tones of four heights
            tone = 8000 * np.sin(np.arange(2000) * (i % 4 + 1) / 3) + rng.normal(0, 500, 2000)
            (Path(folder) / "spoken").mkdir(exist_ok=True)
            wavfile.write(Path(folder) / "spoken" / f"{i % 4}_{i}.wav", RATE, tone.astype(np.int16))
        recipe = replace(_mobile("spoken", (), BANDS), make=lambda: CifarResNet(1, 4), rows=(16, 8, 6, 6), left_out=1)
        about = of_pictures(recipe, reader(Path(folder)), recipe.make(), Path(folder) / "sounds.npz", cpu)
        show("sounds", about, 0.0)
        data = {part: [(f"{word} {part}", word) for word in "abc" * 4] for part in ("train", "val", "test", "oos_test")}
        about = of_texts(data, lambda texts: rng.normal(size=(len(texts), 5)), Path(folder) / "texts.npz", cpu)
        show("texts", about, 0.0)


def main() -> None:
    parser = arguments(__doc__, parts=[*NETWORKS, CLINC])
    parser.add_argument(
        "--pictures", type=Path, default=Path("build/pictures"), help="the folder of pictures and texts"
    )
    parser.add_argument("--weights", type=Path, default=Path("build/weights"), help="the folder of published weights")
    parser.add_argument("--out", type=Path, default=Path("build/networks"), help="the folder of the feature files")
    options = parser.parse_args()
    if options.smoke:
        smoke(options.seed)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    read = reader(options.pictures)
    failed = []
    for name in options.only:
        begun = time.perf_counter()
        try:
            show(name, make(name, read, options, device), time.perf_counter() - begun)
        except Exception as error:  # one network that fails does not stop the others
            failed.append(name)
            print(f"{name}: failed, {type(error).__name__}: {error}", flush=True)
    if failed:
        sys.exit(f"{len(failed)} of {len(options.only)} networks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
