"""A Griffe extension: adapts docstrings and signatures to the site."""

from __future__ import annotations

import importlib
import inspect
import re
from textwrap import dedent
from typing import Any

import torch
from griffe import Class, Extension, Function, Object, Parameter, ParameterKind, Parameters

# Sections of Google's style. Its parser requires an empty line before each.
_SECTION = re.compile(r"^(?=(?:Args|Returns|Raises):$)", re.MULTILINE)
_RETURNS = re.compile(r"^Returns:\n +", re.MULTILINE)
# Sections that Google's parser does not support.
_OWN_SECTION = re.compile(r"^(Shape|Numerics|Saved for backward|Gradient|Source):\s+", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example::\n\n((?: {4}.*\n|\n)*(?: {4}.*))", re.MULTILINE)
_KINDS = {kind: getattr(ParameterKind, kind.name.lower()) for kind in inspect._ParameterKind}


class Docstrings(Extension):
    """Converts this library's own sections, and shows constructors that come from torch.nn."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Puts an empty line before each section of Google's style; makes others paragraphs."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, Function) and obj.returns is not None:
            # The parser reads the text before the first colon as the type. So put the type there.
            text = _RETURNS.sub(lambda match: f"{match[0]}{obj.returns}: ", text)
        text = _EXAMPLE.sub(
            lambda match: f"**Example:**\n\n```python\n{dedent(match[1])}\n```", text
        )
        obj.docstring.value = _OWN_SECTION.sub(r"\n**\1:** ", _SECTION.sub("\n", text))

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Removes the default of ``*args`` and ``**kwargs``, which Griffe sets."""
        for parameter in func.parameters:
            if parameter.kind in (ParameterKind.var_positional, ParameterKind.var_keyword):
                parameter.default = None

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Shows the base class from torch.nn, and the constructor if it is inherited from there."""
        cls.bases = [base for base in cls.bases if not str(base).startswith("Generic")]
        if not cls.name.startswith("Fused"):
            return
        # ``cls`` is Griffe's description of the class; the class itself has the inherited members.
        python_class = getattr(importlib.import_module(cls.module.path), cls.name)
        base = next((c for c in python_class.__mro__ if c.__module__.startswith("torch.nn.")), None)
        if base is None:
            return
        cls.bases = [f"torch.nn.{base.__name__}"]
        constructor = python_class.__init__
        if "__init__" not in cls.members and constructor is not torch.nn.Module.__init__:
            cls.set_member("__init__", Function("__init__", parameters=_parameters(constructor)))


def _parameters(function: Any) -> Parameters:
    """Return Griffe's description of a Python function's parameters."""
    return Parameters(
        *(
            Parameter(
                p.name,
                annotation=_annotation(p.annotation),
                kind=_KINDS[p.kind],
                default=None if p.default is p.empty else repr(p.default),
            )
            for p in inspect.signature(function).parameters.values()
        )
    )


def _annotation(annotation: Any) -> str | None:
    """Return the source text of an annotation, or None if there is none."""
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
