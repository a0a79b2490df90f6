"""Users' functions under `fusedops.rowwise`, beside eager PyTorch and torch.compile.

`functions` has the functions, `workloads` the tensors that they are called with, `command` the
command.
"""
