"""Ready networks: the last linear layer and the stages of many families, fits from loaders, forms of batches, files."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sepc_torch import TrustedModel, TrustHead
from sepc_torch.head.network import Places, TappedNetwork, find_places, output_logits

Rng = np.random.Generator


def conv(a: int, b: int, stride: int = 1, groups: int = 1, size: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, size, stride, size // 2, groups=groups), nn.BatchNorm2d(b), nn.ReLU())


class Residual(nn.Module):
    """The input plus what a part makes of it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.layer1 = conv(3, 8), Residual(conv(8, 8))
        self.layer2 = nn.Sequential(conv(8, 12, 2), Residual(conv(12, 12)))
        self.layer3 = nn.Sequential(conv(12, 16, 2), Residual(conv(16, 16)))
        self.layer4 = nn.Sequential(conv(16, 20, 2), Residual(conv(20, 20)))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.part = conv(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.part(x)], dim=1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 8), Dense(8), conv(14, 8, 2), Dense(8), conv(14, 8, 2), Dense(8), nn.BatchNorm2d(14)
        )
        self.classifier = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).relu().mean(dim=(2, 3)))


def vgg() -> nn.Module:
    features = nn.Sequential(conv(3, 6), nn.MaxPool2d(2), conv(6, 8), nn.MaxPool2d(2), conv(8, 10), nn.MaxPool2d(2))
    top = nn.Sequential(nn.Linear(40, 12), nn.ReLU(), nn.Dropout(), nn.Linear(12, 5))
    return nn.Sequential(features, nn.Flatten(), top)


def mobilenet() -> nn.Module:
    def block(a: int, b: int, stride: int) -> nn.Module:
        inner = nn.Sequential(conv(a, 2 * a, size=1), conv(2 * a, 2 * a, stride, 2 * a), nn.Conv2d(2 * a, b, 1))
        return inner if stride == 2 or a != b else Residual(inner)

    features = nn.Sequential(conv(3, 4), block(4, 6, 2), block(6, 6, 1), block(6, 8, 2), block(8, 10, 2))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(10, 5))


class Gate(nn.Module):
    """Squeeze and excitation by convolutions of one position, which are linear layers too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(x.mean(dim=(2, 3), keepdim=True)))


def efficientnet() -> nn.Module:
    stages = [nn.Sequential(conv(a, b, 2), Gate(b)) for a, b in ((3, 5), (5, 8), (8, 12))]
    return nn.Sequential(nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.start = nn.Conv2d(3, 12, 4, 4), nn.Parameter(torch.zeros(1, 1, 12))
        layers = (nn.TransformerEncoderLayer(12, 2, 16, batch_first=True) for _ in range(5))
        self.blocks, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.start.expand(len(x), -1, -1), tokens], dim=1)
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class ConvNeXt(nn.Module):
    """Stages of square maps with channels last, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in ((3, 6), (6, 9), (9, 12)))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in (6, 9, 12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for stage, norm in zip(self.stages, self.norms, strict=True):
            x = norm(stage(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(x.mean(dim=(2, 3)))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.layer = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True) for _ in range(4))
        self.pooler, self.classifier = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        x = self.words(input_ids)
        for layer in self.layer:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        return SimpleNamespace(logits=self.classifier(torch.tanh(self.pooler(x[:, 0]))), hidden=x)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.fc = nn.Embedding(30, 8), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made, (hidden, _) = self.lstm(self.words(x))
        return self.fc(hidden[-1]), made


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = conv(3, 6), conv(6, 8, 2), nn.ConvTranspose2d(8, 6, 2, 2)
        self.out = nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        return self.out(torch.cat([first, self.up(self.deep(first))], dim=1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], int]] = {
    # network, last layer, shape of the embedding of two rows, number of stages
    "resnet": (ResNet, "fc", (2, 20), 3),
    "densenet": (DenseNet, "classifier", (2, 14), 3),
    "vgg": (vgg, "2.3", (2, 12), 3),
    "mobilenet": (mobilenet, "4", (2, 10), 3),
    "efficientnet": (efficientnet, "3", (2, 12), 3),
    "vit": (ViT, "head", (2, 12), 3),
    "convnext": (ConvNeXt, "head", (2, 12), 3),
    "bert": (Bert, "classifier", (2, 12), 3),
    "mlp": (mlp, "5", (2, 9), 3),
    "lstm": (Lstm, "fc", (2, 10), 2),
    "unet": (UNet, "out", (2, 12, 16, 16), 0),
}


def example(name: str, rows: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
    words = torch.randint(0, 30, (rows, 6))
    if name == "bert":
        return (), {"input_ids": words, "attention_mask": torch.ones(rows, 6, dtype=torch.int64)}
    return (words if name == "lstm" else torch.randn(rows, 3, 16, 16),), {}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_places_of_a_family_are_found(name: str) -> None:
    make, last, shape, stages = FAMILIES[name]
    network = make().eval()
    args, kwargs = example(name)
    places = find_places(network, args, kwargs)
    assert places.last == last
    assert not places.normalised
    assert len(places.layers) == stages
    tapped = TappedNetwork(network, places)
    given: list[Tensor] = []
    handle = network.get_submodule(last).register_forward_hook(lambda _, inputs, __: given.append(inputs[0]))
    with torch.no_grad():
        output, embedding, linear, layers = tapped(*args, **kwargs)
        # With the hooks: torch's encoder layers take another path of other last digits without hooks.
        expected = output_logits(network(*args, **kwargs))
    handle.remove()
    tapped.remove()
    assert torch.equal(output_logits(output), expected)
    assert torch.equal(linear, expected)
    assert embedding is given[0]
    assert tuple(embedding.shape) == shape
    assert all(len(layer) == 2 for layer in layers)
    assert not any(module._forward_hooks for module in network.modules())


def test_stages_are_spread_over_the_depth() -> None:
    network = nn.Sequential(*(nn.Sequential(nn.Linear(a, a + 1), nn.ReLU()) for a in range(4, 13)), nn.Linear(13, 3))
    assert find_places(network, (torch.ones(2, 4),), {}).layers == ("2", "5", "7")
    assert find_places(network, (torch.ones(2, 4),), {}, "8.0", ["1", "3.0"]) == Places("8.0", ("1", "3.0"))
    assert find_places(network, (torch.ones(2, 4),), {}, layers=None).layers == ()


def test_probabilities_are_traced_back_to_logits() -> None:
    base = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)]
    for end in (nn.Softmax(dim=1), nn.LogSoftmax(dim=1), nn.Sigmoid()):
        assert find_places(nn.Sequential(*base, end), (torch.randn(3, 4),), {}).normalised
    assert not find_places(nn.Sequential(*base), (torch.randn(3, 4),), {}).normalised


def test_the_output_may_have_another_precision_than_the_last_layer() -> None:
    """Mixed precision computes in bfloat16 and turns the output into float32."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classifier = nn.Linear(4, 3), nn.Linear(3, 3)
            self.unused = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.classifier(self.body(x).relu())
                self.unused(x)
            return logits.float()

    assert find_places(Mixed(), (torch.randn(3, 4),), {}, layers=None) == Places("classifier")


class Masked(nn.Module):
    """A transformer with a mask: in evaluation mode, torch gives its blocks nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        self.classifier = nn.Linear(8, 3)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.words(words), src_key_padding_mask=mask)[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_masked_transformers_are_no_places(rng: Rng) -> None:
    net, words = Masked().eval(), torch.from_numpy(rng.integers(0, 9, (6, 5)))
    mask = torch.arange(5) >= torch.tensor([5, 4, 3, 5, 2, 1])[:, None]
    with torch.no_grad():
        expected = net(words, mask)
        places = find_places(net, (words, mask), {}, "auto", "auto")
        assert places.last == "classifier"
        assert not any(name.startswith("blocks.") for name in places.layers)
        assert torch.equal(TappedNetwork(net, places)(words, mask)[0], expected)


def test_misspelt_names_get_a_hint() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'layer2'\?"):
        find_places(ResNet(), *example("resnet"), layers=["leyer2"])
    with pytest.raises(ValueError, match="layer: 'fd' names no submodule"):
        find_places(ResNet(), *example("resnet"), layer="fd")
    with pytest.raises(ValueError, match="No linear layer"):
        find_places(nn.Sequential(nn.ReLU()), (torch.ones(2, 3),), {})


def blobs(rng: Rng, rows: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    y = rng.integers(0, 3, rows)
    return torch.from_numpy(spread * rng.normal(size=(rows, 4)) + 4.0 * np.eye(3, 4)[y]).float(), torch.from_numpy(y)


def network(columns: int = 3) -> nn.Sequential:
    """A network that separates the blobs, with dropout."""
    first, last = nn.Linear(4, 8), nn.Linear(8, columns)
    with torch.no_grad():
        first.weight.copy_(0.3 * torch.eye(8, 4))
        first.bias.fill_(0.1)
        last.weight.copy_(6.0 * torch.eye(columns, 8))
        last.bias.zero_()
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(0.1), last)


def loader(rng: Rng, rows: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*blobs(rng, rows)), batch_size=50, **options)


