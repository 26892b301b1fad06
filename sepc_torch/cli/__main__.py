"""``python -m sepc_torch.cli``, the same as ``sepc``."""

from sepc_torch.cli import app

if __name__ == "__main__":
    app(prog_name="sepc")
