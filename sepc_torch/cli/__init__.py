"""Command line interface ``sepc`` (extra ``cli``): fit, calibrate, score, explain, report, export and more.

Results go to standard output, notes and progress to standard error. Exit code 0 means success. ``sepc drift`` ends
with exit code 1 if the rows have drifted. Exit code 2 means wrong arguments, data or files, reported in one line;
nothing is written then.
"""

from sepc_torch.cli.explaining import compare, demo, explain
from sepc_torch.cli.exporting import export
from sepc_torch.cli.finding import label_errors, novelties
from sepc_torch.cli.fitting import calibrate, fit
from sepc_torch.cli.paper import NearestBy, landscape
from sepc_torch.cli.scoring import score
from sepc_torch.cli.shell import app
from sepc_torch.cli.streams import drift, report

__all__ = [
    "NearestBy",
    "app",
    "calibrate",
    "compare",
    "demo",
    "drift",
    "explain",
    "export",
    "fit",
    "label_errors",
    "landscape",
    "novelties",
    "report",
    "score",
]
