"""Explanations of single predictions, as text and as a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.data.text import printable
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.prediction import Prediction
from sepc_torch.model.rules import Rule, TrainingCounts
from sepc_torch.model.trust import posterior, trust_from_sums
from sepc_torch.shapes import Float, Int

# Number of features in the text; the dictionary lists all features.
_NAMED_FEATURES = 3

_REASONS = {
    Rule.SINGLE: "the point lies in exactly one ellipsoid",
    Rule.OVERLAP: "the point lies in several ellipsoids; the training points in all of them decide",
    Rule.UNION: "the point lies in several ellipsoids; the training points in all of them give no majority; those in "
    "any of them decide",
    Rule.OUTSIDE: "the point lies outside every ellipsoid; the nearest ellipsoid, expanded until it touches the point, "
    "decides",
}


@dataclass(frozen=True)
class Explanation:
    """Explanation of one prediction: ``str()`` gives the text, ``details`` the dictionary."""

    details: dict[str, Any]

    def __str__(self) -> str:
        d = self.details
        lines = [f"label {d['label']!r}, trust {d['trust']:.3f}, because {d['reason']} (rule {d['rule']})"]
        for e in d["ellipsoids"]:
            held = ", ".join(f"{n} of class {label!r}" for label, n in e["holds"].items() if n) or "none"
            lines.append(
                f"  ellipsoid {e['index']} of class {e['label']!r} at distance {e['distance']:.3f} "
                f"holds training points: {held}"
            )
        decided = ", ".join(f"{n} of class {label!r}" for label, n in d["counts"].items() if n) or "none"
        lines.append(f"  training points in the region that decides: {decided}")
        lines.append(f"  trust: {d['arithmetic']}")
        if d["runner_up"] is not None:
            lines.append(
                f"  runner-up {d['runner_up']!r}: its nearest ellipsoid is at distance {d['runner_up_distance']:.3f} "
                f"({d['margin']:.3g} times the distance of the label's class)"
            )
        named = ", ".join(
            f"{printable(name)} {share:+.0%}" for name, share in list(d["features"].items())[:_NAMED_FEATURES]
        )
        lines.append(
            f"  contributions to the distance from the nearest centre: {named} (+ increases it, - decreases it)"
        )
        return "\n".join(lines)


class ModelParts(NamedTuple):
    """The parts of a model that an explanation reads."""

    bank: EllipsoidBank
    training: TrainingCounts
    totals: Int[Tensor, "C"]
    classes: list[Any]
    feature_names: tuple[str, ...] | None


def explain_rows(
    model: ModelParts,
    z: Float[Tensor, "B D"],
    distance: Float[Tensor, "B K"],
    counts: Int[Tensor, "B C"],
    prediction: Prediction,
) -> list[Explanation]:
    """Explain every prediction of a batch."""
    numbers = zip(*(field.tolist() for field in prediction), strict=True)
    fields = (dict(zip(prediction._fields, row, strict=True)) for row in numbers)
    return [_explain(model, *row) for row in zip(z, distance, counts, fields, strict=True)]


def _explain(
    model: ModelParts,
    z: Float[Tensor, "D"],
    distance: Float[Tensor, "K"],
    counts: Int[Tensor, "C"],
    prediction: Mapping[str, int | float],
) -> Explanation:
    """Explain one prediction from its point, distances, class counts and fields as Python numbers."""
    label, nearest, runner_up = (int(prediction[field]) for field in ("label", "nearest", "runner_up"))
    rule = Rule(int(prediction["rule"]))
    classes, codes = model.classes, model.training.codes.tolist()
    inside = (distance <= 1.0 + SURFACE_TOLERANCE).nonzero().squeeze(1).tolist()
    shown = sorted(inside, key=lambda k: float(distance[k])) or [nearest]
    rival = [float(distance[k]) for k, code in enumerate(codes) if code == runner_up != label]
    probabilities = posterior(counts.unsqueeze(0), model.totals, torch.tensor([label], device=counts.device))[0]
    return Explanation(
        {
            "label": classes[label],
            "trust": prediction["trust"],
            "rule": rule.name,
            "reason": _REASONS[rule],
            "ellipsoids": [
                {
                    "index": k,
                    "label": classes[codes[k]],
                    "distance": float(distance[k]),
                    "holds": dict(zip(classes, model.training.held[k].tolist(), strict=True)),
                }
                for k in shown
            ],
            "counts": dict(zip(classes, counts.tolist(), strict=True)),
            "arithmetic": _arithmetic(counts, model.totals, label),
            "posterior": dict(zip(classes, probabilities.tolist(), strict=True)),
            "distance": prediction["distance"],
            "margin": prediction["margin"],
            "runner_up": classes[runner_up] if rival else None,
            "runner_up_distance": min(rival, default=float("inf")),
            "features": _contributions(model.bank, z, nearest, model.feature_names),
        }
    )


def _arithmetic(counts: Int[Tensor, "C"], totals: Int[Tensor, "C"], label: int) -> str:
    """The Bayes formula with its numbers, without the zero terms of classes that have no point in the region."""
    if int(counts.sum()) == int(counts[label]):
        return "no other class has training points in the region, so trust = 1.000"
    own = f"({int(counts[label])}+1)({int(totals[label])}+1)"
    pairs = enumerate(zip(counts.tolist(), totals.tolist(), strict=True))
    terms = [f"{count}·{total}" for c, (count, total) in pairs if c != label and count]
    trust = float(trust_from_sums(counts[label], totals[label], (counts * totals).sum()))
    return f"{own} / ({' + '.join([own, *terms])}) = {trust:.3f}"


def _contributions(
    bank: EllipsoidBank, z: Float[Tensor, "D"], nearest: int, feature_names: tuple[str, ...] | None
) -> dict[str, float]:
    r"""Each feature's term :math:`(z-c)_j (W^\top W (z-c))_j` of the squared distance, largest magnitude first.

    The terms are divided by the sum of their magnitudes rather than by the squared distance: terms of correlated
    features can be much larger than the squared distance, because terms of opposite sign cancel.
    """
    relative = bank.relative(z.unsqueeze(0))[0]
    offset = (relative - bank.offsets[nearest].to(relative.dtype)).double()  # rounded as in the distance
    whitener = bank.whiteners[nearest].double()
    parts = offset * (whitener.T @ (whitener @ offset))
    shares = (parts / parts.abs().sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    names = feature_names or tuple(f"feature {j}" for j in range(bank.dim))
    return dict(sorted(zip(names, shares, strict=True), key=lambda item: -abs(item[1])))
