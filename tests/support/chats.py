"""A tiny byte-level BPE tokenizer, trained on the spot, and chat templates of the families that people use."""

from __future__ import annotations

import functools
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>")

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED_IN_MACRO = """\
{%- macro said(text) %}{{ '[' }}{% generation %}{{ text }}{% endgeneration %}{{ ']' }}{% endmacro %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ 'A' + said(message.content) }}{% else %}{{ 'U' + message.content }}{% endif %}
{%- endfor %}"""

MARKED_AND_TRIMMED = """\
{%- macro said(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<s>A:' + said(message.content) | trim + '</s>' }}
{%- else %}{{ 'U:' + message.content }}{% endif %}
{%- endfor %}"""

THINKING = """\
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = '' %}
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- answer + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Takes the reasoning out of all but the last turn, and writes an empty one where there is none."""

MERGED_SYSTEM = """\
{{- '<s>' }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

BARE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ ' ' + message.content + ' </s>' }}
{%- else %}{{ '<s>[INST] ' + message.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""
"""Has no generation prompt."""

TOOLS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TEXT = ["the user says hello and the assistant answers; think\n\n about it, fine. Über 日本語 user model system"] * 8


@functools.cache
def _bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    return bpe


def tokenizer(template: str | None) -> Any:
    """A fast tokenizer with this chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bpe().to_str()), eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages
