"""Updates of a head: equal to a full fit with the same projection, undone by forget, saved, and refused when wrong."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sepc_torch import SEPC, DriftMonitor, FileFormatError, Kind, Partition, TrustHead, partition
from sepc_torch.data import files, schemas
from sepc_torch.head.evidence.evidence import fit_evidence, pieces_of
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.reading.passes import ProjectedSet
from sepc_torch.partitioning.record import UncountedEllipsoid

Rng = np.random.Generator
CLASSES = ["ant", "bee", "cat", "dog"]
FEATURES = 6
# Distance of class centres at which one ellipsoid covers each class, and at which classes overlap.
APART, MIXED = 12.0, 2.5


def draw(rng: Rng, points: int, apart: float, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings around one centre per class, and their labels; all classes have about the same size."""
    codes = np.arange(points) % classes
    z = rng.normal(size=(points, FEATURES)) + apart * np.eye(FEATURES)[codes]
    return z.astype(np.float32), np.array(CLASSES)[codes]


def fit(z: np.ndarray, y: np.ndarray, **options: object) -> TrustHead:
    return TrustHead.fit(z, y, **{"dim": 3, "normalize": None, "keep_points": True, **options})  # type: ignore[arg-type]


def inner(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points halfway between those of a class and its mean: deep inside any convex cover of the class."""
    means = np.stack([z[y == label].mean(axis=0) for label in y])
    return (z + means) / 2, y


def full_partition(head: TrustHead) -> Partition:
    """The partition of all present points from scratch, with the head's projection and options."""
    kept, made = head.training_set, {k: v for k, v in head.sepc.made.items() if k != "versions"}
    assert kept is not None
    return partition(kept.points, np.array(head.classes)[kept.codes], classes=head.classes, **made)


def assert_equals_full_fit(head: TrustHead, labels: list[str], tolerance: float = 0.0) -> None:
    """The ellipsoids of the given classes, apart from balls, are those of a full fit."""
    kept, full = head.training_set, full_partition(head)
    assert kept is not None
    for label in labels:
        code = head.classes.index(label)
        mine = [e for e in kept.ellipsoids if e.code == code and e.kind is not Kind.ISOLATED]
        theirs = [e for e in full.ellipsoids if e.label == label and e.kind is not Kind.ISOLATED]
        assert len(mine) == len(theirs)
        for e, other in zip(mine, theirs, strict=True):
            if tolerance:
                # The geometric means of the semi-axes: the certificate bounds the D-th root of the volume.
                assert abs(e.ellipsoid.log_volume - other.log_volume) / other.dim <= tolerance
            else:
                assert np.array_equal(e.ellipsoid.whitener, other.whitener)
                assert np.array_equal(e.ellipsoid.center, other.center)


def assert_same_state(head: TrustHead, other: TrustHead) -> None:
    mine, theirs = head.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


@pytest.fixture(scope="module")
def data(module_rng: Rng) -> dict[float, tuple[np.ndarray, np.ndarray]]:
    return {apart: draw(module_rng, 160, apart) for apart in (APART, MIXED)}


@pytest.fixture(scope="module")
def fitted(data: dict[float, tuple[np.ndarray, np.ndarray]]) -> dict[float, TrustHead]:
    return {apart: fit(z, y) for apart, (z, y) in data.items()}


@pytest.fixture
def apart(fitted: dict[float, TrustHead]) -> TrustHead:
    """A head whose classes have one ellipsoid each."""
    return copy.deepcopy(fitted[APART])


@pytest.fixture
def mixed(fitted: dict[float, TrustHead]) -> TrustHead:
    """A head whose classes overlap."""
    return copy.deepcopy(fitted[MIXED])


def test_points_are_not_kept_by_default(apart: TrustHead, tmp_path: Path, rng: Rng) -> None:
    plain = TrustHead.fit(*draw(rng, 80, APART), dim=3, normalize=None)
    assert plain.training_set is None
    assert (plain.marked, plain.calibration_age) == ((), 0.0)
    for call in (plain.certificate, plain.refit, lambda: plain.forget([0]), lambda: plain.update([[0.0] * 6], ["ant"])):
        with pytest.raises(RuntimeError, match="keep_points=True"):
            call()
    plain.save(tmp_path / "plain")
    arrays, options = files.read(tmp_path / "plain", "trust_head")
    assert "training" not in options
    assert not [name for name in arrays if name.startswith("training")]
    # The module itself is the same with and without points.
    assert plain.state_dict().keys() == apart.state_dict().keys()


def test_points_inside_change_counts_only(
    apart: TrustHead, fitted: dict[float, TrustHead], data: dict[float, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Without a solve: volumes within 1e-7 of a full fit, and counts of all points."""
    before = fitted[APART]
    z, y = inner(*data[APART])
    assert apart.update(z[:40], y[:40]) is apart
    assert list(apart.marked) == []
    found = apart.certificate()
    assert [c.state for c in found.classes] == ["counts only"] * 4
    assert found.equals_full_fit
    assert all(0.0 < c.volume_error <= 1e-7 for c in found.classes)
    assert_equals_full_fit(apart, CLASSES, tolerance=1e-7)
    assert torch.equal(apart.sepc.bank.whiteners, before.sepc.bank.whiteners)
    assert (apart.sepc.totals - before.sepc.totals).tolist() == [10] * 4
    assert torch.equal(apart.sepc.held.sum(dim=1) - before.sepc.held.sum(dim=1), torch.full((4,), 10))
    assert apart.training_set is not None
    assert apart.reference_ids == tuple(apart.training_set.ids[apart.training_set.reference_rows].tolist())
    assert len(apart.reference_ids) == 200


def test_one_class_changes(apart: TrustHead, data: dict[float, tuple[np.ndarray, np.ndarray]]) -> None:
    z, y = inner(*data[APART])
    apart.update(z[y == "bee"], y[y == "bee"])
    assert [c.state for c in apart.certificate().classes] == ["unchanged", "counts only", "unchanged", "unchanged"]
    assert "bee    counts only      80           1  within" in str(apart.certificate())


def test_points_outside_mark_their_class(apart: TrustHead, rng: Rng) -> None:
    """Only the marked class is solved, and it is equal to a full fit bit for bit."""
    along = apart.projection.matrix[0].numpy()  # a direction that the projection keeps
    apart.update([APART * np.eye(FEATURES)[1] + rng.choice([-60.0, 60.0]) * along / np.linalg.norm(along)], ["bee"])
    assert apart.training_set is not None
    assert list(apart.marked) == ["bee"]
    before = {e.code: e.ellipsoid.whitener for e in apart.training_set.ellipsoids}
    assert math.isnan(apart.certificate().classes[1].volume_error)
    apart.refit()
    assert list(apart.marked) == []
    assert [c.state for c in apart.certificate().classes][1] == "refitted"
    assert_equals_full_fit(apart, ["bee"])
    for e in apart.training_set.ellipsoids:
        if e.code != 1:
            assert np.array_equal(e.ellipsoid.whitener, before[e.code])
    known = [c.label for c in apart.certificate().classes if not math.isnan(c.volume_error)]
    assert_equals_full_fit(apart, known, tolerance=1e-7)


def test_too_many_others_mark_a_class(apart: TrustHead, data: dict[float, tuple[np.ndarray, np.ndarray]]) -> None:
    """Points of one class at the centre of another: allowed up to max_impure."""
    z, y = data[APART]
    most = apart.sepc.made["max_impure"]
    centre = np.tile(z[y == "ant"].mean(axis=0), (most + 1, 1))
    apart.update(centre[:most], ["dog"] * most)
    assert list(apart.marked) == ["dog"]
    assert apart.certificate().classes[0].state == "counts only"
    apart.update(centre[most:], ["dog"])
    assert list(apart.marked) == ["ant", "dog"]


@pytest.mark.slow
def test_update_and_refit_equal_a_full_fit(
    mixed: TrustHead, data: dict[float, tuple[np.ndarray, np.ndarray]], rng: Rng
) -> None:
    """All classes again: partition, counts and evidence are those of a fit to all points with the same projections."""
    z, y = draw(rng, 24, MIXED)
    mixed.update(z, y)
    partial = copy.deepcopy(mixed).refit()
    assert_equals_full_fit(partial, [c.label for c in partial.certificate().classes if c.volume_error == 0.0])
    mixed.refit(CLASSES)
    assert mixed.certificate().equals_full_fit
    assert {c.volume_error for c in mixed.certificate().classes} == {0.0}
    full, kept, evidence = full_partition(mixed), mixed.training_set, mixed.evidence
    assert kept is not None
    assert evidence is not None
    reference = SEPC.from_partition(full, nan_policy="raise")
    for name, tensor in reference.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, mixed.sepc.state_dict()[name]), name
    everything = np.concatenate([data[MIXED][0], z])
    order = np.argsort(kept.codes, kind="stable")
    points = Neighbours(torch.from_numpy(everything[order]), torch.from_numpy(kept.codes[order]))
    with torch.no_grad():
        coordinates = evidence.polar(torch.from_numpy(everything)).numpy()
    projected = ProjectedSet(
        kept.points,
        coordinates,
        kept.codes,
        full.classes,
        evidence.polar,
        evidence.white,
        points,
        order,
        kept.variance,
    )
    expected = fit_evidence(projected, pieces_of(full, kept.points, kept.codes)).measure(torch.from_numpy(z))
    found = evidence.measure(torch.from_numpy(z))
    # Offsets of the reference points have another origin, so that distances differ by rounding errors of float32.
    for mine, theirs in zip(found[:-1], expected[:-1], strict=True):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [APART, MIXED])
def test_forget_undoes_an_update(fitted: dict[float, TrustHead], rng: Rng, spread: float) -> None:
    """Counts, densities and reference points come back bit for bit; marks stay."""
    head = copy.deepcopy(fitted[spread])
    z, y = draw(rng, 30, spread)
    names, points = [1000 + i for i in range(30)], draw(rng, 40, spread)
    head.update(z, y, ids=names)
    assert head.calibration_age == 30 / 190
    marked = head.marked
    head.forget(names)
    assert head.calibration_age == 60 / 160
    assert set(marked) <= set(head.marked)
    assert_same_state(head.calibrate(*points), copy.deepcopy(fitted[spread]).calibrate(*points))


@pytest.mark.slow
def test_forgotten_support_points_mark_their_class(apart: TrustHead) -> None:
    kept = apart.training_set
    assert kept is not None
    cat = kept.ellipsoids[2]
    rows = np.flatnonzero(kept.codes == 2)
    interior = int(rows[cat.ellipsoid.distance(kept.points[rows]).argmin()])
    apart.forget(kept.ids[interior])
    assert list(apart.marked) == []
    assert_equals_full_fit(apart, CLASSES, tolerance=1e-7)
    support = kept.ids[cat.support].tolist()
    apart.forget(support[:1])
    assert list(apart.marked) == ["cat"]
    assert_equals_full_fit(apart.refit(), ["cat"])
    assert apart.training_set is not None
    assert support[0] not in apart.training_set.ids
    assert support[0] not in (apart.reference_ids or ())


@pytest.mark.slow
def test_two_classes_are_solved_together(rng: Rng) -> None:
    z, y = draw(rng, 80, APART, classes=2)
    head = fit(z, y, dim=2)
    head.update(*inner(z, y))
    assert list(head.marked) == []
    assert head.certificate().equals_full_fit
    assert_equals_full_fit(head, CLASSES[:2], tolerance=1e-7)
    kept = head.training_set
    assert kept is not None
    head.forget(kept.ids[kept.ellipsoids[0].support[0]])
    assert list(head.marked) == ["ant", "bee"]
    head.refit("ant")
    assert [c.state for c in head.certificate().classes] == ["refitted", "refitted"]
    assert_equals_full_fit(head, CLASSES[:2])


@pytest.mark.slow
def test_partitioned_rest_is_solved_class_by_class(rng: Rng) -> None:
    z, y = draw(rng, 90, APART, classes=3)
    head = fit(z, y, partition={"rest": "partitioned"})
    head.update(*inner(z, y))
    assert not head.certificate().equals_full_fit  # how others are covered may change
    head.refit(["cat"])
    assert [c.volume_error == 0.0 for c in head.certificate().classes] == [False, False, True]
    assert_equals_full_fit(head, ["cat"])


def test_reference_points_stay_a_sample(rng: Rng) -> None:
    z, y = draw(rng, 120, APART)
    head = fit(z, y, reference_points=40)
    more, labels = draw(rng, 200, APART)
    head.update(more, labels)
    everything = torch.from_numpy(np.concatenate([z, more]))
    assert head.evidence is not None
    reference, ids = head.evidence.reference_points, head.reference_ids
    assert ids is not None
    assert len(ids) == len(set(ids)) == 40
    assert max(map(int, ids)) >= 120  # 200 of 320 points are new: none among 40 has probability below 1e-13
    torch.testing.assert_close(reference.points, everything[[int(i) for i in ids]], rtol=0, atol=1e-4)
    assert torch.equal(reference.codes, torch.arange(4).repeat_interleave(10))


@pytest.mark.slow
def test_heads_without_reference_points(rng: Rng) -> None:
    z, y = draw(rng, 80, APART)
    head = fit(z, y, reference_points=0)
    head.update(*inner(z, y)).forget(range(100, 110))
    assert head.reference_ids == ()
    assert head.evidence is not None
    assert head.evidence.support_names == ("regions",)


@pytest.mark.slow
def test_the_calibration_ages(rng: Rng) -> None:
    z, y = draw(rng, 80, APART)
    head = fit(z, y).calibrate(*draw(rng, 80, APART))
    assert head.calibration_age == 0.0
    head.update(*draw(rng, 20, APART)).forget([0, 1, 2])
    assert head.calibration_age == 23 / 97
    assert f"{23 / 97:.1%} of the training points changed since the calibration." in str(head.certificate())
    with pytest.warns(UserWarning, match=r"calibration is stale: 23\.7% of the training points"):
        assert torch.isfinite(head(torch.from_numpy(z)).confidence).all()  # the old calibration still answers
    head.accept_at(flag_rate=0.2)  # one warning is enough
    head.update(*draw(rng, 1, APART)).judge(z)
    assert head.calibrate(*draw(rng, 80, APART)).calibration_age == 0.0


@pytest.mark.slow
def test_saved_heads_can_be_updated(mixed: TrustHead, rng: Rng, tmp_path: Path) -> None:
    """A loaded head continues where the saved one stood, bit for bit."""
    first, second = draw(rng, 20, MIXED), draw(rng, 20, MIXED)
    mixed.update(*first)
    mixed.save(tmp_path / "head")
    loaded = TrustHead.load(tmp_path / "head")
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "head").read_bytes()
    assert loaded.marked == mixed.marked
    assert loaded.calibration_age == mixed.calibration_age == 20 / 180
    assert str(loaded.certificate()) == str(mixed.certificate())
    for head in (mixed, loaded):
        head.refit().update(*second).forget([3, 161])
    assert_same_state(loaded, mixed)
    assert loaded.reference_ids == mixed.reference_ids


@pytest.mark.slow
def test_a_stale_calibration_is_told_by_thresholds_and_files(rng: Rng, tmp_path: Path) -> None:
    z, y = draw(rng, 80, APART)
    head = fit(z, y)
    head.update(*draw(rng, 20, APART)).judge(z)  # no calibration, so none is stale
    head.calibrate(*draw(rng, 80, APART)).judge(z)
    head.update(*draw(rng, 4, APART))
    head.save(tmp_path / "head")
    for stale in (head, TrustHead.load(tmp_path / "head")):
        with pytest.warns(UserWarning, match="calibration is stale"):
            stale.accept_at(flag_rate=0.2)
        head.calibrate(*draw(rng, 80, APART)).judge(z)
    head.forget([0])
    with pytest.warns(UserWarning, match=r"calibration is stale: 1\.0%"):
        head.judge(z)


@pytest.mark.slow
def test_state_dicts_keep_the_age_of_a_calibration(rng: Rng) -> None:
    z, y = draw(rng, 80, APART)
    head = fit(z, y).calibrate(*draw(rng, 80, APART)).update(*draw(rng, 20, APART))
    other = TrustHead.empty()
    other.load_state_dict(head.state_dict())
    assert other.calibration_age == head.calibration_age == 20 / 100
    with pytest.warns(UserWarning, match="calibration is stale"):
        other.judge(z)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The calibration is stale")
@pytest.mark.filterwarnings("ignore:The risk 0.5 cannot be promised")
def test_regions_that_stay_keep_their_thresholds(mixed: TrustHead, rng: Rng, tmp_path: Path) -> None:
    """After a refit, a region has the threshold of the equal region before; a new one accepts nothing."""
    mixed.calibrate(*draw(rng, 400, MIXED))
    monitor = DriftMonitor(mixed)

    def contents(e: UncountedEllipsoid) -> tuple[int, bytes, bytes]:
        return e.code, e.ellipsoid.center.tobytes(), e.ellipsoid.whitener.tobytes()

    mixed.accept_at(risk=0.5, delta=0.5, by="region", joint=False)
    assert mixed.calibration is not None
    before, kept = mixed.calibration.own.region_threshold, mixed.training_set
    assert kept is not None
    old = {contents(e): float(threshold) for e, threshold in zip(kept.ellipsoids, before, strict=True)}
    mixed.forget(kept.ids[kept.ellipsoids[0].support].tolist()).refit(["ant"])
    after, kept = mixed.calibration.own.region_threshold, mixed.training_set
    assert kept is not None
    new = [contents(e) for e in kept.ellipsoids]
    assert [old.get(name, math.inf) for name in new] == after.tolist()
    assert sum(name in old for name in new) < len(new)
    z = torch.from_numpy(draw(rng, 200, MIXED)[0])
    out = mixed(z)
    assert bool(out.accept.any())
    assert torch.equal(out.accept, out.joint.double() >= after[out.nearest])
    mixed.save(tmp_path / "head")
    assert torch.equal(TrustHead.load(tmp_path / "head")(z).accept, out.accept)
    for use in (lambda: DriftMonitor(mixed), lambda: mixed.accept_at(risk=0.5, by="region")):
        with pytest.raises(RuntimeError, match="regions of the head changed since the calibration"):
            use()
    with pytest.raises(RuntimeError, match="start a new DriftMonitor"):
        monitor.update(z)
    mixed.calibrate(*draw(rng, 400, MIXED))
    DriftMonitor(mixed).update(z)


@pytest.mark.filterwarnings("ignore:The calibration is stale")
def test_a_change_in_the_middle_of_a_judgement_is_not_seen(
    mixed: TrustHead, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread solves ellipsoids again, and numbers their thresholds anew, after they were found."""
    mixed.calibrate(*draw(rng, 400, MIXED))
    assert mixed.calibration is not None
    mixed.calibration.own.set_table("region_threshold", rng.random(len(mixed.sepc.bank)))
    z = torch.from_numpy(draw(rng, 200, MIXED)[0])
    before, judge, kept = mixed(z), SEPC.judge, mixed.training_set
    assert kept is not None
    changer = threading.Thread(target=lambda: mixed.forget(kept.ids[kept.ellipsoids[0].support].tolist()).refit())

    def judge_and_wait(sepc: SEPC, *points: Any, **options: Any) -> Any:
        found = judge(sepc, *points, **options)
        changer.start()
        changer.join()
        return found

    with monkeypatch.context() as slow:
        slow.setattr(SEPC, "judge", judge_and_wait)
        meanwhile = mixed(z)
    assert all(torch.equal(one, other) for one, other in zip(before, meanwhile, strict=True))
    assert not torch.equal(mixed(z).joint, before.joint)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("run", range(6))
def test_every_head_that_can_be_saved_can_be_loaded(rng: Rng, tmp_path: Path, run: int) -> None:
    """Random sequences of operations: after each, the head judges, and the loaded head judges alike."""
    classes, apart = int(rng.integers(2, 5)), float(rng.choice([APART, MIXED]))
    normalize = [None, "l2", "standardize"][run % 3]
    points = draw(rng, int(rng.integers(40, 120)), apart, classes)
    head = fit(*points, normalize=normalize, partition={"max_isolated": run % 2 or None})
    z = draw(rng, 30, apart, classes)[0]

    def accept() -> None:
        by = [None, "predicted", "region", "class"][rng.integers(4)]
        with contextlib.suppress(RuntimeError):  # not calibrated, or other regions since
            head.accept_at(risk=0.4, delta=0.3, by=by)

    def forget() -> None:
        ids = head.training_set.ids  # type: ignore[union-attr]
        with contextlib.suppress(ValueError):  # a class would be empty
            head.forget(rng.choice(ids, 6, replace=False).tolist())

    operations = [
        lambda: head.calibrate(*draw(rng, 60, apart, classes)),
        accept,
        accept,
        lambda: head.update(*draw(rng, 8, apart, classes)),
        forget,
        lambda: head.refit(progress=False),
        head.double,
        head.float,
    ]
    for _ in range(8):
        operations[rng.integers(len(operations))]()
        head.save(tmp_path / "head")
        loaded = TrustHead.load(tmp_path / "head")
        out, again = head.judge(z), loaded.judge(z)
        assert torch.equal(out.accept, again.accept)
        assert torch.equal(out.p_value.nan_to_num(-1.0), again.p_value.nan_to_num(-1.0))
        assert str(loaded.promise) == str(head.promise)


def test_state_dicts_hold_no_points(apart: TrustHead) -> None:
    """Kept points would not belong to the loaded state."""
    with pytest.warns(UserWarning, match="drops the 160 points that this head kept"):
        apart.load_state_dict(apart.state_dict())
    assert apart.training_set is None
    apart.load_state_dict(apart.state_dict())  # nothing is left to drop


def test_forged_training_points_are_refused(apart: TrustHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart.save(tmp_path / "head")
    arrays, options = files.read(tmp_path / "head", "trust_head")
    options = {name: value for name, value in options.items() if name not in ("kind", "format")}
    options["sepc"]["made"]["max_isolated"] = 2
    codes, training = arrays["training.codes"], options["training"]
    forgeries = [
        ({"training.codes": np.roll(codes, 1) * 0}, {}, "do not match their counts"),
        ({"training.reference_rows": arrays["training.reference_rows"][::-1]}, {}, "reference points do not match"),
        ({}, {"ids": training["ids"][1:]}, "do not list 160 identifiers"),
        ({}, {"ids": None}, "do not name the training points"),
        ({}, {"kinds": ["round"] * 4}, "other kinds"),
        ({}, {"states": []}, "do not list 4 states"),
        ({}, {"kinds": ["isolated"] * len(training["kinds"])}, "more than 2 isolated points"),
        ({"sepc.codes": arrays["sepc.codes"] * 0}, {}, "a class has no ellipsoid"),
    ]
    for changed, described, message in forgeries:
        forged = {**arrays, **changed}, {**options, "training": {**training, **described}}
        with pytest.raises(ValueError, match=rf"Cannot write .*{message}"):
            files.write(tmp_path / "forged", "trust_head", *forged)
        with monkeypatch.context() as unchecked:
            unchecked.setattr(schemas, "check", lambda *_: None)
            files.write(tmp_path / "forged", "trust_head", *forged)
        with pytest.raises(FileFormatError, match=message):
            TrustHead.load(tmp_path / "forged")


def test_a_float64_head_is_updated_in_float64(apart: TrustHead, rng: Rng) -> None:
    apart.double().update(*draw(rng, 8, APART))
    assert apart.sepc.bank.whiteners.dtype == torch.float64
    assert apart.evidence is not None
    assert apart.evidence.reference_points.offsets.dtype == torch.float64
    assert len(apart.training_set or ()) == 168


def test_ids_of_unsigned_integers_stay_integers(rng: Rng) -> None:
    z, y = draw(rng, 80, APART)
    head = fit(z, y, ids=np.arange(80, dtype=np.uint64))
    head.update(z[:2], y[:2]).update(z[:1], y[:1], ids=np.array([200], dtype=np.uint8))
    assert head.training_set is not None
    assert head.training_set.ids.dtype == np.int64
    assert head.training_set.ids[-3:].tolist() == [80, 81, 200]


def test_ids_beyond_64_bits_are_refused(rng: Rng) -> None:
    z, y = draw(rng, 80, APART)
    hashes = np.arange(80, dtype=np.uint64) + np.uint64(2**63)
    with pytest.raises(ValueError, match=r"9223372036854775887 in ids does not fit.*pass ids as strings"):
        fit(z, y, ids=hashes)
    head = fit(z, y)
    with pytest.raises(ValueError, match="does not fit"):
        head.update(z[:1], y[:1], ids=[2**63 + 7])
    head.update(z[:1], y[:1], ids=[2**63 - 1])
    with pytest.raises(ValueError, match=r"No integers are left.*pass ids"):
        head.update(z[:1], y[:1])
    named = fit(z, y, ids=[str(name) for name in hashes])
    named.forget(str(hashes[3]))
    assert len(named.training_set or ()) == 79


def test_wrong_updates_are_refused(apart: TrustHead) -> None:
    row = [[0.0] * FEATURES]
    before = apart.training_set
    with pytest.raises(ValueError, match=r"does not know the classes 'eel'.* Fit again"):
        apart.update(row, ["eel"])
    with pytest.raises(ValueError, match="must have 6 features"):
        apart.update([[0.0]], ["ant"])
    with pytest.raises(ValueError, match="NaN"):
        apart.update([[np.nan] * FEATURES], ["ant"])
    with pytest.raises(ValueError, match="2 labels for 1 embeddings"):
        apart.update(row, ["ant", "bee"])
    with pytest.raises(ValueError, match="must be new: 7 is in the training set"):
        apart.update(row, ["ant"], ids=[7])
    with pytest.raises(ValueError, match="one of them is given twice"):
        apart.update(row * 2, ["ant", "bee"], ids=[999, 999])
    with pytest.raises(TypeError, match="same kind"):
        apart.update(row, ["ant"], ids=["x"])
    with pytest.raises(ValueError, match="does not know the classes 'eel'"):
        apart.refit(["eel"])
    with pytest.raises(ValueError, match=r"1 ids are not in the training set of the head, such as 500"):
        apart.forget([0, 500])
    with pytest.raises(ValueError, match="All points of class 'ant' would be removed"):
        apart.forget(range(0, 160, 4))
    assert apart.training_set is before
    assert apart.refit() is apart  # nothing is marked


def test_wrong_updates_of_other_heads_are_refused(rng: Rng) -> None:
    z, y = draw(rng, 80, APART)
    head = fit(z, y, normalize="l2", reference_points=4, ids=[f"p{i}" for i in range(80)])
    with pytest.raises(ValueError, match="Row 1 has no projection"):
        head.update(np.stack([z[0], 0.0 * z[0]]), y[:2], ids=["a", "b"])
    with pytest.raises(ValueError, match="pass ids for the new points too"):
        head.update(z, y)
    assert head.reference_ids is not None
    with pytest.raises(ValueError, match="All reference points of class 'ant' would be removed"):
        head.forget(head.reference_ids[0])
