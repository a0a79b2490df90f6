"""Benchmarks of users' functions: `fusedops.rowwise`, eager PyTorch and torch.compile.

`functions` has the functions, `workloads` the tensors of their calls, and `command` the command.
`measuring` times workloads, for this command and for that of `benchmarks.horizontal`.
"""
