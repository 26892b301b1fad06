"""Active learning on top of a trust head: flagging, a label pool, query selection and annotation files.

Nothing here needs a training framework. The callbacks are in :mod:`sepc_torch.training.lightning`
and :mod:`sepc_torch.training.transformers`.
"""

from sepc_torch.training.annotation_files import read_answers, write_questions
from sepc_torch.training.flags import confirmed_disjuncts
from sepc_torch.training.pool import LabelPool
from sepc_torch.training.query import Candidates, choose
from sepc_torch.training.selection import select

__all__ = ["Candidates", "LabelPool", "choose", "confirmed_disjuncts", "read_answers", "select", "write_questions"]
