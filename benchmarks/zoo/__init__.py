"""The zoo: many architectures, compiled by torch.compile and by `fusedops.compile`.

It is the regression test of the backend: it lists the models that are slower than with
torch.compile, or need more memory.
"""
