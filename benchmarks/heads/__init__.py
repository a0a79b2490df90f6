"""Benchmarks of losses of a head: `fusedops.losses`, its matrix products alone, and alternatives.

`functions` has the losses of whole logits and those of this package, `workloads` their sizes, and
`command` the command. `benchmarks.rowwise.measuring` measures them. `errors` compares their results
with fp64.
"""
