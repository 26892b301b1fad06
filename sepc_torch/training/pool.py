"""Label pool: the record of which samples of a data set are labelled, with which label, since which round.

An id is an index into the original data set, so it denotes the same sample in every round.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sepc_torch.data import files
from sepc_torch.data.options import check_choice
from sepc_torch.data.warn import warn_user
from sepc_torch.shapes import Array, Int

# The values of a sample without a label, by the name of their array.
_EMPTY = {"round": -1, "answered": False, "answers": 0, "ignored": False}
# Samples that share a checksum.
_BLOCK = 256
# Keys of a state.
_STATE = (*_EMPTY, "rounds")


class View(Dataset[Any]):
    """Subset of a data set, given by ids; ``answer`` gives samples the annotator's label instead of their own."""

    def __init__(self, dataset: Any, ids: Int[Tensor, "n"], answer: Callable[[int, Any], Any] | None = None) -> None:
        self.dataset = dataset
        self.ids = ids
        self._answer = answer

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, position: int) -> Any:
        name = int(self.ids[position])
        item = self.dataset[name]
        return item if self._answer is None else self._answer(name, item)


def replace_label(item: Any, label: int) -> Any:
    """Replace the label of a sample: the second entry of a pair. A sample that is not a sequence becomes a pair."""
    if isinstance(item, (tuple, list)):
        if len(item) == 2:
            before = item[1]
            return item[0], before.new_tensor(label) if isinstance(before, Tensor) else label
        raise TypeError(
            f"A sample is a {type(item).__name__} of {len(item)} entries; expected a pair of input and label. Pass "
            "LabelPool(..., relabel=lambda sample, label: ...)."
        )
    if isinstance(item, Mapping):
        raise TypeError(
            f"A sample is a dictionary with the keys {list(item)}; expected a pair of input and label. Pass "
            "LabelPool(..., relabel=lambda sample, label: {**sample, 'label': label}) with the key of your labels."
        )
    return item, label


