"""Command line interface ``sepc`` (extra ``cli``): fit, calibrate, score, explain, report, export and more.

Results go to standard output, notes and progress to standard error. Exit code 0 means success. ``sepc drift`` ends
with exit code 1 if the rows have drifted, ``sepc score --guard`` if the promise does not hold. Exit code 2 means wrong
arguments, data or files, reported in one line; nothing is written then.
"""

from sepc_torch.cli.shell import app

__all__ = ["app"]
