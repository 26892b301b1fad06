"""Active learning without a framework: who is labelled, which samples to ask about next, and how a person answers."""

from sepc_torch.active.answers import read_answers, write_questions
from sepc_torch.active.mistakes import confirmed_disjuncts
from sepc_torch.active.pool import LabelPool
from sepc_torch.active.querying import Candidates, choose
from sepc_torch.active.selection import select

__all__ = ["Candidates", "LabelPool", "choose", "confirmed_disjuncts", "read_answers", "select", "write_questions"]
