"""Who is labelled: one record over the original data set, so that an id means the same sample for ever."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sepc_torch import storage
from sepc_torch.shapes import Int


class View(Dataset[Any]):
    """Some samples of a data set, by id; those with an answer carry it in place of their label."""

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
    """The sample with another label, of the same type: the second of a pair, or added to a sample without one."""
    if isinstance(item, (tuple, list)):
        if len(item) == 2:
            before = item[1]
            return item[0], before.new_tensor(label) if isinstance(before, Tensor) else label
        raise TypeError(
            f"A sample is a {type(item).__name__} of {len(item)}, so it is not clear which entry is the label. "
            "Give LabelPool(..., relabel=lambda sample, label: ...)."
        )
    if isinstance(item, Mapping):
        raise TypeError(
            f"A sample is a dictionary with the keys {list(item)}. Give LabelPool(..., relabel=lambda sample, label: "
            "{**sample, 'label': label}) with the key of your labels."
        )
    return item, label


class LabelPool:
    """A data set of which some samples are labelled, and the others wait.

    Ids are indices into ``dataset``, always. Labels come from the data set itself (a simulated experiment) or from
    :meth:`label`'s ``y`` (people).

    Args:
        dataset: A sized, indexable data set.
        labelled: Ids labelled from the start.
        eval_view: The same samples without augmentation, to embed and to judge; by default ``dataset``.
        relabel: How to put an answer into a sample; by default it becomes the second entry of a pair.

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
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset must have a length and give samples by index, got a {type(dataset).__name__}; an iterable "
                "data set has no ids to label by. Put it into a list, or a table of files."
            )
        if eval_view is not None and len(eval_view) != len(dataset):
            raise ValueError(f"eval_view has {len(eval_view)} samples and dataset {len(dataset)}; they must match.")
        self.dataset = dataset
        self.eval_view = dataset if eval_view is None else eval_view
        self.relabel = relabel
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
            f"{len(self.pool_ids)} waiting, {int(self._ignored.sum())} ignored)"
        )

    @property
    def rounds(self) -> int:
        """How many times :meth:`label` was called."""
        return self._rounds

    @property
    def round_of(self) -> Int[Tensor, "N"]:
        """The round in which each sample was labelled: 0 from the start, -1 not yet."""
        return self._round.clone()

    @property
    def labelled_ids(self) -> Int[Tensor, "n"]:
        """Ids of the labelled samples, ascending."""
        return (self._round >= 0).nonzero().squeeze(1)

    @property
    def pool_ids(self) -> Int[Tensor, "n"]:
        """Ids that wait for a label, ascending."""
        return ((self._round < 0) & ~self._ignored).nonzero().squeeze(1)

    def labelled(self) -> View:
        """The labelled samples as they are now, to train on."""
        return View(self.dataset, self.labelled_ids, self._with_answer)

    def labelled_eval(self) -> View:
        """The labelled samples without augmentation."""
        return View(self.eval_view, self.labelled_ids, self._with_answer)

    def pool(self) -> View:
        """The samples that wait, without augmentation; ``.ids`` are their ids."""
        return View(self.eval_view, self.pool_ids)

    def label(self, ids: Any, y: Any = None) -> None:
        """Mark samples as labelled, with the labels in ``y`` or, without it, those of the data set.

        All or none: a wrong id leaves the pool as it was.
        """
        chosen = self._checked(ids)
        twice = chosen[self._round[chosen] >= 0].tolist()
        if twice:
            raise ValueError(f"The ids {twice[:5]} are labelled already; use answer() to repeat answers safely.")
        if y is not None:
            answers = _integers(y, "y")
            if len(answers) != len(chosen):
                raise ValueError(f"There are {len(chosen)} ids and {len(answers)} labels in y; one for each is needed.")
            self._answers[chosen], self._answered[chosen] = answers, True
        self._rounds += 1
        self._round[chosen] = self._rounds
        self._ignored[chosen] = False

    def answer(self, answers: Mapping[int, int]) -> list[int]:
        """Label samples by answers that may be partial or repeated; returns the ids that are new.

        Reading the same file again, after a crash for instance, labels nothing twice. A different second answer is an
        error: correct the file, or use :meth:`correct`.
        """
        ids = self._checked(list(answers))
        fresh = [int(i) for i in ids if self._round[i] < 0]
        changed = [
            int(i)
            for i in ids
            if self._round[i] >= 0 and self._answered[i] and int(self._answers[i]) != answers[int(i)]
        ]
        if changed:
            i = changed[0]
            raise ValueError(
                f"{len(changed)} samples have another answer already; id {i} was {int(self._answers[i])} and is now "
                f"{answers[i]}. Use correct() to change labels."
            )
        if fresh:
            self.label(fresh, [answers[i] for i in fresh])
        return fresh

    def correct(self, ids: Any, y: Any) -> None:
        """Change the labels of labelled samples."""
        chosen, answers = self._checked(ids), _integers(y, "y")
        if len(answers) != len(chosen):
            raise ValueError(f"There are {len(chosen)} ids and {len(answers)} labels in y; one for each is needed.")
        waiting = chosen[self._round[chosen] < 0].tolist()
        if waiting:
            raise ValueError(f"The ids {waiting[:5]} are not labelled yet; use label().")
        self._answers[chosen], self._answered[chosen] = answers, True

    def ignore(self, ids: Any) -> None:
        """Take samples out of the pool without a label: broken, private, not decidable."""
        chosen = self._checked(ids)
        labelled = chosen[self._round[chosen] >= 0].tolist()
        if labelled:
            raise ValueError(f"The ids {labelled[:5]} are labelled; only waiting samples can be ignored.")
        self._ignored[chosen] = True

    def labels_of(self, ids: Any) -> Int[Tensor, "n"]:
        """The labels of labelled samples: the answer, or what the data set says."""
        return torch.tensor([int(self._label_of(int(i))) for i in self._checked(ids)], dtype=torch.int64)

    def _label_of(self, name: int) -> int:
        if self._answered[name]:
            return int(self._answers[name])
        item = self.eval_view[name]
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            raise TypeError(f"Sample {name} has no second entry to be its label; give labels to label(ids, y).")
        return int(item[1])

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only."""
        return {
            "round": self._round.clone(),
            "answered": self._answered.clone(),
            "answers": self._answers.clone(),
            "ignored": self._ignored.clone(),
            "rounds": torch.tensor(self._rounds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what the state says."""
        self._check_size(state)
        self._round, self._answered = state["round"].clone(), state["answered"].clone()
        self._answers, self._ignored = state["answers"].clone(), state["ignored"].clone()
        self._rounds = int(state["rounds"])

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Take over the labels of a state, and keep those that it does not know: a label is never forgotten.

        A checkpoint may be older than the answers; testing the best one must not undo what people did since.
        """
        self._check_size(state)
        if int(state["rounds"]) > self._rounds:
            newer = self.state_dict()
            self.load_state_dict(state)
            self._keep(newer)
        else:
            self._keep(state)

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Add the labels of an older state where there are none."""
        extra = (state["round"] >= 0) & (self._round < 0)
        self._round[extra] = state["round"][extra]
        self._answered[extra], self._answers[extra] = state["answered"][extra], state["answers"][extra]
        self._ignored = (self._ignored | state["ignored"]) & (self._round < 0)
        self._rounds = max(self._rounds, int(state["rounds"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record (not the data) to a safetensors file, whole or not at all."""
        storage.write(path, "label_pool", {name: value.numpy() for name, value in self.state_dict().items()}, {})

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Take over the record of a file that :meth:`save` wrote."""
        arrays, _ = storage.read(path, "label_pool")
        self.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})

    def _check_size(self, state: Mapping[str, Any]) -> None:
        if len(state["round"]) != len(self):
            raise ValueError(
                f"The pool state is for another data set: it knows {len(state['round'])} samples, this one has "
                f"{len(self)}. Start with the data set that it was saved with."
            )

    def _with_answer(self, name: int, item: Any) -> Any:
        return self.relabel(item, int(self._answers[name])) if bool(self._answered[name]) else item

    def _checked(self, ids: Any) -> Int[Tensor, "n"]:
        chosen = _integers(ids, "ids")
        outside = chosen[(chosen < 0) | (chosen >= len(self))].tolist()
        if outside:
            raise ValueError(f"ids are indices from 0 to {len(self) - 1} into the data set; got {outside[:5]}.")
        values, times = chosen.unique(return_counts=True)
        if bool((times > 1).any()):
            raise ValueError(f"The ids {values[times > 1].tolist()[:5]} are named twice.")
        return chosen


def _integers(values: Any, name: str) -> Int[Tensor, "n"]:
    """A one-dimensional tensor of integers."""
    if isinstance(values, Sequence) and len(values) == 0:
        return torch.empty(0, dtype=torch.int64)
    found = torch.as_tensor(values)
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(f"{name} must be a list of integers, got {found.dtype} of shape {tuple(found.shape)}.")
    return found.to(torch.int64).cpu()
