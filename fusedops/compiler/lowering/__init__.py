"""What each of PyTorch's operators is in a `Graph`: one function an operator, with the operator's arguments."""

from . import activations as activations
from . import creation as creation
from . import elementwise as elementwise
from . import functions as functions
from . import losses as losses
from . import norms as norms
from . import reductions as reductions
from . import shapes as shapes
from .common import TABLE

__all__ = ["REFUSED", "TABLE"]

# Operators that are refused, with why; others that are not in the table are refused by their names.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), "each column depends on those before it"),
    **dict.fromkeys(("sort", "topk", "kthvalue", "median", "argsort", "unique"), "it sorts columns"),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "batch_norm",
                     "_batch_norm_with_update"), "BatchNorm mixes rows"),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution"), "a matrix product mixes columns"),
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero", "nonzero"),
                    "it takes a tensor's value for Python, and no kernel can wait for that; `torch.where` can replace an `if`"),
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like", "bernoulli", "uniform", "normal", "randint"),
                    "it draws random numbers; of these only dropout's are drawn again in a backward"),
    "_is_all_true": "it takes for Python whether a condition holds everywhere, as distributions do to validate their "
                    "arguments; pass validate_args=False",
    "prod": "it is a reduction without a kernel; of positive numbers it is x.log().sum(-1).exp()",
    **dict.fromkeys(("lgamma", "digamma", "erfc", "erfinv", "atan", "atan2", "asin", "acos", "hypot", "copysign"),
                    "it is a function without a kernel; compute it outside"),
}  # fmt: skip