def fitted(rng: Rng, **options: Any) -> TrustedModel:
    return TrustedModel.fit(network(), loader(rng, 200), loader(rng, 200), risk=0.1, **options).eval()


def test_a_fit_reads_each_loader_once_and_leaves_the_network_alone(rng: Rng) -> None:
    net, calls = network(), []
    net[2].eval()
    before = copy.deepcopy(net.state_dict())
    net.register_forward_hook(lambda *_: calls.append(net.training))
    trusted = TrustedModel.fit(net, loader(rng, 200, shuffle=True), loader(rng, 150), risk=0.1)
    assert calls == [False] * (1 + 4 + 3)  # one batch finds the places
    assert [part.training for part in net.modules()] == [True, True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert trusted.places.last == "3"
    assert trusted.head.promise is not None
    assert trusted.head.promise.risk == 0.1
    x, y = blobs(rng, 300)
    out = trusted.eval()(x)
    assert torch.equal(out.logits, net(x))
    assert torch.equal(out.label, net(x).argmax(dim=1))
    assert float(out.accept.double().mean()) > 0.5
    assert float((out.label != y)[out.accept].double().mean()) < 0.1
    assert len(out.reasons) == 300
    far = trusted(torch.tensor([[-9.0, -5.0, -9.0, -60.0]]))
    assert float(far.p_value) <= 2 / 151  # 150 calibration rows allow no smaller one but 1 / 151
    assert [found.reason for found in trusted.explain(x[:20])] == out.reasons[:20]


@pytest.mark.slow
def test_a_head_fitted_by_hand_is_the_same(rng: Rng) -> None:
    net = network().eval()
    training, held = blobs(rng, 200), blobs(rng, 200)
    pair = [DataLoader(TensorDataset(*part), batch_size=64) for part in (training, held)]
    trusted = TrustedModel.fit(net, pair[0], pair[1], risk=0.1, layers=None)
    with torch.no_grad():
        z = [net[:3](x) for x, _ in (training, held)]
        head = TrustHead.fit(z[0], training[1], classes=[0, 1, 2]).calibrate(z[1], held[1], net(held[0]))
        head.accept_at(risk=0.1)
        x, _ = blobs(rng, 50)
        assert torch.equal(trusted(x).joint, head(net[:3](x), net(x)).joint)


@pytest.mark.slow
def test_batches_of_every_form(rng: Rng) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.net(x if scale is None else x * scale)}

    pairs = [[blobs(rng, 100) for _ in range(2)] for _ in range(2)]
    model = Two()
    forms: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "pair": lambda x, y: (x, y),
        "dictionary": lambda x, y: {"x": x, "labels": y},
        "two inputs": lambda x, y: (x, torch.ones(len(x), 1), y),
        "dictionary and labels": lambda x, y: ({"x": x}, y),
        "one-hot": lambda x, y: (x, nn.functional.one_hot(y, 3)),
        "floats": lambda x, y: (x, y.double()),
    }
    outs = []
    x, _ = blobs(rng, 20)
    for form in forms.values():
        data = [[form(*part) for part in parts] for parts in pairs]
        outs.append(TrustedModel.fit(model, data[0], data[1], risk=0.2).eval()(x).joint)
    own = [[{"picture": x, "kind": y} for x, y in parts] for parts in pairs]
    taken = {"inputs": lambda batch: batch["picture"], "labels": lambda batch: batch["kind"]}
    outs.append(TrustedModel.fit(model, iter(own[0]), iter(own[1]), risk=0.2, **taken).eval()({"x": x}).joint)  # type: ignore[arg-type]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_one_logit_is_two_classes(rng: Rng) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        net[2].bias -= net(blobs(rng, 200)[0]).median()  # both classes are frequent

    def data(rows: int) -> list[tuple[Tensor, Tensor]]:
        x, _ = blobs(rng, rows)
        return [(x, (net(x)[:, 0] > 0).long())]

    trusted = TrustedModel.fit(net, data(200), data(200), risk=0.2).eval()
    x, _ = blobs(rng, 30)
    out = trusted(x)
    assert torch.equal(out.logits, net(x))
    assert torch.equal(out.label, (net(x)[:, 0] > 0).long())


