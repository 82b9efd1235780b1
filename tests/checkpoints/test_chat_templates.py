"""Chat templates: what they find, as in transformers, and what they are refused."""

import pytest
from attnpack.checkpoints.build import Tokenizer, load_tokenizer, smollm2_path

# Pieces of real chat templates, one for each thing that they need from the program that renders them.
CONSTRUCTS = {
    "llama-3.1 no tools": "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools is none }}",
    "llama-3.1 tools": "{%- if tools is not none %}Environment: ipython\n{% endif %}{{ bos_token }}",
    "llama-3.1 builtin": "{%- if builtin_tools is defined or tools is not none %}tools{% else %}none{% endif %}",
    "llama-3.1 custom": "{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{{ tools }}",
    "llama-3.2 date": "{%- if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}",
    "llama-3.2 given date": "{%- if not date is defined %}{% set date = '26 Jul 2024' %}{% endif %}{{ date }}",
    "llama-3 trim": "{% set m = messages[0] %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|eot|>' }}",
    "llama-3 slice": "{% set rest = messages[1:] %}{{ rest | length }}{{ messages[0].role }}",
    "qwen-2.5 tojson": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "qwen-2.5 tools": "{%- if tools %}<tools>{% endif %}{%- if messages[0].role == 'system' %}a{% else %}b{% endif %}",
    "qwen-3 reverse": """{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and m.role == 'user' and m.content is string and not(m.content.startswith('<r>')) %}
        {%- set ns.multi = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{{- ns.multi }} {{ ns.last }}""",
    "qwen-3 thinking": "{%- if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}x",
    "qwen-3 split": "{% set c = messages[0].content %}{{ c.split('Z')[-1].lstrip('\\n').rstrip() }}{{ c.split()[0] }}",
    "gemma-2 roles": """{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}
{{ '<start>' + role + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}""",
    "gemma-3 parts": """{%- for m in messages -%}
    {%- if m['content'] is string -%}{{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}{%- for part in m['content'] -%}{{ part['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
{%- endfor -%}""",
    "mistral pairs": """{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for m in messages %}
    {%- if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- ns.index }}""",
    "mistral select": "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
    "devstral continue": "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "devstral default": "{%- set text = 'You' %}{% if x is not defined %}{{ text | default('a') }}{% endif %}",
    "command-r break": "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "command-r documents": "{% if documents is none %}no{% elif documents %}{{ documents }}{% endif %}",
    "command-r json": "{{ messages | tojson(indent=4) }}{{ {'b': [1, 2.5, none, true], 'a': 'ë'} | tojson }}",
    "command-r lists": """{% set found = [] %}{% for m in messages %}
{% set found = found + [m.role|upper] %}{% endfor %}
{{ found }}{{ '%s-%s' % ('a', 1) }}{{ ['x', 'y'] | join(', ') }}{{ 'a b'|replace(' ', '_') }}""",
    "options of tojson": "{{ {'b': 1, 'a': 'ë<'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
    "smollm-3 generation": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}end",
    "smollm-3 scope": "{% set x = 1 %}{%- generation -%}{% set x = 2 %} {{ x }} {% endgeneration %}{{ x }}",
    "names of arguments": "{{ strftime_now(format='%Y') }}{{ x is defined and raise_exception(message='x') }}",
    "smollm-3 date": "{%- set today = strftime_now('%d %B %Y') -%}Today: {{ today }}",
    "gpt-oss macro": """{%- macro kind(spec) -%}
    {%- if spec.type == 'array' -%}{{ kind(spec['items']) }}[]{%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{{ kind({'type': 'array', 'items': {'type': 'string'}}) }}""",
    "gpt-oss date": "{{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}",
    "gpt-oss items": "{% for k, v in {'z': 1, 'a': 2}.items() %}{{ k ~ v }}{{ ', ' if not loop.last }}{% endfor %}",
    "phi call": "{% macro box(x) %}[{{ caller() }}{{ x }}]{% endmacro %}{% call box(1) %}{{ bos_token }}{% endcall %}",
    "phi-4 elif": """{% for m in messages %}{% if (m['role'] == 'system') %}s
{% elif (m['role'] == 'user') %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}""",
    "dict": "{{ dict(messages[0], x=1) | tojson }}{{ dict.fromkeys(['a', 'b'], 0) }}{{ dict([('k', 2)]) }}",
    "namespace": "{% set n = namespace({'a': 1}, self=2) %}{% set n.b = 3 %}{{ n.a }}{{ n.self }}{{ n.b }}{{ n.c }}",
    "special tokens": "{{ [bos_token, eos_token, pad_token, unk_token] }}{{ sep_token is defined }}{{ cls_token }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n{# note #}\n\tb  \n{{- ' c ' -}}  \n",
}


@pytest.fixture(scope="module")
def backend():
    return load_tokenizer(smollm2_path()).backend


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_template_finds_what_it_finds_in_transformers(name, backend, smollm2_tokenizer_hf):
    hf, template = smollm2_tokenizer_hf, CONSTRUCTS[name]
    prompt = '\n <b>"Zoë\'s"</b> & \U0001f642 5\n'
    messages = [{"role": "user", "content": prompt}]
    expected = hf.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    assert Tokenizer(backend, chat_template=template, special=dict(hf.special_tokens_map)).chat_text(prompt) == expected


def test_the_prompt_of_a_chat_is_text(backend):
    tokenizer = Tokenizer(backend, chat_template="{{ messages[0].content }}")
    with pytest.raises(TypeError, match=r"^attnpack: prompt is 3 \(int\), wants a str"):
        tokenizer.chat(3)
    with pytest.raises(ValueError, match=r"^attnpack: prompt has '\\udcc3' at 1, which is half a character"):
        tokenizer.chat("a\udcc3")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROWTH = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOPS, "its chat template takes more than 2 seconds or 1024 MiB"),
        (CALLS, "its chat template takes more than 2 seconds or 1024 MiB"),
        (GROWTH, "its chat template takes more than 2 seconds or 1024 MiB"),
        ("{{ ('a' * 2000000000) | length }}", "its chat template takes more than 2 seconds or 1024 MiB"),
        ("{{ 'a' * 20000000 }}", "the chat template gives 20000000 characters, 10000000 are the most"),
        ("a" * 1_000_001, "its chat template is no text of up to 1000000 characters"),
        ("{% for", "the chat template fails: TemplateSyntaxError: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: SecurityError: "),
        ("{{ messages.clear() }}", "the chat template fails: SecurityError: "),
        ("{{ raise_exception('no\nusers') }}", "the chat template refuses the prompt: no users"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "the chat template fails: SecurityError: "),
        ("{{ namespace(_a=1) }}", "the chat template fails: SecurityError: "),
        ("{{ dict.update(messages[0], {'a': 1}) }}", "the chat template fails: UndefinedError: "),
        ("{{ strftime_now.__globals__.x }}", "the chat template fails: SecurityError: "),
        ("{{ messages | tojson(indent=2000000000) }}", "its chat template takes more than 2 seconds or 1024 MiB"),
        ("{% generation %}", "the chat template fails: TemplateSyntaxError: "),
        (r"{{ '\ud800' }}", "the chat template fails: UnicodeEncodeError: "),
    ],
    ids=lambda value: value[:30],
)
def test_a_chat_template_that_asks_for_much_or_fails(template, words, backend):
    """A template is a program by the author of the file."""
    with pytest.raises(ValueError) as caught:
        Tokenizer(backend, chat_template=template, source="a file").chat("Hi")
    assert str(caught.value).startswith(f"a file: {words}") and "\n" not in str(caught.value)
