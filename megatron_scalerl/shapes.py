"""Shapes in annotations, in the notation of jaxtyping: `Float[Tensor, "tokens vocab"]`, `Int64[Tensor, " T"]`.

For readers. The type checker sees the array type alone and nothing is checked at run time, so there is no dependency;
an import of the same names from `jaxtyping` would add its checks. One axis is written with a leading space.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int32
from typing import Annotated as Int64

__all__ = ["Bool", "Float", "Int32", "Int64"]
