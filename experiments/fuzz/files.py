"""Targets of the fault campaign (``campaign.py``) for files: damaged files, traces of saving, label pools, answers."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments.fuzz.checks import Finding, Rng, memory_limit, refused, scratch
from sepc_torch import SEPC, Partition, TrustHead, partition
from sepc_torch.training import LabelPool, read_answers

# More than this to refuse a file of a few kilobytes is a fault.
_BYTES, _SECONDS = 200 * 2**20, 2.0
_POOL = 40


def files_target(rng: Rng) -> Finding | None:
    """A damaged file of every kind; sometimes what saving does to its folder and its process."""
    kind = rng.choice(["damage", "special", "mask"], p=[0.94, 0.03, 0.03])
    return {"damage": _damaged, "special": _onto_a_special_file, "mask": _mask_of_other_threads}[kind](rng)


def pool_target(rng: Rng) -> Finding | None:
    """Concurrent writers, killed writers, and files of annotators."""
    kind = rng.choice(["writers", "killed", "answers"], p=[0.15, 0.25, 0.6])
    return {"writers": _concurrent_writers, "killed": _killed_writer, "answers": _hostile_answers}[kind](rng)


@cache
def originals() -> dict[str, bytes]:
    """A small file of every kind that the library writes, always the same."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], 40)
    x = rng.normal(size=(120, 2)) + 1.5 * np.array([[0, 0], [1, 0], [0, 1]])[y]
    part = partition(pd.DataFrame(x, columns=["u", "v"]), np.array(["a", "b", "c"])[y])
    head = TrustHead.fit(x, y, normalize=None).calibrate(x + 0.3 * rng.normal(size=x.shape), y)
    pool = _new_pool()
    pool.label([3, 5, 8], [2, 0, 1])
    pool.ignore([9])
    with scratch() as folder:
        path = folder / "file"
        found = {}
        saved: dict[str, Any] = {"partition": part, "model": SEPC.from_partition(part), "head": head, "pool": pool}
        for name, thing in saved.items():
            thing.save(path)
            found[name] = path.read_bytes()
    return found


def _new_pool() -> LabelPool:
    return LabelPool([(float(i), 0) for i in range(_POOL)])


def _partition_contents(path: Path) -> list[Any]:
    part = Partition.load(path)
    return [*part._arrays().values(), part._metadata()]


def _module_contents(module: torch.nn.Module, points: torch.Tensor) -> list[Any]:
    tensors = [value for value in module.state_dict().values() if isinstance(value, torch.Tensor)]
    others = [value for value in module.state_dict().values() if not isinstance(value, torch.Tensor)]
    return [*(value.numpy() for value in (*tensors, *module(points))), others]


def _pool_contents(path: Path) -> list[Any]:
    pool = _new_pool()
    pool.restore(path)
    return [*(value.numpy() for value in pool.state_dict().values()), pool.labelled_ids.numpy(), str(pool)]


_POINTS = torch.tensor([[0.0, 0.0], [0.7, 0.7], [1.5, 0.0], [9.0, -9.0]])
_CONTENTS: dict[str, Callable[[Path], list[Any]]] = {
    "partition": _partition_contents,
    "model": lambda path: _module_contents(SEPC.load(path), _POINTS),
    "head": lambda path: _module_contents(TrustHead.load(path), _POINTS),
    "pool": _pool_contents,
}


def _damaged(rng: Rng) -> Finding | None:
    kind = str(rng.choice(list(_CONTENTS)))
    content = originals()[kind]
    damaged, what = _damage(rng, content)
    warnings.simplefilter("ignore")
    with scratch() as folder:
        path = folder / "file"
        path.write_bytes(content)
        expected = _CONTENTS[kind](path)
        path.write_bytes(damaged)
        begun = time.process_time()
        try:
            with memory_limit(_BYTES):
                found = _CONTENTS[kind](path)
        except MemoryError:
            return Finding(f"damaged {kind}: more than {_BYTES >> 20} MB to read", what)
        except Exception as error:
            if time.process_time() - begun > _SECONDS:
                return Finding(f"damaged {kind}: more than {_SECONDS} s to read", what)
            return refused(error, ValueError, where=f"damaged {kind}: ", detail=f"after {what}")
    if time.process_time() - begun > _SECONDS:
        return Finding(f"damaged {kind}: more than {_SECONDS} s to read", what)
    if len(found) != len(expected) or not all(map(_equal, found, expected)):
        return Finding(f"damaged {kind}: loads and differs", f"after {what}")
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)


