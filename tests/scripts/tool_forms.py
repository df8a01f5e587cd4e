"""Chat templates that write tool calls in the forms of released models, each with its response template."""

from transformers import AutoTokenizer

from tests.scripts.texts import BASE

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# As Qwen2.5's and Qwen3's: JSON, which is read without a response template.
JSON = """{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}
{{- t.function.name + ': ' + t.function.description }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% else %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# As Qwen3.5's and Nemotron's: XML, which is read so, too.
XML_CALL = """{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for key, value in c.function.arguments.items() %}
{{- '<parameter=' + key + '>\n' ~ value ~ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>"""
before, _, after = JSON.partition("{{- '<tool_call>")
XML = before + XML_CALL + after.partition("{%- endfor %}{{ '<|im_end|>")[2]
# As gpt-oss's: a call ends with another token than an answer, and an answer in its own way if it is the last.
GPT_OSS = """{% if tools %}{{ '<|start|>developer<|message|>' }}{% for t in tools %}
{{- t.function.name + ': ' + t.function.description }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}
{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' + f.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GPT_OSS_READ = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
        "tool_calls": {
            "open_pattern": r" to=functions\.(?P<name>\w+)<\|channel\|>commentary json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}
# As Gemma 4's: the model goes on in its own turn after a tool's output, whose mark it has written itself.
GEMMA = """{% if tools %}{{ '<|turn>system\n' }}{% for t in tools %}
{{- t.function.name + ': ' + t.function.description }}{% endfor %}{{ '<turn|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}{{ '<|tool_response>' if loop.previtem.role == 'tool' }}
{{- 'response:' + m.name + '{value:<|"|>' + m.content + '<|"|>}<tool_response|>' }}
{%- elif m.tool_calls %}{{ '<|turn>model\n' + m.content }}{% for c in m.tool_calls %}
{{- '<|tool_call>call:' + c.function.name + '{' }}{% for key, value in c.function.arguments.items() %}
{{- key + ':<|"|>' + value + '<|"|>' }}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}{{ '<|tool_response>' }}
{%- elif m.role == 'assistant' %}{{ '<|turn>model\n' if loop.previtem.role != 'tool' }}{{ m.content + '<turn|>\n' }}
{%- else %}{{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"""
GEMMA_READ = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": FUNCTION,
        },
        "content": {"close": ["<turn|>", "<|tool_response>"]},
    },
}
GPT_OSS_MARKS = "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>".split()
GEMMA_MARKS = '<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>'.split()
# The chat template, the response template, the special tokens, the end of a call
FORMS = {
    "JSON": (JSON, None, [], "<|im_end|>"),
    "XML": (XML, None, [], "<|im_end|>"),
    "gpt-oss": (GPT_OSS, GPT_OSS_READ, GPT_OSS_MARKS, "<|call|>"),
    "Gemma": (GEMMA, GEMMA_READ, GEMMA_MARKS, "<|tool_response>"),
}


def tokenizer_of(form: str):
    """The demo's tokenizer with the templates and special tokens of a form."""
    template, response_template, marks, _ = FORMS[form]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *marks]})
    tokenizer.chat_template, tokenizer.response_template = template, response_template
    return tokenizer
