"""Lowerings: how each of PyTorch's operators becomes nodes of a `Graph`.

Each operator has one function. It takes the operator's arguments after ``r`` and ``out``, which
`common` describes.
"""

from . import activations as activations
from . import creation as creation
from . import elementwise as elementwise
from . import functions as functions
from . import losses as losses
from . import norms as norms
from . import reductions as reductions
from . import selections as selections
from . import shapes as shapes
from .common import TABLE

__all__ = ["REFUSED", "TABLE"]

# Operators that are refused, with why; others that are not in the table are refused by their names.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
        "each column depends on those before it",
    ),
    **dict.fromkeys(("sort", "kthvalue", "median", "argsort", "unique"), "it sorts columns"),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "cudnn_batch_norm",
            "_native_batch_norm_legit",
            "batch_norm",
            "_batch_norm_with_update",
        ),
        "BatchNorm mixes rows",
    ),
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution"),
        "a matrix product mixes columns",
    ),
    **dict.fromkeys(
        ("_local_scalar_dense", "item", "is_nonzero", "nonzero"),
        "it reads a tensor's value in Python, before any kernel has computed it; "
        "`torch.where` can replace an `if`",
    ),
    **dict.fromkeys(
        (
            "rand",
            "randn",
            "rand_like",
            "randn_like",
            "bernoulli",
            "uniform",
            "normal",
            "randint",
            "exponential",
            "geometric",
            "cauchy",
            "log_normal",
            "random",
        ),
        "it draws random numbers, and a backward can repeat only those of dropout; draw them "
        "outside, and pass them as an argument",
    ),
    "_is_all_true": (
        "it tests in Python whether a condition holds everywhere, as distributions do to "
        "validate their arguments; pass validate_args=False"
    ),
    "prod": "it is a reduction without a kernel; of positive numbers it is x.log().sum(-1).exp()",
    **{
        name: f"{name} is a function without a kernel; compute it outside"
        for name in ("lgamma", "digamma", "erfinv", "atan", "atan2", "asin", "acos", "copysign")
    },
    "erfc": "erfc is a function without a kernel; write 1 - torch.erf(x)",
    **dict.fromkeys(
        ("index", "index_select", "embedding", "_unsafe_index"),
        "indexing with a tensor reads other rows or columns; index before the call, or take "
        "columns of each row with gather",
    ),
    **dict.fromkeys(
        ("index_put", "index_put_", "index_fill_", "slice_scatter", "scatter", "scatter_"),
        "it writes into a part of a tensor; put parts together with torch.cat, or use torch.where",
    ),
    "diagonal": (
        "it has rows and columns in one dimension; multiply by a mask of torch.arange, and sum"
    ),
    **dict.fromkeys(
        ("__rshift__", "__lshift__", "bitwise_right_shift", "bitwise_left_shift"),
        "it shifts bits; multiply or divide by powers of two with * and //",
    ),
    **dict.fromkeys(
        ("adaptive_max_pool2d", "adaptive_max_pool3d"),
        "only one of equal elements gets the gradient; if they may share it, use x.amax((-2, -1))",
    ),
    "unfold": "it reads each column several times; pass the slices as arguments of their own",
}
