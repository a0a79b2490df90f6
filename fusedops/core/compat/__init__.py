"""Private names of PyTorch and Triton: what each is for, and what a release that lacks it costs.

No file outside this folder uses a private name, except ``backend/fx.py``. Without one the library
is slower, never wrong, and imports as before. Importers name the file that they need.
"""
