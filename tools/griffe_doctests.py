"""griffe extension: the doctests of a docstring become code blocks of the reference; as plain Markdown they would be
nested quotations.
"""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?!\s*$)(?P=indent).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Each run of lines from `>>>` to the next empty line, in a fence.

    >>> fenced("Adds.\\n\\n>>> add(1, 2)\\n3\\n\\nEnd.")
    'Adds.\\n\\n```pycon\\n>>> add(1, 2)\\n3\\n```\\n\\nEnd.'
    """
    return DOCTEST.sub(lambda match: f"{match['indent']}```pycon\n{match[0]}\n{match['indent']}```", docstring)
