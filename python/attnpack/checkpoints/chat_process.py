"""Renders one chat template: reads JSON from standard input and writes JSON to standard output; see chat_template.py.

It imports nothing of attnpack, because that would take longer than to render the template.
"""

import json
import resource
import sys


class Refusal(Exception):
    """The template calls raise_exception."""


def refuse_prompt(message):
    raise Refusal(message)


def one_line(error):
    return " ".join(str(error).split())[:500]


def render_template(template, values, limits):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The block options are those of transformers' chat templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse_prompt
    try:
        text = environment.from_string(template).render(**values)
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
