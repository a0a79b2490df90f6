"""What docstrings and signatures need before the site shows them."""

from __future__ import annotations

import importlib
import inspect
import re
from textwrap import dedent
from typing import Any

import torch
from griffe import Class, Extension, Function, Object, Parameter, ParameterKind, Parameters

# Google's parser wants an empty line before a section; the others it does not know.
_SECTION = re.compile(r"^(?=(?:Args|Returns|Raises):$)", re.MULTILINE)
_RETURNS = re.compile(r"^Returns:\n +", re.MULTILINE)
_OWN_SECTION = re.compile(r"^(Shape|Numerics|Saved for backward|Gradient|Source):\s+", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example::\n\n((?: {4}.*\n|\n)*(?: {4}.*))", re.MULTILINE)
_KINDS = {kind: getattr(ParameterKind, kind.name.lower()) for kind in inspect._ParameterKind}


class Docstrings(Extension):
    """Sections of this library's own, and constructors that a module has from torch.nn."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Sets sections apart; those that Google's style does not know become paragraphs."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, Function) and obj.returns is not None:
            # Without a type in front, what stands before a sentence's first colon would be taken
            # for one.
            text = _RETURNS.sub(lambda match: f"{match[0]}{obj.returns}: ", text)
        text = _EXAMPLE.sub(
            lambda match: f"**Example:**\n\n```python\n{dedent(match[1])}\n```", text
        )
        obj.docstring.value = _OWN_SECTION.sub(r"\n**\1:** ", _SECTION.sub("\n", text))

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Shows no default of ``*args`` and ``**kwargs``, which have none."""
        for parameter in func.parameters:
            if parameter.kind in (ParameterKind.var_positional, ParameterKind.var_keyword):
                parameter.default = None

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Shows a module's constructor, also PyTorch's, and the public class that it implements."""
        cls.bases = [base for base in cls.bases if not str(base).startswith("Generic")]
        if not cls.name.startswith("Fused"):
            return
        real = getattr(importlib.import_module(cls.module.path), cls.name)
        base = next((c for c in real.__mro__ if c.__module__.startswith("torch.nn.")), None)
        if base is None:
            return
        cls.bases = [f"torch.nn.{base.__name__}"]
        if "__init__" not in cls.members and real.__init__ is not torch.nn.Module.__init__:
            cls.set_member("__init__", Function("__init__", parameters=_parameters(real.__init__)))


def _parameters(function: Any) -> Parameters:
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
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
