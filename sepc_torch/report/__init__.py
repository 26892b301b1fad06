"""Trust report: one self-contained HTML page about a head's decisions on a data set (extra ``report``)."""

from sepc_torch.report.record import Record
from sepc_torch.report.writing import summarise, write_report

__all__ = ["Record", "summarise", "write_report"]