def test_classes_without_calibration_rows_are_named(rng: Rng) -> None:
    x, y = blobs(rng, 300)
    with pytest.warns(UserWarning, match="calibration data have no row of the classes 2: nothing is promised"):
        trusted = TrustedModel.fit(network(), loader(rng, 200), [(x[y < 2], y[y < 2])], risk=0.1).eval()
    out = trusted(x)
    shown = repr(out).removeprefix("TrustedPrediction(300 rows, ").removesuffix(")").split(", ")
    assert shown[0] == f"{int(out.accept.sum())} accepted"
    assert sum(int(part.split()[0]) for part in shown) == 300


def test_a_sample_with_nan_is_not_taken_for_augmentation(rng: Rng) -> None:
    x, y = blobs(rng, 100)
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        TrustedModel.fit(network(), loader(rng, 200), DataLoader(TensorDataset(x, y), batch_size=50))


def test_labels_in_another_order_are_an_error(rng: Rng) -> None:
    names = np.array(["ant", "bee", "cat"])
    data = [[(x, names[y.numpy()].tolist()) for x, y in [blobs(rng, 200)]] for _ in range(2)]
    with pytest.raises(ValueError, match="Pass classes="):
        TrustedModel.fit(network(), *data)
    trusted = TrustedModel.fit(network(), *data, risk=0.1, classes=["ant", "bee", "cat"]).eval()
    assert trusted.classes == ["ant", "bee", "cat"]
    with pytest.raises(ValueError, match="in another order than the columns"):
        TrustedModel.fit(network(), *data, classes=["bee", "cat", "ant"])
    turned = [[(x, (y + 1) % 3) for x, y in [blobs(rng, 200)]] for _ in range(2)]
    with pytest.raises(ValueError, match="in another order than the columns"):
        TrustedModel.fit(network(), *turned)
    with pytest.raises(ValueError, match="A label is 3, and the network has 3 logits"):
        TrustedModel.fit(network(), [(x, y + 1) for x, y in [blobs(rng, 200)]], turned[1])
    with pytest.raises(ValueError, match=r"no row of the classes \[3\]"):
        TrustedModel.fit(network(4), [blobs(rng, 200)], turned[1])
    with pytest.raises(ValueError, match="names 2 classes, and the network has 3"):
        TrustedModel.fit(network(), *data, classes=["ant", "bee"])