def _damage(rng: Rng, content: bytes) -> tuple[bytes, str]:
    """The content of a safetensors file after a fault of a disk, a transfer or an editor, and the name of the fault."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    kind = rng.choice(["bit", "bit of a number", "high bit", "cut", "zeros", "noise", "header"])
    data = bytearray(content)
    place = int(rng.integers(0, len(data)))
    if kind in ("bit of a number", "high bit"):
        name = str(rng.choice([name for name in header if name != "__metadata__"]))
        start, stop = header[name]["data_offsets"]
        if stop > start:
            width = 8 if (stop - start) % 8 == 0 else 1
            # The last numbers are those that sizes are derived from.
            index = (stop - start) // width - 1 if rng.random() < 0.3 else int(rng.integers(0, (stop - start) // width))
            bit = int(rng.integers(20, 50)) if kind == "high bit" and width == 8 else int(rng.integers(0, 8 * width))
            place = 8 + size + start + width * index + bit // 8
            data[place] ^= 1 << (bit % 8)
            return bytes(data), f"bit {bit} of number {index} of {name} is flipped"
    if kind == "cut":
        return content[:place], f"the file is cut to {place} bytes"
    if kind in ("zeros", "noise"):
        length = int(rng.choice([8, 64, 512]))
        block = bytes(length) if kind == "zeros" else rng.bytes(length)
        data[place : place + length] = block[: len(data) - place]
        return bytes(data), f"{kind} from byte {place} on, {length} bytes"
    if kind == "header":
        what = _edit(rng, header)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + content[8 + size :], what
    data[place] ^= 1 << int(rng.integers(0, 8))
    return bytes(data), f"a bit of byte {place} is flipped{' in the header' if place < 8 + size else ''}"


def _edit(rng: Rng, header: dict[str, Any]) -> str:
    """Change one entry of the header in place."""
    metadata = json.loads(header["__metadata__"]["sepc_torch"])
    value: Any = [None, [], {}, -1, 2**62, 0.5, "x", [[]] * 3, "[" * 50_000][rng.integers(0, 9)]
    kind = rng.choice(["metadata", "entry", "lost entry", "lost tensor", "renamed tensor"])
    if kind == "metadata":
        header["__metadata__"]["sepc_torch"] = value if isinstance(value, str) else json.dumps(value)
        return f"the metadata are {str(value)[:20]}"
    if kind in ("entry", "lost entry"):
        name = str(rng.choice(sorted(metadata)))
        metadata[name] = value
        if kind == "lost entry":
            del metadata[name]
        header["__metadata__"]["sepc_torch"] = json.dumps(metadata)
        return f"the metadata {name} are {'lost' if kind == 'lost entry' else str(value)[:20]}"
    name = str(rng.choice([name for name in header if name != "__metadata__"]))
    tensor = header.pop(name)
    if kind == "renamed tensor":
        header[name.swapcase()] = tensor
    return f"{kind} {name}"


def _onto_a_special_file(rng: Rng) -> Finding | None:
    """Saving onto a device or a link leaves it what it is, or is refused."""
    del rng
    with scratch() as folder:
        path = folder / "null"
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except OSError:  # not the administrator: a named pipe, which nobody reads
            os.mkfifo(path)
        before = stat.S_IFMT(path.lstat().st_mode)
        try:
            _new_pool().save(path)
        except Exception as error:
            return refused(error, ValueError, OSError, where="saving onto a device: ")
        replaced = stat.S_IFMT(path.lstat().st_mode) != before
    return Finding("saving onto a device replaces it by a file") if replaced else None


def _mask_of_other_threads(rng: Rng) -> Finding | None:
    """Files that another thread creates meanwhile have the permissions that the process asks for."""
    del rng
    mask = os.umask(0o077)
    stop, modes = threading.Event(), set()
    with scratch() as folder:

        def create() -> None:
            path = folder / "secret"
            while not stop.is_set():
                handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
                modes.add(os.fstat(handle).st_mode & 0o777)
                os.close(handle)
                path.unlink()

        thread = threading.Thread(target=create)
        thread.start()
        pool = _new_pool()
        for _ in range(300):
            pool.save(folder / "pool")
        stop.set()
        thread.join()
    os.umask(mask)
    wrong = [oct(mode) for mode in sorted(modes - {0o600})]
    return Finding("saving changes the permissions of other threads' files", ", ".join(wrong)) if wrong else None


def _concurrent_writers(rng: Rng) -> Finding | None:
    """Three annotators label other samples, and all save to one file too: no state mixes two, and no label is lost."""
    parts = np.array_split(rng.permutation(_POOL), 3)
    answers = rng.integers(0, 5, size=_POOL)
    with scratch() as folder:
        shared, own = folder / "shared", [folder / str(k) for k in range(3)]

        def annotate(k: int) -> None:
            pool = _new_pool()
            for i in parts[k].tolist():
                pool.answer({i: int(answers[i])})
                pool.save(own[k])
                pool.save(shared)

        writers = [_forked(lambda k=k: annotate(k)) for k in range(3)]  # type: ignore[misc]
        found = None
        while found is None and any(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in writers[-1:]):
            if shared.exists():
                pool = _new_pool()
                pool.restore(shared)
                ids = set(pool.labelled_ids.tolist())
                if not any(ids <= set(part.tolist()) for part in parts):
                    found = Finding("a pool's file mixes the states of two writers")
        for pid in writers[:-1] if found is None else writers:
            os.waitpid(pid, 0)
        merged = _new_pool()
        for path in own:
            pool = _new_pool()
            pool.restore(path)
            merged.absorb(pool.state_dict())
        left = sorted(path.name for path in folder.iterdir() if path.name.endswith(".partial"))
    if found is None and (len(merged.labelled_ids) < _POOL or merged.labels_of(range(_POOL)).tolist() != list(answers)):
        found = Finding("labels of concurrent writers are lost or changed", repr(merged))
    return found or (Finding("writers leave partial files", ", ".join(left)) if left else None)


def _killed_writer(rng: Rng) -> Finding | None:
    """A writer killed at a random moment: every label that it reported is in the file, and at most one more."""
    ids, answers = rng.permutation(_POOL).tolist(), rng.integers(0, 5, size=_POOL).tolist()
    reported = 0
    with scratch() as folder:
        path = folder / "pool"
        _new_pool().save(path)
        for _ in range(6):
            reader, writer = os.pipe()

            def annotate(writer: int = writer) -> None:
                pool = _new_pool()
                pool.restore(path)
                for i in [i for i in ids if i not in pool.labelled_ids]:
                    pool.answer({i: answers[i]})
                    pool.save(path)
                    os.write(writer, b".")

            pid = _forked(annotate)
            time.sleep(float(rng.uniform(0.0, 0.03)))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(writer)
            with os.fdopen(reader, "rb") as pipe:
                reported += len(pipe.read())
            pool = _new_pool()
            try:
                pool.restore(path)
            except Exception as error:
                return Finding("a killed writer leaves a broken pool", str(error))
            labelled = pool.labelled_ids.tolist()
            if not reported <= len(labelled) <= reported + 1 or set(labelled) != set(ids[: len(labelled)]):
                return Finding("a killed writer loses or doubles labels", f"{reported} reported, {len(labelled)} held")
            if pool.labels_of(labelled).tolist() != [answers[i] for i in labelled]:
                return Finding("a killed writer changes labels")
            reported = len(labelled)
        for entry in folder.iterdir():
            if entry.name.endswith(".partial"):
                os.utime(entry, (0.0, 0.0))  # a write deletes only leftovers that are older than an hour
        pool.save(path)
        left = [entry.name for entry in folder.iterdir() if entry.name.endswith(".partial")]
    return Finding("a killed writer's partial files are never removed", f"{len(left)} left") if left else None


def _forked(work: Callable[[], None]) -> int:
    """Run a function in a process of its own and return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def _hostile_answers(rng: Rng) -> Finding | None:
    """Files of annotators: an unclear answer is refused, never guessed."""
    value: Any = [
        "1", 1, 1.5, -1, None, "", "nan", "1e3", True, [0, 1], ["1", "0"], {"a": 1}, "9" * 400, 10**400, "\x00", "a,b",
        float("inf"), "=1+1",
    ][rng.integers(0, 18)]  # fmt: skip
    name: Any = [7, "7", 7.0, None, "x", -3, 10**30, [7], True][rng.integers(0, 9)]
    kind = str(rng.choice(["csv", "jsonl", "json", "studio"]))
    chosen: list[str] | None = None
    if kind == "csv":
        text = f"id,answer\n{name},{value}\n"
    elif kind == "jsonl":
        text = json.dumps({"id": name, "answer": value}) + "\n"
    elif kind == "json":
        text = str(rng.choice(["[" * 100_000, "{}", "[[]]", "[null]", '[{"data": 3}]', json.dumps([{"id": name}])]))
    else:
        chosen = [str(i) for i in rng.permutation(3)[: rng.integers(0, 4)]]
        result = {"type": "choices", "from_name": "a", "to_name": "b", "value": {"choices": chosen}}
        text = json.dumps([{"data": {"id": 7}, "annotations": [{"result": [result]}]}])
    if rng.random() < 0.2:
        text = text[: int(rng.integers(0, len(text) + 1))]
        chosen = None
    with scratch() as folder:
        path = folder / f"answers.{'json' if kind == 'studio' else kind}"
        path.write_text(text, encoding="utf-8")
        try:
            found = read_answers(path)
        except Exception as error:
            return refused(error, ValueError, where="answers: ", detail=repr(text[:80]))
    if chosen is not None and len(chosen) > 1 and found:
        return Finding("answers: several choices are read as the first", f"{chosen} {found}")
    if not all(type(i) is int and type(label) is int and i >= 0 for i, label in found.items()):
        return Finding("answers: an id or a label is not an integer", repr(found))
    return None
