"""The stub of public names agrees with the package; ``python tests/test_public_names.py`` writes it."""

from __future__ import annotations

from pathlib import Path

import sepc_torch

STUB = Path(__file__).resolve().parent.parent / "sepc_torch" / "__init__.pyi"


def stub() -> str:
    """The text of the stub."""
    homes = sorted((module, name) for name, module in sepc_torch._HOME.items())
    imports = [f"from sepc_torch.{module} import {name} as {name}" for module, name in homes]
    header = '"""Public names for type checkers; written by ``python tests/test_public_names.py``."""'
    return "\n".join([header, "", *imports, "", "__version__: str", "__all__: list[str]", "_HOME: dict[str, str]", ""])


def test_the_stub_has_the_names_of_the_package() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "run python tests/test_public_names.py"


def test_every_public_name_exists() -> None:
    for name in sepc_torch.__all__:
        assert getattr(sepc_torch, name).__name__ == name


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