class Samples(TensorDataset):
    """A data set that can be iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


@pytest.mark.slow
def test_other_tasks_are_refused_with_what_works(rng: Rng) -> None:
    x, y = blobs(rng, 60)
    with pytest.raises(TypeError, match="multi-label or soft targets"):
        TrustedModel.fit(network(), [(x, torch.ones(60, 3))], [(x, y)])
    with pytest.raises(TypeError, match="regression has no right or wrong"):
        TrustedModel.fit(network(), [(x, y + 0.5)], [(x, y)])
    with pytest.raises(ValueError, match="has no labels"):
        TrustedModel.fit(network(), [x], [(x, y)])
    with pytest.raises(ValueError, match="training data are empty"):
        TrustedModel.fit(network(), [], [(x, y)])
    with pytest.raises(TypeError, match="training data are a data set, which gives single samples"):
        TrustedModel.fit(network(), Samples(x, y), [(x, y)])
    with pytest.raises(TypeError, match="calibration data are a data set"):
        TrustedModel.fit(network(), [(x, y)], Samples(x, y))
    pictures = torch.randn(8, 3, 16, 16)
    with pytest.raises(ValueError, match=r"expected whole numbers of the shape \(8, 16, 16\)"):
        TrustedModel.fit(UNet(), [(pictures, torch.zeros(8))], [(x, y)])
    with pytest.raises(TypeError, match="one label for each sample"):
        TrustedModel.fit(network(), [(x, torch.zeros(60, 4, 4))], [(x, y)])
    resized = nn.Sequential(UNet(), nn.Upsample(scale_factor=2))
    with pytest.raises(TypeError, match="it resizes its logits"):
        TrustedModel.fit(resized, [(pictures, torch.zeros(8, 32, 32).long())], [(x, y)])

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
            return [{"boxes": self.fc(row)} for row in x]

    with pytest.raises(TypeError, match="Take boxes as rows"):
        TrustedModel.fit(Detector(), [(x, y)], [(x, y)])
    with pytest.raises(TypeError, match="takes no 'encoder'"):
        TrustedModel.fit(network(), [(x, y)], [(x, y)], encoder=network())
    with pytest.raises(TypeError, match=r"takes no 'rsk'\. Did you mean 'risk'\?"):
        TrustedModel.fit(network(), [(x, y)], [(x, y)], rsk=0.1)
    with pytest.raises(ValueError, match="Calibration data have no batch"):
        TrustedModel.fit(network(), [(x, y)], [])
    with pytest.raises(TypeError, match="Pass inputs=, a function"):
        TrustedModel.fit(network(), [{"image": x, "labels": y}], [(x, y)])
    with pytest.raises(TypeError, match="must be a list of names"):
        TrustedModel.fit(network(), [(x, y)], [(x, y)], layers="0")
    with pytest.raises(ValueError, match="a module twice, or the last layer"):
        TrustedModel.fit(network(), [(x, y)], [(x, y)], layers=["0", "3"])
    clamped = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Hardtanh(0.49, 0.51))
    with (
        pytest.raises(ValueError, match="value before its sigmoid"),
        pytest.warns(UserWarning, match="not the output of the linear layer '0'"),
    ):
        TrustedModel.fit(clamped, [(x, y.clamp_max(1))], [(x, y)])


@pytest.mark.slow
def test_calibration_rows_that_the_network_saw_are_noticed(rng: Rng) -> None:
    """Labels of new rows are wrong in three of ten cases; those of the rows that the network saw never are."""
    x, y = blobs(rng, 600)
    noisy = torch.where(torch.from_numpy(rng.random(600) < 0.3), (y + 1) % 3, y)
    seen, new = [(x[:300], y[:300])], [(x[300:], noisy[300:])]
    with pytest.warns(UserWarning, match="Are the loaders swapped"):
        TrustedModel.fit(network(), new, seen, flag_rate=0.1)
    TrustedModel.fit(network(), seen, new, flag_rate=0.1)


def test_repeated_calibration_rows_are_noticed(rng: Rng) -> None:
    x, y = blobs(rng, 60)
    with pytest.warns(UserWarning, match="Only 60 of 300 calibration rows differ"):
        TrustedModel.fit(network(), loader(rng, 200), [(x, y)] * 5, flag_rate=0.1)


def test_a_failed_fit_leaves_no_hooks(rng: Rng) -> None:
    net, (x, y) = network(), blobs(rng, 60)
    with pytest.raises(ValueError, match="too few to calibrate"):
        TrustedModel.fit(net, [(x, y)], [(x[:9], y[:9])])
    assert not any(module._forward_hooks for module in net.modules())


def test_the_call_that_makes_the_logits_gives_the_embedding(rng: Rng) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x)
            self.net(-x)
            return found

    x, _ = blobs(rng, 5)
    model = Twice().eval()
    _, embedding, linear, _ = TappedNetwork(model, Places("net.3"))(x)
    assert torch.equal(embedding, model.net[:3](x))
    assert torch.equal(linear, model(x))


class Segmenter(nn.Module):
    """Labels every pixel by its brightest colour; the third class is rare."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 6, 3, padding=1), channels_last
        self.head = nn.Linear(6, 3) if channels_last else nn.Conv2d(6, 3, 1)
        with torch.no_grad():
            self.stem.weight.zero_()
            self.stem.weight[:3, :, 1, 1] = torch.eye(3)
            self.stem.weight[3:, :, 1, 1] = -torch.eye(3)
            self.head.weight.copy_((3.0 * torch.eye(3, 6)).reshape(self.head.weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        made = self.stem(x)
        found: Tensor = self.head(made.flatten(2).transpose(1, 2) if self.last else made)
        return found


def scenes(rng: Rng, pictures: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of 6 x 6 pixels with their classes; a border has no label."""
    y = torch.from_numpy(rng.integers(0, 3, (pictures, 2, 2))).repeat_interleave(3, 1).repeat_interleave(3, 2)
    x = 2.0 * nn.functional.one_hot(y, 3).movedim(-1, 1) + torch.from_numpy(rng.normal(size=(pictures, 3, 6, 6)))
    y[:, 0] = 255
    return x.float(), y


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_maps_and_sequences_are_judged_by_position(rng: Rng, tokens: bool) -> None:
    def data(pictures: int) -> list[tuple[Tensor, Tensor]]:
        x, y = scenes(rng, pictures)
        return [(x, y.flatten(1) if tokens else y)]

    model = Segmenter(tokens)
    options: dict[str, Any] = {"ignore_index": 255, "risk": 0.08, "delta": 0.1}
    trusted = TrustedModel.fit(model, data(30), data(200), **options).eval()
    assert trusted.places.layers == ()
    assert "over units" in str(trusted.head.promise)
    ((x, y),) = data(60)
    out = trusted(x)
    assert out.accept.shape == out.label.shape == out.judged.trust.shape == y.shape
    assert torch.equal(out.logits, model(x))
    assert torch.equal(out.label, model(x).argmax(dim=2 if tokens else 1))
    there = y != 255
    wrong = (out.label != y)[there & out.accept].double().mean()
    assert 0.3 < float(out.accept.double().mean()) < 1.0
    assert float(wrong) < float((out.label != y)[there].double().mean())
    rows = trusted.read(data(5))
    assert rows.units is not None
    assert (np.unique(rows.units) == np.arange(5)).all()
    with pytest.raises(ValueError, match=r"A label is 255, .* ignore_index="):
        TrustedModel.fit(model, data(10), data(10))


def test_examples_of_unknowns_come_in_batches(rng: Rng) -> None:
    """The calibration is that of a head that gets the same rows as arrays; labels of unknowns are not read."""
    trusted, held = fitted(rng), [blobs(rng, 150)]
    examples = torch.from_numpy(rng.normal(size=(30, 4))).float()
    by_hand = copy.deepcopy(trusted.head)
    rows, shown = trusted.read(held), trusted.read([examples])
    by_hand.calibrate(
        rows.z, rows.y, torch.from_numpy(rows.logits), layers=rows.layers,
        unknowns=shown.z, unknown_logits=torch.from_numpy(shown.logits), unknown_layers=shown.layers,
    )  # fmt: skip
    x, _ = blobs(rng, 50)
    for batches in ([examples], [(examples, ["wolf"] * 30)]):
        trusted.calibrate(held, unknowns=batches)
        found = trusted.features(x)
        assert torch.equal(by_hand(found.z, found.logits, layers=found.layers).joint, trusted(x).joint)
    without = trusted.calibrate(held)(x).joint
    assert not torch.equal(by_hand(found.z, found.logits, layers=found.layers).joint, without)


def test_samples_of_a_unit_need_not_be_independent(rng: Rng) -> None:
    """Batches name the video of each frame; the promise is then over videos, also after a new calibration."""

    def videos(count: int) -> list[dict[str, Any]]:
        x, y = blobs(rng, 5 * count)
        names = np.repeat([f"video {i}" for i in range(count)], 5).tolist()
        half = 5 * (count // 2)
        parts = slice(None, half), slice(half, None)
        return [{"input": x[part], "labels": y[part], "video": names[part]} for part in parts]

    taken: dict[str, Any] = {"inputs": lambda batch: batch["input"], "units": lambda batch: batch["video"]}
    trusted = TrustedModel.fit(network(), videos(40), videos(200), risk=0.2, **taken).eval()
    assert trusted.head.promise is not None
    assert trusted.head.promise.units
    assert float(trusted(blobs(rng, 200)[0]).accept.double().mean()) > 0.5
    assert trusted.calibrate(videos(200), **taken).head.promise.units  # type: ignore[union-attr]
    assert trusted.head.promise.found
    rows = trusted.read(videos(3), **taken)
    assert rows.units is not None
    assert rows.units.tolist() == np.repeat(["video 0", "video 1", "video 2"], 5).tolist()
    with pytest.raises(ValueError, match="Got 1 units for 15 rows"):
        trusted.read(videos(6), inputs=taken["inputs"], units=lambda _: ["one"])
    with pytest.warns(UserWarning, match="over units, and those of the new calibration points are not known"):
        trusted.calibrate(videos(50), inputs=taken["inputs"])
    assert not trusted(blobs(rng, 200)[0]).accept.any()


def test_augmented_calibration_data_are_noticed(rng: Rng) -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return 4.0 * torch.eye(3, 4)[i % 3] + torch.randn(4), i % 3

    with pytest.warns(UserWarning, match="augmented at random"):
        TrustedModel.fit(network(), loader(rng, 200), DataLoader(Noisy(), batch_size=50), risk=0.3)


def test_training_mode_is_noticed_once(rng: Rng) -> None:
    trusted = fitted(rng).train()
    x, _ = blobs(rng, 4)
    with pytest.warns(UserWarning, match=r"call trusted\.eval\(\)"):
        trusted(x)
    trusted(x)


@pytest.mark.slow
def test_files_copies_and_other_networks(rng: Rng, tmp_path: Path) -> None:
    trusted = fitted(rng)
    x, _ = blobs(rng, 40)
    expected = trusted(x)
    trusted.save(tmp_path / "trusted.safetensors")
    for other in (
        TrustedModel.load(tmp_path / "trusted.safetensors", network().eval()),
        copy.deepcopy(trusted),
        pickle.loads(pickle.dumps(trusted)),
    ):
        assert torch.equal(other(x).joint, expected.joint)
        assert other.places == trusted.places
        assert other.network is not trusted.network
    assert TrustHead.load(tmp_path / "trusted.safetensors").layer_names == trusted.places.layers
    changed = network().eval()
    with torch.no_grad():
        next(changed[0].parameters()).mul_(1.5)
    with pytest.warns(UserWarning, match="other weights than the one"):
        TrustedModel.load(tmp_path / "trusted.safetensors", changed)
    with pytest.raises(ValueError, match=r"weight of shape \(4, 8\), and the head has 3 classes"):
        TrustedModel.load(tmp_path / "trusted.safetensors", network(4))
    TrustHead.fit(*(part.numpy() for part in blobs(rng, 90)), dim=2).save(tmp_path / "head.safetensors")
    hidden = trusted.head.in_features
    wider = nn.Sequential(*list(network())[:-1], nn.Linear(hidden + 1, 3))
    with pytest.raises(ValueError, match=rf"weight of shape \(3, {hidden + 1}\), .* embeddings of {hidden} numbers"):
        TrustedModel.load(tmp_path / "trusted.safetensors", wider)
    with pytest.raises(ValueError, match=r"load it with TrustHead\.load"):
        TrustedModel.load(tmp_path / "head.safetensors", network())


@pytest.mark.slow
def test_wrapped_and_narrow_networks(rng: Rng) -> None:
    training, held = loader(rng, 200), loader(rng, 200)
    x, _ = blobs(rng, 40)
    plain = TrustedModel.fit(network(), training, held, risk=0.1).eval()(x)
    parallel = TrustedModel.fit(nn.DataParallel(network()), training, held, risk=0.1).eval()
    assert torch.equal(parallel(x).joint, plain.joint)
    half = TrustedModel.fit(network().bfloat16(), training, held, risk=0.1).eval()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        cast = TrustedModel.fit(network(), training, held, risk=0.1).eval()(x)
    for out in (half, cast):
        assert out.logits.dtype == torch.bfloat16
        assert float((out.accept == plain.accept).double().mean()) > 0.8


def test_calibrating_again_keeps_the_promise(rng: Rng) -> None:
    trusted = fitted(rng)
    threshold = float(trusted.head.calibration.network.threshold)  # type: ignore[union-attr]
    trusted.calibrate(loader(rng, 300))
    assert trusted.head.promise is not None
    assert trusted.head.promise.risk == 0.1
    assert float(trusted.head.calibration.network.threshold) != threshold  # type: ignore[union-attr]
    rows = trusted.read(loader(rng, 70))
    assert rows.y is not None
    assert rows.layers is not None
    assert (rows.z.shape, rows.y.shape, rows.logits.shape, list(rows.layers)) == (
        (70, 8), (70,), (70, 3), list(trusted.places.layers)
    )  # fmt: skip
    assert trusted.read([blobs(rng, 5)[0]]).y is None


# Shape checks wrap functions in Python code that the compiler and the exporter cannot trace: a process without them.
EXPORT = """
import json, sys
import numpy as np, onnxruntime, torch
sys.path.insert(0, {tests!r})
from test_trusted_model import blobs, fitted
from sepc_torch import export, to_onnx
rng = np.random.default_rng({seed})
trusted = fitted(rng)
x, _ = blobs(rng, 10_000, spread=4.0)
with torch.no_grad():
    expected = trusted(x)
    assert expected.accept.any() and not expected.accept.all()
    compiled = torch.compile(trusted, fullgraph=True, backend="aot_eager")(x)
    graphs = []  # a compiled network keeps its backend; this one generates no code, so that logits are equal
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward
    again = type(trusted).fit(torch.compile(trusted.network, backend=backend), [blobs(rng, 90)], [blobs(rng, 90)])
    assert torch.equal(again.eval()(x).logits, expected.logits) and graphs
export(trusted, {folder!r} + "/trusted.pt2")
fields = torch.export.load({folder!r} + "/trusted.pt2").module()(x)
to_onnx(trusted, {folder!r} + "/trusted.onnx")
session = onnxruntime.InferenceSession({folder!r} + "/trusted.onnx")
found = session.run(["label", "accept", "reason"], dict(input=x.numpy()))
facts = {{name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}}
assert facts["promise"].startswith("at most 10 % of the accepted"), facts
assert facts["threshold"] == float(trusted.head.calibration.network.threshold)
assert facts["classes"] == [0, 1, 2] and facts["version"]
for ways in ([compiled.label, compiled.accept, compiled.reason], [fields["label"], fields["accept"], fields["reason"]],
             [torch.from_numpy(value) for value in found]):
    for got, want in zip(ways, [expected.label, expected.accept, expected.reason]):
        assert torch.equal(got, want)
"""


@pytest.mark.slow
def test_network_and_head_are_one_file(rng: Rng, tmp_path: Path) -> None:
    tests, seed = str(Path(__file__).parent), int(rng.integers(2**31))
    script = EXPORT.format(tests=tests, seed=seed, folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
def test_on_a_gpu(rng: Rng) -> None:
    training, held = loader(rng, 200), loader(rng, 200)
    x, _ = blobs(rng, 500)
    net = network().cuda()
    trusted = TrustedModel.fit(net, training, held, risk=0.1).eval()
    out = trusted(x.cuda())
    assert out.accept.is_cuda
    assert torch.equal(out.label, net.eval()(x.cuda()).argmax(dim=1))
    assert float(out.accept.double().mean()) > 0.5
