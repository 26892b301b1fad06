"""Command line interface ``sepc``: fit, calibrate, score, explain, compare, landscape and demo (extra ``cli``).

Results go to standard output, notes and progress to standard error. Exit code 0 means success. Exit code 2 means wrong
arguments, data or files, reported in one line; nothing is written then.
"""

from sepc_torch.cli.explaining import compare, demo, explain
from sepc_torch.cli.fitting import calibrate, fit
from sepc_torch.cli.paper import NearestBy, landscape
from sepc_torch.cli.scoring import score
from sepc_torch.cli.shell import app

__all__ = ["NearestBy", "app", "calibrate", "compare", "demo", "explain", "fit", "landscape", "score"]
