"""Chat templates as released models have them, tokenizers of every kind, and what of a sequence is trained,
as text."""

from functools import cache, partial

from common.data.chat_template import read_chat_template
from common.data.tokenizer import train_bpe
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LLAMA2 = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}
{%- if loop.first and system is defined %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}
{%- else %}{% set content = m.content %}{% endif %}{{ '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PHI3 = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
QWEN3 = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}{% set content = m.content %}{% set think = '' %}
{%- if '</think>' in content %}{% set think = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\n' + think + '\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HEADER = "add_generation_prompt %}{{ '<|im_start|>assistant\n"
THINKS_ALWAYS = QWEN3.replace("loop.index0 > ns.last", "true").replace(
    HEADER, HEADER + "<think>\n\n</think>\n\n"
)
MARKED_OUTSIDE = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- generation %}{{ m.content }}{%- endgeneration %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NO_END = """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


# Templates that write an answer otherwise once another message follows, or end it by other marks. The history:
# as gpt-oss, another end for the last answer, thoughts of the last one only, and calls with an end of their own.
OTHER_LAST_END = """{{ bos_token }}{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt and m.thinking %}
{{- '<|assistant|>analysis' + m.thinking + '<|end|>' }}{% endif %}
{%- if m.tool_calls %}{{- '<|assistant|>to=' + m.tool_calls[0].function.name + ' '
    + (m.tool_calls[0].function.arguments | tojson) + '<|eot_id|>' }}
{%- else %}{{- '<|assistant|>final' + m.content }}
{{- '<|endoftext|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}
{%- else %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As GLM: no end but the mark of the next role; thoughts of the last answer only.
NEXT_MARK = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n<think>' }}
{%- if loop.last %}{{ m.thinking or '' }}{% endif %}{{ '</think>\n' + m.content | trim }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + ('\n<think></think>' if enable_thinking is false else '') }}
{%- endif %}"""
# As Qwen3.5 and Nemotron: the header begins a thought, or closes it if thinking is off.
OPENED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- if m.thinking %}{{ '<think>\n' + m.thinking + '\n</think>\n\n' }}{% else %}{{ '<think></think>' }}{% endif %}
{%- endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{{- '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}"""
WRITES_CALLS = CHATML.replace(
    "m.content +",
    "m.content + (('<tool_call>' + m.tool_calls[0].function | tojson) if m.tool_calls else '') +",
)
# As Cohere2: two marks end an answer.
TWO_ENDS = CHATML.replace("'<|im_end|>", "('<|end|>' if m.role == 'assistant' else '') + '<|im_end|>")
# As SmolVLM: content is read as parts.
PARTS = CHATML.replace("m.content +", "m.content[0].text +")
# As Mistral: ids of calls have nine characters; arguments are JSON text, as DeepSeek-V3's.
STRICT_CALLS = """{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}
{%- if m.tool_calls[0].id | length != 9 %}{{ raise_exception('ids of nine characters') }}{% endif %}
{%- if m.content is not none %}{{ m.content }}{% else %}{{ '[CALL]' + m.tool_calls[0].function.name + m.tool_calls[0].id }}
{{- '[ARGS]' + m.tool_calls[0].function.arguments }}{% endif %}{% else %}
{%- if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# As gpt-oss: what was thought before a call, in a field or in its content, is dropped once there is a final answer; a
# field that is there is written, empty or not.
DROPS_LATER = """{% for m in messages %}{% if m.role == 'assistant' %}
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') %}
{%- set thought = m.content if m.tool_calls and m.content else m.thinking %}
{%- if thought is defined and not later | list and (m.tool_calls or not add_generation_prompt) %}
{{- '<|assistant|>analysis' + thought + '<|end|>' }}{% endif %}
{%- if m.tool_calls %}{{ '<|assistant|>to=add ' + (m.tool_calls[0].function.arguments | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|assistant|>final' + m.content + '<|endoftext|>' }}{% endif %}
{%- else %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As SmolLM3's and Kimi's: an empty thought that the template writes itself, in the header or after it.
CLOSED_HEADER = CHATML.replace(
    "m.content +", "('<think>\n\n</think>\n' if m.role == 'assistant' else '') + m.content +"
)
CLOSED_HEADER = CLOSED_HEADER.replace("assistant\n' }}", "assistant\n<think>\n\n</think>\n' }}")
CLOSED_AFTER = CLOSED_HEADER.replace("assistant\n<think>\n\n</think>\n' }}", "assistant\n' }}")

# As DeepSeek-R1's: what is sampled begins in <think>, what an earlier turn thought is cut off, and answers
# are trained so, too.
R1 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""

# The name of a template: it, the end of a turn, what the template writes between the header and the words
TEMPLATES = {
    "chatml, shipped": (read_chat_template("chatml"), "<|im_end|>", ""),
    "plain, shipped": (read_chat_template("plain"), "<|endoftext|>", ""),
    "chatml": (CHATML, "<|im_end|>", ""),
    "end outside the markers": (MARKED_OUTSIDE, "<|im_end|>", ""),
    "llama2": (LLAMA2, " <|endoftext|>", " "),
    "llama3": (LLAMA3, "<|eot_id|>", ""),
    "phi3": (PHI3, "<|end|>", ""),
    "gemma": (GEMMA, "<end_of_turn>", ""),
    "header with closed thinking": (THINKS_ALWAYS, "<|im_end|>", ""),
}
ALL = {**TEMPLATES, "qwen3": (QWEN3, "<|im_end|>", "")}
# All kinds: whether the text before an answer differs from that of a chat in which it is the last one
EVERY_KIND = {name: template for name, (template, *_) in ALL.items()} | {
    "another end for the last answer": OTHER_LAST_END,
    "the next role's mark": NEXT_MARK,
    "a thought opened in the header": OPENED,
    "two end marks": TWO_ENDS,
    "parts": PARTS,
}
SPECIALS = (
    "<|bos|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|end|> <|user|> <|assistant|> <|system|> "
    "<start_of_turn> <end_of_turn>"
).split()
TEXTS = [
    "Hello there, how are you?\n\nI am well.",
    "The answer is 42. 你好世界 é 🙂",
    "def f(x):\n    return x\n",
] * 20
TEXTS += ["one\n\ntwo\n\n\nthree\n  four\n\n"] * 50

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4\n\nYes, 4."},
]


@cache
def make_tokenizer(
    template: str = read_chat_template("chatml"), adds_bos: bool = False, joins_spaces: bool = False
) -> PreTrainedTokenizerFast:
    """joins_spaces: GPT-2's kind, which takes line breaks and spaces together, by what follows them."""
    tokenizer = train_bpe(TEXTS, 450)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    tokenizer.chat_template = template
    if joins_spaces:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
        )
    return tokenizer


make_gpt2_tokenizer = partial(make_tokenizer, joins_spaces=True)


@cache
def make_spm_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Llama's kind: a space before the text, ▁ for spaces, bytes where a character is unknown."""
    alphabet = sorted(set("".join(TEXTS) + "Y▁") - set(" \n"))
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *alphabet,
        "▁t",
        "▁th",
        "4Y",
        "th",
        "▁▁",
    ]
    merges = [("▁", "t"), ("▁t", "h"), ("4", "Y"), ("t", "h"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.pad_token = "</s>"
    tokenizer.chat_template = template
    return tokenizer


def decode(ids, tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def trained(sequence, tokenizer) -> list[str]:
    """The trained stretches of a sequence as text."""
    mask = sequence["loss_mask"].astype(bool)
    stretches = np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1)
    return [decode(sequence["input_ids"][part], tokenizer) for part in stretches if mask[part[0]]]
