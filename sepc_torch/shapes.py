"""Shape annotations, ``Float["N D"]``: checked while testing, free everywhere else.

The letters mean the same in every signature of the package: B batch, N (or M) training points, D features,
K ellipsoids, C classes, P cells, S support points. They come from jaxtyping where it is installed (the tests
install it and check them at every call); a machine that only runs inference needs nothing but torch and NumPy, so
without jaxtyping the annotation is simply the array type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from jaxtyping import Bool, Float, Int

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
else:
    Array = np.ndarray
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int"]
