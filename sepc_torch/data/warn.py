"""Warnings that name the user's own line as their place."""

from __future__ import annotations

import sys
import warnings

# Packages whose functions lie between the user's line and the warning: ours, decorators, and what calls us back.
_BETWEEN = {"sepc_torch", "contextlib", "jaxtyping", "joblib", "lightning", "pytorch_lightning", "sklearn", "torch"}
_BETWEEN |= {"transformers"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn; the place of the warning is the nearest caller outside the libraries that lie between.

    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     warn_user("Few points.")
    >>> told[0].category, str(told[0].message)
    (<class 'UserWarning'>, 'Few points.')
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
