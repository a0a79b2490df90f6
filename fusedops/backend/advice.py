"""What a user can do about the reasons for which regions and graphs are left to Inductor."""

from __future__ import annotations

__all__ = ["next_step"]

# A part of a reason, and the step. The first that is in a reason counts.
_STEPS = (
    (
        "no region",
        "to fuse other code, decorate its function with fusedops.rowwise",
    ),
    (
        "to be as fast",
        "to fuse it anyway, decorate its function with fusedops.rowwise",
    ),
    (
        "a length that changes from call to call",
        "compile with dynamic=False if there are few lengths",
    ),
    ("a tensor that it saves is changed later", "replace the change in place by a new tensor"),
    ("calls a custom autograd function", "write the function in PyTorch's operators"),
    ("it calls ", "call it outside of the compiled part"),
    ("tensor subclass", "pass plain tensors, or call fuse_model"),
)


def next_step(reason: str) -> str:
    """The step for a reason, in brackets after a space; "" if there is none."""
    for part, step in _STEPS:
        if part in reason:
            return f" ({step})"
    return ""
