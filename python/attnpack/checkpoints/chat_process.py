"""Renders one chat template: reads JSON from standard input and writes JSON to standard output; see chat_template.py.

It imports nothing of attnpack, because that would take longer than to render the template. Templates of checkpoints are
written for transformers, so they find here what they find there.
"""

import json
import resource
import sys
from datetime import datetime


class Refusal(Exception):
    """The template calls raise_exception."""


def refuse_prompt(message):
    raise Refusal(message)


def one_line(error):
    return " ".join(str(error).split())[:500]


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter `tojson`. Jinja's own is for web pages: it escapes <, > and &, and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):  # templates may call it by this name
    return datetime.now().strftime(format)


def make_dict(*pairs, **values):
    """`dict` as a function: the type itself would have methods that change their argument."""
    return dict(*pairs, **values)


make_dict.fromkeys = dict.fromkeys


def chat_environment():
    """The environment that chat templates find in transformers, within Jinja's sandbox."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training. Here it gives them, with variables of their own
        as in a macro."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("words"), [], [], body, lineno=line)

        def words(self, caller):
            return caller()

    class PlainNamespace(Namespace):
        """A namespace without names such as __class__, with which it could pass for another object."""

        def __init__(self, /, *pairs, **values):
            super().__init__()
            for name, value in dict(*pairs, **values).items():
                self[name] = value

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise SecurityError(f"a namespace cannot hold {name!r}, which begins with _")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "dict": make_dict,
        "namespace": PlainNamespace,
        "raise_exception": refuse_prompt,
        "strftime_now": strftime_now,
    }
    return environment


def render_template(template, values, limits):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    environment = chat_environment()
    try:
        text = environment.from_string(template).render(values)
        text.encode()  # raises for half of a surrogate pair
    except MemoryError:
        raise
    except Refusal as refusal:
        return {"failed": f"refuses the prompt: {one_line(refusal)}"}
    except Exception as error:
        return {"failed": f"fails: {type(error).__name__}: {one_line(error)}"}
    if len(text) > limits["characters"]:
        return {"failed": f"gives {len(text)} characters, {limits['characters']} are the most"}
    return {"text": text}


if __name__ == "__main__":
    print(json.dumps(render_template(**json.load(sys.stdin))))
