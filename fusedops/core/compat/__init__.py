"""Access to private names of PyTorch and Triton.

No file outside this folder uses a private name, except ``backend/fx.py``. If a release lacks one,
the library can be imported all the same, and is slower, never wrong. A comment or docstring at each
name states its purpose, and what happens without it. Importers import the file that they need.
"""
