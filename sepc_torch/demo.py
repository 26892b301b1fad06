"""The whole path on data that scikit-learn ships: ``python -m sepc_torch.demo [FOLDER]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer, make_moons

from sepc_torch import landscape, partition
from sepc_torch.plot import draw_partition


def main(folder: Path) -> None:
    """Partition two data sets, print what was found, draw one and save the other."""
    folder.mkdir(parents=True, exist_ok=True)

    frame = load_breast_cancer(as_frame=True)
    names = frame.target_names[frame.target]
    begun = time.perf_counter()
    wdbc = partition(frame.data, names, max_impure=2)
    print(f"Breast cancer (WDBC): 569 records, 30 features, partitioned in {time.perf_counter() - begun:.2f} s\n")
    print(wdbc)
    print("\nIts landscape: how far do the classes overlap?\n")
    print(landscape(frame.data, names, partition=wdbc))
    model = folder / "wdbc.partition.safetensors"
    wdbc.save(model)

    points, labels = make_moons(400, noise=0.12, random_state=0)
    begun = time.perf_counter()
    moons = partition(points, labels, max_impure=2)
    print(f"\nTwo moons: 400 points, partitioned in {time.perf_counter() - begun:.2f} s\n")
    print(moons)
    picture = folder / "moons.png"
    mpl.use("Agg")
    figure, ax = plt.subplots(figsize=(8, 5.5), layout="constrained")
    draw_partition(moons, points, labels, ax=ax)
    ax.set_title("Two moons: the ellipsoids of SEP-C and the hyperplane of every iteration")
    figure.savefig(picture, dpi=150)
    plt.close(figure)

    print(f"\nWritten: {model} (the partition), {picture} (the picture)")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo"))
