"""Shape annotations such as ``Float[Array, "N D"]``, checked in tests and without cost in production.

Each letter has one meaning in every signature of the package: B batch, N (or M) training points, D features,
K ellipsoids, C classes, P cells, S support points. The annotations come from jaxtyping if it is installed. The tests
install it and check the shapes at every call. Inference needs only torch and NumPy: without jaxtyping, an annotation is
the plain array type.
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
