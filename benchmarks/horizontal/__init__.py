"""Benchmarks of horizontal fusion: functions that are called for each of many slices.

`functions` has the functions of one slice, `workloads` the slices and the loops over them, and
`command` the command. The workloads are measured by `benchmarks.rowwise.measuring`.
"""