class LabelPool:
    """A data set with labelled and unlabelled samples.

    Ids are indices into ``dataset``. Labels come from the data set itself (a simulated experiment) or from the argument
    ``y`` of :meth:`label` (annotators).

    Args:
        dataset: A data set with a length and access by index.
        labelled: Ids of the samples labelled from the start.
        eval_view: The same samples without augmentation, for embedding and evaluation; by default ``dataset``.
        relabel: From a sample and a label to the sample with this label; by default the label becomes the second entry
            of a pair.
        label_of: From a sample to its integer label; by default the second entry of a pair. Other kinds of samples,
            such as dictionaries, need this function to compare the data set's labels with annotated ones.

    >>> samples = [(float(i), i % 2) for i in range(6)]
    >>> pool = LabelPool(samples, labelled=[0, 1])
    >>> pool.label([4, 5], y=[1, 1])
    >>> list(pool.labelled()), pool.pool_ids.tolist()
    ([(0.0, 0), (1.0, 1), (4.0, 1), (5.0, 1)], [2, 3])
    """

    def __init__(
        self,
        dataset: Any,
        labelled: Any = (),
        eval_view: Any = None,
        relabel: Callable[[Any, int], Any] = replace_label,
        label_of: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(dataset, (Mapping, str, bytes)):
            raise TypeError(
                f"dataset must return samples by index, from 0 to its length - 1; got a {type(dataset).__name__}. Put "
                "the samples into a list, for instance list(samples.values()), or pass one split of a dictionary of "
                "splits."
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset must have a length and return samples by index; got a {type(dataset).__name__}. The samples "
                "of an iterable data set have no ids. Put them into a list, or into a table of files."
            )
        if eval_view is not None and len(eval_view) != len(dataset):
            raise ValueError(
                f"eval_view has {len(eval_view)} samples and dataset has {len(dataset)}; the lengths must match."
            )
        self.dataset = dataset
        self.eval_view = dataset if eval_view is None else eval_view
        self.relabel = relabel
        if label_of is not None and not callable(label_of):
            raise TypeError(f"label_of must be a function from a sample to its label; got {label_of!r}.")
        self.label_of = label_of
        n = len(dataset)
        self._round = torch.full((n,), -1, dtype=torch.int64)
        self._answered = torch.zeros(n, dtype=torch.bool)
        self._answers = torch.zeros(n, dtype=torch.int64)
        self._ignored = torch.zeros(n, dtype=torch.bool)
        self._rounds = 0
        first = self._checked(labelled)
        self._round[first] = 0

    def __len__(self) -> int:
        return len(self._round)

    def __repr__(self) -> str:
        return (
            f"LabelPool({len(self)} samples: {len(self.labelled_ids)} labelled in {self.rounds} rounds, "
            f"{len(self.pool_ids)} unlabelled, {int(self._ignored.sum())} ignored)"
        )

    @property
    def rounds(self) -> int:
        """Number of calls of :meth:`label`."""
        return self._rounds

    @property
    def round_of(self) -> Int[Tensor, "N"]:
        """Round in which each sample was labelled: 0 for those labelled from the start, -1 for unlabelled ones."""
        return self._round.clone()

    @property
    def labelled_ids(self) -> Int[Tensor, "n"]:
        """Ids of the labelled samples, in ascending order."""
        return (self._round >= 0).nonzero().squeeze(1)

    @property
    def pool_ids(self) -> Int[Tensor, "n"]:
        """Ids of the unlabelled samples that are not ignored, in ascending order."""
        return ((self._round < 0) & ~self._ignored).nonzero().squeeze(1)

    def labelled(self) -> View:
        """The samples labelled at the time of the call, for training."""
        return View(self.dataset, self.labelled_ids, self._with_answer)

    def labelled_eval(self) -> View:
        """The labelled samples without augmentation."""
        return View(self.eval_view, self.labelled_ids, self._with_answer)

    def pool(self) -> View:
        """The unlabelled samples, without augmentation; ``.ids`` holds their ids."""
        return View(self.eval_view, self.pool_ids)

    def label(self, ids: Any, y: Any = None) -> None:
        """Mark samples as labelled, with the labels in ``y`` or, without ``y``, those of the data set.

        An invalid argument raises an error and leaves the pool unchanged.
        """
        chosen = self._checked(ids)
        twice = chosen[self._round[chosen] >= 0].tolist()
        if twice:
            raise ValueError(f"The ids {twice[:5]} are labelled already; answer() accepts repeated answers.")
        if y is not None:
            answers = _labels(y, "y")
            if len(answers) != len(chosen):
                raise ValueError(
                    f"There are {len(chosen)} ids and {len(answers)} labels in y; expected one label per id."
                )
            self._answers[chosen], self._answered[chosen] = answers, True
        elif len(chosen):
            self._check_has_label(int(chosen[0]))
        self._rounds += 1
        self._round[chosen] = self._rounds
        self._ignored[chosen] = False

    def answer(self, answers: Mapping[int, int]) -> list[int]:
        """Label samples from answers that may be partial or repeated, and return the newly labelled ids.

        Repeated answers change nothing, so the same file can be read again, for instance after a crash. An answer that
        contradicts an earlier answer or the label of the data set is an error: correct the file, or use
        :meth:`correct`.
        """
        ids = self._checked(list(answers))
        given = dict(zip(ids.tolist(), _labels(list(answers.values()), "The answers").tolist(), strict=True))
        fresh = [i for i in given if self._round[i] < 0]
        before = {i: self._label_of(i) for i in given if self._round[i] >= 0}
        changed = [i for i, label in before.items() if label != given[i]]
        if changed:
            i = changed[0]
            raise ValueError(
                f"{len(changed)} answers contradict existing labels; id {i} was {before[i]} and is now {given[i]}. Use "
                "correct() to change labels."
            )
        if fresh:
            self.label(fresh, [given[i] for i in fresh])
        return fresh

    def correct(self, ids: Any, y: Any) -> None:
        """Change the labels of labelled samples."""
        chosen, answers = self._checked(ids), _labels(y, "y")
        if len(answers) != len(chosen):
            raise ValueError(f"There are {len(chosen)} ids and {len(answers)} labels in y; expected one label per id.")
        unlabelled = chosen[self._round[chosen] < 0].tolist()
        if unlabelled:
            raise ValueError(f"The ids {unlabelled[:5]} are not labelled yet; use label().")
        self._answers[chosen], self._answered[chosen] = answers, True

    def ignore(self, ids: Any) -> None:
        """Remove samples from the pool without a label, for instance broken, private or undecidable ones."""
        chosen = self._checked(ids)
        labelled = chosen[self._round[chosen] >= 0].tolist()
        if labelled:
            raise ValueError(f"The ids {labelled[:5]} are labelled; only unlabelled samples can be ignored.")
        self._ignored[chosen] = True

    def labels_of(self, ids: Any) -> Int[Tensor, "n"]:
        """Labels of samples: the annotator's label if there is one, otherwise the label in the data set."""
        return torch.tensor([self._label_of(i) for i in self._checked(ids).tolist()], dtype=torch.int64)

    def _label_of(self, name: int) -> int:
        if self._answered[name]:
            return int(self._answers[name])
        item = self.eval_view[name]
        if self.label_of is not None:
            try:
                label = self.label_of(item)
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                raise TypeError(
                    f"label_of fails for sample {name}, {_kind(item)} ({type(error).__name__}: {error})."
                ) from error
        elif isinstance(item, (tuple, list)) and len(item) == 2:
            label = item[1]
        else:
            raise TypeError(
                f"Sample {name} is {_kind(item)}; expected a pair of input and label. Pass LabelPool(..., "
                "label_of=lambda sample: ...), or pass the labels: label(ids, y)."
            )
        code = _code(label)
        if code is None:
            raise TypeError(
                f"The label of sample {name} must be an integer; got {_kind(label)}. Pass LabelPool(..., "
                "label_of=lambda sample: ...), or pass the labels: label(ids, y)."
            )
        return code

    def _check_has_label(self, name: int) -> None:
        """Raise an error if the data set has no labels. Checks one sample only, because reading all may take long."""
        if self.label_of is not None:
            self._label_of(name)
            return
        item = self.dataset[name]
        # Dictionaries, longer tuples and other objects may hold a label in a place unknown here, so they are accepted.
        bare = isinstance(item, (Tensor, np.ndarray, np.generic, int, float, str, bytes)) or item is None
        if bare or (isinstance(item, (tuple, list)) and (len(item) < 2 or (len(item) == 2 and item[1] is None))):
            raise ValueError(
                f"The data set has no label for id {name}: the sample is {_kind(item)}. Pass the labels: label(ids, y)."
            )

    def state_dict(self) -> dict[str, Tensor]:
        """State of the record, as tensors only."""
        return {name: getattr(self, f"_{name}").clone() for name in _EMPTY} | {"rounds": torch.tensor(self._rounds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the record by a state."""
        self._check_state(state)
        self._round, self._answered = state["round"].clone(), state["answered"].clone()
        self._answers, self._ignored = state["answers"].clone(), state["ignored"].clone()
        self._rounds = int(state["rounds"])

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Merge a state into the record: labels that only one of the two holds are kept.

        A checkpoint may be older than the latest answers, and loading it must not discard them. Where both hold a
        label, the record with more rounds wins.
        """
        self._check_state(state)
        if int(state["rounds"]) > self._rounds:
            current = self.state_dict()
            self.load_state_dict(state)
            self._add_labels(current)
        else:
            self._add_labels(state)

    def _add_labels(self, state: Mapping[str, Any]) -> None:
        """Add the labels of a state to samples without a label."""
        extra = (state["round"] >= 0) & (self._round < 0)
        self._round[extra] = state["round"][extra]
        self._answered[extra], self._answers[extra] = state["answered"][extra], state["answers"][extra]
        self._ignored = (self._ignored | state["ignored"]) & (self._round < 0)
        self._rounds = max(self._rounds, int(state["rounds"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record (not the data) to a safetensors file, atomically."""
        _write_state(path, self.state_dict())

    def restore(self, path: str | os.PathLike[str], *, damaged: Literal["raise", "skip"] = "raise") -> None:
        """Replace the record by that of a file written by :meth:`save`.

        Args:
            path: The file.
            damaged: What to do with a damaged file. ``"raise"`` raises FileFormatError and says how many labels can be
                saved. ``"skip"`` restores the labels of all undamaged blocks of 256 samples, and warns.
        """
        check_choice("damaged", damaged, ("raise", "skip"))
        self.load_state_dict(_read_state(path, skip_damaged=damaged == "skip"))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise ValueError(
                f"The pool state lacks {', '.join(missing)}; expected the keys of LabelPool.state_dict(), "
                f"{', '.join(_STATE)}."
            )
        if len(state["round"]) != len(self):
            raise ValueError(
                f"The pool state is for another data set: it has {len(state['round'])} samples, and this pool has "
                f"{len(self)}. Create the pool with the data set that the state was saved with."
            )

    def _with_answer(self, name: int, item: Any) -> Any:
        return self.relabel(item, int(self._answers[name])) if bool(self._answered[name]) else item

    def _checked(self, ids: Any) -> Int[Tensor, "n"]:
        chosen = _integers(ids, "ids")
        outside = chosen[(chosen < 0) | (chosen >= len(self))].tolist()
        if outside:
            raise ValueError(f"ids must be indices from 0 to {len(self) - 1} into the data set; got {outside[:5]}.")
        values, times = chosen.unique(return_counts=True)
        if bool((times > 1).any()):
            raise ValueError(f"The ids {values[times > 1].tolist()[:5]} occur more than once; pass each id once.")
        return chosen


def _integers(values: Any, name: str) -> Int[Tensor, "n"]:
    """Convert to a one-dimensional int64 tensor."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # Sets are rejected because labels could not follow their order, generators because they can be read only once.
        inside = f" that starts with {values[0]!r}" if isinstance(values, (list, tuple)) and values else ""
        raise ValueError(
            f"{name} must be a list of integers, or an array or tensor of integers; got {_kind(values)}{inside}."
        ) from None
    if found.ndim == 1 and len(found) == 0:  # empty arrays and tensors are floating-point by default
        return torch.empty(0, dtype=torch.int64)
    if found.ndim != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{name} must be a list of integers; got {found.dtype} of shape {tuple(found.shape)}.")
    return found.to(torch.int64).cpu()


def _labels(values: Any, name: str) -> Int[Tensor, "n"]:
    """Convert labels to a one-dimensional int64 tensor; raise ValueError for negative ones."""
    found = _integers(values, name)
    if (found < 0).any():
        raise ValueError(f"{name} must hold labels from 0; got {int(found.min())}. Use ignore() for undecided samples.")
    return found


def _code(label: Any) -> int | None:
    """A label as an integer, or None. 1.0, True and tensors of one integral entry are accepted."""
    if isinstance(label, (Tensor, np.ndarray, np.generic)):
        label = label.item() if math.prod(label.shape) == 1 else None
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return int(label)
    return None


def _kind(value: Any) -> str:
    """Short description of a value for error messages."""
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {list(value)[:10]}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return f"a {type(value).__name__}"


def _write_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write the state of a pool to a safetensors file, atomically, with a checksum for every block of samples."""
    arrays = {name: value.numpy() for name, value in state.items()}
    files.write(path, "label_pool", {**arrays, "block_checksums": _block_checksums(arrays)}, {})


def _read_state(path: str | os.PathLike[str], *, skip_damaged: bool = False) -> dict[str, Tensor]:
    """Read the state of a pool; with ``skip_damaged`` a damaged file gives its undamaged blocks, with a warning."""
    try:
        arrays, _ = files.read(path, "label_pool")
    except files.FileFormatError as error:
        arrays, lost = _undamaged(path, error)
        kept = int((arrays["round"] >= 0).sum())
        found = f"{kept} labels lie in undamaged blocks; {lost} of {len(arrays['round'])} samples do not"
        if not skip_damaged:
            remedy = f"{found}. Restore a copy, or keep these labels with restore(path, damaged='skip')."
            raise files.FileFormatError(path, error.problem, remedy) from error
        warn_user(f"{os.fspath(path)!r} is damaged: {error.problem}. {found} and lose theirs.")
    return {name: torch.from_numpy(arrays[name]) for name in _STATE}


def _block_checksums(arrays: Mapping[str, Array]) -> Int[Array, "B"]:
    """CRC-32 of the values of every block of samples."""
    rows = [arrays[name] for name in _EMPTY]
    starts = range(0, len(arrays["round"]), _BLOCK)
    found = [zlib.crc32(b"".join(row[start : start + _BLOCK].tobytes() for row in rows)) for start in starts]
    return np.array(found, dtype=np.int64)


def _undamaged(path: str | os.PathLike[str], error: files.FileFormatError) -> tuple[dict[str, Array], int]:
    """The arrays of a damaged file without its damaged blocks, and the number of samples in these blocks."""
    try:
        arrays, _ = files.read(path, "label_pool", damaged=True)
    except files.FileFormatError:
        raise error from None  # not even the sizes can be read
    stored, found = arrays.get("block_checksums"), _block_checksums(arrays)
    if stored is None or stored.shape != found.shape:
        raise error
    intact = np.repeat(stored == found, _BLOCK)[: len(arrays["round"])]
    kept = {name: np.where(intact, arrays[name], value).astype(arrays[name].dtype) for name, value in _EMPTY.items()}
    kept["rounds"] = np.array(int(kept["round"].max(initial=-1)) + 1)
    return kept, int((~intact).sum())
